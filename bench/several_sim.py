"""Simulation of batched decoding in virtual time: the policy against equal shares, fixed widths, and plain batching.

    python bench/several_sim.py [--machine h100|cpu] [--users 1 4 8 16] [--steps 400] [--json FILE]

No model and no device: passes take what `tests/reference/virtual_clock.py` gives (one H100 and the 27B shape: as measured with
up to 16 sequences, or DERIVED from passes of one), sequences are SYNTHETIC with the hit rates of HIGH_ACCEPTANCE and
LOW_ACCEPTANCE. Of equal shares, and of one heap with a fixed width and draft for all sequences or for the high-acceptance ones
alone, the best is shown, which could not be known beforehand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
from common import ROOT, header, save

from dflash_ggml.decode.calibration import path_probabilities
from dflash_ggml.decode.shared_heap import shares
from dflash_ggml.decode.tree import Tree
from dflash_ggml.policy.forecast import blocks
from dflash_ggml.policy.ledger import Ledger
from dflash_ggml.policy.plan import PLAIN, Plan
from dflash_ggml.policy.policy import Policy

sys.path.insert(0, str(ROOT / "tests"))
from reference.virtual_clock import (
    JOINT_CPU,
    JOINT_H100,
    SEVERAL_H100,
    Cut,
    JointMachine,
    Run,
    SyntheticSequence,
    decode,
)

# best candidate's hit rate, how much positions differ, the share of the second: acceptance lengths at 16, 8, 4 and 2 columns are
# 8.4 / 5.7 / 3.4 / 1.9 and 3.5 / 2.8 / 2.2 / 1.6
HIGH_ACCEPTANCE, LOW_ACCEPTANCE = (0.92, 0.8, 0.4), (0.47, 1.5, 0.6)
DEPTH, BUDGET = 15, 31
MACHINES = {"h100": SEVERAL_H100, "h100-derived": JOINT_H100, "cpu": JOINT_CPU}
SEEDS = 3


@dataclass(frozen=True)
class Row:
    """One setting: total tokens per second, of the slowest and the fastest sequence, columns and drafting sequences per pass."""

    machine: str
    texts: str
    users: int
    setting: str
    rate: float
    slowest: float
    fastest: float
    columns: float
    drafting: float


def synthetic(kind: str, users: int, seed: int) -> list[SyntheticSequence]:
    """Synthetic sequences: all of high acceptance, all of low, or alternating."""
    of = {
        "easy": (HIGH_ACCEPTANCE, HIGH_ACCEPTANCE),
        "hard": (LOW_ACCEPTANCE, LOW_ACCEPTANCE),
        "half": (HIGH_ACCEPTANCE, LOW_ACCEPTANCE),
    }[kind]
    made = []
    for i in range(users):
        hits, spread, others = of[i % 2]
        made.append(SyntheticSequence(hits, 100 * seed + i, spread=spread, others=others))
    return made


def equal(columns: int) -> Cut:
    """Give every sequence as many columns, its root's among them."""

    def cut(policy: Policy, trees: list[Tree]) -> list[Tree]:
        policy.cut(trees)
        return [tree.first(columns // len(trees) - 1) for tree in trees]

    return cut


def heap(columns: int) -> Cut:
    """One heap for so many columns, whatever they are worth."""

    def cut(policy: Policy, trees: list[Tree]) -> list[Tree]:
        policy.cut(trees)
        known = [notes.calibration for notes in policy.notes]
        room, widths = columns - len(trees), [tree.width for tree in trees]
        counts = shares(path_probabilities(trees, known), widths, [1] * len(trees), room, [room], [1.0])
        return [tree.first(count - 1) for tree, count in zip(trees, counts)]

    return cut


def always(depth: int, nodes: int, every: int = 1) -> Callable[[list[Plan]], list[Plan]]:
    """Draft all sequences, or every second one, whatever that costs."""
    return lambda plans: [PLAIN if i % every else Plan("tree", nodes, depth=depth) for i in range(len(plans))]


def settings(kind: str, users: int) -> dict[str, dict]:
    """What is compared: arguments of `decode`. Equal shares and fixed widths are tried with many widths and drafts."""
    found: dict[str, dict] = {
        "plain batching": {"plan": lambda plans: [PLAIN] * len(plans), "cut": lambda _, trees: trees},
        "as decided": {},
    }
    for every in (1, 2) if kind == "half" and users > 1 else (1,):
        for columns in (32, 48, 64):
            for block in blocks(DEPTH):
                name = f"heap, {columns} columns, draft of {block}" + (
                    ", high acceptance alone" if every > 1 else ""
                )
                found[name] = {"cut": heap(columns), "plan": always(block - 1, BUDGET, every)}
    for columns in (2, 4, 8, 12, 16, 24, 32):
        if columns * users > 64:
            break
        for block in blocks(DEPTH):
            if block >= min(columns, 16) // 2:
                name = f"equal, {columns} columns, draft of {block}"
                found[name] = {"cut": equal(columns * users), "plan": always(block - 1, columns - 1)}
    return found


def measured(machine: JointMachine, kind: str, users: int, how: dict, steps: int) -> tuple[float, Run]:
    """The mean rate over a few seeds, and the last run."""
    rates = []
    for seed in range(SEEDS):
        policy = Policy(DEPTH, machine.costs(), is_gpu=machine is not JOINT_CPU)
        if how:  # what is asked for is done whatever it loses
            policy.draft_ledger = policy.lookup_ledger = Ledger(left=float("inf"))
        run = decode(
            policy, machine, synthetic(kind, users, seed), steps=steps, budget=BUDGET, seed=seed, **how
        )
        rates.append(1000 * run.rate())
    return float(np.mean(rates)), run


def rows(name: str, machine: JointMachine, kind: str, users: int, steps: int) -> list[Row]:
    """All settings of one mix; of the equal shares, and of the fixed widths, the best alone."""
    found = []
    for setting, how in settings(kind, users).items():
        rate, run = measured(machine, kind, users, how, steps)
        each = [1000 * n / sum(run.ms) for n in run.tokens]
        columns, drafting = float(np.mean([n or users for n in run.columns])), float(np.mean(run.drafting))
        found.append(Row(name, kind, users, setting, rate, min(each), max(each), columns, drafting))
    of = {how: [r for r in found if r.setting.split(",")[0] == how] for how in ("equal", "heap")}
    best = [max(shares, key=lambda row: row.rate) for shares in of.values() if shares]
    return [*[row for row in found if "," not in row.setting], *best]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=MACHINES, default="h100")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--texts", nargs="+", choices=["easy", "half", "hard"], default=["easy", "half", "hard"]
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--each", type=float, help="milliseconds that a further sequence adds to a pass of the target"
    )
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args()
    machine = MACHINES[args.machine]
    if args.each is not None:
        machine = replace(machine, each=args.each)
    found = []
    print("SYNTHETIC sequences and virtual time: a prediction, not a measurement")
    for kind in args.texts:
        for users in args.users:
            for row in rows(args.machine, machine, kind, users, args.steps):
                found.append(row)
                print(
                    f"{row.texts:5} {row.users:3} users  {row.setting:46} {row.rate:7.0f} tokens/s  each {row.slowest:5.0f} to "
                    f"{row.fastest:5.0f}  {row.columns:5.1f} columns, {row.drafting:4.1f} drafting"
                )
    save(
        args.json,
        {**header(), "made_up": True, "machine": asdict(machine), "rows": [asdict(r) for r in found]},
    )


if __name__ == "__main__":
    main()
