"""One policy for one or many sequences: who is drafted, how far, and which candidates get the columns of the verify pass.

One objective: expected tokens per millisecond of the whole step. With p the calibrated probabilities of the nodes that are
verified, a step of n sequences is worth

    (n + sum p) / (C_draft + C_verify + C_commit + C_host)

tokens per millisecond (CaDDTree, arXiv 2606.01813, for one sequence). The cost of a pass is a staircase over its columns, so only
step ends are looked at; no node at all is plain decoding, a width like any other. A pass costs much the same whichever sequence
its columns belong to, so they are one budget, filled best-first over the candidates of all sequences (`shared_heap`).

Whether to run a draft is decided before there are candidates, by what the last ones promised (`Forecast`). Who is left out is
tried now and then, for at most 1 % of the time. A draft that promises less than its verify pass costs is not verified: the
tokens that follow tell what it was worth. What all that may lose against plain decoding is bounded (`Ledger`).

No plan looks at a target draw of the step that it plans, so no plan can change what is written.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache
from math import floor, inf, log, sqrt
from typing import NamedTuple

import numpy as np

from ..decode.accept import Accepted
from ..decode.calibration import Calibration, path_probabilities
from ..decode.merged import DRAFT
from ..decode.merged import observe as count_votes
from ..decode.sequence import Sequence
from ..decode.shared_heap import shares
from ..decode.tree import Tree, verify_width
from .costs import Costs, step_ends
from .fixed import plan_of
from .forecast import LOOK_BACK, Array, Forecast, Gains
from .ledger import PATIENCE, Ledger
from .notes import Hindsight, Notes
from .plan import PLAIN, Plan

PROBE = 0.01  # share of the time that tries may take
REFRESH = 8  # steps between looks at plain decoding's cost and at who is drafted
LONG = (
    64  # steps in which a GPU's batch is looked at twice as often; a CPU keeps other costs for up to as many
)
REST = 3  # steps that a lone sequence stays plain without a look where nothing may be tried
MARGIN = 0.02  # by which another choice must be ahead
LONGER = 24  # steps after which a longer draft is run again, to see what a part of it misses
LEARN_EVERY = 3  # steps of a known sequence between trees that its forecast learns from
GROW_ALL = 16  # steps between trees that are grown to the whole budget
LEAST_TREE = 3  # nodes of a tree that is grown to choose from
LESS_LIKELY = log(4)  # than the last nodes that were verified: paths that are grown too
FLAT = 0.03  # of a step's cost: a narrower pass or a shorter draft that saves less is not worth graphs of its own
STARVED = 0.4  # of its speed in plain decoding, below which no sequence may fall because others are drafted
MOST_COLUMNS = 64  # of a pass: matmuls over more are no longer read-bound on any device that was measured
HOPELESS_AFTER = 40  # drafts without a hit: such a draft does not belong to this target
log_ = logging.getLogger("dflash_ggml")


@dataclass(slots=True)
class Result:
    """What came of a step, in the order of its sequences.

    Attributes:
        trees: What was verified, root-only where nothing was.
        accepted: None for a sequence that failed.
        draft, tree, verify, commit, host: Wall milliseconds; tree: of planning and growing trees.
        warm: Which of "draft", "verify" and "commit" built no graph.
    """

    trees: Items[Tree]
    accepted: Items[Accepted | None]
    draft: float
    tree: float
    verify: float
    commit: float
    host: float
    warm: frozenset[str] = frozenset(("draft", "verify", "commit"))

    @property
    def ms(self) -> float:
        """The whole step."""
        return self.draft + self.tree + self.verify + self.commit + self.host


class Choice(NamedTuple):
    """Who is drafted (places in the step), with how many columns each, and the tokens per millisecond expected of it."""

    drafting: frozenset[int]
    block: int
    rate: float


class Table(NamedTuple):
    """Steps of so many sequences and drafts: nodes at which a pass is full, and milliseconds of a step with so many."""

    ends: list[int]
    ms: list[float]


class _Step:
    """The step under way."""

    __slots__ = (
        "after",
        "block",
        "drafting",
        "fixed",
        "free",
        "grown",
        "longer",
        "nodes",
        "notes",
        "plain",
        "plans",
        "promised",
        "rejected",
        "sequences",
        "table",
        "trying",
        "was_wide",
    )  # fmt: skip

    def __init__(
        self, sequences: Items[Sequence], notes: list[Notes], plans: list[Plan], was_wide: bool
    ) -> None:
        """was_wide: whether the step before it was no plain one."""
        self.sequences, self.notes, self.plans, self.was_wide = sequences, notes, plans, was_wide
        self.free: list[int] = []  # whose mode is `auto`
        self.fixed = 0  # drafts of other modes
        self.block, self.drafting = 0, 0  # columns of each draft, and how many run
        self.trying: frozenset[int] = frozenset()
        self.longer = False  # whether a longer draft runs than pays, to see what it adds
        self.plain = self.after = 0.0  # milliseconds of a plain step, and what it takes more behind this one
        self.table: Table | None = None
        self.promised = [0.0] * len(plans)  # by sequence, the sum of its verified nodes' probabilities
        self.rejected: list[int] = []  # columns of each tree that would have been verified, where none was
        self.grown: list[tuple[int, Tree, Array]] = []  # trees of drafts that forecasts learn from


class Policy:
    """Plans the steps of an engine."""

    def __init__(
        self, depth: int, costs: Costs | None = None, is_gpu: bool = False, most_columns: int = MOST_COLUMNS
    ) -> None:
        """depth: the longest path that the draft model proposes, 0 without one."""
        self.depth, self.is_gpu, self.most = depth, is_gpu, most_columns
        self.costs = costs or Costs()
        self.calibration, self.forecast = Calibration(), Forecast(depth)  # of all sequences
        self.ledger = Ledger(PATIENCE if is_gpu else 1.0)
        self.drafted = self.right = 0  # drafts, and their nodes that were accepted
        self._now = 0  # steps
        self._choice, self._longer_at = Choice(frozenset(), 0, 0.0), 0
        self._who: list[Notes] = []  # whom the choice is about
        self._has_news = False  # whether forecasts have learned since
        self._saved = self._wanted = 0.0  # milliseconds that tries may take, and the next one wants
        self._tables: dict[tuple[int, int, int], Table] = {}  # by sequences, drafts and their columns
        self._verified: dict[int, dict[int, float]] = {}  # milliseconds by sequences and nodes
        self._drafts: dict[tuple[int, int], float] = {}
        self._plain: dict[int, float] = {}  # milliseconds by sequences
        self._after = 0.0
        self._sure: dict[int, float] = {}  # how sure prompt lookup must be, by sequences
        self._looked_at = self._met_at = 0  # the steps of the last look, and of the first at this batch
        self._renewed_at, self._kept = (
            0,
            0,
        )  # the step at which the tables were renewed, and for how many they are kept
        self._context = 0
        self._step = _Step((), [], [], False)
        self._came: tuple[_Step, Result] | None = None  # the last step, not learned from yet
        self._was_wide = False

    @property
    def notes(self) -> list[Notes]:
        """On the sequences of the step under way."""
        return self._step.notes

    # ---- before the draft

    def plan(self, sequences: Items[Sequence]) -> list[Plan]:
        """Return a plan per sequence. Those that are drafted all look equally far ahead."""
        self._now += 1
        if len(sequences) == 1 and (notes := sequences[0].notes) is not None and notes.rest:
            notes.rest -= 1
            self._step = _Step(sequences, [notes], [PLAIN], self._was_wide)
            return [PLAIN]
        if not self.is_gpu:  # elsewhere the device would wait for it
            self._learn()
        notes = [s.notes or self._meet(s, len(sequences)) for s in sequences]
        plans = [PLAIN if s.undraftable else n.fixed for s, n in zip(sequences, notes)]
        step = self._step = _Step(sequences, notes, [plan or PLAIN for plan in plans], self._was_wide)
        step.free = [i for i, plan in enumerate(plans) if plan is None]
        step.fixed = sum([plan is not None and plan.kind != "plain" and plan.drafts for plan in plans])
        if step.free:
            self._decide(step)
        return step.plans

    def _meet(self, sequence: Sequence, n: int) -> Notes:
        """Begin notes of a sequence."""
        mode, lookup = sequence.mode, sequence.lookup is not None
        fixed = plan_of(mode, sequence.budget, self.depth, sequence.chain_seed, lookup)
        sequence.notes = Notes(fixed, Calibration(self.calibration), Forecast(self.depth, self.forecast))
        self.ledger.begin(self._plain.get(n, inf))
        return sequence.notes

    def _decide(self, step: _Step) -> None:
        """Plan the sequences whose mode is `auto`."""
        n, free = len(step.plans), step.free
        who = step.notes if len(free) == n else [step.notes[i] for i in free]
        if who != self._who or self._is_due(self._now) or not self._plain.get(n):
            self._look(step, who)
        step.plain = self._plain[n]
        for i in free:
            if step.notes[i].waiting:
                self._follow(step, i)
        if len(free) == n and self.ledger.wants_plain(step.plain > 0):
            step.notes[0].rest = REST if n == 1 and self.ledger.is_empty else 0
            return
        step.after = 0.0 if step.was_wide else self._after
        sure = {i: self._glance(step, i) for i in free if step.sequences[i].lookup is not None}
        if self.depth and n < self.most:
            self._choose(step, sure)
        for i in sure:
            if step.plans[i] is PLAIN:
                step.plans[i] = self._from_lookup(step, i, sure[i])
        step.drafting += step.fixed
        if any(plan is not PLAIN for plan in step.plans):
            step.table = self._table(n, step.drafting, step.block or self.depth + 1)
        elif n == 1 and not sure and step.plain and not step.notes[0].waiting:
            step.notes[0].rest = REST

    # ---- costs, and who is drafted by them

    def _is_due(self, at: int) -> bool:
        """Whether to look at costs, and at who is drafted, before a step."""
        every = REFRESH
        if self.is_gpu:
            every = REFRESH // 2 if at - self._met_at < LONG else REFRESH
        elif not (self._choice.drafting or self._has_news):  # there is nothing to choose from
            every = self._kept
        return at - self._looked_at >= every

    def _look(self, step: _Step, who: list[Notes]) -> None:
        """Look costs up, and choose who is drafted."""
        n, same, costs = len(step.plans), who == self._who, self.costs
        self._looked_at = self._now
        if not same:
            self._met_at = self._now
        # a GPU leaves time for it
        if self.is_gpu or not (same and self._plain.get(n)) or self._now - self._renewed_at >= self._kept:
            self._kept = min(2 * self._kept, LONG) if same else REFRESH
            self._renewed_at, self._context = self._now, sum([s.n_tokens for s in step.sequences]) // n
            for known in (self._tables, self._verified, self._drafts, self._sure):
                known.clear()
        self._plain = {n: costs.expected("plain", n, self._context, n) if costs.knows_plain(n) else 0.0}
        self._after = costs.expected("after", 1, 0, n)
        if self.depth and n < self.most and (not same or self._has_news or self._choice.drafting):
            self._choice = self._best(step, same)
            self._has_news = False
        self._who = who

    def _draft(self, drafting: int, block: int) -> float:
        """Milliseconds of a draft."""
        if not drafting:
            return 0.0
        found = self._drafts.get((drafting, block))
        if found is None:
            found = self.costs.expected("draft", drafting * block, self._context, drafting)
            self._drafts[drafting, block] = found
        return found

    def _table(self, n: int, drafting: int, block: int) -> Table:
        """What steps of n sequences take of which so many are drafted, 0 of none."""
        found = self._tables.get((n, drafting, block))
        if found is None:
            costs, context = self.costs, self._context
            if n not in self._verified:
                self._verified[n] = costs.verified(step_ends(self.most, n), context, n)
            verified, plain = self._verified[n], costs.expected("plain", n, context, n)
            if drafting:
                more = self._draft(drafting, block)
                plain += more
            else:  # the draft only reads what was committed
                more = costs.expected("append", 1, context)
            found = Table([0, *verified], [plain, *[ms + more for ms in verified.values()]])
            self._tables[n, drafting, block] = found
        return found

    def _best(self, step: _Step, same: bool) -> Choice:
        """The set of drafted sequences, and columns of each, that are worth most by their forecasts."""
        free, n = step.free, len(step.plans)
        most, plain = self.most - n, self.costs.expected("plain", n, self._context, n)
        found = [Choice(frozenset(), 0, n / plain if plain else 0.0)]
        promises: dict[int, dict[int, float]] = {}
        counts = sorted({-(-len(free) * k // 4) for k in (1, 2, 3, 4)})
        longer = inf
        for block in self.forecast.blocks[:1] if step.fixed else self.forecast.blocks:
            draft = self._draft(step.fixed + len(free), block)
            if draft > longer - FLAT * plain:
                continue
            longer = draft
            gains = {i: step.notes[i].forecast.of(block, min(most, step.sequences[i].budget)) for i in free}
            promises[block] = promise = {i: float(np.dot(*gains[i])) for i in free}
            order = sorted(free, key=lambda i: -promise[i])
            for count in counts:
                # where all are drafted each has its part of what that gives
                ms = inf if step.fixed + count == n else plain / STARVED
                rate = _rate(
                    n, [gains[i] for i in order[:count]], self._table(n, step.fixed + count, block), ms
                )
                found.append(Choice(frozenset(order[:count]), block, rate))
        best, kept = max(found, key=lambda choice: choice.rate), self._choice
        if same and best[:2] != kept[:2]:
            now = [choice.rate for choice in found if choice[:2] == kept[:2]]
            best = kept._replace(rate=now[0]) if now and best.rate < (1 + MARGIN) * now[0] else best
        for i in best.drafting:
            step.notes[i].promise = promises[best.block][i]
        return best

    def _choose(self, step: _Step, sure: dict[int, float]) -> None:
        """Plan the drafts: of those for whom they are worth it, and of one that is tried."""
        drafting, block = self._choice.drafting, self._choice.block
        if sure and drafting:
            drafting -= {i for i in drafting & sure.keys() if self._is_surer(step, i, sure[i])}
        blocks = self.forecast.blocks
        if step.fixed:
            block = blocks[0]
        elif not drafting:
            block = blocks[min(1, len(blocks) - 1)]  # of a try
        elif self._now - self._longer_at > LONGER and block != blocks[0]:
            longer, k = blocks[blocks.index(block) - 1], len(drafting)
            if self._pays(self._draft(k, longer) - self._draft(k, block)):
                block, step.longer = longer, True
        if step.longer or block == blocks[0]:
            self._longer_at = self._now
        if len(drafting) < len(step.free):
            step.trying = self._tries(step, drafting, block)
            drafting |= step.trying
        step.block, step.drafting = block, len(drafting)
        for i in drafting:
            step.plans[i] = _tree(*self._size(step, i), block)
            step.notes[i].tried_at = self._now

    def _tries(self, step: _Step, drafting: frozenset[int], block: int) -> frozenset[int]:
        """Who is drafted to see what it is worth: new ones at once, others when it has been saved for."""
        left_out = [i for i in step.free if i not in drafting]
        k = len(drafting) + step.fixed
        cost = self._draft(k + 1, block) - self._draft(k, block)
        if (n := len(step.plans)) > 1:  # the others are verified anyway, and the try with them
            ends, ms = self._table(n, k, block)
            cost += max(ms[-1] - ms[0], 0.0) / ends[-1] * LEAST_TREE
        self._wanted = cost
        again = [i for i in left_out if step.notes[i].again or self._repeats(step, i)]
        if again:
            for i in again:
                step.notes[i].again = False
            return frozenset(again)
        i = min(left_out, key=lambda i: step.notes[i].tried_at)
        if step.notes[i].waiting:
            return frozenset()
        if not step.notes[i].forecast.tried:
            self._saved -= cost  # a new sequence borrows its first try
            return frozenset([i])
        return frozenset([i] if self._pays(cost) else [])

    def _repeats(self, step: _Step, i: int) -> bool:
        """Whether a sequence has begun to repeat itself, which prompt lookup would know better."""
        return step.sequences[i].lookup is None and step.notes[i].repetition.is_worth_a_try(
            step.sequences[i].tokens
        )

    def _pays(self, ms: float) -> bool:
        """Take so much of what was saved for tries, if it is there."""
        if self._saved < ms:
            return False
        self._saved -= ms
        return True

    def _size(self, step: _Step, i: int, lookup: bool = False) -> tuple[int, float]:
        """Nodes of a tree to choose from, and the log-probability of the least: growing many to keep few costs time."""
        notes, budget = step.notes[i], min(step.sequences[i].budget, self.most)
        if (
            len(notes.kept) < 2
            or not (lookup or notes.least)
            or step.longer
            or (self._now + i) % GROW_ALL == 0
        ):
            return budget, -inf
        least = floor(4 * (min(notes.least) - LESS_LIKELY)) / 4 if notes.least else -inf
        return min(max(2 * max(notes.kept) + 1, LEAST_TREE), budget), least

    def _from_lookup(self, step: _Step, i: int, sure: float) -> Plan:
        """Plan a sequence that is not drafted: what prompt lookup proposes, where that is sure enough to pay."""
        notes, n = step.notes[i], len(step.plans)
        least = self._least_sure(n)
        if sure < least or not sure:
            if (
                n == 1 and not notes.waiting
            ):  # a match grows by a token a step, and one too short now takes some
                notes.rest = 2 if not sure else int(2 * sure < least)
            return PLAIN
        return Plan("tree", self._size(step, i, lookup=True)[0], drafts=False)

    def _glance(self, step: _Step, i: int) -> float:
        """How likely the likeliest token is that prompt lookup proposes."""
        sequence, notes = step.sequences[i], step.notes[i]
        notes.glanced = True
        found: float = sequence.lookup.glance(sequence, notes.foretold)
        return found

    def _is_surer(self, step: _Step, i: int, sure: float) -> bool:
        """Whether prompt lookup leaves a draft too little to do: it adds tokens where the first of lookup's is wrong."""
        choice, k = self._choice, len(self._choice.drafting)
        saved = self._draft(k, choice.block) - self._draft(k - 1, choice.block)
        return (1 - sure) * step.notes[i].promise < choice.rate * saved

    def _least_sure(self, n: int) -> float:
        """How likely the next token of prompt lookup must be for a pass over its candidates to pay, 1 where it never does.

        A match grows with every token that is right, so each is likelier than the one before: those behind the first are taken
        to be as likely as its square root, more than was found of any match length.
        """
        found = self._sure.get(n)
        if found is None:
            table = self._table(n, 0, 0)
            token = self._plain[n] / n
            after = self.costs.of("after", 1, 0, n) or 0.0
            lost = (
                [(nodes, (ms + after) / token - n) for nodes, ms in zip(table.ends[1:], table.ms[1:])]
                if token
                else []
            )
            found = next(
                (p / 25 for p in range(25) if any(_chain(p / 25, k) > loss for k, loss in lost)), 1.0
            )
            self._sure[n] = found
        return found

    # ---- between the draft and the verify pass

    def cut(self, trees: Items[Tree]) -> list[Tree]:
        """Return the part of each grown tree that is verified: what is worth most per millisecond of all candidates together.

        Trees of a width that was asked for stay whole while there is room for all of them.
        """
        step, n = self._step, len(trees)
        widths, asked = [tree.width for tree in trees], 0
        if sum(widths) == n:
            return list(trees)
        counts, room = [1] * n, max(self.most - n, 0)  # the roots
        calibrations: list[Calibration | None] = [notes.calibration for notes in step.notes]
        ends, ms = step.table or ([room], [1.0])
        if len(step.free) < n:
            fixed = [notes.fixed is not None for notes in step.notes]
            calibrations = [None if f else known for f, known in zip(fixed, calibrations)]
            asked = sum([width - 1 for f, width in zip(fixed, widths) if f])
            if asked > room:  # there is no choice left: the pass is full
                ends, ms = [room], [1.0]
            elif step.table is None:  # no tree is free
                return list(trees)
            else:
                counts, room = [width if f else 1 for f, width in zip(fixed, widths)], room - asked
                first = bisect_left(ends, asked)
                ends, ms = [end - asked for end in ends[first:]], ms[first:]
        if step.after:
            ms = [ms[0], *[took + step.after for took in ms[1:]]]
        if not step.drafting:  # prompt lookup must be ahead, not only seem so
            ms = [ms[0] / (1 + MARGIN), *ms[1:]]
        gains = path_probabilities(trees, calibrations)
        counts, sums = shares(gains, widths, counts, room, ends, ms, FLAT)
        step.promised = [promised - 1 for promised in sums]
        nodes = sum(counts) - n
        if nodes and step.drafting and step.plain and not asked:
            took = _took(ends, ms, nodes) - ms[0] + step.plain  # beside the draft
            if sum(sums) * step.plain < took * n:
                step.rejected, counts = counts, [1] * n
        self._note(step, trees, widths, gains, counts)
        return [
            tree if count == width else tree.first(count - 1)
            for tree, count, width in zip(trees, counts, widths)
        ]

    def _note(
        self, step: _Step, trees: Items[Tree], widths: list[int], gains: Array, counts: list[int]
    ) -> None:
        """Keep what is learned of grown trees."""
        end = 0
        for i, (tree, plan, notes, width) in enumerate(zip(trees, step.plans, step.notes, widths)):
            first, end = end, end + width
            if notes.fixed is not None or plan is PLAIN:
                continue
            verified = counts[i] - 1
            if plan.drafts and not verified and width > 1 and (i in step.trying or step.rejected):
                verified = step.rejected[i] - 1 if step.rejected else 0
                notes.waiting.append(Hindsight(tree, step.sequences[i].n_tokens))
            notes.kept.append(verified)
            if plan.drafts:
                if verified and tree.evidence is None:
                    notes.least.append(float(tree.log_probs[verified]))
                tried = notes.forecast.tried
                if tried < LOOK_BACK or (self._now + i) % LEARN_EVERY == 0 or step.longer:
                    step.grown.append((i, tree, gains[first:end]))

    # ---- behind the step

    def record(self, result: Result) -> None:
        """Note what came of the step, for which `cut` gave these trees. It is learned from by `think`, or the next plan."""
        step, n = self._step, len(result.trees)
        columns = sum([tree.width for tree in result.trees])
        is_wide, ms = columns > n, result.ms
        self._learn()
        if not is_wide and not result.draft:
            self.ledger.plain(ms)
        elif step.plain and any(result.accepted):
            tokens = sum([len(accepted.tokens) for accepted in result.accepted if accepted])
            expected = max(_took(*step.table, columns - n), step.plain) if step.table else inf
            is_cold = len(result.warm) < 3
            self.ledger.speculative(ms, tokens * step.plain / n, step.plain, expected, is_cold)
        self._saved = min(self._saved + PROBE * ms, max(self._wanted, ms))
        for notes, tree in zip(step.notes, result.trees):
            notes.foretold, notes.glanced = notes.glanced and tree.width == 1, False
        if step.table is None and not is_wide:
            self._measure(step, result, columns)
        else:
            self._came = step, result
        self._was_wide = is_wide or result.draft > 0

    def _measure(self, step: _Step, result: Result, columns: int) -> None:
        """Note what the passes took."""
        n, measured, warm = len(result.trees), self.costs.measured, result.warm
        if n == 1 and columns > 1 and self._now % 2:  # half of them tell as much
            return
        context = sum([s.n_tokens for s in step.sequences]) // n
        if result.draft and "draft" in warm:
            drafts = [
                (plan.depth or self.depth) + 1 for plan in step.plans if plan.kind != "plain" and plan.drafts
            ]
            if drafts:
                measured("draft", result.draft, max(drafts) * len(drafts), context, len(drafts))
            else:
                measured("append", result.draft, 1, context)
        if columns > n:
            width = verify_width(columns - 1)
            if "verify" in warm:
                measured("verify", result.verify, width, context, n)
            if "commit" in warm:
                measured("commit", result.commit, 1, 0, n)
            measured("host", result.tree + result.host, width, 0, n)
        elif not result.draft and "verify" in warm:
            usual = self.costs.of("plain", n, context, n) if step.was_wide and not self.is_gpu else None
            if usual is None or result.ms < usual:
                measured("plain", result.ms, n, context, n)
            if usual is not None:
                measured("after", max(result.ms - usual, 0.0), 1, 0, n)

    def think(self) -> None:
        """Do what has time while a device is busy: learn from the last step, and look costs up anew."""
        if not self.is_gpu:  # there is no such time: `plan` learns
            return
        self._learn()
        step = self._step
        if step.free and self._is_due(self._now + 1):
            self.costs.catch_up()
            self._look(step, [step.notes[i] for i in step.free])

    def _learn(self) -> None:
        """Learn from the last step, if that is still to be done."""
        if self._came is None:
            return
        (step, result), self._came = self._came, None
        self._measure(step, result, sum([tree.width for tree in result.trees]))
        for i, tree, probability in step.grown:
            plan, most = step.plans[i], min(step.sequences[i].budget, self.most)
            whole = plan.least == -inf and plan.budget >= most
            depths = tree.depths
            if tree.sources is not None:  # what lookup alone offered would come without a draft
                offered = (tree.sources & DRAFT) > 0
                offered[0] = True
                probability, depths = probability[offered], depths[offered]
            step.notes[i].forecast.learn(probability, depths, (plan.depth or self.depth) + 1, whole)
        is_first = any(step.notes[i].forecast.tried == 1 for i in step.trying)
        if is_first or (
            step.trying and not self._choice.drafting
        ):  # what such a try showed is acted on at once
            self._looked_at = -REFRESH
        self._has_news = self._has_news or bool(step.grown)
        for i, (tree, accepted) in enumerate(zip(result.trees, result.accepted)):
            if accepted is None or not tree.n_nodes:
                continue
            notes, lookup = step.notes[i], step.sequences[i].lookup
            if tree.evidence is not None and lookup is not None:
                count_votes(tree, accepted, lookup.rates)
            if notes.fixed is not None:
                continue
            notes.forecast.came(step.promised[i], accepted.n_accepted)
            if step.plans[i].drafts:
                by_draft = self._count(notes, tree, accepted)
                notes.again = i in step.trying and by_draft * step.plain > self._wanted * len(step.plans)

    def _count(self, notes: Notes, tree: Tree, accepted: Accepted) -> int:
        """Learn how right a draft was; return its accepted nodes."""
        notes.calibration.observe(tree, accepted)
        right = accepted.n_accepted
        if tree.sources is not None:
            right = sum([bool(tree.sources[node] & DRAFT) for node in accepted.kept[1:]])
        self.drafted += 1
        self.right += right
        if self.drafted == HOPELESS_AFTER and not self.right:
            log_.warning(
                "none of the first %d drafts was right: the draft was probably made for another model or tokenizer; "
                "it is tried now and then, and decoding is plain otherwise",
                self.drafted,
            )
        return right

    def _follow(self, step: _Step, i: int) -> None:
        """Learn from drafts that were not verified, once the text tells what they were worth."""
        notes, sequence = step.notes[i], step.sequences[i]
        waiting, notes.waiting = notes.waiting, []
        for draft in waiting:
            accepted = draft.follow(sequence)
            if accepted is None:
                notes.waiting.append(draft)
                continue
            self._count(notes, draft.tree, accepted)
            if draft.tree.evidence is not None and sequence.lookup is not None:
                count_votes(draft.tree, accepted, sequence.lookup.rates)
            n, block = len(step.plans), self.forecast.blocks[min(1, len(self.forecast.blocks) - 1)]
            took = _took(
                *self._table(n, 1, block), accepted.path[-1]
            )  # the width that would have held its path
            notes.again = (n + accepted.n_accepted) * step.plain > took * n and accepted.n_accepted > 0

    def expected_ms(self, nodes: int, context: int) -> float | None:
        """What a step of one sequence is expected to take that verifies so many drafted nodes, None if nothing is known."""
        if not nodes:
            return self.costs.of("plain", 1, context)
        return self.costs.drafted([nodes], self.depth + 1 if self.depth else 0, context)[nodes] or None


def _took(ends: list[int], ms: list[float], nodes: int) -> float:
    """What a step with so many nodes takes, by the ends of passes."""
    return ms[min(bisect_left(ends, nodes), len(ms) - 1)]


@lru_cache(maxsize=4096)
def _tree(nodes: int, least: float, block: int) -> Plan:
    """The plan of a tree behind a draft of so many columns."""
    return Plan("tree", nodes, depth=block - 1, least=least)


def _chain(sure: float, nodes: int) -> float:
    """Expected tokens of a path of so many nodes, the first of which is as likely as this."""
    further = sqrt(sure)
    return sure * (1 - further**nodes) / (1 - further)


def _rate(n: int, parts: list[Gains], table: Table, most: float) -> float:
    """Tokens per millisecond of n sequences at the best width that takes at most `most`, if drafts of some are worth this."""
    gains, often = parts[0] if len(parts) == 1 else (np.concatenate(both) for both in zip(*parts))
    order = (-gains).argsort()
    gains, often = gains[order], often[order]
    filled, sums = np.zeros(len(order) + 1), np.zeros(len(order) + 1)
    often.cumsum(out=filled[1:])
    (gains * often).cumsum(out=sums[1:])
    tokens = np.interp(table.ends, filled, sums).tolist()
    return max([(n + more) / ms for ms, more in zip(table.ms, tokens) if 0 < ms <= most], default=0.0)
