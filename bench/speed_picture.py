"""Generator of the README's speed plot, from a result file of step_time.py.

    python bench/speed_picture.py bench/results/history/step-h100-27b-again.json docs/speed.svg

It shows passes of a file with RANDOM WEIGHTS, and the plot is labelled so.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dflash_ggml.bench.plots import gallery, svg
from dflash_ggml.bench.sections import Plot, Series

WIDTHS = (1, 2, 4, 8, 16, 24, 32)


def passes(result: dict) -> Plot:
    """Time of a pass by its columns: ours, and the same graph with ggml's own matmuls."""
    ours = [result["passes"][f"verify {n}"]["pass_ms"] for n in WIDTHS]
    stock = [result["stock_products_ms"][f"verify {n}"] for n in WIDTHS]
    return Plot(
        "passes",
        "Checking a tree of candidates in one pass",
        "candidates, the root counted",
        "milliseconds",
        [Series("dflash-ggml", WIDTHS, ours), Series("ggml's own products", WIDTHS, stock)],
        levels=[("one token, dflash-ggml", result["passes"]["plain"]["pass_ms"])],
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("result", type=Path)
    p.add_argument("picture", type=Path)
    a = p.parse_args()
    result = json.loads(a.result.read_text())
    facts = [
        ("pair", "27B shape, Q4_K_M, RANDOM WEIGHTS, 2,048 tokens of context"),
        ("device", result["device"]),
        ("dflash-ggml", result["commit"][:7]),
    ]
    a.picture.write_text(gallery(facts, [svg(passes(result))]))


if __name__ == "__main__":
    main()
