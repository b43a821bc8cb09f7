"""How fast prompts are read beside texts that are being written, on a clock that is not the machine's."""

from __future__ import annotations

import pytest

from dflash_ggml.session.pace import BORROWED, LEAST, SLOWER, Pace


def beside(
    step: float, per_token: float, fixed: float, n: int, steps: int
) -> tuple[float, float, list[float]]:
    """Read n tokens beside texts whose step takes so long: seconds of all, of their steps, and the pieces' seconds."""
    pace, total, stepped, pieces = Pace(), 0.0, 0.0, []
    for _ in range(steps):
        if n and pace.may_read:
            piece = min(pace.most(), n)
            took = fixed + per_token * piece
            pace.read(piece, took, True)
            n, total = n - piece, total + took
            pieces.append(took)
        pace.stepped(step)
        total, stepped = total + step, stepped + step
    return total, stepped, pieces


@pytest.mark.parametrize(
    ("step", "per_token", "fixed"),
    [(0.013, 4e-4, 0.008), (0.002, 1e-4, 0.001), (0.4, 0.02, 0.3)],
    ids=["27B on a GPU", "small on a CPU", "27B on a CPU"],
)
def test_a_long_prompt_slows_the_others_by_what_was_said(step: float, per_token: float, fixed: float):
    """Beside what is borrowed at once, and the last piece."""
    total, stepped, pieces = beside(step, per_token, fixed, 10**9, 2000)
    assert total <= (1 + SLOWER) * stepped + BORROWED + max(pieces)
    assert total >= (1 + 0.8 * SLOWER) * stepped


def test_no_piece_stops_the_others_for_long():
    _, _, pieces = beside(0.013, 4e-4, 0.008, 10**6, 500)
    assert max(pieces) <= 0.1
    _, _, pieces = beside(0.4, 0.02, 0.3, 10**6, 500)
    assert max(pieces[2:]) <= 3.1 * 0.4


def test_the_first_token_of_a_short_prompt_comes_soon():
    """500 tokens at 2,500 tokens/s beside four texts: a little more than reading alone would take."""
    pace, left, clock = Pace(), 500, 0.0
    for _ in range(100):
        pace.stepped(0.013)
    while left:
        if pace.may_read:
            piece = min(pace.most(), left)
            took = 0.008 + 4e-4 * piece
            pace.read(piece, took, True)
            left, clock = left - piece, clock + took
        pace.stepped(0.013)
        clock += 0.013
    assert clock <= 0.6


def test_pieces_are_never_too_small_to_be_worth_a_pass():
    pace = Pace()
    pace.stepped(0.001)
    pace.read(64, 60.0, True)
    assert pace.most() == LEAST and not pace.may_read


def test_what_is_built_once_is_no_debt():
    """A first pass of its width took three seconds: others are not made to wait ten for the next."""
    pace = Pace()
    pace.read(64, 3.0, True, usual=False)
    pace.stepped(0.013)
    assert pace.may_read and pace.most() >= 64
