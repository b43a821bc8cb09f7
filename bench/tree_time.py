"""Host time of a step's tree, in C and in the Python that is its reference in the tests.

    python bench/tree_time.py [--repeat 400] [--json FILE]

SYNTHETIC drafts of 15 depths and 16 candidates, with and without pair scores, and three lookup matches, which diverge after
four and nine tokens; a walk over six nodes. Microseconds of process time, the minimum of several runs: rows, growing,
calibrated probabilities, what calibration and prompt lookup learn of the walk, ancestor masks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import ROOT, header, save

from dflash_ggml.decode.accept import Accepted
from dflash_ggml.decode.calibration import Calibration, count_votes
from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.lookup import LookupRates, Merged
from dflash_ggml.decode.tree import expand, observers

sys.path.insert(0, str(ROOT / "tests"))

from reference import calibrated, merging, native_lookup, trees, voting

DEPTHS, RANKS, BUDGETS = 15, 16, (31, 63)
STAGES = ("grow", "probabilities", "calibration", "copies", "observers")
RUNS = 7


def draft(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Made-up rows, less sure with the depth, and pair scores."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((DEPTHS, 1000)) * np.linspace(4, 2.5, DEPTHS)[:, None]
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    ids = np.argsort(-logits, 1)[:, :RANKS].astype(np.int32)
    scores = np.take_along_axis(logits, ids, 1).astype(np.float32)
    return ids, scores, rng.normal(size=(DEPTHS, RANKS, RANKS)).astype(np.float32)


def microseconds(work: Callable[[], Any], repeat: int) -> float:
    best = float("inf")
    for _ in range(RUNS):
        began = time.process_time()
        for _ in range(repeat):
            work()
        best = min(best, (time.process_time() - began) / repeat * 1e6)
    return best


def both(kind: str, budget: int) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """Stage -> what is timed, in C and in Python."""
    ids, scores, pairs = draft(budget)
    rows = CandidateBlock(ids, scores, pairs if kind == "pairs" else None)
    windows = [[*ids[:, 0].tolist(), *range(budget - DEPTHS)] for _ in range(3)]
    windows[1][4], windows[2][9] = 7, 8
    sizes = windows, [20, 9, 4], budget
    rates, rates_in_python = LookupRates(LookupRates()), voting.LookupRates(voting.LookupRates())
    known, known_in_python = Calibration(Calibration()), calibrated.Calibration(calibrated.Calibration())
    is_merged = kind in ("merged", "copies")
    beside = None if kind == "copies" else rows
    looked_up, looked_up_in_python = native_lookup.candidates(*sizes), voting.LookupCandidates(*sizes)

    def grow() -> Any:
        if is_merged:
            return expand(0, Merged(beside, looked_up, rates), budget)
        return expand(0, rows, budget)

    def grow_in_python() -> Any:
        if is_merged:
            # votes of the matches are computed once a step
            looked_up_in_python._agreed.clear()
            return merging.Merged(beside, looked_up_in_python, rates_in_python).grow(0, budget)
        if kind == "pairs":
            return trees.grown(0, trees.Pairs(rows), budget)
        return trees.grown_of_rows(0, ids.tolist(), scores.tolist(), budget, False)

    tree = grow()
    with_lists = voting.with_lists(tree) if is_merged else tree
    path = [0]
    while len(path) <= 6 and len(children := np.flatnonzero(tree.parents == path[-1])):
        path.append(int(children[0]))
    accepted = Accepted(tuple(path), (0,) * len(path))
    in_c = {
        "grow": grow,
        "probabilities": lambda: known.path_probabilities(tree),
        "calibration": lambda: known.observe(tree, accepted),
        "observers": lambda: observers(tree, budget + 1),
    }
    in_python = {
        "grow": grow_in_python,
        "probabilities": lambda: known_in_python.path_probabilities(with_lists),
        "calibration": lambda: known_in_python.observe(with_lists, accepted),
        "observers": lambda: trees.observers(tree, budget + 1),
    }
    if is_merged:
        in_c["copies"] = lambda: count_votes(tree, accepted, rates)
        in_python["copies"] = lambda: voting.observe(with_lists, accepted, rates_in_python)
    return in_c, in_python


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--repeat", type=int, default=400)
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    found = {}
    print(
        f"{'us':10} {'nodes':>5} {'in':>6} " + " ".join(f"{stage:>13}" for stage in STAGES) + f" {'sum':>7}"
    )
    for kind in ("plain", "pairs", "merged", "copies"):
        for budget in BUDGETS:
            for language, stages in zip(("C", "Python"), both(kind, budget)):
                nodes = stages["grow"]().n_nodes
                us = {name: microseconds(work, a.repeat) for name, work in stages.items()}
                found[f"{kind} {budget} {language}"] = {name: round(t, 2) for name, t in us.items()}
                cells = " ".join(f"{us[name]:13.1f}" if name in us else " " * 13 for name in STAGES)
                print(f"{kind:10} {nodes:5} {language:>6} {cells} {sum(us.values()):7.1f}")
    if a.json:
        save(a.json, {**header(), "microseconds": found})


if __name__ == "__main__":
    main()
