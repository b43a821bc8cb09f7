"""Calibration of pass costs before the first request: most useful first, until the time is up.

Two context lengths give a line. Nothing is prefilled: pass time does not depend on the caches' contents. Passes that were not
reached are learned while decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ..decode.forest import Forest
from ..decode.sequence import Sequence
from ..decode.tree import Tree, verify_width
from ..drafts.drafter import Drafter
from ..policy.costs import Pass, Point
from ..policy.forecast import blocks
from .passes import TargetPasses

SHORT, LONG = 64, 4096  # tokens of context; of the long one, the trees' rows included
WARM, TIMED = 3, 3  # runs of each pass: the first builds its graph, a GPU captures one of the next two
SMALL = 10.0  # milliseconds of a plain pass on a CPU up to which its caches hold much of a model
USEFUL = (7, 3, 15, 31, 1, 23, 5, 2, 47, 63)  # node counts, in this order


def calibrate(passes: TargetPasses, drafter: Drafter | None, deadline: float) -> list[Point]:
    """Measure plain, draft, commit and verify passes until `deadline` (performance counter). Leaves an empty state."""
    probe = _Probe(passes, drafter, deadline)
    for context in (SHORT, min(LONG, passes.n_rows) - passes.max_width - probe.depth - 1):
        if context >= SHORT:
            probe.measure(context)
    probe.leave()
    return probe.points


def warm_up(passes: TargetPasses, drafter: Drafter | None, deadline: float) -> None:
    """Build the graphs that a sequence begins with, so that a short one does not pay for them. Leaves an empty state."""
    probe = _Probe(passes, drafter, deadline, timed=0)
    probe.measure(SHORT)
    probe.leave()


class _Probe:
    """Runs passes of a dummy sequence until `deadline`, and times the last `timed` runs of each."""

    def __init__(
        self, passes: TargetPasses, drafter: Drafter | None, deadline: float, timed: int = TIMED
    ) -> None:
        self.passes, self.drafter, self.deadline, self.timed = passes, drafter, deadline, timed
        self.depth = drafter.depth if drafter else 0
        self.sequence = Sequence()
        self.column = 0 if drafter and drafter.taps else None
        self.points: list[Point] = []
        self._is_small = False

    def measure(self, context: int) -> None:
        """All passes behind `context` tokens, as long as there is time."""
        self.sequence.tokens.clear()
        if self.drafter:
            self.drafter.prefilled(self.sequence, context, True)
        self.sequence.tokens += [0] * context
        for kind, width, work in self._passes():
            if not self._time(kind, width, context, work):
                return

    def leave(self) -> None:
        """Reset the dummy sequence."""
        self.passes.state.reset()
        if self.drafter:
            self.drafter.reset(self.sequence)

    def _passes(self) -> Iterator[tuple[Pass, int, Callable[[], object]]]:
        """Kind, width and one run of each pass, most useful first."""
        yield "plain", 1, self._plain
        if self.drafter:
            for block in blocks(self.depth)[:2]:
                yield "draft", block, partial(self._draft, block, self.drafter)
        for i, nodes in enumerate(n for n in USEFUL if n < self.passes.max_width):
            tree = _probe_tree(nodes, self.depth or nodes)
            yield "verify", verify_width(nodes), partial(self._verify, tree)
            if i == 0:
                yield "commit", 1, self._commit
                if self.passes.max_width > 2:
                    # a path with a gap moves rows, in a graph of its own, which a sequence meets soon
                    self.passes.commit(self._forest, ((0, 2),))
                if self.drafter and self.drafter.taps:
                    yield "append", 1, partial(self._append, self.drafter)

    def _plain(self) -> None:
        self.passes.choices(self.passes.linear(self.sequence, [0], column=self.column))

    def _verify(self, tree: Tree) -> None:
        self._forest = Forest([self.sequence], [tree])
        self.passes.choices(self.passes.verify(self._forest, columns=range(self._forest.width)))

    def _draft(self, block: int, drafter: Drafter) -> None:
        self.sequence.pending, self.sequence.unseen = 0, ()
        drafter.propose([self.sequence], 1, block - 1)

    def _append(self, drafter: Drafter) -> None:
        self.sequence.unseen = (0, 1)
        drafter.take_in([self.sequence])
        self.passes.device.synchronize()

    def _commit(self) -> None:
        self.passes.commit(self._forest, ((0, 1),))
        self.passes.device.synchronize()

    def _time(self, kind: Pass, width: int, context: int, work: Callable[[], object]) -> bool:
        """Time a pass; False when there was no time to finish."""
        best = float("inf")
        for i in range(WARM + self.timed):
            if time.perf_counter() > self.deadline:
                return False
            if i >= WARM and self._is_small:
                self._other_model(kind)
            at = time.perf_counter()
            work()
            if i >= WARM:  # the minimum is the least disturbed by other processes
                best = min(best, (time.perf_counter() - at) * 1e3)
        if self.timed:
            self.points.append(Point(kind, width, context, best))
        if kind == "plain":
            self._is_small = not self.passes.device.is_gpu and best < SMALL
        return True

    def _other_model(self, kind: Pass) -> None:
        """What a step runs before a pass: a CPU's caches then hold the weights of the other model."""
        if kind == "verify" and self.drafter:
            self._draft(min(blocks(self.depth)[:2]), self.drafter)
        elif kind == "draft":
            self._plain()


def _probe_tree(nodes: int, depth: int) -> Tree:
    """A tree as deep as the draft goes, the rest children of the root."""
    parents = np.array([-1, *(i if i < depth else 0 for i in range(nodes))], np.int32)
    depths = np.zeros(nodes + 1, np.int32)
    for node in range(1, nodes + 1):
        depths[node] = depths[parents[node]] + 1
    return Tree(np.zeros(nodes + 1, np.int32), parents, depths, np.zeros(nodes + 1, np.float32))
