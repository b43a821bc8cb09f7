"""Every kind of draft against llama.cpp: the same files, float32, proposals compared at every position of given sequences.

    python bench/upstream_drafts.py --source LLAMA_CPP --libs FOLDER [--prompts 20] [--json FILE]

`--source` is llama.cpp's tree at the pin, `--libs` a folder with its shared libraries (libllama, libllama-common, libggml),
made from it; the other side is upstream_drafts.cpp, compiled here. Weights are random. Sequences are the target's own greedy
output, so that the acceptance of a chain can be counted in both columns; where two chains differ, the gap between the two
tokens is reported, by our scores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import Solo, header, save

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.tree import spine

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "cmake"))
BASE: dict[str, Any] = {"n_vocab": 300, "shared": 1.0, "own": 1.0, "draft_own": 1.5, "draft_tokens": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("draft-dflash", {"block_size": 16}),
    "dflash-windows-yarn": (
        "draft-dflash",
        {"block_size": 10, "window": 24, "full_layers": 1, "causal": False, "yarn": 4.0},
    ),
    "dflash2": ("draft-dflash", {"draft": "dflash2", "block_size": 8, "window": 24, "causal": False}),
    "dspark": ("draft-dspark", {"draft": "dspark", "block_size": 7, "pair_scale": 2.0}),
    "dspark-masks": ("draft-dspark", {"draft": "dspark", "block_size": 8, "from_anchor": False}),
    "dspark-reduced": ("draft-dspark", {"draft": "dspark", "block_size": 8, "n_draft_vocab": 200}),
    "mtp": ("draft-mtp", {"nextn": True}),
}


def compile_driver(source: Path, libs: Path, out: Path) -> None:
    """Build upstream_drafts.cpp against these libraries."""
    include = [f"-I{source / part}" for part in ("common", "include", "ggml/include", "vendor")]
    link = [f"-L{libs}", "-lllama-common", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libs}"]
    command = ["g++", "-O1", "-std=c++17", *include, str(HERE / "upstream_drafts.cpp"), *link, "-o", str(out)]
    subprocess.run(command, check=True)


def theirs(
    driver: Path,
    libs: Path,
    folder: Path,
    files: list[Path],
    kind: str,
    depth: int,
    ids: list[int],
    start: int,
) -> list[list[int]]:
    """What llama.cpp drafts behind each token of `ids` from `start` on."""
    text = folder / "ids.txt"
    text.write_text(" ".join(map(str, ids)))
    options = ["-m", str(files[0]), "--spec-type", kind, "--spec-draft-n-max", str(depth), "-c", "512"]
    options += [
        "-ub",
        "128",
        "-t",
        "1",
        "-fa",
        "off",
        *(x for f in ("-ctk", "-ctv", "-ctkd", "-ctvd") for x in (f, "f32")),
    ]
    if kind != "draft-mtp":
        options += ["-md", str(files[1])]
    environment = os.environ | {"LD_LIBRARY_PATH": str(libs)}
    done = subprocess.run(
        [str(driver), str(text), str(start), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"llama.cpp ended with {done.returncode}: {done.stderr[-2000:]}")
    return [[int(token) for token in line.split()] for line in done.stdout.splitlines()]


def ours(engine: Solo, ids: list[int], start: int) -> list[tuple[list[int], CandidateBlock]]:
    """The same from our drafter, with the candidates that the chain was taken from."""
    assert engine.drafter is not None
    engine.reset()
    engine.prefill(ids[:start])
    found = []
    for token in ids[start:]:
        engine.sequence.pending = token
        (rows,) = engine.drafter.propose([engine.sequence], 31)
        assert isinstance(rows, CandidateBlock)
        found.append((spine(token, rows, engine.drafter.depth).tokens[1:].tolist(), rows))
        engine.prefill([token])
    return found


def gap(rows: CandidateBlock, mine: list[int], other: list[int]) -> tuple[int, float]:
    """Where two chains part, and by how much ours is the likelier there; infinite for a token that is no candidate."""
    from reference.cursors import children_of, root_of

    cursor = root_of(rows)
    for depth, (a, b) in enumerate(zip(mine, other)):
        tokens, scores, cursors = children_of(rows, cursor)
        if a != b:
            return depth, float(scores[0] - scores[list(tokens).index(b)]) if b in tokens else float("inf")
        cursor = cursors[0]
    return len(mine), 0.0


def acceptance(chains: list[list[int]], ids: list[int], start: int) -> float:
    """Tokens per step that chains would have given, when `ids` is what the target writes."""
    at, steps = start, 0
    while at + 1 < len(ids):
        n = 0
        for drafted, real in zip(chains[at - start], ids[at + 1 :]):
            if drafted != real:
                break
            n += 1
        at, steps = at + n + 1, steps + 1
    return (min(at, len(ids) - 1) - start) / steps


def compare(kind: str, driver: Path, libs: Path, folder: Path, prompts: int, tokens: int) -> dict[str, Any]:
    """Positions, equal chains, and each difference."""
    from reference import toys

    spec, sizes = KINDS[kind]
    files = toys.write_pair(folder, 100 + list(KINDS).index(kind), **BASE | sizes)
    draft = None if spec == "draft-mtp" else files[1]
    config = EngineConfig(
        files[0],
        draft,
        n_ctx=512,
        n_threads=1,
        type_k="f32",
        type_v="f32",
        reference=True,
        calibrate="never",
        candidates=None if kind == "dflash2" else 64,  # a selector was trained to choose among so many
    )
    positions = same = drafted = 0
    distinct: set[tuple[int, ...]] = set()
    differences: list[dict[str, Any]] = []
    lengths: tuple[list[float], list[float]] = ([], [])
    with Solo.load(config) as engine:
        assert engine.drafter is not None
        depth = engine.drafter.depth
        for prompt in range(prompts):
            start = 8 + 3 * prompt
            ids = np.random.default_rng(prompt).integers(0, BASE["n_vocab"] - 4, start).tolist()
            engine.reset()
            engine.prefill(ids)
            sampler = Sampler(SamplingParams(temperature=0.8, seed=prompt), engine.n_vocab)
            steps = engine.generate(sampler, max_tokens=tokens, mode="plain", stop=lambda token: False)
            ids += [token for step in steps for token in step.tokens]
            mine = ours(engine, ids, start)
            other = theirs(driver, libs, folder, list(files), spec, depth, ids, start)
            for (chain, rows), theirs_chain in zip(mine, other, strict=True):
                positions, drafted = positions + 1, drafted + len(theirs_chain)
                same += chain == theirs_chain
                distinct.add(tuple(chain))
                if chain != theirs_chain:
                    where, by = gap(rows, chain, theirs_chain)
                    differences.append({"prompt": prompt, "depth": where, "gap": by})
            lengths[0].append(acceptance([chain for chain, _ in mine], ids, start))
            lengths[1].append(acceptance(other, ids, start))
    return {
        "positions": positions,
        "depth": depth,
        "drafted": drafted,
        "same": same,
        "distinct": len(distinct),
        "differences": differences,
        "acceptance": [float(np.mean(column)) for column in lengths],
        "largest_difference_of_acceptance": float(np.abs(np.subtract(*lengths)).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--libs", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        driver = folder / "upstream_drafts"
        compile_driver(args.source, args.libs, driver)
        for kind in args.kinds:
            found[kind] = one = compare(kind, driver, args.libs, folder, args.prompts, args.tokens)
            mine, other = one["acceptance"]
            parted = ", ".join(f"{d['gap']:.1e} at depth {d['depth']}" for d in one["differences"]) or "none"
            print(
                f"{kind:20} {one['same']} of {one['positions']} chains of {one['depth']} the same ({one['distinct']} distinct "
                f"ones); acceptance {mine:.3f} and {other:.3f}; differences: {parted}",
                flush=True,
            )
    if args.json:
        save(args.json, header() | {"weights": "random", "kinds": found})


if __name__ == "__main__":
    main()
