"""Several sequences in one pass: who drafts, how deep, and which of their candidates get the columns.

A pass over C columns costs much the same whoever they belong to, so the columns are one budget: best-first over the candidates of
all sequences, by calibrated probability, one column each for certain. With p the probabilities of the nodes taken, a step of S
sequences is worth (S + sum p) / (C_draft + C_verify + C_commit + C_host), and as for one sequence only step ends of the cost are
looked at; no node at all is plain batching, a width like any other. Two designs were weighed. Growing one tree with S roots needs
no second order, but a draft's own probabilities, which one text earns and another does not, would decide between texts. Here each
tree is grown as ever, by the draft's order, and its nodes enter the common heap with what calibration makes of them.

A draft pass is paid before there are candidates. Who takes part in it, and with how many columns, follows from a `Prospect` per
sequence: what its last trees promised. A sequence that is left out is tried again now and then, for at most 1 % of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate
from math import inf, log
from typing import TYPE_CHECKING

import numpy as np

from .accept import Accepted
from .adaptive import FLAT, PROBE_COST, Adaptive
from .joint_costs import JointCosts, JointPass
from .plan import Plan
from .prospect import Gains, Prospect
from .sequence import Sequence
from .shared_heap import best_first
from .tree import Tree, verify_width

if TYPE_CHECKING:
    from .controller import Controller

MOST_COLUMNS = 64  # of a pass: products over more are no longer read-bound on any device that was measured
REFRESH = 8  # steps between looks at who drafts, and at what passes cost
YOUNG, SOON = 64, 4  # steps in which it is looked at who drafts of new company more often, and how often
FIRST = 2  # texts that are drafted where nothing is known of any
FAIR = 0.01  # of the rate of all that is given up so that the slowest text is faster
STARVED = 0.5  # of its speed in plain batching: less is expected of no text because others are drafted
NARROWER = 0.005  # the same within a step
MARGIN = 0.02  # by which another set of drafting sequences must be ahead to be chosen
OTHER_BLOCK = 24  # steps after which the whole block is drafted again, to see what a part of it misses
SHORTEST = 4  # columns of a draft
LOOK_AT_ALL = 16  # steps between trees that are grown to the whole budget
# trees of a text that a prospect is learned from one by one, and steps between later ones
LOOK_AT_MOST, LOOK_EVERY = 6, 3
LEAST_GROWN = 3  # nodes of a tree that is grown to choose from
LESS_LIKELY = log(4)  # than the last nodes that were kept: paths that are grown too
PLAIN = Plan("plain", 0)
VERIFY: tuple[JointPass, JointPass] = ("verify", "host")


@dataclass(frozen=True, slots=True)
class Member:
    """A sequence of a step, and what plans it alone."""

    sequence: Sequence
    controller: Controller

    @property
    def adaptive(self) -> Adaptive | None:
        """The controller, where how much to draft is free and there is a draft to run."""
        free = isinstance(self.controller, Adaptive) and self.controller.depth
        return self.controller if free and not self.sequence.undraftable else None  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Who drafts (places in the list of members), with how many columns each; expected tokens per millisecond of all and of the
    slowest text."""

    drafting: frozenset[int]
    block: int
    rate: float
    slowest: float = 0.0
    nodes: int = 0


def widths(most: int) -> list[int]:
    """Columns of a pass over several sequences: as those of a tree."""
    return [*range(1, min(most, 8) + 1), *range(16, most + 1, 8)]


def blocks(depth: int) -> list[int]:
    """Columns that a draft of `depth` positions may be run with: the whole block, half of it, and so on."""
    found = [depth + 1]
    while found[-1] // 2 >= SHORTEST:
        found.append(found[-1] // 2)
    return found


class Together:
    """Plans the steps of two or more sequences; one object per engine."""

    def __init__(self, depth: int, most_columns: int = MOST_COLUMNS) -> None:
        """`depth`: the longest path of the model draft, 0 for none."""
        self.depth, self.most = depth, most_columns
        self.others = Prospect()  # the mean of all texts
        self._blocks = blocks(depth) if depth else []
        self._step = 0
        self._chosen: _Choice | None = None
        self._members: tuple[tuple[int, bool], ...] = ()  # whom the choice is about, and who of them is free
        self._chosen_at = self._whole_at = self._met_at = 0
        self._saved = 0.0  # milliseconds that tries may take
        self._wanted = 0.0  # what the next one takes
        self._token = 0.0  # and a token in plain batching
        self._trying: list[int] = []  # places of members that are tried in the step under way
        self._again: set[int] = set()  # controllers of those whose last try paid
        self._promised: list[float] = []  # by member, the sum of its nodes' probabilities
        self._now: list[Member] = []
        self._plans: list[Plan] = []
        self._unlearned: list[tuple[Adaptive, list[float], Tree, int, bool]] = []
        # what the choice rests on beside prospects: who is free, how many draft anyhow, costs and context
        self._asked: tuple[list[int], int, JointCosts, int] | None = None
        self._ms: Callable[[int], float] = lambda nodes: 0.0  # of the step under way, by nodes of all
        # costs and when they were looked up, and those that are to be looked up anew
        self._known: dict[tuple[JointPass, int, int], tuple[int, float]] = {}
        self._stale: dict[tuple[JointPass, int, int], tuple[JointCosts, int]] = {}

    def next(self, members: Items[Member], costs: JointCosts) -> list[Plan]:
        """A plan per member. Those who draft all look equally deep; the trees are to go through `share`."""
        self._step += 1
        self._now = list(members)
        self._plans = [
            PLAIN if m.adaptive or m.sequence.undraftable else m.controller.next(m.sequence, costs.costs)
            for m in members
        ]
        context = sum(m.sequence.n_tokens for m in members) // len(members)
        fixed = [i for i, plan in enumerate(self._plans) if plan.kind != "plain" and plan.drafts]
        free = [i for i, m in enumerate(members) if m.adaptive]
        chosen = self._choose(free, len(fixed), costs, context)
        block = self._blocks[0] if fixed and self._blocks else chosen.block
        for i in chosen.drafting:
            adaptive = members[i].adaptive
            if adaptive is None:
                continue
            nodes, least = self._grown(adaptive, i, block)
            self._plans[i] = Plan("tree", nodes, depth=block - 1, least=least)
        for i in free:
            if i not in chosen.drafting and (adaptive := members[i].adaptive) and adaptive.copies:
                self._plans[i] = Plan("tree", self._grown(adaptive, i, 1)[0], drafts=False)
        n, drafting = len(members), len(fixed) + len(chosen.drafting)
        self._ms = self._costs(n, drafting, block, costs, context)
        return self._plans

    def share(self, trees: Items[Tree]) -> list[Tree]:
        """The part of each grown tree that is verified: what is worth most per millisecond of all candidates together.

        Trees of a width that was asked for stay whole while there is room for all of them.
        """
        n, gains, asked = len(trees), list[list[float]](), 0
        for member, plan, tree in zip(self._now, self._plans, trees):
            adaptive = member.adaptive
            if adaptive is None:
                gains.append(np.exp(tree.log_probs[1:].astype(np.float64)).tolist())
                asked += tree.n_nodes
                continue
            probability = adaptive.calibration.path_probabilities(tree).tolist()
            gains.append(probability[1:])
            if plan.drafts and plan.depth is not None and tree.evidence is None:
                prospect = self.prospect(adaptive)
                if prospect.tried < LOOK_AT_MOST or (prospect.tried + len(gains)) % LOOK_EVERY == 0:
                    whole = plan.least == -inf and plan.budget >= min(adaptive.budget, self.most)
                    self._unlearned.append((adaptive, probability, tree, plan.depth + 1, whole))
                prospect.tried, prospect.tried_at = prospect.tried + 1, self._step
        room, promised = max(self.most - n, 0), list(gains)
        counts = [0] * n
        if asked <= room:
            for i, member in enumerate(self._now):
                if member.adaptive is None:
                    counts[i], gains[i] = trees[i].n_nodes, []
            room -= asked
        for i in self._trying:  # what a try is for is to see what comes of it, whatever is expected
            counts[i] = min(LEAST_GROWN, trees[i].n_nodes, max(room, 0))
            gains[i], room = gains[i][counts[i] :], room - counts[i]
        taken = best_first(gains, room)
        whole = asked <= self.most - n
        nodes = self._best_end(taken, counts, promised) if whole else len(taken)
        for i, _ in taken[:nodes]:
            counts[i] += 1
        self._promised = [sum(p[:count]) for p, count in zip(promised, counts)]
        for member, plan, tree, count in zip(self._now, self._plans, trees, counts):
            if (adaptive := member.adaptive) and plan.kind != "plain":
                prospect = self.prospect(adaptive)
                prospect.recent.append(count)
                if count and plan.drafts and tree.evidence is None:
                    prospect.lasts.append(float(tree.log_probs[count]))
        return [tree.first(count) for tree, count in zip(trees, counts)]

    def meanwhile(self) -> None:
        """What can be thought about while a device is busy with the pass: what the grown trees promise, and who drafts next."""
        for adaptive, probability, tree, block, whole in self._unlearned:
            self.prospect(adaptive).learn(probability, tree.depths.tolist(), self._blocks, block, whole)
        self._unlearned.clear()
        for key, (costs, context) in self._stale.items():
            self._known[key] = self._step, costs.of(*key, context)
        self._stale.clear()
        if self._is_due(self._step + 1):
            self._look_again()

    def observe(self, trees: Items[Tree], accepted: Items[Accepted | None], ms: float) -> None:
        """What came of the step, for which `share` gave these trees, and what it took; None for a sequence that failed."""
        self._saved = min(self._saved + PROBE_COST * ms, max(self._wanted, ms))
        self._again.clear()
        for i, (member, tree, what) in enumerate(zip(self._now, trees, accepted)):
            if what is None or not tree.n_nodes:
                continue
            if (adaptive := member.adaptive) is not None:
                self.prospect(adaptive).came(self._promised[i], what.n_accepted)
            if i in self._trying and what.n_accepted * self._token > self._wanted:
                self._again.add(id(member.controller))
            if isinstance(member.controller, Adaptive):
                member.controller.learn(tree, what)
            else:
                member.controller.observe(tree, what)

    @property
    def members(self) -> list[Member]:
        """Those of the step under way."""
        return self._now

    def prospect(self, adaptive: Adaptive) -> Prospect:
        """What drafting is expected to give a text."""
        if adaptive.prospect is None:
            adaptive.prospect = Prospect(others=self.others)
        found: Prospect = adaptive.prospect
        return found

    # ---- who drafts

    def _choose(self, free: list[int], fixed: int, costs: JointCosts, context: int) -> _Choice:
        """The set of free members that is to draft, and the columns of each."""
        n, members = len(self._now), self._who()
        none = _Choice(frozenset(), self._blocks[0] if self._blocks else 1, 0.0)
        self._trying, self._asked = [], None
        if not free or n >= self.most:
            return none
        self._asked = free, fixed, costs, context
        if self._chosen is None or members != self._members or self._is_due(self._step):
            self._look_again()
        chosen = self._chosen
        assert chosen is not None
        if (
            not fixed
            and chosen.drafting
            and (self._step - self._met_at) % SOON == 1
            and not costs.knows("plain", n)
        ):
            return none  # what drafting is held against must be known too, and this is how it gets known
        block = chosen.block
        if chosen.drafting and self._step - self._whole_at > OTHER_BLOCK:
            whole = self._ms_of_draft(len(chosen.drafting), self._blocks[0], costs, context)
            part = self._ms_of_draft(len(chosen.drafting), block, costs, context)
            if block == self._blocks[0] or self._pays(whole - part):
                block = self._blocks[0]
        elif not chosen.drafting and not fixed:
            block = self._blocks[min(1, len(self._blocks) - 1)]  # of a try
        drafting = set(chosen.drafting)
        self._trying = self._tries(free, drafting, fixed, block, n, costs, context)
        drafting.update(self._trying)
        if block == self._blocks[0]:
            self._whole_at = self._step
        return _Choice(frozenset(drafting), block, chosen.rate)

    def _is_due(self, step: int) -> bool:
        """Whether who drafts is to be looked at again at a step."""
        return step - self._chosen_at >= (SOON if step - self._met_at < YOUNG else REFRESH)

    def _who(self) -> tuple[tuple[int, bool], ...]:
        return tuple([(id(m.controller), m.adaptive is not None) for m in self._now])

    def _look_again(self) -> None:
        """Choose anew who drafts, of those who still can: a draft without numbers may have come since they were asked about."""
        if self._asked is None:
            return
        n, members = len(self._now), self._who()
        free, fixed, costs, context = self._asked
        free = [i for i in free if self._now[i].adaptive]
        if not free:
            return
        same, chosen = members == self._members, self._chosen
        choices = list(self._choices(free, fixed, n, costs, context))
        plain = self._cost("plain", n, n, costs, context)
        fair = [c for c in choices if c.slowest * plain >= STARVED] or choices
        most = max([choice.rate for choice in fair])
        best = max([c for c in fair if c.rate >= (1 - FAIR) * most], key=lambda c: c.slowest)
        if chosen is not None and same and (chosen.drafting or best.drafting):
            kept = self._rate(chosen.drafting, chosen.block, fixed, n, costs, context)
            if best.rate < (1 + MARGIN) * kept.rate and best.slowest < (1 + MARGIN) * kept.slowest:
                best = kept
        if not same:
            self._met_at = self._step
        self._chosen, self._members, self._chosen_at = best, members, self._step
        if not best.rate:  # nothing was known: look again as soon as something is
            self._chosen_at -= REFRESH - 1

    def _choices(
        self, free: list[int], fixed: int, n: int, costs: JointCosts, context: int
    ) -> Iterator[_Choice]:
        """Nobody, and for every length of the draft the members who promise most, some or all of them."""
        if not self.others.gains:  # nothing is known of any text
            yield _Choice(frozenset(free[: max(FIRST, n // 2)]), self._blocks[0], 0.0)
            return
        yield self._rate(frozenset(), self._blocks[0], fixed, n, costs, context)
        counts = sorted({-(-len(free) * k // 4) for k in (1, 2, 3, 4)})
        per_text = max(self.most // n, 2)
        for block in self._blocks[:1] if fixed else self._blocks:
            order = sorted(free, key=lambda i: -float(np.dot(*self._gains(i, block, per_text))))
            for count in counts:
                yield self._rate(frozenset(order[:count]), block, fixed, n, costs, context)

    def _gains(self, i: int, block: int, most: int) -> Gains:
        adaptive = self._now[i].adaptive
        if adaptive is None:
            return np.zeros(0), np.zeros(0)
        return self.prospect(adaptive).of(block, min(most, adaptive.budget))

    def _rate(
        self,
        drafting: frozenset[int],
        block: int,
        fixed: int,
        n: int,
        costs: JointCosts,
        context: int,
        starved: float = STARVED,
    ) -> _Choice:
        """Tokens per millisecond of the best width, if these members draft; of those that leave every text `starved` of its speed
        in plain batching, if there is one."""
        parts = [self._gains(i, block, self.most - n) for i in drafting]
        gains, often = (np.concatenate(both) for both in zip(*parts)) if parts else (np.zeros(0), np.zeros(0))
        order = np.argsort(-gains)
        falling, often = gains[order], often[order]
        nodes_so_far = np.concatenate([[0.0], np.cumsum(often)])
        sums = np.concatenate([[0.0], np.cumsum(falling * often)])
        ms = self._costs(n, fixed + len(drafting), block, costs, context)
        best, plain = _Choice(drafting, block, 0.0), self._cost("plain", n, n, costs, context)
        ends = self._ends(n, int(nodes_so_far[-1] + 0.5))
        for nodes, tokens in zip(ends, np.interp(ends, nodes_so_far, sums).tolist()):
            took, least = ms(nodes), 0.0  # tokens of the slowest text beside its certain one
            rate = (n + tokens) / took if took > 0 else 0.0
            if rate <= best.rate:
                continue
            if nodes and len(drafting) == n:
                at = min(int(np.searchsorted(nodes_so_far[1:], nodes)), len(falling) - 1)
                least = min([float((g * w)[g >= falling[at]].sum()) for g, w in parts])
            if starved * took <= plain * (1 + least) or not best.rate:
                best = _Choice(drafting, block, rate, (1 + least) / took, nodes)
        return best

    def _tries(
        self,
        free: list[int],
        drafting: set[int],
        fixed: int,
        block: int,
        n: int,
        costs: JointCosts,
        context: int,
    ) -> list[int]:
        """Members that are drafted to see what they are worth: new ones at once, others when that has been saved up."""
        left_out = [i for i in free if i not in drafting]
        if not left_out:
            return []
        prospects = {i: self.prospect(a) for i in left_out if (a := self._now[i].adaptive)}
        oldest = min(left_out, key=lambda i: (prospects[i].tried_at, i))
        nodes = min(LEAST_GROWN, self.most - n)
        with_it = self._costs(n, fixed + len(drafting) + 1, block, costs, context)(nodes)
        without = self._costs(n, fixed + len(drafting), block, costs, context)(0)
        self._wanted = cost = max(with_it - without, 0.0)
        self._token = self._cost("plain", n, n, costs, context) / n
        again = [
            i
            for i in left_out
            if id(self._now[i].controller) in self._again
            or ((a := self._now[i].adaptive) is not None and a.repeats(self._now[i].sequence))
        ]
        if again:
            return again
        if not prospects[oldest].tried:
            self._saved -= cost  # a new text may borrow its first try
            return [oldest]
        return [oldest] if self._pays(cost) else []

    def _pays(self, ms: float) -> bool:
        """Take so much of what has been saved up for tries, if it is there."""
        if self._saved < ms:
            return False
        self._saved -= ms
        return True

    def _grown(self, adaptive: Adaptive, i: int, block: int) -> tuple[int, float]:
        """Nodes of a tree to choose from, and the log-probability of the least of them: growing many to keep few costs time. Now
        and then all are looked at."""
        prospect, budget = self.prospect(adaptive), min(adaptive.budget, self.most)
        recent, lasts = prospect.recent, prospect.lasts
        longer = self._chosen is not None and block > self._chosen.block
        if longer or (self._step + i) % LOOK_AT_ALL == 0 or len(recent) < 2 or not (lasts or any(recent)):
            return budget, -inf
        return min(max(2 * max(recent) + 1, LEAST_GROWN), budget), min(lasts, default=-inf) - LESS_LIKELY

    # ---- what it costs

    def _costs(
        self, n: int, drafting: int, block: int, costs: JointCosts, context: int
    ) -> Callable[[int], float]:
        """Milliseconds of a step by its drafted nodes."""
        rest = self._ms_of_draft(drafting, block, costs, context) if drafting else 0.0
        rest += self._cost("commit", 1, n, costs, context)

        def of(nodes: int) -> float:
            if not nodes and not drafting:
                return self._cost("plain", n, n, costs, context)
            width = verify_width(n + nodes - 1)
            verify, host = (self._cost(kind, width, n, costs, context) for kind in VERIFY)
            return rest + verify + host

        return of

    def _ms_of_draft(self, drafting: int, block: int, costs: JointCosts, context: int) -> float:
        return self._cost("draft", drafting * block, drafting, costs, context)

    def _cost(self, kind: JointPass, columns: int, sequences: int, costs: JointCosts, context: int) -> float:
        """A pass's cost, looked up anew every few steps, when there is time."""
        key = kind, columns, sequences
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._step, costs.of(kind, columns, sequences, context)
        elif self._step - found[0] >= REFRESH:
            self._stale[key] = costs, context
        return found[1]

    def _ends(self, n: int, most: int) -> list[int]:
        """Node counts at which a pass of n sequences is full, up to `most` and what is left of the columns; none is one."""
        room = min(most, self.most - n)
        ends = [w - n for w in widths(self.most) if 0 <= w - n < room]
        return [*ends, room] if room > 0 else [0]

    def _best_end(
        self, taken: list[tuple[int, float]], counts: list[int], promised: list[list[float]]
    ) -> int:
        """How many of the nodes, in the order of the heap, are worth most per millisecond.

        counts, promised: by sequence, nodes that are in already, and the probabilities of all of its nodes.
        """
        n, asked, wider = len(counts), sum(counts), float("inf")
        total = n + sum([sum(p[:count]) for p, count in zip(promised, counts)])
        sums = list(accumulate([gain for _, gain in taken], initial=total))
        ends = {0, *(e - asked for e in self._ends(n, len(taken) + asked) if e >= asked)}
        rates: list[tuple[int, float]] = []
        for nodes in sorted(ends, reverse=True):
            took = self._ms(nodes + asked)
            if took < (1 - FLAT) * wider:  # else graphs of one more width, for next to nothing
                wider = max(took, 1e-9)
                rates.append((nodes, sums[nodes] / wider))
        enough = (1 - NARROWER) * max([rate for _, rate in rates])
        return min([nodes for nodes, rate in rates if rate >= enough])
