"""One step of decoding for one or many sequences: plan, propose, build trees, verify, accept, commit.

Between steps each sequence has committed tokens and one pending token, emitted but not yet run through the target. A tree of its
root alone is plain decoding: the pass that verifies it commits it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..decode.accept import Accepted
from ..decode.candidates import Candidates, NonFiniteDraft
from ..decode.forest import Forest
from ..decode.lookup import Merged
from ..decode.reduced import Watch, watch
from ..decode.sequence import Finish, Sequence
from ..decode.tree import DRAFT, LOOKUP, Tree, root_only
from ..drafts.drafter import Drafter
from ..drafts.prompt_lookup import NAME
from ..ggml.graph import Graph
from ..ggml.graph_cache import GraphCache
from ..policy.plan import PLAIN, Plan
from ..policy.policy import Policy, Result, StepTimes
from .accept import Acceptance
from .batches import joined_columns
from .passes import TargetPasses

# runs the trees of a forest in a pass: see `TargetPasses.verify`
Verify = Callable[[Forest, Items[Watch | None], Items[int]], Graph]

log = logging.getLogger("dflash_ggml")


@dataclass(slots=True)
class Step:
    """Result of one target pass for a sequence.

    Attributes:
        tokens: New token ids, at least one.
        mode: Mode of the step; "prefill" for the first token of a generation, from the prefill logits.
        tree, path: The verified tree and its accepted nodes, root first.
        n_draft, n_accepted: Drafted nodes that were verified and accepted.
        logits: The target's logits of each emitted token, if requested.
        finish: Finish reason, on the last step.
        sources: Drafted nodes by source; a node of two sources counts for both.
    """

    tokens: tuple[int, ...]
    mode: Literal["prefill", "plain", "chain", "tree"]
    tree: Tree | None = None
    path: tuple[int, ...] = ()
    n_draft: int = 0
    n_accepted: int = 0
    logits: tuple[np.ndarray, ...] | None = None
    finish: Finish | None = None
    timings: StepTimes = field(default_factory=StepTimes)
    sources: tuple[SourceUse, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceUse:
    """Nodes that a source proposed in a step, and how many of them were accepted."""

    name: str
    drafted: int
    accepted: int


class Clock:
    """Laps of one step, summed by name.

    Attributes:
        cold: Laps in which a graph was run for the first times, which take longer than later ones.
    """

    __slots__ = ("_at", "_graphs", "_n", "cold", "times")

    def __init__(self, graphs: GraphCache) -> None:
        self.times, self._graphs, self._n = StepTimes(), graphs, graphs.cold
        self.cold: set[str] = set()  # set[str]() takes much longer
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        """Note the milliseconds since the last lap under `name`."""
        now, times = time.perf_counter(), self.times
        setattr(times, name, getattr(times, name) + (now - self._at) * 1e3)
        if (n := self._graphs.cold) != self._n:
            self._n = n
            self.cold.add(name)
        self._at = now


class Stepper:
    """Steps sequences on one target, with a draft, prompt lookup, both or neither."""

    def __init__(self, passes: TargetPasses, drafter: Drafter | None, policy: Policy) -> None:
        self.passes, self.drafter, self.policy = passes, drafter, policy
        self._warned = False

    def first(self, sequence: Sequence) -> Step:
        """The first token of a generation, from the prefill logits."""
        clock, logits = Clock(self.passes.graphs), sequence.logits
        assert logits is not None, "a generation begins where a prefill left logits"
        token = sequence.pending = sequence.sample(logits)
        sequence.emit(token)
        sequence.logits = None
        if sequence.lookup is not None:
            sequence.lookup.begin(sequence)
        clock.lap("host")
        kept = (logits,) if sequence.keep_logits else None
        return Step((token,), "prefill", logits=kept, finish=sequence.finish, timings=clock.times)

    def step(
        self,
        sequences: Items[Sequence],
        idle: Items[Sequence] = (),
        plain: bool = False,
        verify: Verify | None = None,
    ) -> list[Step | Exception]:
        """Step each sequence once, all in one pass of the target.

        Args:
            idle: Sequences of other slots, whose waiting features may have to be taken in to free their columns.
            plain: Bypass the policy: draft nothing and record nothing.
            verify: Runs the pass together with a prefill batch; only if nothing is drafted.

        Returns:
            Per sequence its step or its exception. A failed sequence is unchanged or, without a pending token, one token
            further.
        """
        clock = Clock(self.passes.graphs)
        plans = [PLAIN] * len(sequences) if plain else self.policy.plan(sequences)
        for i, sequence in enumerate(sequences):
            if sequence.forced:  # the next token is known, so nothing is drafted
                plans[i] = PLAIN
        trees = self._trees(sequences, plans, clock)
        if not plain:
            trees = self.policy.cut(trees)
        forest = Forest(sequences, trees, joined_columns(len(trees)) if verify else None)
        columns = self._columns(forest, idle, clock)
        watches = [self._watch(s, tree.tokens) for s, tree in zip(sequences, trees)]
        clock.lap("tree")

        for sequence, width in zip(sequences, forest.widths):
            sequence.inconsistent = width == 1  # inconsistent until the pass that commits it has completed
        graph = (verify or self.passes.verify)(forest, watches, columns)
        if not plain and self.passes.device.is_gpu:
            self.policy.catch_up()  # while the GPU runs the pass
        elif not plain:  # the pass is over: the policy's work is not part of its time
            clock.lap("verify")
            self.policy.catch_up()
            clock.lap("tree")
        acceptance = Acceptance(self.passes, graph, forest, watches)
        for sequence, width in zip(sequences, forest.widths):
            if width == 1:
                sequence.tokens.append(sequence.pending)  # type: ignore[arg-type]
                sequence.pending = None
        clock.lap("verify")
        walked = [acceptance.walk(i) for i in range(len(sequences))]
        clock.lap("host")

        accepted = [None if isinstance(what, Exception) else what for what, _ in walked]
        self._commit(forest, accepted, columns)
        clock.lap("commit")
        if not plain:
            self.policy.record(Result(trees, accepted, clock.times, clock.cold))
        clock.lap("host")
        steps: list[Step | Exception] = [
            what if isinstance(what, Exception) else self._step_of(sequence, plan, tree, what, rows, clock)
            for sequence, plan, tree, (what, rows) in zip(sequences, plans, trees, walked)
        ]
        for sequence, plan in zip(sequences, plans):
            if plan is not PLAIN and sequence.finish is None and sequence.pending is not None:
                self._look_up(sequence)  # while a GPU runs the commit, before the next tree
        return steps

    # ---- before the pass

    def _trees(self, sequences: Items[Sequence], plans: Items[Plan], clock: Clock) -> list[Tree]:
        """The candidate tree of each sequence before `Policy.cut`: the root alone if nothing is proposed."""
        if all(plan is PLAIN for plan in plans):
            return [root_only(s.pending) for s in sequences]  # type: ignore[arg-type]
        trees = []
        for sequence, plan, drafted in zip(sequences, plans, self._draft(sequences, plans, clock)):
            assert sequence.pending is not None
            tree, found = None, None if plan is PLAIN else self._look_up(sequence)
            try:
                if found is not None:
                    tree = plan.build(sequence.pending, Merged(drafted, found, sequence.lookup.rates))
                elif drafted is not None:
                    tree = plan.build(sequence.pending, drafted)
            except NonFiniteDraft:
                self._give_up_drafting(sequence)
            trees.append(root_only(sequence.pending) if tree is None else tree)
        return trees

    def _draft(self, sequences: Items[Sequence], plans: Items[Plan], clock: Clock) -> list[Candidates | None]:
        """The draft's candidates by sequence, None for sequences that do not draft."""
        found: list[Candidates | None] = [None] * len(sequences)
        asked = [
            i
            for i, (sequence, plan) in enumerate(zip(sequences, plans))
            if plan.kind != "plain" and plan.drafts and not sequence.undraftable
        ]
        if not asked or self.drafter is None:
            return found
        clock.lap("tree")
        depths = [plans[i].depth for i in asked]
        depth = None if None in depths else max(d or 0 for d in depths)
        budget = max(plans[i].budget for i in asked)
        for i, candidates in zip(asked, self.drafter.propose([sequences[i] for i in asked], budget, depth)):
            if isinstance(candidates, NonFiniteDraft):
                self._give_up_drafting(sequences[i])
            else:
                found[i] = candidates
        clock.lap("draft")
        return found

    def _look_up(self, sequence: Sequence):
        """Prompt lookup's candidates; None without a match."""
        return None if sequence.lookup is None else sequence.lookup.look_up(sequence)

    def _give_up_drafting(self, sequence: Sequence) -> None:
        """The draft produced NaN: warn once, and decode the sequence without it until it is reset."""
        sequence.undraftable, sequence.draft_nonfinite, sequence.unseen = True, True, ()
        if not self._warned:
            log.warning(
                "draft produced NaN or infinite values (corrupt weights or overflow); decoding is plain"
            )
        self._warned = True

    def _columns(self, forest: Forest, idle: Items[Sequence], clock: Clock) -> Items[int]:
        """Free feature columns, one per column of the pass; if too few are free, waiting features are taken in."""
        if self.drafter is None or not self.drafter.taps:
            return ()
        features, members = self.passes.state.features, [*forest.sequences, *idle]
        fixed = self.passes.fixed_columns(forest)
        taken = {column for s in members for column in s.unseen}
        crowded = [s for s in members if len(s.unseen) > self.drafter.depth]
        if taken and (fixed or crowded or features.width - len(taken) < forest.width):
            self.drafter.take_in([s for s in members if s.unseen])
            taken.clear()
            if fixed and not clock.times.draft:
                self.passes.device.synchronize()
                clock.lap("draft")
        return range(forest.width) if fixed else features.free(taken, forest.width)

    def _watch(self, sequence: Sequence, nodes: NDArray[np.int32]) -> Watch | None:
        """How to reduce the logits of these nodes; None if full logits are needed, or the pass cannot reduce."""
        if sequence.keep_logits or not self.passes.reduces:
            return None
        assert sequence.sampler is not None
        return watch(sequence.sampler, sequence.history, nodes)

    # ---- after the pass

    def _commit(self, forest: Forest, accepted: Items[Accepted | None], columns: Items[int]) -> None:
        """Commit the accepted paths; the pass itself has committed trees of one column."""
        paths: list[tuple[int, ...]] = []
        for (sequence, tree, block), what in zip(forest.blocks, accepted):
            paths.append(() if what is None or tree.width == 1 else what.path)
            sequence.inconsistent = bool(paths[-1])
            if tree.width == 1:
                sequence.pending = None if what is None else what.tokens[-1]
                self._keep_features(sequence, sequence.unseen, (0,), block, columns)
        self.passes.commit(forest, paths)
        for (sequence, _, block), path, what in zip(forest.blocks, paths, accepted):
            if path and what is not None:
                waiting = sequence.unseen
                sequence.commit(path, what.tokens)
                self._keep_features(sequence, waiting, path, block, columns)
                sequence.inconsistent = False

    @staticmethod
    def _keep_features(
        sequence: Sequence, waiting: tuple[int, ...], path: tuple[int, ...], block: slice, columns: Items[int]
    ) -> None:
        """Append the feature columns of a path to the waiting ones."""
        keeps = columns and not sequence.undraftable
        sequence.unseen = (*waiting, *[columns[block.start + node] for node in path]) if keeps else ()

    def _step_of(
        self,
        sequence: Sequence,
        plan: Plan,
        tree: Tree,
        accepted: Accepted,
        logits: list[NDArray[np.float32]],
        clock: Clock,
    ) -> Step:
        kept = tuple(logits) if sequence.keep_logits else None
        step = Step(accepted.tokens, "plain", logits=kept, finish=sequence.finish, timings=clock.times)
        if tree.width > 1:
            step.mode = "chain" if plan.kind == "chain" else "tree"
            step.tree, step.path = tree, accepted.kept
            step.n_draft, step.n_accepted = tree.n_nodes, accepted.n_accepted
            step.sources = self._uses(tree, accepted)
        sequence.statistics.took(step.tokens, step.n_draft, step.n_accepted)
        return step

    def _uses(self, tree: Tree, accepted: Accepted) -> tuple[SourceUse, ...]:
        """How many nodes of a tree each source proposed, and how many of them were accepted."""
        draft = self.drafter.name if self.drafter else ""
        if tree.sources is None:
            return (SourceUse(draft, tree.n_nodes, accepted.n_accepted),)
        bits, uses = tree.sources.tolist(), []
        for bit, name in ((DRAFT, draft), (LOOKUP, NAME)):
            drafted = sum([1 for b in bits if b & bit])
            if drafted:
                uses.append(SourceUse(name, drafted, sum([1 for n in accepted.kept if bits[n] & bit])))
        return tuple(uses)
