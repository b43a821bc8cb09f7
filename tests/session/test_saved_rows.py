"""Tests of K/V rows that are saved before another prompt overwrites them: exact, in buffers touched ahead, within the budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.engine.engine import Engine
from dflash_ggml.session.events import Begin, TextDelta
from dflash_ggml.session.requests import CompletionRequest
from dflash_ggml.session.session import Session, run_completion
from dflash_ggml.state import snapshot

FIRST, SECOND = np.random.default_rng(6).integers(3, 60, (2, 400)).tolist()


@pytest.fixture
def session(toy_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setattr(snapshot, "BLOCK", 16)
    config = EngineConfig(*toy_pair, n_ctx=512, n_batch=64, n_threads=1, reference=True, n_gpu_layers=0)
    with Engine.load(config) as engine:
        yield Session(engine)


def ask(session: Session, prompt: list[int]) -> tuple[int, str]:
    """Tokens of the prompt that were known, and the answer."""
    request = CompletionRequest(prompt=prompt, sampling=SamplingParams(temperature=0.0), max_tokens=12)
    events = list(run_completion(session, request))
    (begin,) = (e for e in events if isinstance(e, Begin))
    return begin.cached_n, "".join(e.text for e in events if isinstance(e, TextDelta))


def touched() -> None:
    """Wait for the thread that touches buffers."""
    for thread in threading.enumerate():
        if thread.name == "dflash-buffers":
            thread.join()


def held(session: Session) -> int:
    """Host memory of the prefix cache, and of buffers that are kept for it."""
    return session.slots.cache.nbytes + session.engine.device.buffers.free_nbytes


@pytest.mark.parametrize("waits", [False, True], ids=["while it touches", "when all are touched"])
def test_rows_are_saved_exactly_in_touched_buffers(session: Session, waits: bool) -> None:
    (_, text), cache, buffers = ask(session, FIRST), session.slots.cache, session.engine.device.buffers
    slot = session.slots.all[0].slot
    expected = [np.concatenate(part) for part in zip(*(b.parts for b in slot.snapshot().rows or ()))]
    if waits:
        touched()
        free = buffers.free_nbytes
        assert free >= 380 * slot.row_nbytes
    ask(session, SECOND)
    saved = cache.longest(FIRST, len(FIRST), lambda found: found.rows is not None)
    assert saved is not None and saved.rows is not None and len(saved.tokens) > 380
    for part, whole in zip(zip(*(block.parts for block in saved.rows)), expected, strict=True):
        rows = np.concatenate(part)
        assert np.array_equal(rows, whole[: len(rows)])
    known, same = ask(session, FIRST)
    assert known == len(saved.tokens) and same == text


def test_the_budget_holds_with_buffers_touched_ahead(session: Session) -> None:
    ask(session, FIRST)
    row = session.slots.all[0].slot.row_nbytes
    state = min(kept.state_nbytes for kept in session.slots.cache.without_rows(FIRST))
    for budget in (3 * state, 380 * row, 600 * row + 4 * state, 1 << 30):
        session.slots.cache.clear()
        session.slots.cache.budget = budget
        for prompt in (FIRST, SECOND, FIRST[:200], SECOND[::-1]):
            ask(session, prompt)
            touched()
            assert held(session) <= budget


@pytest.mark.parametrize("stops", [False, True], ids=["fails", "is cancelled"])
def test_what_was_saved_outlives_a_prompt_that_does_not_end(
    session: Session, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    _, text = ask(session, FIRST)
    request = CompletionRequest(prompt=SECOND, sampling=SamplingParams(temperature=0.0), max_tokens=12)
    if stops:
        looks = iter([False] * 3)
        list(run_completion(session, request, should_stop=lambda: next(looks, True)))
        assert 0 < session.slots.all[0].slot.n_tokens < len(SECOND)
    else:
        linear, passes = session.engine.passes.linear, iter(range(2))

        def breaks(*args: object, **how: object) -> object:
            next(passes)  # StopIteration in the third
            return linear(*args, **how)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(session.engine.passes, "linear", breaks)
            with pytest.raises(RuntimeError):
                list(run_completion(session, request))
    known, same = ask(session, FIRST)
    assert known > 380 and same == text
