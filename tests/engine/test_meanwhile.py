"""What is learned while a device is busy is learned as if it had been at once: same plans, same text, same counts."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.costs import Costs, Point
from dflash_ggml.decode.experience import Experience
from dflash_ggml.drafts.suffix import Copies
from reference.engine_kit import Solo
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.engine.step import Stepper
from reference.engine_kit import foretold, fresh, steps

MS = {"plain": 1.0, "draft": 0.2, "append": 0.05, "verify": 1.1, "commit": 0.1, "host": 0.1, "after": 0.0}


def as_on_a_gpu(stepper: Stepper, run: Sequence) -> None:
    """What is learned waits for the next read."""

    def catch_up() -> None:
        run.controller.catch_up()
        stepper.costs.catch_up()

    stepper.passes.device.meanwhile(catch_up)


def at_once(stepper: Stepper, run: Sequence) -> None:
    run.controller.catch_up()
    stepper.costs.catch_up()


@pytest.fixture
def engine(toy_pair: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """On a machine whose passes always take the same."""
    taken = Costs.measured
    monkeypatch.setattr(
        Costs, "measured", lambda self, kind, ms, *at, **by: taken(self, kind, MS[kind], *at, **by)
    )
    config = EngineConfig(
        *toy_pair, n_ctx=1024, n_threads=1, type_k="f32", type_v="f32", reference=True, calibrate="never"
    )
    with Solo.load(config) as engine:
        yield engine


def written(
    engine: Solo, said: list[int], copies: bool
) -> tuple[list[tuple[int, int]], list[int], Experience]:
    engine.copies = Copies(engine.config.budget) if copies else None
    foretold(fresh(engine), said, 5, seed=1)
    costs = engine.costs = engine.stepper.costs = Costs()
    costs.learn([Point("plain", 1, 8, 1.0), *(Point("verify", w, 8, 1.1 + w / 50) for w in (2, 8, 16))])
    engine.experience = Experience()
    found = list(steps(engine, mode="auto", max_tokens=200))
    told = [(step.n_draft, step.n_accepted) for step in found]
    return told, [token for step in found for token in step.tokens], engine.experience


@pytest.mark.parametrize("copies", [False, True])
def test_waiting_changes_no_plan(engine: Solo, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [token for step in steps(fresh(engine), mode="plain", max_tokens=200) for token in step.tokens]
    plans, text, known = written(engine, said, copies)
    for way in (as_on_a_gpu, at_once):
        monkeypatch.setattr(Stepper, "_meanwhile", way)
        again, same, learned = written(engine, said, copies)
        assert again == plans and same == text == said
        assert learned.calibration.tried == known.calibration.tried
    assert sum(known.calibration.tried) > 20
    assert learned.worth == known.worth and learned.drafted == known.drafted > 5


def test_work_is_done_once_by_the_next_read(engine: Solo) -> None:
    done: list[str] = []
    engine.device.meanwhile(lambda: done.append("first"))
    engine.device.meanwhile(lambda: done.append("second"))
    assert not done
    fresh(engine)
    fresh(engine)
    assert done == ["second"]


@pytest.mark.parametrize("how", ["read", "synchronize"])
def test_work_is_done_once_before_a_device_is_waited_for(engine: Solo, how: str) -> None:
    """The last that was asked for, once."""
    done: list[int] = []
    engine.prefill([1, 2, 3])
    for i in range(2):
        engine.device.before_waiting(lambda i=i: done.append(i))  # type: ignore[misc]
    for _ in range(2):
        if how == "read":
            engine.device.read(engine.passes.state.live()[0])
        else:
            engine.device.synchronize()
    assert done == [1]
