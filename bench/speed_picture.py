"""Generator of the README's speed plot, from a result file of beside_llama.py.

    python bench/speed_picture.py                                # docs/speed.svg from bench/results/beside-llama-h200-27b.json
    python bench/speed_picture.py beside-llama.json speed.svg

It shows passes of a file with RANDOM WEIGHTS, and the plot is labelled so.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dflash_ggml.bench.plots import gallery, svg
from dflash_ggml.bench.sections import Plot, Series

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "bench" / "results" / "beside-llama-h200-27b.json"
PICTURE = ROOT / "docs" / "speed.svg"


def passes(result: dict[str, Any]) -> Plot:
    """Time of a pass by its columns, the better of the runs: ours and llama.cpp's."""
    best = {
        program: {name: min(run[name] for run in runs) for name in runs[0]}
        for program, runs in result["ms"].items()
    }
    names = ["plain", *(name for name in best["ours"] if name.startswith("verify "))]
    widths = [1, *(int(name.removeprefix("verify ")) for name in names[1:])]
    return Plot(
        "passes",
        f"One pass of the target: 27B, Q4_K_M, one {result['gpu']['name'].removeprefix('NVIDIA ')}",
        "tokens verified in the pass (1: plain decoding)",
        "milliseconds",
        [
            Series("dflash-ggml", widths, [best["ours"][name] for name in names]),
            Series("llama.cpp", widths, [best["llama.cpp"][name] for name in names]),
        ],
    )


def facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What the picture was drawn from, which its description holds."""
    return [
        ("pair", "27B shape, RANDOM WEIGHTS"),
        ("device", result["gpu"]["name"]),
        ("dflash-ggml", f"{result['commit'][:7]}, {result['when'][:10]}"),
    ]


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("result", type=Path, nargs="?", default=RESULT)
    p.add_argument("picture", type=Path, nargs="?", default=PICTURE)
    a = p.parse_args()
    result = json.loads(a.result.read_text())
    a.picture.write_text(gallery(facts(result), [svg(passes(result))]))


if __name__ == "__main__":
    main()
