"""Tests of hidden states of an input beside a held sequence: their values, and that the sequence is not disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.errors import ConfigError, ContextOverflowError
from fixtures import hf_layout
from reference import toys
from reference.engine_kit import PROMPT, Solo, fresh, generate, steps


def states_of(engine: Any, ids: list[int], should_stop: Any = None) -> Any:
    parts: list[np.ndarray] = []
    engine.hidden_states(ids, parts.append, should_stop)
    return np.concatenate(parts) if parts else None


OTHER = [i % 50 for i in range(40)]  # more than two batches


@pytest.mark.parametrize("seed", [12, 13])
def test_they_are_what_the_output_matrix_makes_logits_of(seed: int, tmp_path: Path) -> None:
    """At every position matrix times state is the row of logits, and only one state solves that."""
    target, _ = toys.write_pair(tmp_path, seed, **{**toys.VARIANTS[seed], "n_vocab": 300})
    tensors = hf_layout.read(target).tensors
    head = tensors.get("output.weight", tensors["token_embd.weight"]).astype(np.float64)
    with Solo.load(
        EngineConfig(target, None, type_k="f32", type_v="f32", n_ctx=64, n_batch=16, n_threads=1)
    ) as engine:
        ids = [int(i) for i in np.random.default_rng(seed).integers(4, 60, 40)]
        states = states_of(engine, ids)
        assert states.shape == (40, engine.params.n_embd) and states.dtype == np.float32
        assert np.linalg.matrix_rank(head) == engine.params.n_embd
        for i, token in enumerate(ids):
            engine.prefill([token])
            solved = np.linalg.lstsq(head, engine.logits.astype(np.float64), rcond=None)[0]
            np.testing.assert_allclose(states[i], solved, atol=2e-3)


def test_one_input_has_one_result(contracted: Any) -> None:
    states = states_of(contracted, OTHER)
    fresh(contracted)
    assert np.allclose(states_of(contracted, OTHER), states, atol=1e-4)
    assert not np.allclose(states_of(contracted, OTHER[::-1]), states, atol=1e-2)


@pytest.mark.parametrize("n", [5, 60, 120])
def test_the_sequence_goes_on_as_if_nothing_had_been(contracted: Any, n: int) -> None:
    """Also where the context cannot hold both, and rows must be moved out of the way (128 tokens)."""
    tokens = generate(fresh(contracted, OTHER), max_tokens=20)
    fresh(contracted, OTHER[:30])
    states_of(contracted, [i % 40 for i in range(n)])
    assert contracted.tokens == OTHER[:30]
    contracted.prefill(OTHER[30:])
    row = contracted.logits.copy()
    states_of(contracted, [i % 40 for i in range(n)])
    assert np.array_equal(contracted.logits, row)
    assert generate(contracted, max_tokens=20) == tokens


@pytest.mark.parametrize("n", [30, 110])
def test_snapshots_without_rows_stay_good(contracted: Any, n: int) -> None:
    fresh(contracted, OTHER[:20])
    short = contracted.snapshot(with_rows=False)
    contracted.prefill(OTHER[20:])
    tokens = generate(contracted, max_tokens=12)
    fresh(contracted, OTHER)
    contracted.restore(short)
    long_gone = contracted.snapshot(with_rows=False)
    states_of(contracted, [i % 40 for i in range(n)])
    assert contracted.can_restore(short) and contracted.can_restore(long_gone)
    contracted.restore(short)
    contracted.prefill(OTHER[20:])
    assert generate(contracted, max_tokens=12) == tokens


def test_what_cannot_be_is_refused(contracted: Any) -> None:
    contracted.prefill(PROMPT)
    with pytest.raises(ContextOverflowError, match=r"Requested tokens \(129\) exceed context window of 128"):
        states_of(contracted, [1] * 129)
    with pytest.raises(ConfigError, match="token id 99999 is outside the vocabulary"):
        states_of(contracted, [1, 99_999])
    with pytest.raises(ConfigError, match="no tokens"):
        states_of(contracted, [])
    assert states_of(contracted, OTHER, lambda: True) is None and contracted.tokens == PROMPT


def test_not_while_a_generation_runs(contracted: Any) -> None:
    stream = steps(fresh(contracted), max_tokens=5)
    next(stream)
    with pytest.raises(ConfigError, match="hidden_states: a generation is running"):
        states_of(contracted, PROMPT)
    stream.close()
