"""Several sequences in one pass: who drafts, how deep, and which of their candidates get the columns.

A pass over C columns costs much the same whoever they belong to, so the columns are one budget: best-first over the candidates of
all sequences, by calibrated probability, one column each for certain. With p the probabilities of the nodes taken, a step of S
sequences is worth (S + sum p) / (C_draft + C_verify + C_commit + C_host), and as for one sequence only step ends of the cost are
looked at; no node at all is plain batching, a width like any other. Two designs were weighed. Growing one tree with S roots needs
no second order, but a draft's own probabilities, which one text earns and another does not, would decide between texts. Here each
tree is grown as ever, by the draft's order, and its nodes enter the common heap with what calibration makes of them.

A draft pass is paid before there are candidates: `drafting` has who takes part in it. What comes of all that is held against
plain batching: steps are plain while too much has been lost (`account`), and now and then, so that what they take stays known.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache
from math import floor, inf, log

import numpy as np
from numpy.typing import NDArray

from .accept import Accepted
from .account import Account
from .adaptive import Adaptive
from .calibration import path_probabilities
from .company import Company, Member
from .drafting import LEAST_GROWN, Choice, Drafting
from .ends import FLAT, MARGIN
from .joint_costs import JointCosts
from .merged import DRAFT
from .plan import Plan
from .prospect import Prospect
from .shared_heap import shares
from .step_costs import StepCosts
from .tree import Tree

MOST_COLUMNS = 64  # of a pass: products over more are no longer read-bound on any device that was measured
NARROWER = 0.002  # of the rate that is given up within a step for a narrower pass, which is fairer
LOOK_AT_ALL = 16  # steps between trees that are grown to the whole budget
# trees of a text that a prospect is learned from one by one, and steps between later ones
LOOK_AT_MOST, LOOK_EVERY = 6, 3
LESS_LIKELY = log(4)  # than the last nodes that were kept: paths that are grown too
STEPS = 4  # of a log-probability of paths that are not grown, so that plans are few
PLANS = 2048
PLAIN = Plan("plain", 0)


@dataclass(frozen=True, slots=True)
class _Grown:
    """A tree that a prospect is to learn from. block: columns of its draft; whole: whether all of it was grown."""

    adaptive: Adaptive
    probability: NDArray[np.float64]
    tree: Tree
    block: int
    whole: bool


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step of a company. ends: nodes of all texts that fill a pass; ms: what the step takes then; expected: by all nodes."""

    company: Company
    costs: JointCosts | None
    plans: list[Plan]
    chosen: Choice
    ends: list[int]
    ms: list[float]
    expected: Callable[[int], float]

    def is_for(self, company: Company, costs: JointCosts) -> bool:
        """Whether these would be planned for alike."""
        same = self.costs is costs and self.company.who == company.who
        return same and all(a.sequence is b.sequence for a, b in zip(self.company.members, company.members))


@dataclass(frozen=True, slots=True)
class _Came:
    """What came of a step, and all of its plans that is held against it."""

    company: Company
    trees: Items[Tree]
    accepted: Items[Accepted | None]
    ms: float
    usual: bool
    due: bool
    expected: Callable[[int], float]
    promised: list[float]
    trying: tuple[int, ...]


class Together:
    """Plans the steps of two or more sequences; one object per engine."""

    def __init__(self, depth: int, most_columns: int = MOST_COLUMNS, account: Account | None = None) -> None:
        """`depth`: the longest path of the model draft, 0 for none."""
        self.depth, self.most = depth, most_columns
        self.others = Prospect()  # the mean of all texts
        self.costs = StepCosts(most_columns)
        self.drafting = Drafting(depth, self.costs)
        self.account = account or Account()
        self._due = False  # whether the step under way is plain whatever it might be worth
        self._company = Company((), self.others)
        self._plans: list[Plan] = []
        # the step under way, or the last one that was not plain for being due
        self._step = _Planned(self._company, None, [], Choice(frozenset(), 1, 0.0), [], [], lambda nodes: 0.0)
        self._ahead: _Planned | None = None  # the next one, planned while a device was busy
        self._promised: list[float] = []  # by member, the sum of its nodes' probabilities
        self._unlearned: list[_Grown] = []
        self._came: _Came | None = None
        # of the last `share`: trees, their widths, what their nodes promise, and how many of each were taken
        self._shared: tuple[Items[Tree], list[int], NDArray[np.float64], list[int]] | None = None

    def next(self, members: Items[Member], costs: JointCosts) -> list[Plan]:
        """A plan per member. Those who draft all look equally deep; the trees are to go through `share`."""
        self._settle()
        company = self._company = Company(members, self.others)
        self._due = self._is_plain_due(members, costs)
        if self._due:
            self._plans = [PLAIN] * len(company)
            return [*self._plans]
        planned, self._ahead = self._ahead, None
        if planned is None or not planned.is_for(company, costs):
            planned = self._plan(company, costs)
        self._step, self._plans = planned, planned.plans
        return planned.plans

    def _plan(self, company: Company, costs: JointCosts) -> _Planned:
        """The next step of a company."""
        n, members = len(company), company.members
        self.costs.begin(costs, sum([m.sequence.n_tokens for m in members]) // n)
        plans = [
            PLAIN if free or m.sequence.undraftable else m.controller.next(m.sequence, costs.costs)
            for m, free in zip(members, company.free)
        ]
        fixed = sum([plan.kind != "plain" and plan.drafts for plan in plans])
        chosen = self.drafting.choose(company, fixed)
        blocks = self.drafting.blocks
        block = blocks[0] if fixed and blocks else chosen.block
        for i, adaptive in enumerate(company.free):
            if adaptive is None:
                continue
            if i in chosen.drafting:
                nodes, least = self._grown(company.prospect(adaptive), adaptive.budget, i, chosen.longer)
                plans[i] = _draft(nodes, block - 1, least)
            elif adaptive.copies:
                nodes, _ = self._grown(company.prospect(adaptive), adaptive.budget, i, copies=True)
                plans[i] = _copies(nodes)
        expected, ends = self.costs.drafted(n, fixed + len(chosen.drafting), block), self.costs.ends(n)
        ms = [expected(nodes) for nodes in ends]
        if not fixed and not chosen.drafting:  # copies must be ahead, not only seem so
            ms[0] /= 1 + MARGIN
        return _Planned(company, costs, plans, chosen, ends, ms, expected)

    def _plan_ahead(self) -> None:
        """Plan the next step, should the same be in it, unless that waits already or rests on what comes of this one."""
        company, costs = self._company, self._step.costs
        if self._ahead is not None or costs is None:
            return
        company = Company(company.members, self.others)
        if all(free or m.sequence.undraftable for m, free in zip(company.members, company.free)):
            self._ahead = self._plan(company, costs)

    def _is_plain_due(self, members: Items[Member], costs: JointCosts) -> bool:
        """Whether this step is to be plain: too much was lost, or what plain batching takes is to be seen. Where a plan was asked
        for it never is."""
        if not all(isinstance(member.controller, Adaptive) for member in members):
            return False
        n, account = len(members), self.account
        # looked up no more often than it is asked for
        is_known = account.is_empty or self.costs.knows_plain(n, costs)
        return account.wants_plain(self.costs.known_plain(n) if is_known else None)

    def share(self, trees: Items[Tree]) -> list[Tree]:
        """The part of each grown tree that is verified: what is worth most per millisecond of all candidates together.

        Trees of a width that was asked for stay whole while there is room for all of them.
        """
        company, n = self._company, len(trees)
        if self._due and not any(tree.n_nodes for tree in trees):
            self._promised = [0.0] * n
            return list(trees)
        company.update()
        widths, free = [tree.width for tree in trees], company.free
        gains = path_probabilities(trees, [None if one is None else one.calibration for one in free])
        asked = sum([width - 1 for width, adaptive in zip(widths, free) if adaptive is None])
        room, counts = max(self.most - n, 0), [1] * n  # the roots
        if whole := asked <= room:
            counts = [width if adaptive is None else 1 for width, adaptive in zip(widths, free)]
            room -= asked
        for i in self._step.chosen.trying:  # what it is for is to see what comes of it, whatever is expected
            tried = min(LEAST_GROWN, trees[i].n_nodes, max(room, 0))
            counts[i], room = 1 + tried, room - tried
        in_anyhow = sum(counts) - n
        # where not all that was asked for fits there is no choice left: the pass is full
        ends, ms = [room], [1.0]
        if whole:
            planned = zip(self._step.ends, self._step.ms)
            fit = [(end - in_anyhow, ms) for end, ms in planned if end >= in_anyhow]
            ends, ms = [end for end, _ in fit], [ms for _, ms in fit]
        counts, sums = shares(gains, widths, counts, room, ends, ms, FLAT, NARROWER)
        self._promised = [promised - 1 for promised in sums]
        self._shared = trees, widths, gains, counts
        return [tree.first(count - 1) for tree, count in zip(trees, counts)]

    def meanwhile(self) -> None:
        """What can be thought about while a device is busy with the pass: what came of the step before, what the grown trees
        promise, who drafts next, and how."""
        self.catch_up()
        if self._due:
            return
        self._settle()
        for grown in self._unlearned:
            prospect, depths = self._company.prospect(grown.adaptive), grown.tree.depths
            prospect.learn(grown.probability, depths, self.drafting.blocks, grown.block, grown.whole)
        self._unlearned.clear()
        self.costs.refresh()
        self.drafting.think_ahead()
        self._plan_ahead()

    def observe(
        self, trees: Items[Tree], accepted: Items[Accepted | None], ms: float, usual: bool = True
    ) -> None:
        """What came of the step, for which `share` gave these trees, and what it took; None for a sequence that failed. usual:
        all its graphs had run before, as often as it takes until they are fast.

        It is learned from while the next pass runs: the device waits for the next draft now.
        """
        self.catch_up()
        held = self._due, self._step.expected, self._promised, self._step.chosen.trying
        self._came = _Came(self._company, trees, accepted, ms, usual, *held)

    def catch_up(self) -> None:
        """Learn from the last step, if that is still to be done."""
        if (came := self._came) is None:
            return
        self._came = None
        self._hold(came)
        if not came.due:
            self.drafting.saved(came.ms)
        company = came.company
        for i, (member, tree, what) in enumerate(zip(company.members, came.trees, came.accepted)):
            if what is None or not tree.n_nodes:
                continue
            if (adaptive := company.free[i]) is not None:
                company.prospect(adaptive).came(came.promised[i], what.n_accepted)
            if i in came.trying:
                self.drafting.tried(company, i, _by_draft_alone(tree, what))
            if isinstance(member.controller, Adaptive):
                member.controller.learn(tree, what)
            else:
                member.controller.observe(tree, what)

    def _hold(self, came: _Came) -> None:
        """Hold a step against plain batching."""
        ms, trees = came.ms, came.trees
        if came.due and not any(tree.n_nodes for tree in trees):
            self.account.paid(ms)
        elif any(came.accepted) and self.costs.knows_plain(n := len(trees)):
            plain = self.costs.plain(n)
            if not came.usual:
                nodes = sum([tree.n_nodes for tree in trees])
                expected = max(came.expected(nodes), plain)  # costs that are derived may come to nothing
                ms -= self.account.built(max(ms - expected, 0.0), plain)
            tokens = sum([len(what.tokens) for what in came.accepted if what is not None])
            self.account.came(ms, tokens * plain / n, plain)

    @property
    def members(self) -> list[Member]:
        """Those of the step under way."""
        return self._company.members

    def prospect(self, adaptive: Adaptive) -> Prospect:
        """What drafting is expected to give a text."""
        self._settle()
        return self._company.prospect(adaptive)

    def _settle(self) -> None:
        """Note what the last `share` saw and gave, which the pass need not wait for."""
        if self._shared is None:
            return
        (trees, widths, gains, counts), self._shared = self._shared, None
        self._note(trees, widths, gains)
        for adaptive, plan, tree, count in zip(self._company.free, self._plans, trees, counts):
            if adaptive and plan.kind != "plain":
                prospect = self._company.prospect(adaptive)
                prospect.recent.append(count - 1)
                if count > 1 and plan.drafts and tree.evidence is None:
                    prospect.lasts.append(float(tree.log_probs[count - 1]))

    def _note(self, trees: Items[Tree], widths: Items[int], gains: NDArray[np.float64]) -> None:
        """Grown trees of drafts, from which is learned what the next may bring: of a text that is known, now and then."""
        step, most, first = self.costs.step, self.most, 0
        for i, (plan, tree, adaptive) in enumerate(zip(self._plans, trees, self._company.free)):
            probability, first = gains[first : first + widths[i]], first + widths[i]
            if adaptive is None or not plan.drafts or plan.depth is None:
                continue
            prospect = self._company.prospect(adaptive)
            is_due = prospect.tried < LOOK_AT_MOST or (prospect.tried + i) % LOOK_EVERY == 0
            # with copies it does not say what a draft alone is worth
            if (is_due or self._step.chosen.longer) and tree.evidence is None:
                whole = plan.least == -inf and plan.budget >= min(adaptive.budget, most)
                self._unlearned.append(_Grown(adaptive, probability, tree, plan.depth + 1, whole))
            prospect.tried, prospect.tried_at = prospect.tried + 1, step

    def _grown(
        self, prospect: Prospect, budget: int, i: int, longer: bool = False, copies: bool = False
    ) -> tuple[int, float]:
        """Nodes of a tree to choose from, and the log-probability of the least of them: growing many to keep few costs time. Now
        and then all are looked at. longer: than the last drafts; copies: of those alone, soon more once some are kept."""
        budget, recent, lasts = min(budget, self.most), prospect.recent, prospect.lasts
        may_cut = len(recent) > 1 and (copies or lasts or any(recent))
        if longer or not may_cut or (self.costs.step + i) % LOOK_AT_ALL == 0:
            return budget, -inf
        least = floor(STEPS * (min(lasts) - LESS_LIKELY)) / STEPS if lasts else -inf
        return min(max(2 * max(recent) + 1, LEAST_GROWN), budget), least


def _by_draft_alone(tree: Tree, accepted: Accepted) -> int:
    """Accepted nodes that copies did not offer as well: those would have come without a draft."""
    if tree.sources is None:
        return accepted.n_accepted
    return sum([tree.sources[node] == DRAFT for node in accepted.kept])


@lru_cache(PLANS)
def _draft(nodes: int, depth: int, least: float) -> Plan:
    """Plans are made anew for every text and step, and are few."""
    return Plan("tree", nodes, depth=depth, least=least)


@lru_cache(PLANS)
def _copies(nodes: int) -> Plan:
    return Plan("tree", nodes, drafts=False)
