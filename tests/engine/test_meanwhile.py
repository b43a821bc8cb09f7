"""Work that is put off until a device is waited for is done once."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.policy.costs import Costs
from reference.engine_kit import Solo, fresh

MS = {"plain": 1.0, "draft": 0.2, "append": 0.05, "verify": 1.1, "commit": 0.1, "host": 0.1, "after": 0.0}


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
