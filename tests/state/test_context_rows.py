"""Tests of where a draft's context stores the tokens of several sequences: the same for all at once as for each alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.ggml.device import F32, Device
from dflash_ggml.state.context import Context
from dflash_ggml.state.kv_type import KvType
from dflash_ggml.state.spec import KvLayer

N_ROWS, BLOCK, STATES = 2048, 4, 3


@pytest.fixture(scope="module")
def context() -> Iterator[Context]:
    device = Device.cpu(1)
    layers = [KvLayer(1, 32), KvLayer(1, 32, window=200)]
    made = Context(device, layers, KvType(F32, F32), N_ROWS, BLOCK, STATES)
    yield made
    made.close()
    device.close()


# the first slot, the state index, the first known position, and the block's start: a sequence of at most 900 tokens
sequences = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, STATES - 1), st.integers(0, 900), st.integers(0, 900)),
    min_size=1,
    max_size=4,
)


@given(sequences, st.booleans())
def test_blocks_of_several_sequences(context: Context, of: list[tuple[int, ...]], causal: bool) -> None:
    facts = [(first, state_index, min(known, start), start) for first, state_index, known, start in of]
    first, state_index, known, start = np.array(facts, np.int32).T[:, :, None]
    positions = start + np.arange(BLOCK, dtype=np.int32)
    assert [group.pieces for group in context.groups] == [1, 2]
    for group in context.groups:
        rows = group.rows_of(first, state_index, positions)
        ranges = group.ranges(first, state_index, known, start, BLOCK, causal)
        assert rows.dtype == ranges.dtype == np.int32 and ranges.shape == (group.pieces, 2, len(of), BLOCK)
        for i, (slot, ring, from_, at) in enumerate(facts):
            assert rows[i].tolist() == group.rows(slot, ring, at, at + BLOCK).tolist()
            assert (ranges[:, :, i] == group.ranges(slot, ring, from_, at, BLOCK, causal)).all()
            for column in range(BLOCK):
                low = max(from_, at + column - group.window + 1) if group.window else from_
                high = at + column + 1 if causal else at + BLOCK
                seen = [row for piece in ranges[:, :, i, column] for row in range(*piece)]
                assert sorted(seen) == sorted(group.rows(slot, ring, low, high).tolist())
