"""Synthetic acceptance for an engine: its passes run and take their time; which drafted token is right is drawn beforehand."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Self

import numpy as np
from common import ROOT

from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.forest import Forest
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.decode.tree import Tree
from dflash_ggml.engine import step
from dflash_ggml.engine.engine import Engine
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.policy.plan import Plan
from dflash_ggml.policy.policy import Policy

sys.path.insert(0, str(ROOT / "tests"))
from reference.virtual_clock import RANKS, Source

PERIOD = 4096  # positions after which tokens repeat, at most


class MadeUp:
    """Replaces what an engine's draft proposes and what its target chooses, and nothing of what that costs, until it is left.

    Attributes:
        sources: By state index, the tokens and drafts of the slot's sequence.
        period: Positions after which the tokens of a source repeat.
        seconds, process_seconds: Time spent on synthetic choices, of which the engine's own clock, `perf_counter` and
            `process_time` know nothing.
    """

    def __init__(self, engine: Engine, drafts: bool = True) -> None:
        """drafts: whether proposals are made up too, or the target's choices alone."""
        self.engine, self.drafter, self.passes = engine, engine.drafter, engine.passes
        self.sources, self.period = dict[int, Source](), PERIOD
        self.seconds = self.process_seconds = 0.0
        self._forest: Forest | None = None
        self._propose, self._verify, self._choices = (
            self.drafter.propose,
            self.passes.verify,
            self.passes.choices,
        )
        if drafts:
            self.drafter.propose = self.propose  # type: ignore[method-assign]
        self.passes.verify, self.passes.choices = self.verify, self.choices  # type: ignore[method-assign]
        step.time = self  # type: ignore[assignment]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        vars(self.drafter).pop("propose", None)
        del self.passes.verify, self.passes.choices
        step.time = time

    def perf_counter(self) -> float:
        """The time without what synthetic choices took."""
        return time.perf_counter() - self.seconds

    def process_time(self) -> float:
        """The same in processor time."""
        return time.process_time() - self.process_seconds

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Work that no clock is to see."""
        began, process_began = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began
            self.process_seconds += time.process_time() - process_began

    def propose(
        self, sequences: Items[Sequence], budget: int, depth: int | None = None
    ) -> list[CandidateBlock]:
        """Run the draft; return the sources' candidates."""
        self._propose(sequences, budget, depth)
        with self.unseen():
            found = [
                self.sources[s.state_index].at(s.n_tokens, depth or self.drafter.depth)[0] for s in sequences
            ]
            return [CandidateBlock(self.tokens(rows.ids), rows.log_probs) for rows in found]

    def verify(self, forest: Forest, *more: Items[object]) -> Graph:
        """Run the target, and remember over which trees."""
        self._forest = forest
        return self._verify(forest, *more)  # type: ignore[arg-type]

    def choices(self, graph: Graph) -> np.ndarray:
        """What is right after each node of the trees that were verified last."""
        chosen, forest, self._forest = self._choices(graph), self._forest, None
        with self.unseen():
            for sequence, tree, block in forest.blocks if forest else ():
                chosen[block] = self.right(sequence, tree, chosen[block])
        return chosen

    def right(self, sequence: Sequence, tree: Tree, chosen: np.ndarray) -> np.ndarray:
        """What is right after each node of a tree. chosen: by the target, before it is overwritten."""
        right = self.sources[sequence.state_index].at(sequence.n_tokens, int(tree.depths.max()) + 1)[1]
        return self.tokens(right)[tree.depths]

    def tokens(self, ids: np.ndarray) -> np.ndarray:
        """Ids of a source, RANKS + 1 to a position, as tokens of the vocabulary; 0 is what a CPU picks of NaN."""
        n_positions = min(self.period, (self.engine.n_vocab - 1) // (RANKS + 1))
        return 1 + ids % (n_positions * (RANKS + 1))


def reset_policy(engine: Engine) -> None:
    """Let an engine's policy know nothing of what was decoded before; costs stay known."""
    old = engine.policy
    engine.policy = engine.stepper.policy = Policy(old.depth, old.costs, old.is_gpu, old.most)


@contextmanager
def equal_shares(engine: Engine, columns: int) -> Iterator[None]:
    """Every sequence is drafted and gets so many columns, its root's among them; 0: as the policy decides."""
    policy = engine.policy
    if columns:
        plan = Plan("tree", columns - 1, depth=min(max(columns - 1, 3), engine.drafter.depth))
        policy.plan = lambda sequences: [plan] * len(sequences)  # type: ignore[method-assign]
        policy.cut = list  # type: ignore[method-assign]
        policy.record = lambda result: None  # type: ignore[method-assign]
        policy.catch_up = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in ("plan", "cut", "record", "catch_up") if columns else ():
            delattr(policy, name)
