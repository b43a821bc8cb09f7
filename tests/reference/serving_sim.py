"""Simulation of closed-loop clients at a server in virtual time: what a rule for prefilling beside decoding gives, without
timing anything."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

import numpy as np

from dflash_ggml.engine.batches import BatchSizes, joined_columns

WIDTHS = BatchSizes(4096)


@dataclass(frozen=True)
class Machine:
    """Seconds of passes. measured: of prefill passes, columns and seconds, instead of the first two."""

    fixed: float  # of a prefill pass
    per_token: float  # of a prefill pass
    step: float  # of a decode step of one sequence
    per_sequence: float  # of a decode step, for each further one
    is_gpu: bool = True
    measured: tuple[tuple[int, float], ...] = ()

    def one_pass(self, columns: int) -> float:
        """Seconds of a prefill pass."""
        if self.measured:
            return float(np.interp(columns, *zip(*self.measured)))
        return self.fixed + columns * self.per_token

    def prefill(self, tokens: int) -> float:
        """Seconds of a chunk, in as many passes as the engine takes for it."""
        seconds = 0.0
        while tokens:
            n = WIDTHS.next(tokens)
            seconds, tokens = seconds + self.one_pass(n), tokens - n
        return seconds

    def decode(self, n: int) -> float:
        """Seconds of a step of n sequences."""
        return self.step + (n - 1) * self.per_sequence


H100 = Machine(
    0.010, 1 / 9500, 0.0082, 0.0002
)  # 27B shape: 256 tokens 37 ms, 1,024 118 ms, a step of 8 9.6 ms
# linear passes as they were measured on that card (bench/notes-serving.md)
MEASURED = replace(
    H100,
    measured=(
        (8, 0.0087),
        (64, 0.019),
        (128, 0.035),
        (256, 0.056),
        (512, 0.074),
        (768, 0.098),
        (1024, 0.122),
    ),
)
DRAFTING = Machine(0.010, 1 / 9500, 0.017, 0.0009)  # the same with drafts: a step of 8 23 ms
SMALL_CPU = Machine(0.004, 0.0002, 0.004, 0.0008, is_gpu=False)  # MADE UP, as the two below
CPU = Machine(0.03, 0.004, 0.08, 0.02, is_gpu=False)
LARGE_CPU = Machine(0.3, 0.02, 0.35, 0.05, is_gpu=False)


@dataclass(eq=False)
class Request:
    """One request: what it asks, and when its tokens came."""

    remaining: int
    answer: int  # tokens until it ends or its client hangs up
    since: float = 0.0
    came: list[float] = field(default_factory=list)
    calm: float = 0.0  # seconds of the steps that it took part in
    is_scoring: bool = False


class Rule(Protocol):
    """What decides; PrefillBudget is one."""

    def choose(self, prompts: Sequence[Request], n_decoding: int, now: float) -> tuple[int, int] | None: ...
    def prefilled(self, tokens: int, seconds: float, decoding: bool, is_warm: bool = True) -> None: ...
    def decoded(self, seconds: float, n: int) -> None: ...
    def joined(self, tokens: int, seconds: float, is_warm: bool = True) -> float: ...


def load(
    seed: int, requests: int = 48, words: tuple[int, int] = (100, 4000), answer: int = 150
) -> list[Request]:
    """Prompts of 1.3 tokens a word; a third of the clients hang up midway."""
    rng = random.Random(seed)
    leaves = set(rng.sample(range(requests), requests // 3))
    made = []
    for i in range(requests):
        made.append(
            Request(int(1.3 * rng.randint(*words)), rng.randrange(1, answer) if i in leaves else answer)
        )
    return made


@dataclass
class Outcome:
    """What a load came to, in virtual seconds."""

    total: float
    alone: float  # prefilling everything, then decoding everything in full batches
    first: list[float]
    gap: float  # longest time between two tokens
    slowdown: list[
        float
    ]  # of each sequence of 100 tokens and more: first to last token, over the time of its steps
    columns: float  # sequences in a decode step

    def __str__(self) -> str:
        return (
            f"total {self.total:5.1f} s = {self.total / self.alone:.2f} x alone ({self.alone:.1f}), "
            f"first token {median(self.first):.2f} / {max(self.first):.2f} s, "
            f"gap {1e3 * self.gap:4.0f} ms, slower {median(self.slowdown):.2f} / {max(self.slowdown):.2f}, "
            f"{self.columns:.1f} columns"
        )


def served(
    machine: Machine, rule: Rule, requests: Sequence[Request], clients: int = 8, joined: bool = False
) -> Outcome:
    """Serve all requests of a load, so many at a time. joined: chunks are in the pass of a step."""
    waiting, prompts, decoding = deque(requests), list[Request](), list[Request]()
    now, steps, columns = 0.0, 0, 0
    prefill_alone = sum(r.remaining for r in requests) * machine.per_token
    decode_alone = sum(r.answer - 1 for r in requests) * machine.decode(clients) / clients

    def emit(request: Request) -> bool:
        request.came.append(now)
        return len(request.came) < request.answer

    while waiting or prompts or decoding:
        while waiting and len(prompts) + len(decoding) < clients:
            prompts.append(waiting.popleft())
            prompts[-1].since = now
        chosen = rule.choose(prompts, len(decoding), now)
        if chosen is not None:
            index, tokens = chosen
            is_joined = joined and steps > 0 and len(decoding) > 0
            if is_joined:
                tokens = WIDTHS.joined(prompts[index].remaining, len(decoding), tokens)
                took = machine.one_pass(tokens + joined_columns(len(decoding)))
                now, steps, columns = now + took, steps + 1, columns + len(decoding)
                rule.joined(tokens, took)
                for request in decoding:
                    request.calm += machine.decode(len(decoding))
                decoding = [request for request in decoding if emit(request)]
            else:
                took = machine.prefill(tokens)
                now += took
                rule.prefilled(tokens, took, bool(decoding))
            prompts[index].remaining -= tokens
            if not prompts[index].remaining:
                request = prompts.pop(index)
                if emit(request):
                    decoding.append(request)
            continue
        took = machine.decode(len(decoding))
        now, steps, columns = now + took, steps + 1, columns + len(decoding)
        rule.decoded(took, len(decoding))
        for request in decoding:
            request.calm += took
        decoding = [request for request in decoding if emit(request)]
    gaps = [after - before for r in requests for before, after in zip(r.came, r.came[1:])]
    slower = [(r.came[-1] - r.came[0]) / r.calm for r in requests if len(r.came) >= 100]
    first = [r.came[0] - r.since for r in requests]
    return Outcome(now, prefill_alone + decode_alone, first, max(gaps), slower, columns / max(steps, 1))
