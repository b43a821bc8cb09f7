"""Fixtures with the engines that share one contract: the real one on toy pairs, and the fake one that most other tests use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from dflash_ggml.config import EngineConfig
from reference.engine_kit import Solo
from reference.fake_engine import FakeSolo

MakeEngine = Callable[..., Any]


@pytest.fixture(params=["fake", "real", "experts"])
def engine_kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_engine(engine_kind: str, request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """Makes engines of one kind, closed at the end; arguments are the fields of EngineConfig, `draft=None` for none."""
    target, draft = request.getfixturevalue("moe_pair" if engine_kind == "experts" else "toy_pair")
    base = EngineConfig(
        target, draft, n_ctx=128, n_batch=16, n_threads=1, type_k="f32", type_v="f32", reference=True
    )
    with ExitStack() as stack:

        def make(**options: Any) -> Any:
            config = replace(base, **options)
            if engine_kind != "fake":
                return stack.enter_context(Solo.load(config))
            return stack.enter_context(FakeSolo(config=config, has_draft=config.draft is not None))

        yield make


@pytest.fixture
def contracted(make_engine: MakeEngine) -> Any:
    """One engine of each kind, with a draft."""
    return make_engine()


@pytest.fixture
def interrupt_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes the next passes of an engine break off, as Ctrl-C does, until `monkeypatch` is undone."""

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    def interrupt(engine: Any) -> None:
        owner = engine.passes if isinstance(engine, Solo) else engine.slot
        monkeypatch.setattr(owner, "linear" if isinstance(engine, Solo) else "_row", broken)

    return interrupt
