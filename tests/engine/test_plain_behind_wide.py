"""What a plain step takes more behind a wide one is that one's cost, and does not make plain steps dear."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_ggml.decode.costs import Costs, Point
from dflash_ggml.engine.step import Stepper


@pytest.fixture
def stepper() -> Any:
    """With nothing but costs: a plain step takes 1 ms."""
    costs = Costs()
    costs.learn([Point("plain", 1, 0, 1.0)])
    return SimpleNamespace(costs=costs)


def took(stepper: Any, was_wide: bool, ms: float, n: int = 30) -> None:
    for _ in range(n):
        Stepper._took_plain(stepper, SimpleNamespace(was_wide=was_wide), ms, 0)  # type: ignore[arg-type]


def test_what_it_takes_more_belongs_to_the_wide_step(stepper: Any) -> None:
    took(stepper, True, 1.4)
    assert stepper.costs.of("plain") == pytest.approx(1.0)
    assert stepper.costs.of("after") == pytest.approx(0.4)


def test_among_others_it_is_what_plain_steps_take(stepper: Any) -> None:
    took(stepper, False, 1.4)
    assert stepper.costs.of("plain") == pytest.approx(1.4) and stepper.costs.of("after") is None


def test_one_that_takes_less_says_that_plain_steps_do(stepper: Any) -> None:
    """Else what was believed too dear, and so never ran twice in a row, would be for ever."""
    took(stepper, True, 0.6)
    assert stepper.costs.of("plain") == pytest.approx(0.6)
    assert stepper.costs.of("after") < 0.4
