"""The controller of `auto`: the width that gives the most tokens per second, decided anew every step.

With p the calibrated probability of each candidate node, in the order of the tree's growth, and measured costs, a drafted step of
n nodes is worth (1 + p_1 + .. + p_n) / (C_draft + C_verify(n) + C_commit + C_host) tokens per millisecond (CaDDTree, arXiv
2606.01813). ggml's cost of a width is a staircase, so only step ends are looked at. Plain decoding is a width like any other:
1 / C_plain.

Whether to draft at all, and how many columns, must be decided before there are candidates. For that a moving mean tells how many
times plain decoding a drafted step was worth; where plain is ahead, a draft is tried now and then, so seldom that trying
costs at most 1 % of the time, and again at once while trying pays. A draft that promises less than the verify pass costs is not
verified: the text itself tells what it was worth (`unverified`). What all that may lose of one text is bounded (`allowance`).
Nothing here looks at a draw of the target in the step that it plans.

Copied text costs no pass: what it is worth is known before anything is run. It is verified alone where that is worth more than
plain decoding and than a drafted step, in whose tree it would stand beside the draft's candidates.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate

from .accept import Accepted
from .allowance import START_COPIES, Allowance
from .calibration import Calibration
from .copied import Copied, CopySource
from .costs import Costs
from .ends import MARGIN, MOST_REFRESH, REFRESH, Ends
from .experience import MEMORY, Experience
from .merged import DRAFT, Merged
from .merged import observe as count_votes
from .plan import Plan
from .prospect import Prospect, beside_a_draft
from .repetition import Repetition
from .sequence import Sequence
from .tree import Tree
from .unverified import Unverified
from .widths import NOTHING, Cut, Table, block_choices, least_sure

PROBE_COST = 0.01  # share of the time that trying may take
FIRST_PROBES = 2  # drafted steps that the first judgement of a block rests on
FORGETTING = 0.99  # what a plain step leaves of that memory
OTHER_BLOCK = 24  # steps after which the whole block is drafted again, to see what half of it misses
WORTH_SAVING = 0.03  # of a step; half a block that saves less is not looked at
HOPELESS_AFTER = 40  # drafted steps without a hit: such a draft does not belong to this target
COMPARE = 2  # steps between comparisons with a shorter block
LOOK_BACK = 6  # trees whose kept nodes say how many the next is grown to: some more than the most
REPEATED = 8  # foretold tokens in a row at which a text is said to repeat itself
LOOK_AT_ALL = 16  # steps between trees that are grown to the whole budget
REACH = 0.7  # of a draft that has not been tried: likelihood of each further token
UNSURE = 0.5  # of the next token; copies less sure need not be looked at beside a draft that is run
COPIES_ALONE = 0  # columns of a draft that is not run
log = logging.getLogger("dflash_ggml")


PLAIN = Plan("plain", 0)


class Adaptive:
    """Plans the steps of one sequence, and lets others know what it learns."""

    def __init__(
        self, budget: int, depth: int, experience: Experience, copies: CopySource | None = None
    ) -> None:
        """`depth`: the longest path of the model draft, 0 for none."""
        self.budget, self.depth, self.experience, self.copies = budget, depth, experience, copies
        self.calibration = Calibration(experience.calibration)
        self.prospect: Prospect | None = None  # of the text beside others
        self._ends = Ends(budget)
        self._blocks = block_choices(depth)
        self._block = self._blocks[0]
        self._last = NOTHING
        self._plain: float | None = None  # what a plain step costs
        # what a plain step takes more behind a wide one; of several wide ones in a row the first has to answer for it
        self._after_wide = self._after = 0.0
        self._was_plain = True
        self._plain_until = 0  # the step at which that is looked up again
        self._step = 0
        self._recent: deque[int] = deque(maxlen=LOOK_BACK)  # nodes that were kept of the last trees
        self._probing = False  # whether the step is a try where plain decoding is ahead
        self._waiting = False  # whether the last step was plain until tries are paid back
        self._plans: dict[tuple[int, int], Plan] = {}  # of drafted steps, by nodes and columns
        self._now: tuple[Costs, int]  # the costs and the context of the step
        self._later: list[Callable[[], object]] = []  # what need not be done before a pass is launched
        self._whole_at = 0  # the step at which the whole block was last drafted
        self._repetition = Repetition()
        self._wanted = REPEATED  # foretold tokens in a row at which the next try is worth its cost
        self._reach = experience.reach
        self._reach += [REACH ** (d + 1) for d in range(len(self._reach), depth)]
        self._alone = False  # whether the step's tree is of copies alone
        self._copied = NOTHING  # of it
        self._may_lose = {True: Allowance(), False: Allowance(START_COPIES)}  # by whether the draft is run
        self._unverified: list[Unverified] = []  # drafts of which the text has not told all yet
        # how likely the likeliest token of the step's copies is, and must be for a pass to be worth its time
        self._sure = self._least_sure = 0.0
        self._foretold = False  # whether copies were looked at before a plain step
        self._rest = self._rested = 0  # plain steps before the next is planned, and those that were not

    def next(self, sequence: Sequence, costs: Costs) -> Plan:
        self._step += 1
        if self._rest:  # what has to be looked up takes longer behind a pass, whose weights fill the caches
            self._rest -= 1
            self._rested += 1
            return PLAIN
        return self._planned(sequence, costs)

    def _planned(self, sequence: Sequence, costs: Costs) -> Plan:
        """The step's plan, looked up."""
        context = sequence.n_tokens
        self._alone = False
        if self._rested and self._plain is not None:
            self._earn(self._rested)
            self._pay_back(self._rested, self._plain)
            self._rested = 0
        if self._unverified:
            self._follow(sequence)
        if self._step >= self._plain_until:
            self._plain = costs.of("plain", 1, context)
            self._plain_until = self._step + min(REFRESH + self._step // 4, MOST_REFRESH)
            self._after_wide = costs.of("after") or 0.0
            if self.copies is not None and self._plain is not None:
                took = self._costs(costs, COPIES_ALONE, context).ms
                self._least_sure = least_sure(took, self._plain, self._after_wide)
        self._after = self._after_wide if self._was_plain else 0.0
        plain = self._plain
        if plain is None:
            self._plain_until = self._step
            return PLAIN  # what it costs must be known first
        copied = self._look_up(sequence)
        alone = None if copied is None else self._copy(sequence, copied, costs, plain)
        if alone is None or alone[1].times < self._drafted_times(*alone, costs, plain, context):
            may_repeat = copied is not None or self.copies is None
            plan = self._next(sequence, costs, plain, may_repeat) if self.depth else PLAIN
            if plan.kind != "plain":
                return plan
            if alone is None:
                self._earn(1)
                self._was_plain = True
                # where an unverified tree has votes at the same places, they are counted with it
                self._foretold = all(draft.tree.evidence is None for draft in self._unverified)
                self._rest = self._may_rest()
                return plan
        tree, best = alone
        self._ends.used[best.nodes] = self._step
        self._alone, self._copied = True, best
        return Plan("tree", best.nodes, drafts=False, tree=tree)

    def _may_rest(self) -> int:
        """Steps that can be plain without a look: a match grows by a token a step, and one too short now takes some."""
        if not self._waiting and self.depth:
            return 0
        return 2 if not self._sure else int(2 * self._sure < self._least_sure)

    def _look_up(self, sequence: Sequence) -> Copied | None:
        """The step's copies, if they may be worth a pass; what they said before a plain step is counted."""
        if self.copies is None:
            return None
        learn, self._foretold = self._foretold, False
        self._sure = self.copies.glance(sequence, learn)
        if not self._sure:
            return None
        is_plain = self._waiting or not self.depth  # else a draft is run, beside which they may be of use
        if is_plain and (self._sure < self._least_sure or self._may_lose[False].left <= 0):
            return None
        return self.copies.look_up(sequence)

    def _copy(
        self, sequence: Sequence, copied: Copied, costs: Costs, plain: float
    ) -> tuple[Tree, Cut] | None:
        """The tree of copies alone that is worth most, where that is more than plain decoding."""
        assert self.copies is not None and sequence.pending is not None
        rates = self.copies.rates
        if self._may_lose[False].left <= 0:
            return None
        if self.depth and not self._waiting and self._sure < UNSURE:
            return None  # a draft that is worth its pass has more to say
        took = self._costs(costs, COPIES_ALONE, sequence.n_tokens).ms
        took = self._may_lose[False].affordable(took, plain, self._after)
        if not took:
            return None
        best = self._best(copied.gains(rates, self.budget), COPIES_ALONE, took, plain)
        if not best.nodes or best.times <= 1 + MARGIN:
            return None
        return Merged(None, copied, rates).grow(sequence.pending, best.nodes), best

    def _drafted_times(self, tree: Tree, best: Cut, costs: Costs, plain: float, context: int) -> float:
        """How many times plain decoding a step would be worth that runs the draft beside these copies."""
        if not self.depth:
            return 0.0
        tokens = beside_a_draft(tree, self._reach, self.depth)
        took = self._costs(costs, self._block, context).ms
        wanted = max(best.nodes, self._last.nodes)
        ms = min([(n, ms) for n, ms in took.items() if n >= wanted], default=(0, max(took.values())))[1]
        return tokens * plain / ms

    def _next(self, sequence: Sequence, costs: Costs, plain: float, may_repeat: bool) -> Plan:
        """The plan where copies alone are not the best. may_repeat: what repeats itself can be copied."""
        known, context = self.experience, sequence.n_tokens
        if self._may_lose[True].left <= 0:
            return self._wait(plain)
        repeats = self._waiting and may_repeat and self.repeats(sequence)
        if self._waiting and known.owed > PROBE_COST * plain and not repeats:
            return self._wait(plain)  # looking all else up would take a per cent or two of a short step
        self._waiting = False
        self._block = self._best_block(costs, context)
        table = self._costs(costs, self._block, context)
        if table.is_sure and not self._can_pay(table.ms, plain):
            known.owed -= PROBE_COST * plain
            if known.owed > -table.least:
                return PLAIN
            # wrong measurements may say so: what a try costs has been saved up
            self._probing = True
            return self._draft(costs, context)
        worth = known.of(self._block)
        if worth.tried < FIRST_PROBES and self._unverified:
            return PLAIN  # what that tells is waited for
        self._probing = worth.tried >= FIRST_PROBES and worth.mean < 1
        if not self._probing or self._last.times > 1:
            return self._draft(costs, context)
        # a new text may be another kind of text: it may borrow one try
        if repeats or known.owed - PROBE_COST * plain <= (known.last_loss if self._step == 1 else 0.0):
            known.owed -= PROBE_COST * plain
            return self._draft(costs, context)
        return self._wait(plain)

    def _wait(self, plain: float) -> Plan:
        """A plain step, which pays back some of what tries have cost."""
        self._pay_back(1, plain)
        self._last, self._waiting = NOTHING, True
        return PLAIN

    def _pay_back(self, steps: int, plain: float) -> None:
        """So many plain steps pay for tries."""
        self.experience.owed -= PROBE_COST * plain * steps
        for worth in self.experience.worth.values():
            worth.weight *= FORGETTING**steps

    def _earn(self, steps: int) -> None:
        """So many plain steps gave a token each."""
        for allowance in self._may_lose.values():
            allowance.earn(steps)

    def repeats(self, sequence: Sequence) -> bool:
        """Whether the text has begun to repeat itself, or has gone on for as long again since the last try."""
        run = self._repetition.follow(sequence.tokens)
        if run < self._wanted:
            if run < REPEATED:
                self._wanted = REPEATED
            return False
        self._wanted = 2 * run
        return True

    def observe(self, tree: Tree, accepted: Accepted) -> None:
        chosen, self._was_plain = self._copied if self._alone else self._last, False
        self._may_lose[not self._alone].book(len(accepted.tokens), 1 / chosen.token)
        if self._alone:
            return
        self.catch_up()
        self._learn_worth(self._block, self._last, tree, accepted, len(accepted.tokens))
        self._later.append(partial(self.calibration.observe, tree, accepted))
        if self._probing:
            self._owe(self._last.loss)

    def _learn_worth(self, block: int, cut: Cut, tree: Tree, accepted: Accepted, tokens: int) -> float:
        """Count a draft that was looked at, whether it was verified or not; how many times plain decoding it was worth."""
        by_draft = self._count(tree, accepted)
        if tree.evidence is None:
            # half of it what came: a draft that promises too much would be believed for some twenty steps
            worth = (cut.times + tokens * cut.token) / 2
        else:  # what the draft would have given without copies
            worth = (1 + sum([0 < node <= cut.nodes for node in accepted.kept[: 1 + by_draft]])) * cut.token
        self.experience.of(block).learn(worth)
        return worth

    def _owe(self, ms: float) -> None:
        """Note what a try lost; one that paid gives back what others cost."""
        known = self.experience
        known.owed, known.last_loss = max(known.owed, 0.0) + ms, max(ms, 0.0)

    def _follow(self, sequence: Sequence) -> None:
        """Learn from drafts that were not verified, once the text tells what they were worth."""
        waiting, self._unverified = self._unverified, []
        for draft in waiting:
            accepted = draft.follow(sequence)
            if accepted is None:
                self._unverified.append(draft)
                continue
            self.catch_up()
            if self._learn_worth(draft.block, draft.cut, draft.tree, accepted, draft.kept(accepted)) > 1:
                self.experience.owed = 0.0  # it would have paid: the next need not wait
            self.calibration.observe(draft.tree, accepted)
            if draft.tree.evidence is not None and self.copies is not None:
                count_votes(draft.tree, accepted, self.copies.rates)

    def catch_up(self) -> None:
        """Learn what can wait for a busy device: the next plan does without, the next cut does not."""
        later, self._later = self._later, []
        for work in later:
            work()

    def learn(self, tree: Tree, accepted: Accepted) -> None:
        """What a drafted step says of the draft, whatever planned it."""
        self._count(tree, accepted)
        self.calibration.observe(tree, accepted)

    def _count(self, tree: Tree, accepted: Accepted) -> int:
        """Count a drafted step; the accepted nodes that the draft offered."""
        if not self.depth:  # copies alone: there is no draft to be right
            return 0
        known = self.experience
        by_draft = self._learn_reach(tree, accepted)
        known.drafted += 1
        known.right += by_draft
        if known.drafted == HOPELESS_AFTER and not known.right:
            log.warning(
                "none of the first %d drafts was right: the draft was probably made for another model or tokenizer; "
                "it is tried now and then, and decoding is plain otherwise",
                known.drafted,
            )
        return by_draft

    def _learn_reach(self, tree: Tree, accepted: Accepted) -> int:
        """Count how far the draft's own path was kept; its nodes."""
        kept = accepted.kept[1 : self.depth + 1]
        n = len(kept)
        if tree.sources is not None:
            n = next((i for i, node in enumerate(kept) if not tree.sources[node] & DRAFT), n)
        self._reach[:] = [reach + ((depth < n) - reach) / MEMORY for depth, reach in enumerate(self._reach)]
        return n

    def best_cut(self, tree: Tree, costs: Costs, context: int) -> Tree:
        """The part of a tree that is worth most per millisecond: so many of its nodes, in the order in which they grew.

        An order by corrected probabilities was tried: what counts of a few hundred samples say of each cell errs, and 2 % of the
        tokens were lost where the draft's own order was right.
        """
        self.catch_up()
        probability, plain = self.calibration.path_probabilities(tree).tolist(), self._plain or 0.0
        table = self._costs(costs, self._block, context)
        self._last = self._best(list(accumulate(probability)), self._block, table.ms, plain)
        # elsewhere there would be another draft at the next token, and on a GPU a graph to build for a step that is seldom plain
        if plain and self._last.loss > table.draft and self._is_try():
            return self._not_verified(tree, context, table.draft + self._after_wide, plain)
        self._later.append(partial(self._chose, tree, probability, costs, context, plain))
        return tree.first(self._last.nodes)

    def _not_verified(self, tree: Tree, context: int, drafted: float, plain: float) -> Tree:
        """Leave it at a plain step, where a verify pass would lose even though the draft is paid for."""
        self._unverified.append(Unverified(tree, self._last, self._block, context))
        self._may_lose[True].book(0, drafted / plain)
        self._may_lose[True].earn()
        self._was_plain = True
        self._owe(drafted)
        return tree.first(0)

    def _is_try(self) -> bool:
        """Whether the step's draft is there to see what it is worth."""
        return self._probing or self.experience.of(self._block).tried < FIRST_PROBES

    def _chose(self, tree: Tree, probability: list[float], costs: Costs, context: int, plain: float) -> None:
        """Note what was chosen of a tree, and now and then what a shorter draft would have been worth."""
        if self._step % COMPARE == 0:
            for block in self._blocks:
                if block < self._block:
                    within = [p for p, depth in zip(probability, tree.depths.tolist()) if depth < block]
                    took = self._costs(costs, block, context).ms
                    best = self._best(list(accumulate(within)), block, took, plain)
                    self.experience.of(block).learn(best.times)
        self._ends.used[self._last.nodes] = self._step
        self._recent.append(self._last.nodes)

    def _costs(self, costs: Costs, block: int, context: int) -> Table:
        """What drafted steps cost, as `Ends` knows it."""
        return self._ends.costs(costs, block, context, self._step, self._later)

    def _best(self, gains: list[float], block: int, took: Mapping[int, float], plain: float) -> Cut:
        """The best of the step ends now; `gains`: expected tokens of a step by its drafted nodes, 1 for none."""
        return self._ends.best(gains, block, took, plain, self._step, self._after)

    def _draft(self, costs: Costs, context: int) -> Plan:
        whole = self._block == self._blocks[0]
        if whole:
            self._whole_at = self._step
        self._now = costs, context
        nodes = self._grown()
        plan = self._plans.get((nodes, self._block))
        if plan is None:
            depth = None if whole else self._block - 1
            plan = self._plans[nodes, self._block] = Plan("tree", nodes, depth=depth, choose=self._choose)
        return plan

    def _choose(self, tree: Tree) -> Tree:
        """`best_cut` for the step that was planned last."""
        return self.best_cut(tree, *self._now)

    def _grown(self) -> int:
        """Nodes of the tree to choose from: growing many to keep few costs time. Now and then all are looked at."""
        if self._step % LOOK_AT_ALL == 0 or len(self._recent) < LOOK_BACK:
            return self.budget
        wanted = 1.3 * max(self._recent)
        for end in self._ends.all:
            if end > wanted:
                return end
        return self.budget

    def _can_pay(self, took: Mapping[int, float], plain: float) -> bool:
        """Whether any width could win if all that one path can hold were accepted."""
        return any((1 + min(n, self._block - 1)) * plain > ms for n, ms in took.items())

    def _best_block(self, costs: Costs, context: int) -> int:
        """How many columns to draft: the whole block where the rest costs little or is due, else what was worth more."""
        if len(self._blocks) == 1:
            return self._blocks[0]
        whole, half = self._blocks
        known = self.experience
        if self._step - self._whole_at > OTHER_BLOCK and self._last.nodes:
            return whole
        table, shorter = (self._costs(costs, block, context) for block in (whole, half))
        widest = max(table.ms)  # the same for both: the ends that are worth looking at differ
        if table.ms[widest] - shorter.ms[widest] < WORTH_SAVING * table.least:
            return whole
        return half if known.of(half).mean > known.of(whole).mean else whole
