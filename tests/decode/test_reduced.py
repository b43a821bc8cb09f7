"""Tests of draws from reduced rows: same seed, same tokens as from whole rows; a whole row is fetched where it must be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ggml.decode.reduced import KEPT, WATCHED, Reduced, ReducedRows, Watch, draw, watch
from dflash_ggml.decode.sampling import BLOCK, Sampler, SamplingParams
from dflash_ggml.errors import DflashError
from reference.chi_square import assert_drawn_from
from reference.reduction import reduced_row

OPEN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


class Forbid:
    """A mask as a grammar is one; forbids ids by a rule of the history's last token."""

    def __init__(self, share: int) -> None:
        self.share = share

    def allows(self, history: np.ndarray, ids: np.ndarray) -> np.ndarray:
        last = int(history[-1]) if len(history) else 0
        return (ids * 7 + last) % self.share != 0

    def __call__(self, history: np.ndarray, scores: np.ndarray) -> np.ndarray:
        scores[~self.allows(history, np.arange(len(scores)))] = -np.inf
        return scores


def blocks(row: np.ndarray):  # type: ignore[no-untyped-def]
    return lambda i: row[i * BLOCK : (i + 1) * BLOCK].copy()


def both(
    params: SamplingParams,
    row: np.ndarray,
    history: Sequence[int] = (),
    nodes: Sequence[int] = (),
    processors: Sequence[Forbid] = (),
    n: int = 8,
    n_exempt: int = 0,
) -> int:
    """Draws n tokens both ways and compares; the number of times that the whole row was asked for."""
    whole, ours = (Sampler(params, len(row), processors, n_exempt=n_exempt) for _ in "ab")
    watched = watch(ours, history, nodes)
    assert watched is not None
    reduced, fetched = reduced_row(row, watched), 0
    for _ in range(n):
        state = ours.rng.bit_generator.state
        token = draw(ours, reduced, history, blocks(row))
        if token is None:
            assert ours.rng.bit_generator.state == state, "a number was taken and no token given"
            fetched += 1
            token = ours.sample(row, history)
        assert token == whole.sample(row, history)
        assert ours.rng.bit_generator.state == whole.rng.bit_generator.state
    return fetched


def likely(seed: int, n_vocab: int, spread: float = 2.0, heads: int = 12) -> np.ndarray:
    """Logits like a model's: a wide floor and a few tokens far above it."""
    rng = np.random.default_rng(seed)
    row = rng.normal(scale=spread, size=n_vocab).astype(np.float32)
    row[rng.integers(0, n_vocab, heads)] += (8 + rng.exponential(5, heads)).astype(np.float32)
    return row


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([-1.0, 0.0, 1e-30, 0.3, 0.8, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 7, 20, 40, 64, 65, 100]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    typical_p=st.sampled_from([0.5, 1.0, 1.0, 1.0]),
    repeat_penalty=st.sampled_from([0.7, 1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.5, 0.0, 0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    penalty_last_n=st.sampled_from([-1, 0, 5, 64]),
    logit_bias=st.dictionaries(
        st.integers(0, 39), st.one_of(st.floats(-5, 5), st.just(-math.inf)), max_size=3
    ),
    seed=st.just(3),
)


@pytest.mark.parametrize("bias", [30.0, 45.0, 100.0])
def test_a_mask_that_takes_out_what_a_bias_made_nearly_all(bias: float) -> None:
    """Sums of what is left are rounding then, and may not bound a nucleus."""
    options = replace(OPEN, top_p=0.5, logit_bias={0: bias})
    for seed in range(20):
        row = np.random.default_rng(seed).normal(size=600).astype(np.float32)
        both(options, row, processors=[Forbid(9)])


@settings(max_examples=1200)
@given(
    st.integers(0, 2**32),
    st.sampled_from([40, KEPT, KEPT + 1, 64, 300, 512, 513, 1024, 1700]),
    st.sampled_from(["likely", "flat", "ties", "few", "equal"]),
    params,
    st.lists(st.integers(0, 39), max_size=80),
    st.sampled_from([0, 0, 2, 9]),
)
def test_the_same_tokens_as_from_whole_rows(
    seed: int, n_vocab: int, kind: str, options: SamplingParams, history: list[int], masked: int
) -> None:
    rng = np.random.default_rng(seed)
    row = likely(seed, n_vocab) if kind != "flat" else rng.normal(size=n_vocab).astype(np.float32)
    if kind == "ties":
        row = np.round(row)
    if kind == "few":
        row[rng.random(n_vocab) < 0.9] = -np.inf
        row[int(rng.integers(n_vocab))] = 1.5
    if kind == "equal":
        row[:] = 2.0
    processors = [Forbid(masked)] if masked else []
    sampler = Sampler(options, n_vocab, processors)
    if watch(sampler, history) is None:
        assert sampler.greedy
        return
    try:
        sampler.probs(row, history)
    except DflashError:  # everything is forbidden: the sampler raises, with the row
        with pytest.raises(DflashError):
            both(options, row, history, processors=processors)
        return
    both(options, row, history, processors=processors, n=4)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"top_k": 40, "typical_p": 0.9},
        {"top_k": KEPT},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {},
        {"temperature": -1.0},
        {"top_k": 20, "repeat_penalty": 1.1},
        {"top_p": 0.9, "repeat_penalty": 1.1, "frequency_penalty": 0.3},
        {"repeat_penalty": 1.1},
        {"repeat_penalty": 0.9, "logit_bias": {5: 3.0, 700: -math.inf}},
        {"top_k": 20, "logit_bias": {5: 30.0}},
        {"temperature": 0.0, "repeat_penalty": 1.2},
        {"top_k": 20, "repeat_penalty": 1.1, "penalty_last_n": -1},
    ],
    ids=str,
)
def test_likely_rows_are_not_fetched(change: dict) -> None:
    """The usual settings are served from what was kept, on rows like a model's."""
    fetched = 0
    for seed in range(20):
        history = np.random.default_rng(seed).integers(0, 3000, 200).tolist()
        fetched += both(replace(OPEN, **change), likely(seed, 3000), history, nodes=[1, 2, 3])
    assert fetched <= 8, "more than one row of twenty"


def test_a_mask_is_asked_about_kept_tokens_only() -> None:
    for change in ({"top_k": 40, "top_p": 0.95, "min_p": 0.05}, {"min_p": 0.1}, {"temperature": 0.0}):
        fetched = sum(
            both(replace(OPEN, **change), likely(s, 3000), [4, s], processors=[Forbid(3)]) for s in range(20)
        )
        assert fetched <= 8
    assert both(OPEN, likely(0, 3000), [4], processors=[Forbid(3)], n=5) == 5, (
        "of all tokens, some are forbidden"
    )


@pytest.mark.parametrize(
    "change", [{"top_k": KEPT + 1}, {"top_p": 0.99}, {"min_p": 1e-4}, {"typical_p": 0.9}, {"top_p": 0.5}]
)
def test_flat_rows_are_fetched(change: dict) -> None:
    """Filters that reach beyond the kept logits ask for the row, every time."""
    row = np.random.default_rng(0).normal(scale=0.3, size=4000).astype(np.float32)
    assert both(replace(OPEN, **change), row, n=5) == 5


def test_a_nucleus_at_the_edge_of_rounding_is_fetched() -> None:
    """Two kept tokens hold exactly the requested share, within the precision of the device's sum."""
    row = np.full(600, -1e4, np.float32)
    row[:100] = 0.0
    row[[100, 200]] = math.log(1000)  # 2,000 of 2,100
    for share, expected in ((2000 / 2100, 5), (2000 / 2100 - 1e-3, 0), (2000 / 2100 + 1e-3, 0)):
        assert both(replace(OPEN, top_p=share), row, n=5) == expected


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_logits_are_left_to_the_sampler(value: float) -> None:
    row = likely(0, 2000)
    row[1300] = value
    for change in ({}, {"top_k": 5}, {"temperature": 0.0, "repeat_penalty": 1.5}):
        sampler = Sampler(replace(OPEN, **change), 2000)
        watched = watch(sampler, [1])
        assert watched is not None
        assert draw(sampler, reduced_row(row, watched), [1], blocks(row)) is None
    nothing = np.full(2000, -np.inf, np.float32)
    watched = watch(Sampler(OPEN, 2000), [1])
    assert watched is not None
    assert draw(Sampler(OPEN, 2000), reduced_row(nothing, watched), [1], blocks(nothing)) is None


def test_more_changes_than_can_be_watched() -> None:
    """Tokens that are only lowered may stay unknown while they cannot matter; raised ones may not."""
    row, history = likely(1, 4000), list(range(1000, 1000 + 3 * WATCHED))
    long = replace(OPEN, penalty_last_n=-1, repeat_penalty=1.2)
    assert both(replace(long, top_k=20), row, history) == 0
    assert both(replace(long, min_p=0.1), row, history) == 0
    assert both(replace(long, top_p=0.8), row, history) == 0
    assert both(long, row, history, n=5) == 5, "masses would need every lowered logit"
    assert both(replace(long, repeat_penalty=0.8, top_k=20), row, history, n=5) == 5


@pytest.mark.parametrize("last_n", [-1, 3, 64])
def test_a_beginning_that_no_penalty_counts(last_n: int) -> None:
    for seed in range(6):
        row = likely(seed, 2000)
        best = np.argsort(-row)[:6].tolist()
        options = replace(OPEN, top_k=20, repeat_penalty=1.5, frequency_penalty=0.4, penalty_last_n=last_n)
        for change in ({}, {"temperature": 0.0}, {"top_k": 0}):
            for n_exempt in (2, 6, 9):
                both(replace(options, **change), row, best + best[:2], best[:1], n_exempt=n_exempt)


def test_a_block_that_is_nearly_forbidden_is_fetched() -> None:
    """What is left of a block's mass when its one likely token goes is rounding: not drawn from."""
    row = np.zeros(2000, np.float32)
    row[700], row[1500] = 25, 26
    assert both(replace(OPEN, logit_bias={700: -math.inf}), row, n=5) == 5
    assert both(replace(OPEN, logit_bias={701: -math.inf}), row, n=5) == 0


def test_one_block_is_read_and_only_for_a_draw_from_all() -> None:
    row, read = likely(2, 3000), []

    def block(i: int) -> np.ndarray:
        read.append(i)
        return blocks(row)(i)

    for change, expected in (({}, 1), ({"top_k": 20}, 0)):
        read.clear()
        sampler = Sampler(replace(OPEN, **change), 3000)
        watched = watch(sampler, ())
        assert watched is not None
        token = draw(sampler, reduced_row(row, watched), (), block)
        assert token is not None and len(read) == expected
        assert not read or read == [token // BLOCK]


@pytest.mark.parametrize(
    ("change", "scale"),
    [({}, 0.5), ({"temperature": 1.7, "repeat_penalty": 1.3}, 1.0), ({"top_p": 0.8}, 3.0)],
)
def test_draws_follow_the_sampler_s_distribution(change: dict, scale: float) -> None:
    row = np.random.default_rng(4).normal(scale=scale, size=1700).astype(np.float32)
    row[520:1020] = -np.inf
    history, n = [3, 5, 5, 1600], 20_000
    sampler = Sampler(replace(OPEN, **change), 1700)
    watched = watch(sampler, history)
    assert watched is not None
    reduced = reduced_row(row, watched)
    tokens = [draw(sampler, reduced, history, blocks(row)) for _ in range(n)]
    assert None not in tokens
    assert_drawn_from(np.bincount(tokens, minlength=1700), sampler.probs(row, history))  # type: ignore[arg-type]


def test_what_a_pass_is_asked_for() -> None:
    def watched(change: dict, processors: Sequence = ()) -> Watch | None:
        return watch(Sampler(replace(OPEN, **change), 500, processors), [9, 3, 9], [3, 40])

    for change, expected in (
        ({}, []),
        ({"repeat_penalty": 1.1}, [3, 9, 40]),
        ({"repeat_penalty": 1.1, "penalty_last_n": 1}, [3, 9, 40]),
        ({"logit_bias": {7: 1.0, 2: 1.0}}, [2, 7]),
        ({"frequency_penalty": 0.1, "logit_bias": {7: 1.0}, "penalty_last_n": -1}, [3, 7, 9, 40]),
        # lowered tokens that were not kept cannot come up
        ({"repeat_penalty": 1.1, "top_k": 20}, []),
        ({"repeat_penalty": 0.9, "top_k": 20}, [3, 9, 40]),
        ({"repeat_penalty": 1.1, "top_k": 20, "logit_bias": {7: 1.0}}, [3, 7, 9, 40]),
    ):
        found = watched(change)
        assert found is not None and found.ids.tolist() == expected and found.temperature == 1
    negative = watched({"temperature": -2.0})
    assert negative is not None and negative.temperature == 1
    negative = watched({"temperature": -1.0, "repeat_penalty": 1.1, "top_k": 20})
    assert negative is not None and negative.ids.tolist() == [3, 9, 40], "top-k plays no part below 0"
    best = watched({"temperature": 0.0, "repeat_penalty": 1.1})
    assert best is not None and len(best.ids) == 0
    assert watched({"temperature": 0.0}) is None, "greedy: no row is needed"
    assert watched({"mirostat_mode": 2}) is None
    assert watched({}, [lambda ids, scores: scores]) is None
    assert watched({}, [Forbid(3)]) is not None
    assert watched({}, [Forbid(3), lambda ids, scores: scores]) is None


def test_columns_of_a_pass() -> None:
    """The layout of the device's output."""
    rows = np.stack([likely(seed, 700) for seed in range(3)])
    asked = Watch(0.8, np.array([4, 600]))
    expected = [reduced_row(row, asked) for row in rows]
    columns = []
    for r in expected:
        watched = np.zeros(WATCHED, np.float32)
        watched[:2] = r.watched
        log_probs = r.logits - np.float32(r.log_sum)
        columns.append(np.concatenate((r.ids.astype(np.float32), log_probs, r.logits, watched, r.masses)))
    found = ReducedRows(np.stack(columns), asked, 700)
    for i, r in enumerate(expected):
        assert isinstance(found[i], Reduced)
        for name in ("ids", "logits", "watched", "masses"):
            assert (getattr(found[i], name) == getattr(r, name)).all()
        assert found[i].log_sum == pytest.approx(r.log_sum, rel=1e-6) and found[i].n_vocab == 700
