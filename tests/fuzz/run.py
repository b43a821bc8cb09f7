"""Long run of the fuzzer: a table of the outcomes of all cases.

    python tests/fuzz/run.py [--headers 100000] [--coherent 20000] [--experts 20000] [--expert_headers 50000]
        [--safetensors 20000] [--requests 2000] [--jobs 2] [--json FILE]

Every case is its seed: `python -m fuzz.campaign KIND SEED SEED+1`, run in tests/, repeats one, and of requests
`--requests 1 --first SEED` with 0 of all others. Exit code 1 with findings.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]

from common import header, save  # noqa: E402

from fuzz import hostile  # noqa: E402
from fuzz.campaign import GOOD, Outcome, run  # noqa: E402

SIZES = {"headers": 100_000, "coherent": 20_000, "experts": 20_000, "expert_headers": 50_000}
SIZES |= {"safetensors": 20_000, "requests": 2000}
FOUND = ("abort", "wrong exception", "hang", "over 300 MB")
AT_ONCE = 500


def parts(kind: str, first: int, n: int) -> Iterator[tuple[str, int, int]]:
    for at in range(first, first + n, AT_ONCE):
        yield kind, at, min(AT_ONCE, first + n - at)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind, n in SIZES.items():
        p.add_argument(f"--{kind}", type=int, default=n, metavar="N")
    p.add_argument("--first", type=int, default=1_000_000, help="the first seed")
    p.add_argument("--jobs", type=int, default=2)
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    table: dict[str, Outcome] = {}
    for kind in SIZES:
        began, whole = time.monotonic(), table.setdefault(kind, Outcome())
        with ThreadPoolExecutor(a.jobs) as pool:
            fuzz = hostile.run if kind == "requests" else partial(run, kind)
            for part in pool.map(
                lambda one, fuzz=fuzz: fuzz(*one[1:]), parts(kind, a.first, getattr(a, kind))
            ):
                whole.counts += part.counts
                whole.findings += part.findings
        counted = ", ".join(f"{word} {whole.counts[word]:,}" for word in (*GOOD, *FOUND))
        print(
            f"{kind}: {whole.counts.total():,} cases in {time.monotonic() - began:.0f} s: {counted}",
            flush=True,
        )
        for finding in whole.findings:
            print("   ", *finding)
    rows = {kind: {word: one.counts[word] for word in (*GOOD, *FOUND)} for kind, one in table.items()}
    save(
        a.json,
        {
            **header(),
            "first_seed": a.first,
            "cases": rows,
            "findings": [f for o in table.values() for f in o.findings],
        },
    )
    sys.exit(any(outcome.findings for outcome in table.values()))


if __name__ == "__main__":
    main()
