"""A virtual clock: synthetic costs of passes and synthetic sequences, to judge policies without timing anything.

At each position of a sequence the draft has probabilities of a few candidates, one of which is right, or none. `hits` is how
often the best candidate is; the draft's probabilities are right on average, or off by `off` logits. Every run finds the same at
a position, whatever steps it takes, so modes that are compared on a sequence see the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from dflash_ggml.config import Mode
from dflash_ggml.decode.accept import Accepted
from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.decode.tree import Tree, root_only, verify_width
from dflash_ggml.policy.costs import Costs, Pass, Point
from dflash_ggml.policy.plan import Plan
from dflash_ggml.policy.policy import Policy, Result, StepTimes

RANKS = 8


@dataclass(frozen=True)
class Machine:
    """Milliseconds of passes over one sequence. verify: by columns, a staircase; draft: by columns."""

    plain: float
    verify: Mapping[int, float]
    draft: Mapping[int, float]
    rest: float = 0.3
    noise: float = 0.02
    spikes: float = 0.0  # part of the passes that take five times as long

    commit = 0.0

    def verify_ms(self, columns: int, sequences: int = 1) -> float:
        return self.verify[min(w for w in self.verify if w >= columns)]

    def plain_ms(self, sequences: int = 1) -> float:
        return self.plain

    def draft_ms(self, columns: int) -> float:
        return self.draft[min((w for w in self.draft if w >= columns), default=max(self.draft))]

    def host_ms(self, sequences: int = 1) -> float:
        return self.rest

    def costs(self) -> Costs:
        """Costs as a calibration leaves them."""
        costs = Costs()
        costs.learn(
            [
                Point("plain", 1, 32, self.plain),
                *(Point("verify", width, 32, ms) for width, ms in self.verify.items()),
                *(Point("draft", columns, 32, ms) for columns, ms in self.draft.items()),
                Point("commit", 1, 32, 0.05),
            ]
        )
        return costs


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


# the same on two cores of an EPYC: a drafted step takes four to six plain ones
EPYC = Machine(
    1.0, {2: 1.75, 3: 2.1, 4: 2.4, 6: 2.9, 8: 3.4, 16: 5.2, 24: 7.5, 32: 9.4}, {16: 1.65, 8: 0.95}, 0.35
)


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
    spikes: float = 0.0
    commit: float = 0.0
    plain: Mapping[int, float] = field(default_factory=dict)

    def verify_ms(self, columns: int, sequences: int = 1) -> float:
        return _between(self.verify, columns) + self.each * (sequences - 1)

    def plain_ms(self, sequences: int = 1) -> float:
        return _between(self.plain, sequences) if self.plain else self.verify_ms(sequences, sequences)

    def draft_ms(self, columns: int) -> float:
        return _between(self.draft, columns)

    def host_ms(self, sequences: int = 1) -> float:
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


# 27B shape, Q4_K_M, one H100: passes of one sequence measured (bench/results/history/step-h100-27b.json),
# a draft of more than 16 columns
# derived from its weights
JOINT_H100 = JointMachine(
    {1: 8.1, 2: 8.34, 4: 8.39, 8: 8.54, 16: 9.4, 24: 10.6, 32: 11.84, 48: 14.97, 64: 18.63, 128: 61.5},
    {4: 1.3, 8: 1.37, 16: 1.46, 32: 1.75, 64: 2.6, 128: 5.5, 256: 11.0},
)
# the same, measured with several sequences too: where each has one column, the pass writes its state. What a commit takes beyond
# the time in which the host continues; host: of a step of equal shares
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
# every column costs the same, in any sequence
LINEAR_CPU = JointMachine(
    {1: 1.0, 128: 1.0 + 127 * 0.2}, {4: 0.5, 256: 0.5 + 252 * 0.05}, 0.1, (0.2, 0.05), commit=0.05
)
# the demo pair on two cores with AVX-512: matmuls over many columns are compute-bound, not memory-bound
JOINT_CPU = JointMachine(
    {1: 1.05, 2: 1.25, 4: 1.5, 8: 2.05, 16: 3.1, 24: 4.5, 32: 5.4, 64: 10.2, 128: 20.0},
    {4: 0.4, 8: 0.57, 16: 0.9, 32: 1.7, 64: 3.3, 128: 6.5},
    0.1,
    (0.1, 0.1),
)


class Source(Protocol):
    """A sequence that is known before it is drafted."""

    def at(self, position: int, depth: int) -> tuple[CandidateBlock, np.ndarray]:
        """The draft's candidates for the `depth` positions after `position`, and the tokens that are right there."""
        ...


@dataclass
class SyntheticSequence:
    """A synthetic sequence. hits: probability that the best candidate of a position is right, given that the path is."""

    hits: float
    seed: int = 0
    spread: float = 1.2  # deviation of logits between positions, which the draft knows
    off: float = 0.0  # logits by which the draft is wrong on average
    others: float = 0.4  # of what the best candidate leaves: how much is in the second
    never: bool = False  # whether no candidate is ever right
    length: int = 4096  # period in positions
    word: Callable[[int], int] | None = (
        None  # the token of a position; by default tokens that did not occur before
    )

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        logits = np.log(self.hits / (1 - self.hits)) + self.spread * rng.standard_normal(self.length)
        right = _ranks(logits, self.others)
        truth = (np.cumsum(right, 1) < rng.random(self.length)[:, None]).sum(1)
        self._truth = np.full_like(truth, RANKS) if self.never else truth
        believed = np.log(_ranks(logits + self.off, self.others)).astype(np.float32)
        self._order = np.argsort(-believed, 1, kind="stable").astype(np.int32)
        self._log_probs = np.take_along_axis(believed, self._order, 1)

    def at(self, position: int, depth: int) -> tuple[CandidateBlock, np.ndarray]:
        positions = np.arange(position + 1, position + 1 + depth)
        here, firsts = positions % self.length, (RANKS + 1) * positions[:, None]
        ids, right = self._order[here] + firsts, self._truth[here] + firsts[:, 0]
        if self.word is not None:
            words = np.array([self.word(int(p)) for p in positions], np.int64)
            ids = np.where(ids == right[:, None], words[:, None], ids + (1 << 29))
            right = words
        return CandidateBlock(ids.astype(np.int32), self._log_probs[here]), right


@dataclass
class Parts:
    """A sequence whose kind changes. which: the part of a position."""

    parts: Items[Source]
    which: Callable[[int], int]

    def at(self, position: int, depth: int) -> tuple[CandidateBlock, np.ndarray]:
        return self.parts[self.which(position)].at(position, depth)


def by_turns(*hits: float, every: int = 300, seed: int = 0, off: float = 0.0) -> Parts:
    """A sequence whose kind changes every `every` positions."""
    return Parts(
        [SyntheticSequence(h, seed + i, off=off) for i, h in enumerate(hits)],
        lambda at: at // every % len(hits),
    )


def _ranks(logits: np.ndarray, others: float) -> np.ndarray:
    """Probabilities [positions, RANKS]: the best, then half of what is left, and so on."""
    best = 1 / (1 + np.exp(-logits))
    rest = (1 - best)[:, None] * others * 0.5 ** np.arange(RANKS - 1)
    return np.concatenate([best[:, None], rest], 1)


@dataclass
class Run:
    """Result of a run: by step virtual milliseconds, tokens of all, columns of the verify pass (of all), columns of each draft,
    and drafting sequences; tokens of each sequence."""

    ms: list[float] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    drafting: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def rate(self, first: int = 0, last: int | None = None) -> float:
        """Tokens per millisecond of some steps."""
        return sum(self.emitted[first:last]) / sum(self.ms[first:last])


Cut = Callable[[Policy, list[Tree]], list[Tree]]


def decode(
    policy: Policy,
    machine: Machine | JointMachine | Callable[[int], Machine],
    sources: Items[Source],
    n_tokens: int | None = None,
    steps: int = 1 << 30,
    mode: Mode = "auto",
    budget: int = 31,
    seed: int = 0,
    restart_every: int = 0,
    reported: float = 1.0,
    cut: Cut | None = None,
    plan: Callable[[list[Plan]], list[Plan]] | None = None,
) -> Run:
    """Decode sequences in batches of all of them.

    Args:
        machine: May depend on the tokens of the first sequence so far.
        n_tokens: Of the first sequence, after which it ends.
        restart_every: Tokens after which a sequence is followed by another of its kind.
        reported: Measured time of a drafted step, as a fraction of its true time.
        cut, plan: Replacements for the policy's decisions.
    """
    rng, run, n = np.random.default_rng(seed), Run(), len(sources)
    run.tokens = [0] * n
    sequences = [_begun(source, 0, mode, budget) for source in sources]
    committed = 0  # paths for which the next draft waits
    measured = policy.costs.measured

    def as_reported(kind: Pass, ms: float, *where: int) -> None:
        measured(kind, ms if kind == "plain" else reported * ms, *where)

    policy.costs.measured = as_reported  # type: ignore[method-assign, assignment]

    def took(ms: float) -> float:
        if here.spikes and rng.random() < here.spikes:
            ms *= 5
        return ms * float(np.exp(here.noise * rng.standard_normal()))

    while len(run.ms) < steps and (n_tokens is None or run.tokens[0] < n_tokens):
        here = machine(run.tokens[0]) if callable(machine) else machine
        plans = policy.plan(sequences)
        if plan is not None:
            plans = plan(plans)
        drafted = [i for i, p in enumerate(plans) if p.kind != "plain" and p.drafts]
        block = max([(plans[i].depth or policy.depth) + 1 for i in drafted], default=0)
        trees = [root_only(s.pending or 0) for s in sequences]
        for i in drafted:
            trees[i] = plans[i].build(sequences[i].pending or 0, sources[i].at(run.tokens[i], block - 1)[0])
        trees = policy.cut(trees) if cut is None else cut(policy, trees)
        policy.catch_up()
        accepted = []
        for source, tree, at in zip(sources, trees, run.tokens):
            deepest = int(tree.depths.max()) + 1
            accepted.append(_walk(tree, source.at(at, deepest)[1].tolist()))
        total = sum([tree.width for tree in trees])
        draft = took(here.draft_ms(block * len(drafted)) + here.commit * committed) if drafted else 0.0
        if total > n:
            width = verify_width(total - 1)
            verify, host = took(here.verify_ms(width, n)), took(here.host_ms(n))
        else:
            verify, host = took(here.plain_ms(n)), 0.0
        committed = sum([tree.width > 1 for tree in trees])
        for sequence, what in zip(sequences, accepted):
            sequence.tokens += [sequence.pending or 0, *what.tokens[:-1]]
            sequence.pending = what.tokens[-1]
        policy.record(Result(trees, accepted, StepTimes(draft, 0.0, verify, 0.0, host)))
        run.ms.append(draft + verify + host)
        run.emitted.append(sum([len(what.tokens) for what in accepted]))
        run.columns.append(total if total > n else 0)
        run.blocks.append(block)
        run.drafting.append(len(drafted))
        for i, what in enumerate(accepted):
            before = run.tokens[i]
            run.tokens[i] += len(what.tokens)
            if restart_every and before // restart_every != run.tokens[i] // restart_every:
                sequences[i] = _begun(sources[i], run.tokens[i], mode, budget)
    policy.costs.measured = measured  # type: ignore[method-assign]
    return run


def _begun(source: Source, at: int, mode: Mode, budget: int) -> Sequence:
    """A sequence whose prompt has been prefilled; its first token is the one at position `at`."""
    first = int(source.at(at - 1, 1)[1][0])
    return Sequence(tokens=[-1] * 32, pending=first, mode=mode, budget=budget)


def _walk(tree: Tree, right: Items[int]) -> Accepted:
    """The nodes that carry the right tokens of their depths, root first."""
    path = [0]
    while True:
        found = np.flatnonzero((tree.parents == path[-1]) & (tree.tokens == right[len(path) - 1]))
        if not len(found):
            return Accepted(tuple(path), tuple(right[: len(path)]))
        path.append(int(found[0]))
