"""A clock that is not the machine's: made-up costs of passes and a made-up text, to judge controllers without timing anything.

A text is a stream of rows: what the draft believes of each depth, and which candidate is right. `hits` tells how often the best
candidate is; the draft believes something about it that is right in the mean, or off by `off` logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dflash_ggml.decode.accept import Accepted
from dflash_ggml.decode.adaptive import Adaptive
from dflash_ggml.decode.candidates import Rows
from dflash_ggml.decode.company import Member
from dflash_ggml.decode.controller import Controller
from dflash_ggml.decode.costs import Costs, Point
from dflash_ggml.decode.experience import Experience
from dflash_ggml.decode.joint_costs import JointCosts
from dflash_ggml.decode.plan import Plan
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.decode.together import Together
from dflash_ggml.decode.tree import Tree, verify_width

RANKS = 8


@dataclass(frozen=True)
class Machine:
    """Milliseconds of passes. verify: by columns, a staircase; draft: by columns."""

    plain: float
    verify: Mapping[int, float]
    draft: Mapping[int, float]
    rest: float = 0.3
    noise: float = 0.02

    def verify_ms(self, width: int) -> float:
        return self.verify[min(w for w in self.verify if w >= width)]


# 27B shape, Q4_K_M, one H100
H100 = Machine(
    8.1,
    {2: 8.3, 3: 8.4, 4: 8.4, 6: 8.6, 8: 8.8, 16: 9.3, 24: 9.6, 32: 10.6},
    {16: 1.0, 8: 0.95},
)
# the demo pair on two cores with AVX-512
CPU = Machine(
    1.05,
    {2: 1.25, 3: 1.4, 4: 1.5, 6: 1.7, 8: 2.05, 16: 3.1, 24: 4.5, 32: 5.4},
    {16: 0.9, 8: 0.57},
    0.35,
)


def calibrated(machine: Machine) -> Costs:
    """Costs as a calibration leaves them."""
    costs = Costs()
    costs.learn(
        [
            Point("plain", 1, 32, machine.plain),
            *(Point("verify", width, 32, ms) for width, ms in machine.verify.items()),
            *(Point("draft", columns, 32, ms) for columns, ms in machine.draft.items()),
            Point("commit", 1, 32, 0.05),
        ]
    )
    return costs


@dataclass
class Text:
    """A stream of drafts. hits: probability that the best candidate of a depth is right, given that the path is."""

    hits: float
    seed: int = 0
    spread: float = 1.2  # logits by which places differ, which the draft knows
    off: float = 0.0  # logits by which the draft is wrong in the mean
    others: float = 0.4  # of what the best candidate leaves: how much is in the second
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def draft(self, depth: int) -> tuple[Rows, np.ndarray]:
        """Candidates of `depth` positions, and the rank that is right at each (RANKS: none)."""
        logits = np.log(self.hits / (1 - self.hits)) + self.spread * self.rng.standard_normal(depth)
        return self._drafted(logits, self.rng.random(depth))

    def _drafted(self, logits: np.ndarray, u: np.ndarray) -> tuple[Rows, np.ndarray]:
        depth, right = len(logits), _ranks(logits, self.others)
        truth = (np.cumsum(right, 1) < u[:, None]).sum(1)
        ids = np.arange(RANKS, dtype=np.int32) + RANKS * np.arange(depth, dtype=np.int32)[:, None]
        believed = np.log(_ranks(logits + self.off, self.others)).astype(np.float32)
        order = np.argsort(-believed, 1, kind="stable")
        return Rows(np.take_along_axis(ids, order, 1), np.take_along_axis(believed, order, 1)), truth


@dataclass
class Placed(Text):
    """A text that is there before anybody drafts it: how hard a place is, and which candidate is right there, hold for all who
    come by, whatever steps they take. Modes that are compared on one see the same words."""

    length: int = 8192  # places after which it begins anew

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        logits = np.log(self.hits / (1 - self.hits)) + self.spread * rng.standard_normal(self.length)
        # of all places beforehand: whoever times a step does not want to time this
        rows, self._truth = self._drafted(logits, rng.random(self.length))
        self._ids, self._log_probs = rows.ids % RANKS, rows.log_probs

    def at(self, place: int, depth: int) -> tuple[Rows, np.ndarray]:
        """`draft` of the `depth` places behind `place`."""
        places = np.arange(place + 1, place + 1 + depth) % self.length
        ids = self._ids[places] + RANKS * np.arange(depth, dtype=np.int32)[:, None]
        return Rows(ids, self._log_probs[places]), self._truth[places]

    def right(self, place: int, depth: int) -> np.ndarray:
        """The tokens that are right at the `depth` places behind `place`, RANKS * 100 where none of the candidates is; one more
        such behind them."""
        found = np.full(depth + 1, RANKS * 100, np.int32)
        truth = self._truth[np.arange(place + 1, place + 1 + depth) % self.length]
        np.copyto(found[:-1], truth + RANKS * np.arange(depth), where=truth < RANKS, casting="unsafe")
        return found


def _ranks(logits: np.ndarray, others: float) -> np.ndarray:
    """Probabilities [depth, RANKS]: the best, then half of what is left, and so on."""
    best = 1 / (1 + np.exp(-logits))
    rest = (1 - best)[:, None] * others * 0.5 ** np.arange(RANKS - 1)
    return np.concatenate([best[:, None], rest], 1)


@dataclass
class Run:
    """What a controller made of a text: virtual milliseconds, tokens, columns that were verified and drafted, per step."""

    ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)

    def rate(self, first: int = 0, last: int | None = None) -> float:
        """Tokens per millisecond of some steps."""
        return sum(self.tokens[first:last]) / sum(self.ms[first:last])


def decode(
    controller: Controller,
    costs: Costs,
    machine: Callable[[int], Machine] | Machine,
    text: Callable[[int], Text] | Text,
    n_tokens: int,
    depth: int = 15,
    seed: int = 0,
    word: Callable[[int], int] | None = None,
) -> Run:
    """Run a controller over `n_tokens`; machine and text may depend on the tokens so far.

    word: the token at a place; without it, words that were not there before.
    """
    rng, run, sequence = np.random.default_rng(seed), Run(), Sequence()
    sequence.pending = 0
    sequence.tokens += [0] * 32
    told: list[int] = []  # of a draft that was not verified: what the text goes on with
    while sum(run.tokens) < n_tokens:
        at = sum(run.tokens)
        here = machine(at) if callable(machine) else machine
        now = text(at) if callable(text) else text

        def took(ms: float, here: Machine = here) -> float:
            return ms * float(np.exp(here.noise * rng.standard_normal()))

        plan = controller.next(sequence, costs)
        context = sequence.n_tokens
        if plan.kind == "plain":
            ms = took(here.plain)
            costs.measured("plain", ms, context=context)
            n, width, columns = 1, 0, 0
        else:
            rows, truth = now.draft(depth)
            columns = (plan.depth or depth) + 1
            right = _right(truth)
            rows = Rows(rows.ids[: columns - 1], rows.log_probs[: columns - 1])
            if word:
                rows, right = _in_words(rows, right, word, at)
            tree = plan.build(0, rows)
            parts = {("draft", columns): took(here.draft.get(columns, here.draft[16]))}
            if tree.n_nodes:
                accepted = _walk(tree, right)
                width = verify_width(tree.n_nodes)
                parts |= {("verify", width): took(here.verify_ms(width)), ("host", width): took(here.rest)}
                controller.observe(tree, accepted)
                ms, n = sum(parts.values()), len(accepted.tokens)
                told = []
            else:
                ms, n, width = sum(parts.values()) + took(here.plain), 1, 0
                told = right[: right.index(-1) if -1 in right else None]
            for (kind, w), part in parts.items():
                costs.measured(kind, part, w, context)  # type: ignore[arg-type]
        run.ms.append(ms)
        run.tokens.append(n)
        run.widths.append(width)
        run.drafted.append(columns)
        if n == 1 and told:
            new, told = told[:1], told[1:]
        else:
            new, told = rng.integers(RANKS * depth, 1 << 30, n).tolist(), []
        new = list(map(word, range(at, at + n))) if word else new
        sequence.tokens += [*([] if sequence.pending is None else [sequence.pending]), *new[:-1]]
        sequence.pending = new[-1]
    return run


def _right(truth: np.ndarray) -> list[int]:
    """The right token of each depth, -1 where no candidate is."""
    return [RANKS * d + rank if rank < RANKS else -1 for d, rank in enumerate(truth.tolist())]


def _in_words(rows: Rows, right: list[int], word: Callable[[int], int], at: int) -> tuple[Rows, list[int]]:
    """The same candidates, of which the right ones are the words of the text behind `at` tokens."""
    ids = rows.ids + (1 << 30)
    for d, token in enumerate(right[: len(ids)]):
        ids[d, rows.ids[d] == token] = word(at + d)
    return Rows(ids, rows.log_probs), [word(at + d) if token >= 0 else -1 for d, token in enumerate(right)]


def _walk(tree: Tree, right: list[int]) -> Accepted:
    """The nodes that carry the right tokens of their depths, root first; -1: there is none."""
    path = [0]
    while len(path) <= len(right):
        found = np.flatnonzero((tree.parents == path[-1]) & (tree.tokens == right[len(path) - 1]))
        if not len(found):
            break
        path.append(int(found[0]))
    return Accepted(tuple(path), tuple(int(t) for t in [*tree.tokens[path[1:]], -1]))


@dataclass(frozen=True)
class JointMachine:
    """Milliseconds of passes over several sequences. verify: by columns of all; draft: by columns of all that draft; each: what
    every sequence beyond the first adds to a pass of the target; host: of a drafted step, and of each of its sequences; commit:
    of each path, which the next draft waits for; plain: by sequences, a step of one column each (empty: a pass of as many)."""

    verify: Mapping[int, float]
    draft: Mapping[int, float]
    each: float = 0.1
    host: tuple[float, float] = (0.2, 0.08)
    noise: float = 0.02
    commit: float = 0.0
    plain: Mapping[int, float] = field(default_factory=dict)

    def verify_ms(self, columns: int, sequences: int) -> float:
        return _between(self.verify, columns) + self.each * (sequences - 1)

    def plain_ms(self, sequences: int) -> float:
        return _between(self.plain, sequences) if self.plain else self.verify_ms(sequences, sequences)

    def draft_ms(self, columns: int) -> float:
        return _between(self.draft, columns)

    def host_ms(self, sequences: int) -> float:
        return self.host[0] + self.host[1] * sequences

    def costs(self) -> Costs:
        """What a calibration with one sequence knows."""
        costs = Costs()
        verify = [Point("verify", w, 32, self.verify_ms(w, 1)) for w in (2, 4, 8, 16, 24, 32)]
        draft = [Point("draft", w, 32, self.draft_ms(w)) for w in (8, 16)]
        costs.learn([Point("plain", 1, 32, self.verify_ms(1, 1)), *verify, *draft])
        return costs


def _between(table: Mapping[int, float], at: int) -> float:
    """The value at `at` on the line through a table's neighbours."""
    return float(np.interp(at, sorted(table), [table[key] for key in sorted(table)]))


# 27B shape, Q4_K_M, one H100: passes of one sequence measured (bench/results/step-h100-27b.json), a draft of more than 16 columns
# derived from its weights
JOINT_H100 = JointMachine(
    {1: 8.1, 2: 8.34, 4: 8.39, 8: 8.54, 16: 9.4, 24: 10.6, 32: 11.84, 48: 14.97, 64: 18.63, 128: 61.5},
    {4: 1.3, 8: 1.37, 16: 1.46, 32: 1.75, 64: 2.6, 128: 5.5, 256: 11.0},
)
# the same, measured with several texts as well: where each has one column, the pass writes its state. What a commit takes beyond
# the time in which the host goes on; host: of a step of equal shares
SEVERAL_H100 = JointMachine(
    {1: 8.1, 2: 8.28, 4: 8.45, 8: 8.62, 16: 9.5, 24: 10.7, 32: 11.85, 48: 15.2, 64: 18.6, 128: 37.5},
    {4: 1.2, 8: 1.3, 16: 1.4, 32: 1.7, 64: 2.8, 128: 5.5, 256: 11.0},
    0.05,
    (0.25, 0.05),
    commit=0.06,
    plain={1: 8.2, 4: 9.4, 8: 10.0, 16: 12.1},
)
# the same on one H200, at 8f26a34, where drafts of more than 64 columns take two passes; trees of several levels
SEVERAL_H200 = JointMachine(
    {
        1: 7.2,
        2: 7.4,
        4: 7.5,
        8: 7.7,
        16: 9.0,
        24: 10.2,
        32: 11.4,
        40: 14.2,
        48: 14.9,
        56: 17.7,
        64: 18.5,
        128: 37.5,
    },
    {4: 1.3, 8: 1.4, 16: 1.5, 32: 2.0, 48: 2.7, 64: 2.9, 65: 4.5, 128: 5.7, 256: 11.0},
    0.06,
    (0.2, 0.03),
    commit=0.02,
    plain={1: 7.0, 4: 8.6, 8: 9.3, 16: 10.8},
)
# every column costs the same, whosever it is
LINEAR_CPU = JointMachine(
    {1: 1.0, 128: 1.0 + 127 * 0.2}, {4: 0.5, 256: 0.5 + 252 * 0.05}, 0.1, (0.2, 0.05), commit=0.05
)
# the demo pair on two cores with AVX-512: products over many columns are bound by sums, not by reads
JOINT_CPU = JointMachine(
    {1: 1.05, 2: 1.25, 4: 1.5, 8: 2.05, 16: 3.1, 24: 4.5, 32: 5.4, 64: 10.2, 128: 20.0},
    {4: 0.4, 8: 0.57, 16: 0.9, 32: 1.7, 64: 3.3, 128: 6.5},
    0.1,
    (0.1, 0.1),
)


@dataclass
class JointRun:
    """What was made of several texts: virtual milliseconds, tokens and columns per step, tokens of each text."""

    ms: list[float] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    drafting: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second of all texts together."""
        return 1000 * sum(self.tokens) / sum(self.ms)


def decode_together(
    texts: list[Placed],
    machine: JointMachine,
    steps: int,
    depth: int = 15,
    budget: int = 31,
    share: Callable[[Together, list[Tree], list[Plan]], list[Tree]] | None = None,
    plan: Callable[[list[Plan]], list[Plan]] | None = None,
    together: Together | None = None,
    seed: int = 0,
    new_text: int = 0,
    told: float = 1.0,
) -> JointRun:
    """Run `steps` steps of all texts together. share, plan: in place of what Together decides. new_text: tokens after which a
    text is followed by another of its kind. told: what is measured of a drafted step, as a part of what it takes."""
    rng, run, costs = np.random.default_rng(seed), JointRun(), JointCosts(machine.costs())
    together, known = together or Together(depth), Experience()
    run.tokens = [0] * len(texts)
    members = [_member(budget, depth, known) for _ in texts]
    committed = 0  # paths that the next draft waits for

    def took(ms: float) -> float:
        return ms * float(np.exp(machine.noise * rng.standard_normal()))

    for _ in range(steps):
        n = len(texts)
        plans = together.next(members, costs)
        if plan is not None:
            plans = plan(plans)
        drafting = [i for i, p in enumerate(plans) if p.kind != "plain"]
        columns = max([(plans[i].depth or depth) + 1 for i in drafting], default=0)
        trees, truths = [], []
        for i, text in enumerate(texts):
            rows, truth = text.at(run.tokens[i], columns - 1) if i in drafting else (None, np.zeros(0, int))
            trees.append(_ROOT if rows is None else plans[i].build(0, rows))
            truths.append(truth)
        trees = (share or _shared)(together, trees, plans)
        together.meanwhile()
        accepted = [_walk(tree, _right(truth)) for tree, truth in zip(trees, truths)]
        total = sum(tree.width for tree in trees)
        width = verify_width(total - 1)
        if drafting:
            draft = machine.draft_ms(columns * len(drafting)) + machine.commit * committed
            committed = sum([tree.width > 1 for tree in trees])
            parts = {
                ("draft", columns * len(drafting), len(drafting)): draft,
                ("verify", width, n): machine.verify_ms(width, n),
                ("host", width, n): machine.host_ms(n),
            }
        else:
            parts, committed = {("plain", n, n): machine.plain_ms(n)}, 0
        parts = {key: took(ms) for key, ms in parts.items()}
        for (kind, at, sequences), ms in parts.items():
            ms *= 1.0 if kind == "plain" else told
            costs.measured(kind, ms, at, sequences, members[0].sequence.n_tokens)
        together.observe(trees, accepted, sum(parts.values()))
        run.ms.append(sum(parts.values()))
        run.emitted.append(sum([len(what.tokens) for what in accepted]))
        run.columns.append(total)
        run.drafting.append(len(drafting))
        for i, what in enumerate(accepted):
            before = run.tokens[i]
            run.tokens[i] += len(what.tokens)
            members[i].sequence.tokens += range(before, run.tokens[i])  # words that were not there before
            if new_text and before // new_text != run.tokens[i] // new_text:
                members[i] = _member(budget, depth, known)
    return run


def _member(budget: int, depth: int, known: Experience) -> Member:
    sequence = Sequence(tokens=[0] * 32, pending=0)
    return Member(sequence, Adaptive(budget, depth, known))


def _shared(together: Together, trees: list[Tree], plans: list[Plan]) -> list[Tree]:
    return together.share(trees)


_ROOT = Tree(np.zeros(1, np.int32), np.full(1, -1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.float32))
