"""bench/server_load.py at a server of the toy engine: what it counts, who hangs up, what arrives when."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dflash_ggml.ggml.bindings")
pytest.importorskip("starlette", reason="the server extra is not installed")

from dflash_ggml.config import EngineConfig
from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.session import Session
from reference.fake_engine import FakeEngine
from reference.server_kit import serving, wait_until

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("server_load")


def test_a_load_with_disconnects(tool: Any) -> None:
    engine = FakeEngine(EngineConfig(model=Path("toy.gguf"), n_ctx=1024, n_batch=32), parallel=3)
    session = Session(engine)  # type: ignore[arg-type]
    made = make_service(
        lambda progress: Runner(session), Settings(names=("toy",)), queue_limit=100, client_limit=100
    )
    with serving(create_app(made)) as port:
        wait_until(lambda: made.worker.ready)
        load = tool.Load(40, 8, tokens=20, left=10)
        seen = asyncio.run(tool.run(port, load))
        wait_until(lambda: made.worker.running == 0 and made.worker.waiting == 0)
        wait_until(lambda: session.scheduler.counts == {"running": 0, "waiting": 0})
        assert tool.graphs_kept(port) == engine.run_counts()["kept"]
    found = tool.summary(seen)
    assert sum(found["ends"].values()) == 40 and set(found["ends"]) <= {"200", "left"}
    assert found["ends"]["left"] <= 10 and found["ends"]["200"] >= 30
    done = [one for one in seen if one.end == "200"]
    assert all(0 < one.tokens <= 20 and 0 < one.first <= one.seconds for one in done)
    assert found["first_ms"] == sorted(found["first_ms"]) and found["tokens_per_second"] > 0


def test_arrivals_are_random_and_the_same_again(tool: Any) -> None:
    load = tool.Load(400, 4, rate=10.0)
    at = load.arrivals()
    assert at == load.arrivals() == sorted(at)
    assert 25 < at[-1] < 60
    assert tool.Load(3, 4).arrivals() == [0.0, 0.0, 0.0]
    assert len(tool.Load(50, 4, left=10).leaves()) == 10


def test_percentiles(tool: Any) -> None:
    values = [float(n) for n in range(100)]
    assert [tool.percentile(values, part) for part in (0.01, 0.5, 0.99)] == [1.0, 50.0, 99.0]
    assert tool.percentile([], 0.5) == 0.0 and tool.percentile([3.0], 0.99) == 3.0
