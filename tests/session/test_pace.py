"""How fast prompts are read beside texts that are being written, on a clock that is not the machine's."""

from __future__ import annotations

import pytest

from dflash_ggml.session.pace import BORROWED, LEAST, SLOWER, Account, Pace


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


class Round:
    """Prompts beside texts that are written, in virtual time: a prompt of n tokens takes `fixed` a piece and so much a token."""

    def __init__(self, step: float, per_token: float, fixed: float) -> None:
        self.pace, self.step, self.per_token, self.fixed = Pace(), step, per_token, fixed
        self.clock = self.written = 0.0
        self.left: dict[str, int] = {}
        self.accounts: dict[str, Account] = {}
        self.came: dict[str, float] = {}

    def asked(self, name: str, n: int) -> None:
        self.left[name], self.accounts[name] = n, self.pace.opened()

    def make(self) -> None:
        """A round: a piece of a prompt that may be read, of a short one first, and a step."""
        may = [
            (name, account, self.left[name])
            for name, account in self.accounts.items()
            if self.left[name] and self.pace.may_read and self.pace.may_go_on(account, self.left[name])
        ]
        if may:
            turn = self.pace.turn([self.pace.is_short(account, left) for _, account, left in may])
            name, account, left = may[turn]
            piece = min(self.pace.most(), left)
            took = self.fixed + self.per_token * piece
            self.pace.read(piece, took, True, account=account)
            self.clock += took
            self.left[name] -= piece
            if left == piece:
                self.came[name] = self.clock
        self.pace.stepped(self.step)
        self.clock, self.written = self.clock + self.step, self.written + self.step


@pytest.mark.parametrize("n", [4000, 8000, 30000])
@pytest.mark.parametrize(
    ("step", "per_token", "fixed"),
    [(0.0105, 1.2e-4, 0.02), (0.026, 1.2e-4, 0.02), (0.002, 1e-4, 0.001), (0.4, 0.02, 0.3)],
    ids=["27B on a GPU", "16 that draft", "small on a CPU", "27B on a CPU"],
)
def test_a_long_prompt_borrows_nothing(step: float, per_token: float, fixed: float, n: int):
    """While it is read the others are 1.3 times slower at most, whatever a short prompt before it has taught of its cost."""
    rounds = Round(step, per_token, fixed)
    rounds.asked("short", 300)
    while rounds.left["short"] or rounds.pace.level < BORROWED:
        rounds.make()
    began, written = rounds.clock, rounds.written
    rounds.asked("long", n)
    while rounds.left["long"]:
        rounds.make()
    assert 1.2 <= (rounds.came["long"] - began) / (rounds.written - step - written) <= 1.3


def test_a_short_prompt_does_not_wait_for_a_long_one():
    rounds = Round(0.0105, 1.2e-4, 0.02)
    rounds.asked("long", 30000)
    asked = {}
    for i in range(3000):
        if i % 100 == 50 and i < 1000:
            asked[f"short {i}"] = rounds.clock
            rounds.asked(f"short {i}", 500)
        rounds.make()
    assert max(rounds.came[name] - at for name, at in asked.items()) <= 0.6
    assert rounds.came["long"] <= 1.2 * 30000 * (1.2e-4 + 0.02 / 512) * (1 + 1 / SLOWER)


@pytest.mark.parametrize("every", [28, 25])
def test_a_long_prompt_comes_to_an_end_beside_short_ones_that_take_all(every: int):
    """As many short ones as the others can bear: a quarter of what is read is the long one's, and the others don't notice."""
    rounds, n = Round(0.0105, 1.2e-4, 0.02), 8000
    rounds.asked("long", n)
    i = 0
    while rounds.left["long"] and rounds.clock < 100:
        if i % every == 0:
            rounds.asked(f"short {i}", 500)
        rounds.make()
        i += 1
    assert rounds.came["long"] <= 1.2 * 4 * n * (1.2e-4 + 0.02 / 512) * (1 + 1 / SLOWER)
    assert rounds.clock <= (1 + SLOWER) * rounds.written + BORROWED + 0.1


def test_pieces_grow_to_what_may_be_waited_for():
    """A pass over twice the tokens takes less than twice as long: one that just fits is not given up by guessing that it does."""
    pace = Pace()
    pace.stepped(0.01)
    for _ in range(6):
        n = pace.most()
        pace.read(n, 0.022 + 1.24e-4 * n, False)
    assert pace.most() == 512
