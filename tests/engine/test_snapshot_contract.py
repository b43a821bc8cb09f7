"""Contract of snapshots and of closing, run against the real engine and the fake one."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from dflash_ggml.errors import ConfigError, DeviceError
from dflash_ggml.state import snapshot as state_snapshot
from reference import fake_engine
from reference.engine_kit import PROMPT, fresh, generate, steps

LONG = [i % 50 for i in range(40)]


@pytest.mark.parametrize("with_rows", [True, False], ids=["rows", "bare"])
def test_after_a_prefill(contracted: Any, with_rows: bool) -> None:
    contracted.prefill(PROMPT)
    row, snapshot = contracted.logits.copy(), contracted.snapshot(with_rows)
    assert snapshot.tokens == tuple(PROMPT) and (snapshot.rows is not None) == with_rows
    tokens = generate(contracted, max_tokens=30)
    assert contracted.can_restore(snapshot)
    contracted.restore(snapshot)
    assert contracted.tokens == PROMPT and contracted.pending is None
    assert np.array_equal(contracted.logits, row)
    assert generate(contracted, max_tokens=30) == tokens


@pytest.mark.parametrize("with_rows", [True, False], ids=["rows", "bare"])
def test_after_a_generation(contracted: Any, with_rows: bool) -> None:
    """The pending token is no part of it, and there are no logits to continue from."""
    contracted.prefill(PROMPT)
    tokens = generate(contracted, max_tokens=30)
    snapshot = contracted.snapshot(with_rows)
    assert snapshot.tokens == (*PROMPT, *tokens[:-1]) and contracted.pending == tokens[-1]
    contracted.prefill([7, 8])
    contracted.restore(snapshot)
    assert contracted.tokens == [*PROMPT, *tokens[:-1]] and contracted.pending is None
    with pytest.raises(ConfigError, match="no logits"):
        _ = contracted.logits
    contracted.prefill(tokens[-1:])
    onwards = generate(contracted, max_tokens=20)
    assert onwards == generate(fresh(contracted, [*PROMPT, *tokens]), max_tokens=20)


@pytest.mark.parametrize("with_rows", [True, False], ids=["rows", "bare"])
def test_of_an_empty_context(contracted: Any, with_rows: bool) -> None:
    snapshot = contracted.snapshot(with_rows)
    contracted.prefill(PROMPT)
    assert snapshot.tokens == () and contracted.can_restore(snapshot)
    contracted.restore(snapshot)
    assert contracted.tokens == []
    contracted.prefill(PROMPT)
    row = contracted.logits.copy()
    assert np.array_equal(fresh(contracted).logits, row)


def test_rows_make_it_larger_and_independent(contracted: Any) -> None:
    contracted.prefill(LONG)
    tokens = generate(contracted, max_tokens=10)
    bare, full = (fresh(contracted, LONG).snapshot(with_rows) for with_rows in (False, True))
    assert full.nbytes > bare.nbytes > 0
    fresh(contracted, [9] * 50)
    assert contracted.can_restore(full) and not contracted.can_restore(bare)
    contracted.restore(pickle.loads(pickle.dumps(full)))
    assert contracted.tokens == LONG and generate(contracted, max_tokens=10) == tokens
    contracted.restore(full)
    assert generate(contracted, max_tokens=10) == tokens


@pytest.mark.parametrize("size", [16, 256])
def test_snapshots_share_rows(contracted: Any, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Those of a shorter prefix are among those of a longer one, and the longer needs only what is new."""
    for module in (fake_engine, state_snapshot):
        monkeypatch.setattr(module, "BLOCK", size)
    short = fresh(contracted, LONG[:20]).snapshot(with_rows=False)
    contracted.prefill(LONG[20:])
    bare, full = contracted.snapshot(with_rows=False), contracted.snapshot()
    assert [block.n_tokens for block in full.rows] == ([16, 16, 8] if size == 16 else [40])
    first = full.rows[: -(-20 // size)]
    found = contracted.completed(short, first), contracted.completed(bare, first)
    assert found[0].rows == first and found[1].rows[: len(first)] == first
    assert len(found[1].rows) == len(full.rows)
    for snapshot in found:
        tokens = generate(fresh(contracted, list(snapshot.tokens)), max_tokens=20)
        fresh(contracted, [9] * 50)
        contracted.restore(snapshot)
        assert contracted.tokens == list(snapshot.tokens) and generate(contracted, max_tokens=20) == tokens


@pytest.mark.parametrize("write", ["prefill", "generate"])
def test_rows_in_the_cache_last_until_the_next_write(contracted: Any, write: str) -> None:
    long = fresh(contracted, LONG).snapshot(with_rows=False)
    tokens = generate(contracted, max_tokens=10)
    short = fresh(contracted, LONG[:20]).snapshot(with_rows=False)
    fresh(contracted, LONG)
    contracted.reset()
    assert contracted.can_restore(long) and contracted.can_restore(short)
    contracted.restore(short)
    assert contracted.can_restore(long), "going back writes no rows"
    contracted.restore(long)
    assert contracted.tokens == LONG and generate(contracted, max_tokens=10) == tokens
    contracted.restore(short)
    if write == "prefill":
        contracted.prefill([1])
    else:
        generate(contracted, max_tokens=2)
    assert not contracted.can_restore(long) and contracted.can_restore(short)


@pytest.mark.parametrize("batches", [0, 1])
def test_a_prefill_that_was_stopped_wrote_what_it_wrote(contracted: Any, batches: int) -> None:
    bare = fresh(contracted, LONG).snapshot(with_rows=False)
    contracted.reset()
    answers = iter([False] * batches)
    contracted.prefill([9] * 40, should_stop=lambda: next(answers, True))
    assert contracted.can_restore(bare) == (batches == 0)


def test_a_restore_that_cannot_work_changes_nothing(contracted: Any, make_engine: Any) -> None:
    bare = fresh(contracted, LONG).snapshot(with_rows=False)
    other = make_engine(n_ctx=256)
    other.prefill([1] * 200)
    foreign = other.snapshot()
    row = fresh(contracted).logits.copy()
    with pytest.raises(ConfigError, match="K/V rows of this snapshot are gone"):
        contracted.restore(bare)
    with pytest.raises(ConfigError, match="snapshot: taken from a model or context of another shape"):
        contracted.restore(foreign)
    assert contracted.tokens == PROMPT and np.array_equal(contracted.logits, row)


def test_after_an_interrupt_rows_in_the_cache_are_not_trusted(
    contracted: Any, monkeypatch: pytest.MonkeyPatch, interrupt_passes: Any
) -> None:
    bare, full = (fresh(contracted, LONG).snapshot(with_rows) for with_rows in (False, True))
    tokens = generate(contracted, max_tokens=10)
    fresh(contracted, LONG)
    interrupt_passes(contracted)
    with pytest.raises(KeyboardInterrupt):
        contracted.prefill([1])
    monkeypatch.undo()
    contracted.reset()
    assert not contracted.can_restore(bare)
    contracted.restore(full)
    assert generate(contracted, max_tokens=10) == tokens


def test_a_restore_repairs_an_interrupted_state(
    contracted: Any, monkeypatch: pytest.MonkeyPatch, interrupt_passes: Any
) -> None:
    full = fresh(contracted, LONG).snapshot()
    tokens = generate(contracted, max_tokens=10)
    interrupt_passes(contracted)
    with pytest.raises(KeyboardInterrupt):
        contracted.prefill([1])
    monkeypatch.undo()
    contracted.restore(full)
    assert generate(contracted, max_tokens=10) == tokens


# --- the end


def test_a_closed_engine_raises(contracted: Any) -> None:
    contracted.prefill(PROMPT)
    snapshot = contracted.snapshot()
    contracted.close()
    contracted.close()
    calls = (
        contracted.reset,
        contracted.snapshot,
        lambda: contracted.prefill([1]),
        lambda: contracted.restore(snapshot),
        lambda: next(steps(contracted)),
    )
    for call in calls:
        with pytest.raises(DeviceError, match="the engine is closed"):
            call()


def test_a_suspended_generation_ends_with_its_engine(contracted: Any) -> None:
    contracted.prefill(PROMPT)
    running = steps(contracted)
    next(running)
    contracted.close()
    with pytest.raises(DeviceError, match="the engine is closed"):
        next(running)


def test_as_a_context_manager(make_engine: Any) -> None:
    with make_engine() as engine:
        engine.prefill(PROMPT)
    with pytest.raises(DeviceError, match="the engine is closed"):
        engine.prefill([1])
