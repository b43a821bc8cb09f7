"""One policy for one or many sequences: which sequences draft, how deep, and which candidates get the columns of the verify pass.

One objective: expected tokens per millisecond of the whole step. With p the calibrated probabilities of the nodes that are
verified, a step of n sequences is worth

    (n + sum p) / (C_draft + C_verify + C_commit + C_host)

tokens per millisecond (CaDDTree, arXiv 2606.01813, for one sequence). The cost of a pass is a staircase over its columns, so only
the ends of its steps are considered; plain decoding is the width without nodes. A pass costs much the same whichever sequence its
columns belong to, so they are one budget, filled best-first over the candidates of all sequences (`shared_heap`).

Whether to run a draft is decided before there are candidates, from the expected gains of the last ones (`Forecast`). Sequences
that do not draft are tried from time to time, for at most 1 % of the time. The loss against plain decoding is bounded (`Ledger`).

No plan depends on a target sample of the step that it plans, so no plan can bias the output.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from ..decode.accept import Accepted
from ..decode.calibration import Calibration, count_votes, path_probabilities
from ..decode.sequence import Sequence
from ..decode.shared_heap import shares
from ..decode.tree import DRAFT, Tree, verify_width
from .costs import Costs, step_ends
from .forecast import LOOK_BACK, Array, Forecast, Gains
from .ledger import Ledger
from .plan import PLAIN, Plan, plan_of

PROBE = 0.01  # share of the time for trials
LOOK_AGAIN = 200  # steps between measurements of a plain step
# steps for which a CPU keeps its costs and choice; a GPU leaves time to update them in every step
REFRESH = 16
MARGIN = 0.02  # margin by which another choice must be better: every width and draft has graphs of its own
GROW_ALL = 3  # steps between trees grown to the whole budget, for the forecast
LEAST_TREE = 3  # nodes of a tree that is pruned afterwards
STARVED = 0.4  # share of its plain speed that no sequence may fall below because others draft
MOST_COLUMNS = 64  # columns of a pass: beyond them matmuls are no longer memory-bound on any measured device
DISTURBED = 2.0  # multiple of the expected time above which a step counts as disturbed by something else
HOPELESS_AFTER = 40  # drafts without a hit: such a draft belongs to another target
log_ = logging.getLogger("dflash_ggml")


@dataclass(slots=True, eq=False)
class Notes:
    """The policy's state of one sequence.

    Attributes:
        fixed: The plan of a fixed mode, None for `auto`.
        tried_at: The step of the last draft.
        trial_paid: Whether the last trial paid, so that the next need not wait for its budget.
        skip: Remaining steps that are plain without evaluation.
        glanced: Whether prompt lookup was evaluated in this step; glanced_before: in the last one, which was plain.
        expected_gain: Expected additional tokens of its next draft.
        kept: Verified nodes of the last trees.
    """

    fixed: Plan | None
    calibration: Calibration
    forecast: Forecast
    tried_at: int = -(1 << 30)
    trial_paid: bool = False
    skip: int = 0
    glanced: bool = False
    glanced_before: bool = False
    expected_gain: float = 0.0
    kept: deque[int] = field(default_factory=lambda: deque(maxlen=LOOK_BACK))


@dataclass(slots=True)
class StepTimes:
    """Wall milliseconds of one step.

    Attributes:
        tree: Planning the step and growing its trees.
        host: The rest: masks, sampling, bookkeeping.
    """

    draft: float = 0.0
    tree: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return self.draft + self.tree + self.verify + self.commit + self.host


@dataclass(slots=True)
class Result:
    """The outcome of a step, in the order of its sequences.

    Attributes:
        trees: The verified trees, root-only without drafted nodes.
        accepted: None for a failed sequence.
        cold: Which of "draft", "verify" and "commit" ran a new graph, and so took longer than usual.
    """

    trees: Items[Tree]
    accepted: Items[Accepted | None]
    times: StepTimes
    cold: Collection[str] = ()


class Choice(NamedTuple):
    """Which sequences draft (indices in the step), with how many columns each, and the expected tokens per millisecond."""

    drafting: frozenset[int]
    block: int
    rate: float


class Table(NamedTuple):
    """Costs of steps with so many sequences and drafts: node counts that fill a pass, and milliseconds of a step with each."""

    ends: list[int]
    ms: list[float]


@dataclass(slots=True, eq=False)
class _Step:
    """The current step.

    Attributes:
        was_wide: Whether the previous step had drafted nodes.
        free: Sequences with mode `auto`.
        fixed: Drafts of fixed modes.
        block, drafting: Columns of each draft, and number of drafting sequences.
        lost: Whether drafting was slower than plain decoding.
        plain, after: Milliseconds of a plain step, and its additional time after this one.
        grown: Draft trees for the forecasts.
    """

    sequences: Items[Sequence]
    notes: list[Notes]
    plans: list[Plan]
    was_wide: bool
    free: list[int] = field(default_factory=list)
    fixed: int = 0
    block: int = 0
    drafting: int = 0
    trials: frozenset[int] = frozenset()
    lost: bool = False
    plain: float = 0.0
    after: float = 0.0
    table: Table | None = None
    grown: list[tuple[int, Tree, Array]] = field(default_factory=list)


class Policy:
    """Plans the steps of an engine.

    Args:
        depth: The longest path that the draft model proposes, 0 without one.
    """

    def __init__(
        self, depth: int, costs: Costs | None = None, is_gpu: bool = False, most_columns: int = MOST_COLUMNS
    ) -> None:
        self.depth, self.is_gpu, self.most = depth, is_gpu, most_columns
        self.costs = costs or Costs()
        self.calibration, self.forecast = Calibration(), Forecast(depth)  # of all sequences
        # of steps with a draft, and with prompt lookup alone
        self.draft_ledger, self.lookup_ledger = Ledger(), Ledger()
        self._since_plain = 0  # steps
        self.drafted = self.right = 0  # drafts, and their nodes that were accepted
        self._now = 0  # steps
        self._choice = Choice(frozenset(), 0, 0.0)
        self._members: list[Notes] = []  # the sequences of the choice
        self._has_new_forecasts = False  # whether forecasts have changed since
        self._trial_savings = self._trial_cost = (
            0.0  # milliseconds available for trials, and needed by the next one
        )
        self._tables: dict[tuple[int, int, int], Table] = {}  # by sequences, drafts and their columns
        self._verified: dict[int, dict[int, float]] = {}  # milliseconds by sequences and nodes
        self._drafts: dict[tuple[int, int], float] = {}
        self._plain: dict[int, float] = {}  # milliseconds by sequences
        self._after = 0.0
        self._least_lookup: dict[int, float] = {}  # least probability for prompt lookup, by sequences
        self._refreshed_at = 0  # the step of the last cost update
        self._context = 0
        self._step = _Step((), [], [], False)
        self._unlearned: tuple[_Step, Result] | None = (
            None  # the last step and its result, not learned from yet
        )
        self._was_wide = False
        self._built = set[tuple[int, ...]]()  # step shapes whose graphs exist: building them is not debited

    @property
    def notes(self) -> list[Notes]:
        """The policy's state of the current step's sequences."""
        return self._step.notes

    # ---- before the draft

    def plan(self, sequences: Items[Sequence]) -> list[Plan]:
        """Return a plan per sequence. All drafting sequences use the same depth."""
        self._now += 1
        if len(sequences) == 1 and (notes := sequences[0].notes) is not None and notes.skip:
            notes.skip -= 1
            self._step = _Step(sequences, [notes], [PLAIN], self._was_wide)
            return [PLAIN]
        if not self.is_gpu:  # on a GPU `catch_up` does this while the device is busy
            self._learn()
        notes = [s.notes or self._new_notes(s, len(sequences)) for s in sequences]
        plans = [PLAIN if s.undraftable else n.fixed for s, n in zip(sequences, notes)]
        step = self._step = _Step(sequences, notes, [plan or PLAIN for plan in plans], self._was_wide)
        step.free = [i for i, plan in enumerate(plans) if plan is None]
        step.fixed = sum([plan is not None and plan.kind != "plain" and plan.drafts for plan in plans])
        if step.free:
            self._decide(step)
        return step.plans

    def _new_notes(self, sequence: Sequence, n: int) -> Notes:
        """Create the state of a new sequence."""
        mode, lookup = sequence.mode, sequence.lookup is not None
        fixed = plan_of(mode, sequence.budget, self.depth, sequence.chain_seed, lookup)
        sequence.notes = Notes(fixed, Calibration(self.calibration), Forecast(self.depth, self.forecast))
        plain = self.costs.expected("plain", n, self._context, n)
        # the draft's acceptance carries over from other sequences; prompt lookup's does not
        self.draft_ledger.begin(plain, 0.0)
        self.lookup_ledger.begin(plain, 1 / n)
        return sequence.notes

    def _decide(self, step: _Step) -> None:
        """Plan the sequences whose mode is `auto`."""
        n, free = len(step.plans), step.free
        members = step.notes if len(free) == n else [step.notes[i] for i in free]
        if members != self._members or self._now - self._refreshed_at >= REFRESH or not self._plain.get(n):
            self._refresh(step, members)
        step.plain = self._plain[n]
        self._since_plain += 1
        if len(free) == n and self._since_plain > (LOOK_AGAIN if step.plain else 1):
            return
        may_draft = len(free) < n or not self.draft_ledger.is_empty
        may_look_up = len(free) < n or not self.lookup_ledger.is_empty
        step.after = 0.0 if step.was_wide else self._after
        lookup_p = {i: self._glance(step, i) for i in free if step.sequences[i].lookup is not None}
        if self.depth and n < self.most and may_draft:
            self._choose(step, lookup_p)
        if may_look_up:
            for i in lookup_p:
                if step.plans[i] is PLAIN:
                    step.plans[i] = self._from_lookup(step, i, lookup_p[i])
        step.drafting += step.fixed
        if any(plan is not PLAIN for plan in step.plans):
            step.table = self._table(n, step.drafting, step.block or self.depth + 1)
        elif n == 1 and step.plain and not (lookup_p and may_look_up):
            saving = int(max(self._trial_cost - self._trial_savings, 0.0) / (PROBE * step.plain))
            skip = min(max(saving, self.draft_ledger.plain_steps(step.plain)), REFRESH)
            step.notes[0].skip = min(skip, self.lookup_ledger.plain_steps(step.plain)) if lookup_p else skip

    # ---- costs, and the choice of drafting sequences

    def _refresh(self, step: _Step, members: list[Notes]) -> None:
        """Update the costs, and choose the sequences that draft."""
        n, same, costs = len(step.plans), members == self._members, self.costs
        self._refreshed_at, self._context = self._now, sum([s.n_tokens for s in step.sequences]) // n
        for known in (self._tables, self._verified, self._drafts, self._least_lookup):
            known.clear()
        self._plain = {n: costs.expected("plain", n, self._context, n) if costs.knows_plain(n) else 0.0}
        self._after = costs.expected("after", 1, 0, n)
        if self.depth and n < self.most and (not same or self._has_new_forecasts or self._choice.drafting):
            self._choice = self._best(step, same)
            self._has_new_forecasts = False
        self._members = members

    def _draft(self, drafting: int, block: int) -> float:
        """Milliseconds of a draft pass."""
        if not drafting:
            return 0.0
        found = self._drafts.get((drafting, block))
        if found is None:
            found = self.costs.expected("draft", drafting * block, self._context, drafting)
            self._drafts[drafting, block] = found
        return found

    def _table(self, n: int, drafting: int, block: int) -> Table:
        """Costs of steps of n sequences of which `drafts` draft."""
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
        """The best choice of drafting sequences and columns, by their forecasts."""
        free, n = step.free, len(step.plans)
        most, plain = self.most - n, self.costs.expected("plain", n, self._context, n)
        found = [Choice(frozenset(), 0, n / plain if plain else 0.0)]
        expected_gains: dict[int, dict[int, float]] = {}
        counts = sorted({-(-len(free) // 2), len(free)})
        longer = inf
        for block in self.forecast.blocks[:1] if step.fixed else self.forecast.blocks:
            draft = self._draft(step.fixed + len(free), block)
            if draft > longer - MARGIN * plain:
                continue
            longer = draft
            gains = {i: step.notes[i].forecast.of(block, min(most, step.sequences[i].budget)) for i in free}
            expected_gains[block] = expected_gain = {i: float(np.dot(*gains[i])) for i in free}
            order = sorted(free, key=lambda i: -expected_gain[i])
            for count in counts:
                # if all draft, all share the gain: no limit
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
            step.notes[i].expected_gain = expected_gains[best.block][i]
        return best

    def _choose(self, step: _Step, lookup_p: dict[int, float]) -> None:
        """Plan the drafts: of the chosen sequences, and of one on trial."""
        drafting, block = self._choice.drafting, self._choice.block
        if lookup_p and drafting:
            drafting -= {i for i in drafting & lookup_p.keys() if self._lookup_suffices(step, i, lookup_p[i])}
        blocks = self.forecast.blocks
        if step.fixed:
            block = blocks[0]
        elif not drafting:
            block = blocks[min(1, len(blocks) - 1)]  # of a trial
        if len(drafting) < len(step.free):
            step.trials = self._trials(step, drafting, block)
            drafting |= step.trials
        step.block, step.drafting = block, len(drafting)
        for i in drafting:
            step.plans[i] = _tree(self._tree_nodes(step, i), block)
            step.notes[i].tried_at = self._now

    def _trials(self, step: _Step, drafting: frozenset[int], block: int) -> frozenset[int]:
        """The sequences whose drafts are on trial: new ones at once, others when the trial budget allows."""
        left_out = [i for i in step.free if i not in drafting]
        k = len(drafting) + step.fixed
        ends, ms = self._table(len(step.plans), k, block)
        cost = self._draft(k + 1, block) - self._draft(k, block)
        cost += max(ms[-1] - ms[0], 0.0) / ends[-1] * LEAST_TREE
        self._trial_cost = cost
        at_once = [i for i in left_out if step.notes[i].trial_paid or not step.notes[i].forecast.tried]
        if at_once:
            for i in at_once:
                step.notes[i].trial_paid = False
            return frozenset(at_once)
        if self._trial_savings < cost:
            return frozenset()
        self._trial_savings -= cost
        return frozenset([min(left_out, key=lambda i: step.notes[i].tried_at)])

    def _tree_nodes(self, step: _Step, i: int) -> int:
        """Nodes of a tree before pruning: growing many to keep few costs time."""
        notes, budget = step.notes[i], min(step.sequences[i].budget, self.most)
        return budget if self._grows_whole(step, i) else min(max(2 * max(notes.kept) + 1, LEAST_TREE), budget)

    def _grows_whole(self, step: _Step, i: int) -> bool:
        """Whether a tree is to be grown to the whole budget."""
        return len(step.notes[i].kept) < LOOK_BACK or (self._now + i) % GROW_ALL == 0

    def _from_lookup(self, step: _Step, i: int, lookup_p: float) -> Plan:
        """Plan a sequence that does not draft: prompt lookup's candidates, if they are probable enough to pay."""
        notes, n = step.notes[i], len(step.plans)
        least = self._least_lookup_p(n)
        if lookup_p < least or not lookup_p:
            if n == 1:  # a match grows by one token per step, so a short one needs some steps
                notes.skip = 2 if not lookup_p else int(2 * lookup_p < least)
            return PLAIN
        return Plan("tree", self._tree_nodes(step, i), drafts=False)

    def _glance(self, step: _Step, i: int) -> float:
        """Probability of prompt lookup's best token."""
        sequence, notes = step.sequences[i], step.notes[i]
        notes.glanced = True
        found: float = sequence.lookup.glance(sequence, notes.glanced_before)
        return found

    def _lookup_suffices(self, step: _Step, i: int, lookup_p: float) -> bool:
        """Whether prompt lookup makes a draft superfluous: a draft only adds tokens where lookup's first is wrong."""
        choice, k = self._choice, len(self._choice.drafting)
        saved = self._draft(k, choice.block) - self._draft(k - 1, choice.block)
        return (1 - lookup_p) * step.notes[i].expected_gain < choice.rate * saved

    def _least_lookup_p(self, n: int) -> float:
        """Least probability of prompt lookup's next token at which a pass over its candidates pays, 1 if it never does.

        A match grows with every right token, so later tokens are more probable: they are assumed to have the square root of the
        first one's probability, above anything measured for any match length.
        """
        found = self._least_lookup.get(n)
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
            self._least_lookup[n] = found
        return found

    # ---- between the draft and the verify pass

    def cut(self, trees: Items[Tree]) -> list[Tree]:
        """Prune the grown trees: return the part of each that is verified, the most valuable per millisecond of all candidates.

        Trees of fixed modes stay whole while all of them fit.
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
            if asked > room:  # the pass is full
                ends, ms = [room], [1.0]
            elif step.table is None:  # no tree can be pruned
                return list(trees)
            else:
                counts, room = [width if f else 1 for f, width in zip(fixed, widths)], room - asked
                first = bisect_left(ends, asked)
                ends, ms = [end - asked for end in ends[first:]], ms[first:]
        if step.after:
            ms = [ms[0], *[took + step.after for took in ms[1:]]]
        if not step.drafting:  # prompt lookup must win by a margin
            ms = [ms[0] / (1 + MARGIN), *ms[1:]]
        gains = path_probabilities(trees, calibrations)
        counts = shares(gains, widths, counts, room, ends, ms, MARGIN)
        self._keep_grown(step, trees, widths, gains, counts)
        return [
            tree if count == width else tree.first(count - 1)
            for tree, count, width in zip(trees, counts, widths)
        ]

    def _keep_grown(
        self, step: _Step, trees: Items[Tree], widths: list[int], gains: Array, counts: list[int]
    ) -> None:
        """Keep grown trees for the forecasts."""
        end = 0
        for i, (tree, plan, notes, width) in enumerate(zip(trees, step.plans, step.notes, widths)):
            first, end = end, end + width
            if notes.fixed is not None or plan is PLAIN:
                continue
            grows_whole = self._grows_whole(step, i)
            notes.kept.append(counts[i] - 1)
            if plan.drafts and grows_whole:
                step.grown.append((i, tree, gains[first:end]))

    # ---- behind the step

    def record(self, result: Result) -> None:
        """Record the step's outcome, with the trees that `cut` returned; `catch_up` or the next plan learns from it."""
        step, n = self._step, len(result.trees)
        columns = sum([tree.width for tree in result.trees])
        is_wide, ms = columns > n, result.times.total
        self._learn()
        if not is_wide and not result.times.draft:
            self._since_plain = 0
            self.draft_ledger.plain(ms)
            self.lookup_ledger.plain(ms)
        elif step.plain and any(result.accepted):
            tokens = sum([len(accepted.tokens) for accepted in result.accepted if accepted])
            expected = max(_step_ms(*step.table, columns - n), step.plain) if step.table else inf
            shape = n, verify_width(columns - 1), step.drafting, step.block, self._context.bit_length()
            is_first = bool(result.cold) and shape not in self._built
            self._built.add(shape)
            ms = min(ms, expected if is_first else DISTURBED * expected)
            ledger = self.draft_ledger if step.drafting else self.lookup_ledger
            tokens_ms = tokens * step.plain / n
            ledger.speculative(ms, tokens_ms, step.plain)
            step.lost = step.drafting > 0 and ms > tokens_ms
        self._trial_savings = min(self._trial_savings + PROBE * ms, max(self._trial_cost, ms))
        for notes, tree in zip(step.notes, result.trees):
            notes.glanced_before, notes.glanced = notes.glanced and tree.width == 1, False
        if step.table is None and not is_wide:
            self._measure(step, result, columns)
        else:
            self._unlearned = step, result
        self._was_wide = is_wide or result.times.draft > 0

    def _measure(self, step: _Step, result: Result, columns: int) -> None:
        """Record the pass times."""
        n, measured, times, cold = len(result.trees), self.costs.measured, result.times, result.cold
        if n == 1 and columns > 1 and self._now % 2:  # every second one is enough
            return
        context = sum([s.n_tokens for s in step.sequences]) // n
        if times.draft and "draft" not in cold:
            drafts = [
                (plan.depth or self.depth) + 1 for plan in step.plans if plan.kind != "plain" and plan.drafts
            ]
            if drafts:
                measured("draft", times.draft, max(drafts) * len(drafts), context, len(drafts))
            else:
                measured("append", times.draft, 1, context)
        if columns > n:
            width = verify_width(columns - 1)
            if "verify" not in cold:
                measured("verify", times.verify, width, context, n)
            if "commit" not in cold:
                measured("commit", times.commit, 1, 0, n)
            measured("host", times.tree + times.host, width, 0, n)
        elif not times.draft and "verify" not in cold:
            usual = self.costs.of("plain", n, context, n) if step.was_wide and not self.is_gpu else None
            if usual is None or times.total < usual:
                measured("plain", times.total, n, context, n)
            if usual is not None:
                measured("after", max(times.total - usual, 0.0), 1, 0, n)

    def catch_up(self) -> None:
        """Learn from the last step and update the costs, while a GPU is busy."""
        if not self.is_gpu:  # a CPU has no idle time: `plan` learns
            return
        self._learn()
        step = self._step
        if step.free:
            self.costs.catch_up()
            self._refresh(step, [step.notes[i] for i in step.free])

    def _learn(self) -> None:
        """Learn from the last step, unless that is done."""
        if self._unlearned is None:
            return
        (step, result), self._unlearned = self._unlearned, None
        self._measure(step, result, sum([tree.width for tree in result.trees]))
        for i, tree, probability in step.grown:
            depths = tree.depths
            if tree.sources is not None:  # lookup's own nodes would come without a draft
                proposed = (tree.sources & DRAFT) > 0
                proposed[0] = True
                probability, depths = probability[proposed], depths[proposed]
            step.notes[i].forecast.learn(probability, depths, (step.plans[i].depth or self.depth) + 1)
        if step.trials or step.lost:  # act on either at once
            self._refreshed_at = -REFRESH
        self._has_new_forecasts = self._has_new_forecasts or bool(step.grown)
        for i, (tree, accepted) in enumerate(zip(result.trees, result.accepted)):
            if accepted is None or not tree.n_nodes:
                continue
            notes, lookup = step.notes[i], step.sequences[i].lookup
            if tree.evidence is not None and lookup is not None:
                count_votes(tree, accepted, lookup.rates)
            if notes.fixed is not None:
                continue
            if step.plans[i].drafts:
                gained = self._count(notes, tree, accepted)
                notes.trial_paid = i in step.trials and gained * step.plain > self._trial_cost * len(
                    step.plans
                )

    def _count(self, notes: Notes, tree: Tree, accepted: Accepted) -> int:
        """Count a draft's accepted nodes; return how many of them it alone proposed."""
        notes.calibration.observe(tree, accepted)
        right = alone = accepted.n_accepted
        if tree.sources is not None:
            sources = tree.sources[list(accepted.kept[1:])]
            right, alone = int((sources & DRAFT > 0).sum()), int((sources == DRAFT).sum())
        self.drafted += 1
        self.right += right
        if self.drafted == HOPELESS_AFTER and not self.right:
            log_.warning(
                "none of the first %d drafts was right: the draft was probably made for another model or tokenizer; "
                "it is tried now and then, and decoding is plain otherwise",
                self.drafted,
            )
        return alone

    def expected_ms(self, nodes: int, context: int) -> float | None:
        """Expected milliseconds of a step of one sequence that verifies so many drafted nodes; None if unknown."""
        if not nodes:
            return self.costs.of("plain", 1, context)
        return self.costs.drafted([nodes], self.depth + 1 if self.depth else 0, context)[nodes] or None


def _step_ms(ends: list[int], ms: list[float], nodes: int) -> float:
    """Milliseconds of a step with so many nodes, from the costs at step ends."""
    return ms[min(bisect_left(ends, nodes), len(ms) - 1)]


@lru_cache(maxsize=4096)
def _tree(nodes: int, block: int) -> Plan:
    """The plan of a tree from a draft of so many columns."""
    return Plan("tree", nodes, depth=block - 1)


def _chain(lookup_p: float, nodes: int) -> float:
    """Expected tokens of a path of so many nodes, by the probability of the first."""
    further = sqrt(lookup_p)
    return lookup_p * (1 - further**nodes) / (1 - further)


def _rate(n: int, parts: list[Gains], table: Table, most: float) -> float:
    """Tokens per millisecond of n sequences at the best width within `most` milliseconds, given the drafts' gains."""
    gains, often = parts[0] if len(parts) == 1 else (np.concatenate(both) for both in zip(*parts))
    order = (-gains).argsort()
    gains, often = gains[order], often[order]
    filled, sums = np.zeros(len(order) + 1), np.zeros(len(order) + 1)
    often.cumsum(out=filled[1:])
    (gains * often).cumsum(out=sums[1:])
    tokens = np.interp(table.ends, filled, sums).tolist()
    return max([(n + more) / ms for ms, more in zip(table.ms, tokens) if 0 < ms <= most], default=0.0)
