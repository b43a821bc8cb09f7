"""One step of decoding: propose, plan, build the tree, verify, accept, commit.

The state between steps is the sequence's: committed tokens, and one pending token that was emitted but has not been through
the target.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np

from ..decode.accept import Accepted, greedy, walk
from ..decode.candidates import Candidates, NoNumbers
from ..decode.controller import Controller
from ..decode.copied import Copied
from ..decode.costs import Costs
from ..decode.merged import COPIES, DRAFT, Merged, observe
from ..decode.plan import Plan
from ..decode.reduced import ReducedRows, Watch, draw, watch
from ..decode.sampling import Sampler
from ..decode.sequence import Sequence
from ..decode.tree import Tree, verify_width
from ..drafts.drafter import Drafter
from ..drafts.suffix import NAME, Copies
from ..errors import ConfigError, NoNumbersError
from ..ggml.graph import Graph
from .clock import Clock, StepTimes
from .passes import TargetPasses

Finish = Literal["stop", "length", "cancelled"]
log = logging.getLogger("dflash_ggml")
NAN = "the target's numbers are NaN: its file is damaged, or they overflow in it"


@dataclass(slots=True)
class Step:
    """What one target pass gave.

    tokens: new token ids, at least one. mode: how they were found; "prefill" for the first token of a generation, which the
    prompt's own pass gave. tree, path: the verified tree and its accepted nodes, root first. n_draft, n_accepted: drafted
    nodes offered and kept. rows: the target's logits of each emitted token, when asked for. finish: why it ended, on the
    last step. sources: drafted nodes by who offered them; one that two sources offer counts for both.
    """

    tokens: tuple[int, ...]
    mode: Literal["prefill", "plain", "chain", "tree"]
    tree: Tree | None = None
    path: tuple[int, ...] = ()
    n_draft: int = 0
    n_accepted: int = 0
    rows: tuple[np.ndarray, ...] | None = None
    finish: Finish | None = None
    timings: StepTimes = field(default_factory=StepTimes)
    sources: tuple[SourceUse, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceUse:
    """What a source did in a step: nodes that it offered to the target, and those of them that were kept."""

    name: str
    drafted: int
    accepted: int


@dataclass(slots=True)
class Run:
    """A sequence that is being decoded, and when it ends.

    limit: tokens that it may still emit. ends: whether a token ends the text. copies: of its text. keep_rows: hand the logits
    out. apart: it has come to no numbers beside others, and is stepped alone since. was_wide: its last step had several
    columns, or a draft.
    """

    sequence: Sequence
    controller: Controller
    limit: int
    ends: Callable[[int], bool]
    copies: Copies | None = None
    keep_rows: bool = False
    finish: Finish | None = None
    apart: bool = False
    was_wide: bool = False

    def emit(self, token: int) -> bool:
        """A token has been chosen; True if it is the last one."""
        self.sequence.text.append(token)
        self.limit -= 1
        self.finish = "stop" if self.ends(token) else "length" if self.limit <= 0 else None
        return self.finish is not None

    def sample(self, row: np.ndarray) -> int:
        """The sampler's token for a row of logits. Raises ConfigError for an id that the vocabulary does not have."""
        token = int(self.sampler.sample(row, self.sequence.text))
        if not 0 <= token < len(row):
            raise ConfigError(
                f"the sampler gave token {token}, which is outside the vocabulary of {len(row)}"
            )
        return token

    @property
    def sampler(self) -> Sampler:
        """The sequence's sampler."""
        assert self.sequence.sampler is not None
        return self.sequence.sampler


class Stepper:
    """Steps sequences on one target, with its drafter, copies of their texts, both or neither."""

    def __init__(self, passes: TargetPasses, drafter: Drafter | None, costs: Costs) -> None:
        self.passes, self.drafter, self.costs = passes, drafter, costs
        self._gave_up = False

    def first(self, run: Run) -> Step:
        """The token that the prompt's own pass gave."""
        clock, row = Clock(), run.sequence.logits
        assert row is not None, "a run begins where a prefill left logits"
        token = run.sequence.pending = run.sample(row)
        run.emit(token)
        run.sequence.logits = None
        if run.copies:
            run.copies.begin(run.sequence)
        clock.lap("host")
        return Step((token,), "prefill", rows=(row,) if run.keep_rows else None, timings=clock.times)

    def step(self, run: Run, plain: bool = False) -> Step:
        """One step of a run; plain: of the pending token alone. `spoilt_from` says which rows are to be cleared then."""
        if plain or run.sequence.undraftable or (self.drafter is None and run.copies is None):
            step = self._plain(run)
        else:
            clock = Clock()
            plan = run.controller.next(run.sequence, self.costs)
            clock.lap("tree")  # planning is paid for by the step, so it counts in what the step costs
            try:
                step = self._plain(run, clock) if plan.kind == "plain" else self._speculate(run, plan, clock)
            except NoNumbers:
                self._give_up_drafting(run.sequence)
                step = self._plain(run)
        run.sequence.statistics.took(step.tokens, step.n_draft, step.n_accepted)
        run.was_wide = step.n_draft > 0 or step.timings.draft > 0
        if run.finish is None:
            self._meanwhile(run)
        else:
            run.controller.catch_up()
        return step

    def _meanwhile(self, run: Run) -> None:
        """Have what was learned taken in while a GPU is waited for; elsewhere who asks for it takes it in."""
        if not self.passes.device.is_gpu:
            return

        def catch_up() -> None:
            run.controller.catch_up()
            self.costs.catch_up()

        self.passes.device.meanwhile(catch_up)

    def _give_up_drafting(self, sequence: Sequence) -> None:
        """The draft gave no numbers: say so once, and go on without it until the sequence is reset."""
        sequence.undraftable, sequence.spoilt_draft, sequence.unseen = True, True, ()
        if not self._gave_up:
            log.warning(
                "the draft gave NaN or infinite values: its file is damaged, or its sums overflow; decoding is plain"
            )
        self._gave_up = True

    def _speculate(self, run: Run, plan: Plan, clock: Clock) -> Step:
        """Draft, build the tree, verify it, walk it, commit the accepted path; a plain step if there is nothing to verify."""
        sequence, start = run.sequence, run.sequence.n_tokens
        assert sequence.pending is not None
        drafter = self.drafter if plan.drafts else None
        copied = run.copies.look_up(sequence) if run.copies else None
        if drafter is None and copied is None:
            return self._plain(run, clock)
        candidates = self._propose(run, plan, drafter, copied, clock)
        tree = plan.build(sequence.pending, candidates)
        if plan.choose is not None and not tree.n_nodes:
            clock.lap("tree")
            return self._plain(run, clock)  # the text will tell what the draft was worth
        watched = self._watch(run, tree.tokens)
        self._meanwhile(run)
        clock.lap("tree")
        graph = self.passes.verify(sequence, tree, watched)
        found = self.passes.reduced(graph, watched) if watched else self.passes.choices(graph)
        clock.lap("verify")
        width = verify_width(tree.n_nodes)
        if graph.is_warm:
            self.costs.measured("verify", clock.times.verify, width, start)
        rows: list[np.ndarray] = []
        accepted = self._accept(run, tree, graph, found, rows, start)
        clock.lap("host")
        cold = self.passes.graphs.cold
        sequence.torn = True
        self.passes.commit(sequence, accepted.path)
        sequence.commit(accepted.path, accepted.tokens)
        sequence.torn = False
        if self.drafter is None:
            sequence.unseen = ()
        else:
            self.drafter.observe(sequence, accepted)
        if tree.evidence is not None and run.copies is not None:
            observe(tree, accepted, run.copies.rates)
        run.controller.observe(tree, accepted)
        clock.lap("commit")
        if self.passes.graphs.cold == cold:
            self.costs.measured("commit", clock.times.commit)
        self.costs.measured("host", clock.times.tree + clock.times.host, width)
        return Step(
            accepted.tokens,
            "chain" if plan.kind == "chain" else "tree",
            tree,
            accepted.kept,
            tree.n_nodes,
            accepted.n_accepted,
            tuple(rows) if run.keep_rows else None,
            timings=clock.times,
            sources=self._uses(tree, accepted),
        )

    def _propose(
        self, run: Run, plan: Plan, drafter: Drafter | None, copied: Copied | None, clock: Clock
    ) -> Candidates | Merged:
        """What there is to verify, of the draft if it is asked; the columns of its features are free afterwards."""
        sequence = run.sequence
        found, cold, start = None, self.passes.graphs.cold, sequence.n_tokens
        if drafter is not None:
            found = drafter.propose(sequence, plan.budget, plan.depth)
            clock.lap("draft")
            if self.passes.graphs.cold == cold:
                columns = (plan.depth or drafter.depth) + 1
                self.costs.measured("draft", clock.times.draft, columns, start)
        if sequence.unseen:
            assert self.drafter is not None
            self.drafter.take_in(sequence)  # the tree's own features come to lie where these are
            if drafter is None:
                self.passes.device.synchronize()
                clock.lap("draft")
                if self.passes.graphs.cold == cold:
                    self.costs.measured("append", clock.times.draft, context=start)
        if copied is None:
            assert found is not None
            return found
        assert run.copies is not None
        return Merged(found, copied, run.copies.rates)

    def _uses(self, tree: Tree, accepted: Accepted) -> tuple[SourceUse, ...]:
        """Who offered the nodes of a tree, and what came of them."""
        if tree.sources is None:
            assert self.drafter is not None
            return (SourceUse(self.drafter.name, tree.n_nodes, accepted.n_accepted),)
        bits = tree.sources.tolist()
        uses = []
        for bit, name in ((DRAFT, self.drafter.name if self.drafter else ""), (COPIES, NAME)):
            drafted = sum([1 for b in bits if b & bit])
            if drafted:
                uses.append(SourceUse(name, drafted, sum([1 for n in accepted.kept if bits[n] & bit])))
        return tuple(uses)

    def _watch(self, run: Run, nodes: np.ndarray | tuple[int, ...] = ()) -> Watch | None:
        """How the next pass, over these nodes, is to reduce its rows; None if whole rows are wanted, or none."""
        if run.keep_rows or not self.passes.reduces:
            return None
        return watch(run.sampler, run.sequence.text, nodes)

    def _draw(
        self, run: Run, graph: Graph, reduced: ReducedRows, column: int = 0, first: int = 0
    ) -> int | None:
        """The sampler's token after a column of those from `first` on, from its reduced row; None if that takes the whole row."""
        block = partial(self.passes.logits_block, graph, first + column)
        return draw(run.sampler, reduced[column], run.sequence.text, block)

    def _accept(
        self,
        run: Run,
        tree: Tree,
        graph: Graph,
        found: np.ndarray | ReducedRows,
        rows: list[np.ndarray],
        start: int,
        first: int = 0,
    ) -> Accepted:
        """Walk the tree by the target's own choices; `rows` takes the logits behind them, if they are kept.

        start, first: position and column of the root. Raises NoNumbersError where its row is NaN.
        """
        sequence, is_greedy = run.sequence, run.sampler.greedy and not run.keep_rows
        if isinstance(found, ReducedRows):
            spoilt = found.without_numbers(tree.width)
        else:
            choices = found if len(found) else self.passes.choices(graph)[first:]
            spoilt = self.passes.without_numbers(graph, choices[: tree.width], first)
        if spoilt:
            sequence.spoilt_from = start
            if not spoilt[0]:
                raise NoNumbersError(NAN)
            followed = tree.tokens.copy()
            followed[spoilt] = -1  # its token is emitted where it is chosen, and is the next root
            tree = replace(tree, tokens=followed)
        if is_greedy:
            assert isinstance(found, np.ndarray)
            accepted = greedy(tree, found, run.emit)
            if spoilt:
                sequence.spoilt_from = start + len(accepted.path)
            return accepted

        def choose(node: int) -> int:
            if isinstance(found, ReducedRows):
                token = self._draw(run, graph, found, node, first)
                if token is not None:
                    return token
            row = self.passes.logits_row(graph, first + node)
            if run.keep_rows:
                rows.append(row)
            return run.sample(row)

        accepted = walk(tree, choose, run.emit)
        if spoilt:
            sequence.spoilt_from = start + len(accepted.path)
        return accepted

    def _plain(self, run: Run, clock: Clock | None = None) -> Step:
        """Run the pending token alone; its features are kept for the draft."""
        sequence, clock, start = run.sequence, clock or Clock(), run.sequence.n_tokens
        assert sequence.pending is not None
        column = None
        if self.drafter is not None and self.drafter.taps and not sequence.undraftable:
            if len(sequence.unseen) > self.drafter.depth:
                self.drafter.take_in(sequence)
            column = self.passes.state.features.free(sequence.unseen)
        watched = self._watch(run)
        sequence.torn = True
        graph = self.passes.linear(sequence, [sequence.pending], column=column, watch=watched, decoding=True)
        sequence.tokens.append(sequence.pending)
        if column is not None:
            sequence.unseen += (column,)
        row = choice = reduced = None
        if run.sampler.greedy and not run.keep_rows:
            choices = self.passes.choices(graph)
            choice, is_spoilt = int(choices[0]), bool(self.passes.without_numbers(graph, choices))
        elif watched:
            reduced = self.passes.reduced(graph, watched)
            is_spoilt = bool(reduced.without_numbers(1))
        else:
            row = self.passes.logits_row(graph)
            is_spoilt = bool(np.isnan(row[0]))
        if is_spoilt:
            sequence.spoilt_from = start
            raise NoNumbersError(NAN)
        # from here on the state is whole: a sampler that raises leaves the row to start from again
        sequence.pending, sequence.logits, sequence.torn = choice, row, False
        clock.lap("verify")
        if reduced is not None:
            try:
                choice = self._draw(run, graph, reduced)
            finally:
                if choice is None:
                    row = sequence.logits = self.passes.logits_row(graph)
        if row is not None:
            choice, sequence.logits = run.sample(row), None
        assert choice is not None
        sequence.pending = choice
        run.emit(choice)
        clock.lap("host")
        # sampling counts: a drafted step's is in its `host`; behind a draft that was not verified everything takes longer
        if graph.is_warm and not clock.times.draft:
            spent = clock.times.tree + clock.times.verify + clock.times.host
            self._took_plain(run, spent, start)
        rows = (row,) if run.keep_rows and row is not None else None
        return Step((choice,), "plain", rows=rows, timings=clock.times)

    def _took_plain(self, run: Run, ms: float, context: int) -> None:
        """Note what a plain step took: behind a wide one what it took more than others, which that one has to answer for."""
        usual = self.costs.of("plain", 1, context) if run.was_wide else None
        if usual is None or ms < usual:
            self.costs.measured("plain", ms, context=context)
        if usual is not None:
            self.costs.measured("after", max(ms - usual, 0.0))
