"""The step ends of one text: what drafted steps of so many nodes cost, what they were worth so far, and which is worth most now.

ggml's cost of a width is a staircase, so only the widest tree of each step is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf

from .costs import Costs
from .widths import Cut, Table, step_ends

CURIOSITY = 5e-4  # how much cheaper per step a width is hoped to have become since it was last used
MOST_HOPE = 0.2
USUAL = 0.05  # share of the newest step in a width's usual worth
MARGIN = 0.04  # by which a width must be ahead of the usual best to be chosen
FLAT = 0.03  # of a step's cost; a width that saves less than that is left out
REFRESH, MOST_REFRESH = 8, 24  # steps between looks at the costs, when a text begins and later


class Ends:
    """all: node counts, rising; used: the step at which each was last chosen."""

    def __init__(self, budget: int) -> None:
        self.all = step_ends(budget)
        self.used = dict.fromkeys(self.all, 0)
        self._tables: dict[int, Table] = {}  # by columns of the draft
        # by those and by nodes: a moving mean of tokens per millisecond
        self._usual: dict[int, dict[int, float]] = {}

    def costs(
        self, costs: Costs, block: int, context: int, step: int, later: list[Callable[[], object]]
    ) -> Table:
        """What steps behind a draft of `block` columns cost, looked up anew every few steps; `later` takes what can wait."""
        table = self._tables.get(block)
        if table is None or (table.asked is not None and table.asked < step):
            return self._look_at(costs, block, context, step)
        if step >= table.due and table.asked is None:
            table.asked = step
            later.append(partial(self._look_at, costs, block, context, step))
        return table

    def _look_at(self, costs: Costs, block: int, context: int, step: int) -> Table:
        """Look costs up, without ends that save next to nothing against a wider one: every width needs graphs of its own."""
        ms, wider = dict[int, float](), inf
        for n, took in sorted(costs.drafted(self.all, block, context).items(), reverse=True):
            if took < (1 - FLAT) * wider:
                ms[n] = wider = max(took, 1e-9)
        due = step + min(REFRESH + step // 4, MOST_REFRESH)
        is_sure = costs.is_sure("draft", block, context)
        found = Table(ms, min(ms.values()), costs.draft(block, context), is_sure, due)
        self._tables[block] = found
        return found

    def best(
        self,
        gains: list[float],
        block: int,
        took: Mapping[int, float],
        plain: float,
        step: int,
        after: float = 0.0,
    ) -> Cut:
        """The end that is worth most. gains: expected tokens of a step by its drafted nodes, 1 for none; took: milliseconds, as
        `costs` has them; plain: of a plain step; after: what the step costs beyond what it takes.

        Probabilities err, and the best of several is the one that errs upwards: another width than the usual best must be
        ahead by a margin.
        """
        most, usual = len(gains) - 1, self._usual.setdefault(block, {})
        best = base = 0
        rates, hope, best_usual = dict[int, float](), 0.0, 0.0
        for end, ms in took.items():
            rates[end] = rate = gains[min(end, most)] / (ms + after)
            before = usual.get(end, rate)
            usual[end] = now = before + USUAL * (rate - before)
            if now > best_usual:
                best_usual, base = now, end
            rate /= 1 - min(CURIOSITY * (step - self.used.get(end, step)), MOST_HOPE)
            if rate > hope:
                hope, best = rate, end
        if hope < (1 + MARGIN) * rates[base]:
            best = base
        n, ms = min(best, most), took[best] + after
        return Cut(n, gains[n] * plain / ms, ms - gains[n] * plain, plain / ms)
