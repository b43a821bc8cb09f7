"""What `auto` may lose of one text against plain decoding, whatever the draft says; in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dflash_ggml.config import Mode
from dflash_ggml.decode.adaptive import Adaptive
from dflash_ggml.decode.allowance import MOST, SHARE, START, Allowance
from dflash_ggml.decode.candidates import Rows
from dflash_ggml.decode.controller import controller
from dflash_ggml.decode.costs import Costs, Point
from dflash_ggml.decode.experience import Experience
from reference.virtual_clock import CPU, H100, RANKS, Machine, Run, Text, decode

EXACT = {"h100": replace(H100, noise=0.0), "cpu": replace(CPU, noise=0.0)}


def calibrated(machine: Machine) -> Costs:
    """Costs that are right from the first step on."""
    verify = [Point("verify", w, 32, ms) for w, ms in machine.verify.items()]
    draft = [Point("draft", w, 32, ms) for w, ms in machine.draft.items()]
    costs = Costs()
    costs.learn([Point("plain", 1, 32, machine.plain), *verify, *draft])
    costs.learn([Point("host", w, 0, machine.rest) for w in machine.verify])
    return costs


class Misleading(Text):
    """Nothing that the draft is sure of is right."""

    def draft(self, depth: int) -> tuple[Rows, np.ndarray]:
        rows, _ = super().draft(depth)
        return rows, np.full(depth, RANKS)


def never() -> Callable[[int], Text]:
    text = Misleading(0.95)
    return lambda at: text


def by_fits_and_starts() -> Callable[[int], Text]:
    parts = [Text(0.9, 1, off=2.0), Text(0.05, 2, off=2.0)]
    return lambda at: parts[at // 12 % 4 > 0]


def easy_and_then_misleading() -> Callable[[int], Text]:
    parts = [Text(0.9, 3), Misleading(0.9, 4)]
    return lambda at: parts[at >= 150]


TEXTS = [never, by_fits_and_starts, easy_and_then_misleading]


def most_lost(run: Run, plain: float) -> float:
    """By how many plain steps the text was at worst beyond what may be lost and what one step loses at most."""
    tokens, ms = np.cumsum(run.tokens), np.cumsum(run.ms)
    dearest = float((np.array(run.ms) / plain - run.tokens).max())
    return float((ms / plain - (1 + SHARE) * tokens).max()) - START - dearest


@pytest.mark.parametrize("n", [40, 200, 800])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", EXACT)
def test_no_text_loses_more_than_it_may(name: str, text: Callable[[], Callable[[int], Text]], n: int):
    """The first text of an engine, and one after texts for which drafting paid."""
    machine, known = EXACT[name], Experience()
    for before in (0, 4):
        for seed in range(before):
            decode(Adaptive(31, 15, known), calibrated(machine), machine, Text(0.9, seed), 200)
        run = decode(Adaptive(31, 15, known), calibrated(machine), machine, text(), n)
        assert most_lost(run, machine.plain) <= 1e-6
        assert any(run.widths)


def test_what_was_won_is_not_lost_again_without_end():
    """A long text that was easy for a thousand words: what follows pays for some tries, not for all that was won."""
    machine = EXACT["cpu"]
    parts = [Text(0.93, 3), Misleading(0.93, 4)]
    run = decode(
        Adaptive(31, 15, Experience()), calibrated(machine), machine, lambda at: parts[at >= 1000], 1600
    )
    first = next(i for i in range(len(run.tokens)) if sum(run.tokens[:i]) >= 1000)
    ms, tokens = sum(run.ms[first:]), sum(run.tokens[first:])
    dearest = max(run.ms[first:]) / machine.plain
    assert ms / machine.plain <= (1 + SHARE) * tokens + MOST + dearest


@pytest.mark.parametrize("hits", [0.839, 0.908])
def test_fast_texts_keep_their_gain(hits: float):
    """Lengths of about 6 and 8 on an H100, six texts: within 3 % of the best fixed mode."""
    known, costs = Experience(), calibrated(H100)
    texts = [Text(hits, seed, 1.0) for seed in range(6)]
    auto = [decode(Adaptive(31, 15, known), costs, H100, text, 250) for text in texts]

    def fixed(mode: Mode, budget: int) -> float:
        return sum(
            sum(decode(controller(mode, budget, 15), Costs(), H100, Text(hits, seed, 1.0), 250).ms)
            for seed in range(6)
        )

    best = min(fixed("tree", 7), fixed("tree", 15), fixed("chain", 15), fixed("plain", 31))
    assert sum(sum(run.ms) for run in auto) <= best / 0.97


def test_gains_are_remembered_up_to_a_limit_and_plain_steps_earn_a_share():
    allowance = Allowance()
    assert allowance.left == START
    allowance.book(1, 3.0)
    assert allowance.left == pytest.approx(START - 2 + SHARE)
    allowance.earn()
    assert allowance.left == pytest.approx(START - 2 + 2 * SHARE)
    for _ in range(100):
        allowance.book(8, 3.0)
    assert allowance.left == MOST
    allowance.earn()
    assert allowance.left == MOST
