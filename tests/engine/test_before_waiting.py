"""Tests of `Device.before_waiting`: deferred work runs once, before the host waits for the device."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_ggml.config import EngineConfig
from reference.engine_kit import Solo


@pytest.fixture
def engine(toy_pair: Any) -> Any:
    config = EngineConfig(
        *toy_pair, n_ctx=1024, n_threads=1, type_k="f32", type_v="f32", reference=True, calibrate="never"
    )
    with Solo.load(config) as engine:
        yield engine


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
