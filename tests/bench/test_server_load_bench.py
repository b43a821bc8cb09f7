"""Tests of bench/server_load.py against a server of the toy engine: counts, disconnects, arrival times."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def toy_server() -> Iterator[tuple[str, FakeEngine]]:
    """The address of a server, and its engine; all requests have ended at the end."""
    engine = FakeEngine(EngineConfig(model=Path("toy.gguf"), n_ctx=1024, n_batch=32), parallel=3)
    session = Session(engine)  # type: ignore[arg-type]
    made = make_service(
        lambda progress: Runner(session), Settings(names=("toy",)), queue_limit=100, client_limit=100
    )
    with serving(create_app(made)) as port:
        wait_until(lambda: made.worker.ready)
        yield f"http://127.0.0.1:{port}", engine
        wait_until(lambda: made.worker.running == 0 and made.worker.waiting == 0)
        wait_until(lambda: not session.scheduler.running and not session.scheduler.waiting)


def test_a_load_with_disconnects(tool: Any) -> None:
    with toy_server() as (url, engine):
        load = tool.Load(40, 8, tokens=20, left=10)
        seen = asyncio.run(tool.run(url, load))
        assert tool.metric(url, "dflash_graphs") == engine.run_counts()["kept"]
    found = tool.summary(seen)
    assert sum(found["ends"].values()) == 40 and set(found["ends"]) <= {"200", "left"}
    assert found["ends"]["left"] <= 10 and found["ends"]["200"] >= 30
    done = [one for one in seen if one.end == "200"]
    assert all(0 < one.tokens <= 20 and 0 < one.first <= one.seconds for one in done)
    assert found["first_ms"] == sorted(found["first_ms"]) and found["tokens_per_second"] > 0


def test_a_mix_of_prompts_at_a_running_server(tool: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """Clients disconnect anywhere in their answers; the result has the figures that a prompt-heavy load is judged by."""
    result = tmp_path / "load.json"
    options = "--mix prompts --requests 9 --clients 3 --tokens 12 --words 2 40 --rounds 2"
    with toy_server() as (url, _):
        monkeypatch.setattr(
            "sys.argv", ["server_load.py", *options.split(), "--against", f"{url}/v1", "--json", str(result)]
        )
        assert tool.main() == 0
    rows = json.loads(result.read_text())["rows"]
    assert len(rows) == 2, "of the running server only"
    for row in rows:
        assert row["ends"] == {"200": 6, "left": 3} and row["errors"] == 0
        assert 6 * 12 < row["tokens"] <= 9 * 12 and row["columns"] >= 1.0
        assert 0 < row["first_ms"][0] <= row["first_worst_ms"] and row["gap_ms"] >= 0


def test_prompts_of_a_mix_are_drawn_and_the_same_again(tool: Any) -> None:
    load = tool.Load(48, 8, words=(100, 4000), midway=True)
    prompts = [load.body(i)["prompt"] for i in range(48)]
    assert prompts == [load.body(i)["prompt"] for i in range(48)]
    assert all(100 <= len(prompt.split()) <= 4020 for prompt in prompts)
    assert max(len(prompt) for prompt in prompts) > 5 * min(len(prompt) for prompt in prompts)
    other = tool.Load(48, 8, words=(100, 4000), midway=True, seed=1)
    assert other.body(0)["prompt"][:20] != prompts[0][:20]


def test_a_server_that_reports_no_columns_has_none(tool: Any) -> None:
    assert tool.metric("http://127.0.0.1:9", "dflash_graphs") == 0.0
    seen = [tool.Seen(0.0, 0.5, 0.2, 1.0, 7, "200"), tool.Seen(0.0, end="ConnectionRefusedError")]
    found = tool.summary(seen)
    assert found["errors"] == 1 and found["gap_ms"] == 200.0 and found["first_worst_ms"] == 500.0
    assert "1 errors" in tool.line({"server": "other", "clients": 8, "columns": None, **found})


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
