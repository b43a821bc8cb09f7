"""Runner of fuzz cases in separate processes, with counts of their outcomes.

A worker prints which case it begins before it begins it, so a case is named even if the worker dies, hangs or fills the memory.
"""

from __future__ import annotations

import os
import resource
import selectors
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HANGS_AFTER = 60.0  # seconds for one case
TOO_MUCH = 300 << 20  # bytes above what a worker had before
TESTS = Path(__file__).parents[1]
GOOD = ("loads", "refused")


@dataclass
class Outcome:
    """Counts by outcome, and the cases that are findings: (outcome, seed, message)."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, int, str]] = field(default_factory=list)

    def note(self, what: str, seed: int, words: str = "") -> None:
        self.counts[what] += 1
        if what not in GOOD:
            self.findings.append((what, seed, words))


def run(kind: str, first: int, n: int, hangs_after: float = HANGS_AFTER) -> Outcome:
    """Cases `first` to `first + n - 1` of a kind, one after another; after a finding that ends a worker, with a new one."""
    outcome, seed = Outcome(), first
    while seed < first + n:
        seed = _worker(kind, seed, first + n, outcome, hangs_after)
    return outcome


def _worker(kind: str, first: int, end: int, outcome: Outcome, hangs_after: float) -> int:
    """One worker process; the case to continue with. Its start is no case: it may take longer than one."""
    command = [sys.executable, "-X", "faulthandler", "-m", "fuzz.campaign", kind, str(first), str(end)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=TESTS
        )
        assert process.stdout is not None
        under_way, looked, patience = first, selectors.DefaultSelector(), HANGS_AFTER
        looked.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not looked.select(patience):
                process.kill()
                process.wait()
                outcome.note("hang", under_way)
                return under_way + 1
            line, patience = process.stdout.readline(), hangs_after
            if not line:
                break
            word, seed, *words = line.rstrip("\n").split("\t")
            if word == "begin":
                under_way = int(seed)
            else:
                outcome.note(word, int(seed), *words)
                under_way = int(seed) + 1
        code = process.wait()
        if code == 0:
            return end
        errors.seek(0)
        printed = errors.read().decode(errors="replace").strip().splitlines()
    outcome.note("abort", under_way, f"exit code {code}: {' | '.join(printed[:3])}")
    return under_way + 1


def work(kind: str, first: int, end: int) -> None:
    """What a worker does: cases in order, a line before and after each."""
    from fuzz.cases import CASES

    case = CASES[kind]
    before = None
    for seed in range(first, end):
        print("begin", seed, sep="\t", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                what, words = case(seed, Path(folder)), ""
            except Exception as error:  # noqa: BLE001
                what, words = (
                    "wrong exception",
                    f"{type(error).__name__}: {error}".replace("\t", " ").replace("\n", " "),
                )
        most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = before or most
        if most > before + TOO_MUCH:
            what, before = "over 300 MB", most
        print(what, seed, words[:300], sep="\t", flush=True)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
