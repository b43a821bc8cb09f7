"""Who of several texts drafts, and with how many columns each: decided before there are candidates, by what prospects promise.

A set of drafting texts is worth (S + sum p) / (C_draft + C_verify + C_commit + C_host) at its best width, p being the gains that
the nodes of the last trees promise. A text that is left out is tried again now and then, for at most 1 % of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .adaptive import PROBE_COST
from .company import Company
from .prospect import Gains
from .step_costs import StepCosts

REFRESH = 8  # steps between looks at who drafts
YOUNG, SOON = 64, 4  # steps in which it is looked at who drafts of new company more often, and how often
FIRST = 2  # texts that are drafted where nothing is known of any
FAIR = 0.01  # of the rate of all that is given up so that the slowest text is faster
STARVED = 0.4  # of its speed in plain batching: less is expected of no text because others are drafted
MARGIN = 0.02  # by which another set of drafting sequences must be ahead to be chosen
OTHER_BLOCK = 24  # steps after which a longer draft is run again, to see what a part of it misses
SHORTEST = 4  # columns of a draft
BORROWED = 4  # tries of new texts that are not paid back yet
LEAST_GROWN = 3  # nodes of a tree that is grown to choose from


@dataclass(frozen=True, slots=True)
class Choice:
    """Who drafts (places in the company), with how many columns each; expected tokens per millisecond of all and of the slowest
    text. nodes: of the best width. trying: places of those among them that are tried; longer: whether a longer draft is run than
    pays, to see what it adds."""

    drafting: frozenset[int]
    block: int
    rate: float
    slowest: float = 0.0
    nodes: int = 0
    trying: tuple[int, ...] = ()
    longer: bool = False


def blocks(depth: int) -> list[int]:
    """Columns that a draft of `depth` positions may be run with: the whole block, half of it, and so on."""
    found = [depth + 1]
    while found[-1] // 2 >= SHORTEST:
        found.append(found[-1] // 2)
    return found


class Drafting:
    """Chooses who drafts; one object per engine."""

    def __init__(self, depth: int, costs: StepCosts) -> None:
        """`depth`: the longest path of the model draft, 0 for none."""
        self.blocks, self._costs = blocks(depth) if depth else [], costs
        self._chosen: Choice | None = None
        self._who: tuple[tuple[int, bool], ...] = ()  # whom the choice is about
        self._chosen_at = self._longer_at = self._met_at = 0
        self._looks = 0  # at longer drafts than were chosen
        self._saved = 0.0  # milliseconds that tries may take
        self._wanted = self._longer = 0.0  # what the next one takes, and a longer draft for all
        self._token = 0.0  # and a token in plain batching
        self._again: set[int] = set()  # controllers of those whose last try paid
        # what nodes promise by member, block and most of them, of the look under way
        self._gains: dict[tuple[int, int, int], Gains] | None = None
        # what the choice rests on beside prospects and costs: whom it is about, and how many of them draft anyhow
        self._asked: tuple[Company, int] | None = None

    def choose(self, company: Company, fixed: int) -> Choice:
        """The free members that are to draft, and the columns of each. fixed: members that draft anyhow."""
        n, step = len(company), self._costs.step
        none = Choice(frozenset(), self.blocks[0] if self.blocks else 1, 0.0)
        self._asked = None
        if not any(company.free) or n >= self._costs.most:
            return none
        self._asked = company, fixed
        if self._chosen is None or company.who != self._who or self._is_due(step):
            self._look_again()
        chosen = self._chosen
        assert chosen is not None
        block, saving = chosen.block, False
        if chosen.drafting and step - self._longer_at > OTHER_BLOCK:
            # the next longer and the whole one by turns: the next one costs less
            longer = [b for b in self.blocks if b > block] or [block]
            other = longer[-1 - self._looks % len(longer)]
            more, part = (self._costs.draft(len(chosen.drafting), b) for b in (other, block))
            self._longer = more - part
            saving = not self._pays(self._longer)
            if not saving:
                block, self._longer_at, self._looks = other, step, self._looks + 1
        elif not chosen.drafting and not fixed:
            block = self.blocks[min(1, len(self.blocks) - 1)]  # of a try
        trying = tuple(self._tries(company, chosen.drafting, fixed, block, saving))
        if block == self.blocks[0]:
            self._longer_at = step
        drafting = chosen.drafting.union(trying)
        return Choice(drafting, block, chosen.rate, trying=trying, longer=block > chosen.block)

    def think_ahead(self) -> None:
        """Look at the next step's choice now, if it is due then."""
        if self._is_due(self._costs.step + 1):
            self._look_again()

    def saved(self, ms: float) -> None:
        """A step took so long: a share of it may be spent on tries."""
        self._saved = min(self._saved + PROBE_COST * ms, max(self._wanted, self._longer, ms))
        self._again.clear()

    def tried(self, company: Company, i: int, accepted: int) -> None:
        """What came of a try."""
        if accepted * self._token > self._wanted:
            self._again.add(id(company.members[i].controller))

    # ---- sets

    def _is_due(self, step: int) -> bool:
        """Whether who drafts is to be looked at again at a step."""
        return step - self._chosen_at >= (SOON if step - self._met_at < YOUNG else REFRESH)

    def _look_again(self) -> None:
        """Choose anew who drafts, of those who still can."""
        if self._asked is None:
            return
        company, fixed = self._asked
        company.update()
        if any(company.free):
            self._gains = {}
            self._look(company, fixed)
            self._gains = None

    def _look(self, company: Company, fixed: int) -> None:
        who, chosen = company.who, self._chosen
        same, choices = who == self._who, list(self._choices(company, fixed))
        plain = self._costs.plain(len(company))
        fair = [c for c in choices if c.slowest * plain >= STARVED] or choices
        most = max([choice.rate for choice in fair])
        best = max([c for c in fair if c.rate >= (1 - FAIR) * most], key=lambda c: c.slowest)
        if chosen is not None and same and (chosen.drafting or best.drafting):
            kept = self.rate(company, chosen.drafting, chosen.block, fixed)
            if best.rate < (1 + MARGIN) * kept.rate and best.slowest < (1 + MARGIN) * kept.slowest:
                best = kept
        if not same:
            self._met_at = self._costs.step
        self._chosen, self._who, self._chosen_at = best, who, self._costs.step
        if not best.rate:  # nothing was known: look again as soon as something is
            self._chosen_at -= REFRESH - 1

    def _choices(self, company: Company, fixed: int) -> Iterator[Choice]:
        """Nobody, and for every length of the draft the members who promise most, some or all of them."""
        n, free = len(company), [i for i, adaptive in enumerate(company.free) if adaptive]
        if not company.others.gains:  # nothing is known of any text
            yield Choice(frozenset(free[: max(FIRST, n // 2)]), self.blocks[0], 0.0)
            return
        nobody = self.rate(company, frozenset(), self.blocks[0], fixed)
        yield nobody
        counts = sorted({-(-len(free) * k // 4) for k in (1, 2, 3, 4)})
        per_text = max(self._costs.most // n, 2)
        for block in self.blocks[:1] if fixed else self.blocks:
            worth = {i: float(np.dot(*self._of(company, i, block, per_text))) for i in free}
            order = sorted(free, key=lambda i: -worth[i])
            whole = {i: float(np.dot(*self._of(company, i, block, self._costs.most - n))) for i in free}
            for count in counts:
                # whom no width could make worth it need not be looked at: that takes longer than a narrow pass may
                most = n + sum([whole[i] for i in order[:count]])
                if most > nobody.rate * self._costs.drafted(n, fixed + count, block)(1):
                    yield self.rate(company, frozenset(order[:count]), block, fixed)

    def rate(
        self, company: Company, drafting: frozenset[int], block: int, fixed: int, starved: float = STARVED
    ) -> Choice:
        """Tokens per millisecond of the best width, if these members draft; of those that leave every text `starved` of its speed
        in plain batching, if there is one."""
        n = len(company)
        parts = [self._of(company, i, block, self._costs.most - n) for i in drafting]
        gains, often = (np.concatenate(both) for both in zip(*parts)) if parts else (np.zeros(0), np.zeros(0))
        order = np.argsort(-gains)
        falling, often = gains[order], often[order]
        nodes_so_far = np.concatenate([[0.0], np.cumsum(often)])
        sums = np.concatenate([[0.0], np.cumsum(falling * often)])
        ms, most = self._costs.drafted(n, fixed + len(drafting), block), int(nodes_so_far[-1] + 0.5)
        best, plain = Choice(drafting, block, 0.0), self._costs.plain(n)
        ends = [end for end in self._costs.ends(n) if end < most] + [min(most, self._costs.ends(n)[-1])]
        for nodes, tokens in zip(ends, np.interp(ends, nodes_so_far, sums).tolist()):
            took, least = ms(nodes), 0.0  # tokens of the slowest text beside its certain one
            rate = (n + tokens) / took if took > 0 else 0.0
            if rate <= best.rate:
                continue
            if nodes and len(drafting) == n:
                at = min(int(np.searchsorted(nodes_so_far[1:], nodes)), len(falling) - 1)
                least = min([float((g * w)[g >= falling[at]].sum()) for g, w in parts])
            if starved * took <= plain * (1 + least) or not best.rate:
                best = Choice(drafting, block, rate, (1 + least) / took, nodes)
        return best

    def _of(self, company: Company, i: int, block: int, most: int) -> Gains:
        """What a member's nodes promise; found once in a look."""
        adaptive, known = company.free[i], self._gains if self._gains is not None else {}
        if adaptive is None:
            return np.zeros(0), np.zeros(0)
        asked = i, block, min(most, adaptive.budget)
        if (found := known.get(asked)) is None:
            found = known[asked] = company.prospect(adaptive).of(*asked[1:])
        return found

    # ---- tries

    def _tries(
        self, company: Company, drafting: frozenset[int], fixed: int, block: int, saving: bool = False
    ) -> list[int]:
        """Members that are drafted to see what they are worth: new ones at once, others when that has been saved up, unless a
        longer draft is being saved for."""
        left_out = [(i, a) for i, a in enumerate(company.free) if a and i not in drafting]
        if not left_out:
            return []
        n, costs = len(company), self._costs
        prospects = {i: company.prospect(adaptive) for i, adaptive in left_out}
        oldest = min(prospects, key=lambda i: (prospects[i].tried_at, i))
        nodes = min(LEAST_GROWN, costs.most - n)
        with_it = costs.drafted(n, fixed + len(drafting) + 1, block)(nodes)
        without = costs.drafted(n, fixed + len(drafting), block)(0)
        self._wanted = cost = max(with_it - without, 0.0)
        self._token = costs.plain(n) / n
        again = [
            i
            for i, adaptive in left_out
            if id(company.members[i].controller) in self._again
            # what repeats itself can be copied, where copies are looked for
            or (adaptive.copies is None and adaptive.repeats(company.members[i].sequence))
        ]
        if again:
            return again
        if not prospects[oldest].tried and self._saved > -BORROWED * cost:
            self._saved -= cost  # a new text may borrow its first try
            return [oldest]
        return [oldest] if not saving and self._pays(cost) else []

    def _pays(self, ms: float) -> bool:
        """Take so much of what has been saved up for tries, if it is there."""
        if self._saved < ms:
            return False
        self._saved -= ms
        return True
