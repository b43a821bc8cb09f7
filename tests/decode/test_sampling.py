"""Tests of the sampler against straightforward references; draws against the distributions by chi-square."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ggml.decode.sampling import Sampler, SamplingParams, largest, log_softmax, token_log_probs
from dflash_ggml.errors import ConfigError, DflashError
from reference.chi_square import assert_drawn_from

NEUTRAL = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


def random_row(seed: int, n_vocab: int = 50, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=scale, size=n_vocab).astype(np.float32)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def reference_probs(row: np.ndarray, p: SamplingParams, history: list[int]) -> np.ndarray:
    """The stock chain on Python lists, every filter on freshly computed probabilities."""
    logits = [float(x) for x in row]
    for token, bias in p.logit_bias.items():
        logits[token] += bias
    window = history[len(history) - p.penalty_last_n :] if 0 <= p.penalty_last_n < len(history) else history
    for token, count in Counter(window).items():
        logits[token] *= p.repeat_penalty if logits[token] <= 0 else 1 / p.repeat_penalty
        logits[token] -= count * p.frequency_penalty + p.presence_penalty

    def best_first(ids: list[int]) -> list[int]:
        return sorted(ids, key=lambda i: -logits[i])

    def up_to(ids: list[int], reached: object) -> list[int]:
        probs = dict(zip(ids, softmax([logits[i] for i in ids]), strict=True))
        mass = 0.0
        for n, i in enumerate(ids):
            mass += probs[i]
            if reached(mass):  # type: ignore[operator]
                return ids[: n + 1]
        return ids

    ids = list(range(len(logits)))
    temperature = p.temperature
    if temperature == 0:
        ids, temperature = best_first(ids)[:1], 1.0
    elif temperature < 0:
        temperature = 1.0
    else:
        if p.top_k > 0:
            ids = best_first(ids)[: p.top_k]
        if p.typical_p < 1:
            probs = dict(zip(ids, softmax([logits[i] for i in ids]), strict=True))
            entropy = -sum(q * math.log(q) for q in probs.values())
            ids = sorted(ids, key=lambda i: abs(-math.log(probs[i]) - entropy))
            ids = up_to(ids, lambda mass: mass > p.typical_p)
        if p.top_p < 1:
            ids = up_to(best_first(ids), lambda mass: mass >= p.top_p)
        if p.min_p > 0:
            top = max(logits[i] for i in ids)
            ids = [i for i in ids if math.exp(logits[i] - top) >= p.min_p]
    probs = np.zeros(len(logits))
    probs[ids] = softmax([logits[i] / temperature for i in ids])
    return probs


options = st.builds(
    SamplingParams,
    temperature=st.sampled_from([-1.0, 0.0, 0.3, 0.8, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 40, 50, 1000]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    typical_p=st.sampled_from([0.2, 0.9, 1.0]),
    repeat_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.5, 0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    penalty_last_n=st.sampled_from([-1, 0, 1, 5, 64]),
    logit_bias=st.dictionaries(st.integers(0, 49), st.floats(-5, 5), max_size=3),
)


@settings(max_examples=300)
@given(st.integers(0, 2**32), options, st.lists(st.integers(0, 49), max_size=80))
def test_probs_equal_the_reference(seed: int, params: SamplingParams, history: list[int]) -> None:
    row = random_row(seed, scale=1.5)
    before = row.copy()
    probs = Sampler(params, 50).probs(row, history)
    assert probs == pytest.approx(reference_probs(row, params, history), rel=1e-4, abs=1e-7)
    assert probs.sum() == pytest.approx(1)
    assert (row == before).all()


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"typical_p": 0.6},
        {"temperature": 0.5},
        {"temperature": -1.0, "top_k": 1},
        {"temperature": 0.0},
    ],
)
def test_each_option_alone_equals_the_reference_on_a_larger_vocabulary(change: dict[str, float]) -> None:
    params = replace(NEUTRAL, **change)
    for seed in range(3):
        row = random_row(seed, 5000, scale=1.0)
        expected = reference_probs(row, params, [])
        assert Sampler(params, 5000).probs(row) == pytest.approx(expected, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize(
    ("last_n", "expected"),
    [(-1, [-0.75, 0.25, -3, 1]), (3, [1, 0.25, -3, 1]), (1, [1, 2, -2.75, 1]), (0, [1, 2, -1, 1])],
)
def test_penalties_act_on_the_last_tokens_only(last_n: int, expected: list[float]) -> None:
    params = replace(
        NEUTRAL, repeat_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, penalty_last_n=last_n
    )
    row, history = np.array([1, 2, -1, 1], np.float32), [0, 0, 0, 1, 2, 2]
    assert Sampler(params, 4).probs(row, history) == pytest.approx(softmax(expected), rel=1e-5)


@pytest.mark.parametrize("last_n", [-1, 2, 5, 64])
@pytest.mark.parametrize("n_exempt", [1, 3, 6, 9])
def test_a_beginning_that_no_penalty_counts(last_n: int, n_exempt: int) -> None:
    params = replace(NEUTRAL, repeat_penalty=1.5, frequency_penalty=0.25, penalty_last_n=last_n)
    row, history = random_row(4), [0, 0, 0, 1, 2, 2, 1, 7]
    sampler = Sampler(params, 50, n_exempt=n_exempt)
    for n in (3, 6, 8):
        expected = Sampler(params, 50).probs(row, history[n_exempt:n])
        assert np.array_equal(sampler.probs(row, history[:n]), expected)


class Anew(Sampler):
    """The reference for histories: converts the whole of it for every token."""

    def _scores(self, row: np.ndarray, history: Sequence[int]) -> tuple[np.ndarray, float]:
        p, scores = self.params, row.copy()
        for processor in self.processors:
            scores = np.array(processor(np.asarray(history, np.int32), scores), np.float32)
        window = history if p.penalty_last_n < 0 else history[-p.penalty_last_n :]
        ids, counts = np.unique(np.asarray(window, np.int64), return_counts=True)
        seen = scores[ids]
        seen = np.where(seen > 0, seen / np.float32(p.repeat_penalty), seen * np.float32(p.repeat_penalty))
        scores[ids] = seen - (counts * p.frequency_penalty + p.presence_penalty)
        return scores, float(scores.max())


ids = st.lists(st.integers(0, 49), max_size=6)
edits = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), ids),
        st.tuples(st.just("copy"), ids),
        st.tuples(st.just("cut"), st.integers(1, 9)),
        st.tuples(st.just("cut and extend"), st.lists(st.integers(0, 49), min_size=1, max_size=9)),
        st.tuples(st.just("change"), st.integers(0, 49)),
        st.tuples(st.just("another"), ids),
        st.tuples(st.just("tuple"), ids),
    ),
    max_size=12,
)


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.sampled_from([-1, 1, 5, 64]), st.booleans(), st.booleans(), edits)
def test_draws_do_not_depend_on_how_the_history_came_about(
    seed: int, last_n: int, processed: bool, probed: bool, steps: list[tuple[str, object]]
) -> None:
    """Extended, rewound, edited, copied: always, bit for bit, the tokens of a new sampler that is fed the whole history."""
    params = replace(
        NEUTRAL,
        repeat_penalty=1.3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        penalty_last_n=last_n,
        seed=seed,
    )
    kept: list[tuple[np.ndarray, list[int]]] = []

    def lean(seen: np.ndarray, scores: np.ndarray) -> np.ndarray:
        kept.append((seen, seen.tolist()))
        scores[seen[-3:]] += np.float32(len(seen) % 7)
        return scores

    processors = [lean] if processed else []
    fast, anew = Sampler(params, 50, processors), Anew(params, 50, processors)
    history: list[int] = [1, 2, 2]
    for i, (what, x) in enumerate([("extend", []), *steps]):
        given: Sequence[int] = history
        if what in ("extend", "copy", "tuple"):
            history = history + x if what == "copy" else history  # type: ignore[operator]
            history += [] if what == "copy" else x  # type: ignore[operator]
            given = tuple(history) if what == "tuple" else history
        elif what == "cut":
            del history[-x:]  # type: ignore[operator]
        elif what == "cut and extend":
            del history[-len(x) :]  # type: ignore[arg-type]
            history += x  # type: ignore[operator]
        elif what == "change" and history:
            history[x % len(history)] = x  # type: ignore[operator,call-overload]
        elif what == "another":
            given = history = list(x)  # type: ignore[call-overload]
        row = random_row(seed + i)
        if probed:
            assert (fast.probs(row, given) == anew.probs(row, given)).all()
        token = fast.sample(row, given)
        assert token == anew.sample(row, given)
        assert fast.rng.bit_generator.state == anew.rng.bit_generator.state
        history.append(token)
    assert all(seen.tolist() == then for seen, then in kept)  # what a processor was given stays as it was


class Counted(Sequence):
    """A history that counts how many of its ids are read."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.n_read = ids, 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        found = self.ids[at]
        self.n_read += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize(
    ("change", "processors"),
    [
        ({"repeat_penalty": 1.2}, []),
        ({"repeat_penalty": 1.2, "penalty_last_n": -1}, []),
        ({}, [lambda ids, scores: scores]),
    ],
)
def test_a_grown_history_is_not_read_again(change: dict[str, float], processors: list) -> None:
    """The second token of a long text costs its window or a bounded look behind, not the whole of it."""
    sampler = Sampler(replace(NEUTRAL, **change), 50, processors)
    history = Counted([i % 50 for i in range(20_000)])
    for step in range(3):
        history.ids.append(sampler.sample(random_row(step), history))
        assert history.n_read < 1000 or step == 0
        history.n_read = 0


def test_processors_cannot_change_the_history() -> None:
    def write(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        ids[0] = 3
        return scores

    with pytest.raises(ValueError, match="read-only"):
        Sampler(NEUTRAL, 50, [write]).sample(random_row(0), [1, 2])


def test_an_id_outside_the_vocabulary_leaves_nothing_behind() -> None:
    params = replace(NEUTRAL, repeat_penalty=1.5, penalty_last_n=-1)
    sampler, history = Sampler(params, 50), [7, 7]
    sampler.sample(random_row(0), history)
    history += [7, 50]
    with pytest.raises(IndexError):
        sampler.sample(random_row(1), history)
    history[-1] = 7
    expected = Sampler(params, 50).probs(random_row(1), history)
    assert (sampler.probs(random_row(1), history) == expected).all()


@pytest.mark.parametrize(
    "params",
    [
        NEUTRAL,
        replace(NEUTRAL, temperature=-1.0),
        replace(NEUTRAL, temperature=0.6, top_k=20, top_p=0.95),
        replace(NEUTRAL, temperature=1.7, min_p=0.02, repeat_penalty=1.2),
        replace(NEUTRAL, typical_p=0.8),
        replace(NEUTRAL, logit_bias={3: 2.0, 4: -math.inf}),
    ],
)
def test_draws_follow_probs(params: SamplingParams) -> None:
    row, history, n = random_row(5, scale=1.5), [1, 2, 2], 20_000
    sampler = Sampler(params, 50)
    counts = np.bincount([sampler.sample(row, history) for _ in range(n)], minlength=50)
    assert_drawn_from(counts, sampler.probs(row, history))


@pytest.mark.parametrize("change", [{"top_p": 0.999}, {"typical_p": 0.999}])
def test_filters_that_leave_all_tokens_leave_their_probabilities(change: dict[str, float]) -> None:
    row = np.linspace(0, 1, 40, dtype=np.float32)
    params = replace(SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1), **change)  # type: ignore[arg-type]
    expected = np.exp(row) / np.exp(row).sum()
    np.testing.assert_allclose(Sampler(params, 40).probs(row), expected, rtol=1e-5)


def test_draws_from_a_vocabulary_of_many_blocks_follow_probs() -> None:
    n_vocab, n = 2000, 20_000
    row = random_row(2, n_vocab, scale=0.5)
    row[600:1300] = -np.inf  # whole blocks of the two-level draw have no mass
    sampler = Sampler(NEUTRAL, n_vocab)
    draws = np.array([sampler.sample(row) for _ in range(n)])
    assert np.isfinite(row[draws]).all()
    bins = sampler.probs(row).reshape(100, 20).sum(axis=1)
    assert_drawn_from(np.bincount(draws // 20, minlength=100), bins)


@pytest.mark.parametrize(
    "change", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": -1.0}, {"mirostat_mode": 1}]
)
def test_one_random_number_per_sampled_token(change: dict[str, float]) -> None:
    sampler = Sampler(replace(NEUTRAL, **change), 50)
    expected = np.random.Generator(np.random.PCG64(1))
    for step in range(10):
        sampler.sample(random_row(step))
        expected.random()
        sampler.probs(random_row(step))
        assert sampler.rng.bit_generator.state == expected.bit_generator.state


def test_greedy_takes_no_random_number_and_the_first_of_equals() -> None:
    sampler = Sampler(replace(NEUTRAL, temperature=0.0), 4)
    state = sampler.rng.bit_generator.state
    assert sampler.sample(np.array([1, 3, 3, 2], np.float32)) == 1
    assert sampler.rng.bit_generator.state == state


def test_a_seed_fixes_the_draws_and_no_seed_gives_fresh_ones() -> None:
    row = np.zeros(1000, np.float32)

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(replace(NEUTRAL, seed=seed), 1000)
        return [sampler.sample(row) for _ in range(8)]

    assert draws(3) == draws(3) != draws(4)
    assert draws(None) != draws(None)


@pytest.mark.parametrize("top_k", [0, 20])
def test_noise_in_the_last_bits_does_not_change_the_draws(top_k: int) -> None:
    params = replace(NEUTRAL, top_k=top_k)
    row = np.repeat(random_row(0, 25), 2)  # every token has an equal: an order by probability would swap them
    noisy = row + np.float32(1e-6) * random_row(1)
    exact, disturbed = Sampler(params, 50), Sampler(params, 50)
    assert [exact.sample(row) for _ in range(500)] == [disturbed.sample(noisy) for _ in range(500)]


@given(st.integers(0, 2**32))
def test_temperature_towards_zero_is_greedy(seed: int) -> None:
    row = random_row(seed)
    for temperature in (1e-4, 1e-30, 1e-300):
        assert Sampler(replace(NEUTRAL, temperature=temperature), 50).sample(row) == row.argmax()


def test_greedy_property_means_the_plain_argmax() -> None:
    greedy = replace(NEUTRAL, temperature=0.0)
    assert Sampler(greedy, 9).greedy
    assert Sampler(replace(greedy, repeat_penalty=1.2, penalty_last_n=0), 9).greedy
    for change in (
        {"temperature": 0.1},
        {"repeat_penalty": 1.1},
        {"logit_bias": {1: 1.0}},
        {"presence_penalty": 1},
    ):
        assert not Sampler(replace(greedy, **change), 9).greedy
    assert not Sampler(greedy, 9, processors=[lambda ids, scores: scores]).greedy


def test_processors_come_first_and_see_the_history() -> None:
    seen: list[list[int]] = []

    def forbid_even(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        seen.append(ids.tolist())
        scores[::2] = -np.inf  # in place, as some libraries do
        return scores

    row = random_row(0)
    before = row.copy()
    sampler = Sampler(replace(NEUTRAL, top_k=1), 50, processors=[forbid_even])
    assert sampler.sample(row, [4, 5]) == 1 + 2 * row[1::2].argmax()
    assert seen == [[4, 5]] and (row == before).all()


def test_two_processors_and_a_bias_combine() -> None:
    def raise_first(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        return scores + np.array([10, 0, 0, 0], np.float32)

    def raise_second(ids: np.ndarray, scores: np.ndarray) -> list[float]:
        return [x + 10 * (i == 1) for i, x in enumerate(scores)]

    sampler = Sampler(replace(NEUTRAL, logit_bias={2: 10.0}), 4, processors=[raise_first, raise_second])
    assert sampler.probs(np.zeros(4, np.float32)) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0], abs=1e-4)


@pytest.mark.parametrize("mode", [1, 2])
def test_mirostat_steers_the_surprise_to_tau(mode: int) -> None:
    row = -np.log(np.arange(1, 1001, dtype=np.float32)) * np.float32(1.1)  # Zipf, entropy above 7 bits
    sampler = Sampler(replace(NEUTRAL, mirostat_mode=mode, mirostat_tau=3.0), 1000)
    surprises = []
    for _ in range(2000):
        probs = sampler.probs(row)
        surprises.append(-math.log2(probs[sampler.sample(row)]))
    assert np.mean(surprises[500:]) == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("mode", [1, 2])
def test_mirostat_survives_flat_and_certain_rows(mode: int) -> None:
    certain = np.full(10, -np.inf, np.float32)
    certain[4] = 0
    for tau in (0.0, 1.0, 5.0):
        for row, allowed in ((np.zeros(10, np.float32), range(10)), (certain, [4])):
            sampler = Sampler(replace(NEUTRAL, mirostat_mode=mode, mirostat_tau=tau), 10)
            assert all(sampler.sample(row) in allowed for _ in range(50))


def test_mirostat_v2_keeps_tokens_up_to_the_surprise() -> None:
    row = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))
    sampler = Sampler(replace(NEUTRAL, mirostat_mode=2, mirostat_tau=1.25), 5)  # starts at mu = 2.5 bits
    assert sampler.probs(row) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0])


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 400))
def test_largest_equals_a_sort(seed: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(-20, 20, n).astype(np.float32)  # many ties
    values[rng.random(n) < 0.3] = -np.inf
    expected = [i for i in sorted(range(n), key=lambda i: (-values[i], i)) if values[i] > -np.inf][:k]
    assert largest(values, k).tolist() == expected


def test_largest_on_a_wide_row() -> None:
    values = random_row(3, 248_320)
    assert (largest(values, 40) == np.argsort(-values, kind="stable")[:40]).all()


def test_log_probs_of_a_token_and_the_best() -> None:
    row = random_row(7)
    expected = np.log(softmax([float(x) for x in row]))
    assert log_softmax(row) == pytest.approx(expected, abs=1e-5)
    log_prob, best = token_log_probs(row, 11, 3)
    assert log_prob == pytest.approx(expected[11], abs=1e-5)
    assert [token for token, _ in best] == np.argsort(-expected)[:3].tolist()
    assert [value for _, value in best] == pytest.approx(sorted(expected)[:-4:-1], abs=1e-5)
    assert token_log_probs(row, 0, 0)[1] == []


@pytest.mark.parametrize(
    ("values", "word"),
    [([0, math.nan, 1], "NaN"), ([0, math.inf, 1], r"token 1 is \+inf"), ([-math.inf] * 3, "-inf")],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8, -1.0])
def test_unusable_logits_are_refused(values: list[float], word: str, temperature: float) -> None:
    row = np.array(values, np.float32)
    with pytest.raises(DflashError, match=word):
        Sampler(replace(NEUTRAL, temperature=temperature), 3).sample(row)
    with pytest.raises(DflashError, match=word):
        log_softmax(row)


def test_a_row_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\)"):
        Sampler(NEUTRAL, 3).sample(np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="processor"):
        Sampler(NEUTRAL, 3, processors=[lambda ids, scores: scores[:2]]).sample(np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("typical_p", math.nan),
        ("repeat_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("penalty_last_n", -2),
        ("seed", -1),
        ("mirostat_mode", 3),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {50: 1.0}),
        ("logit_bias", {-1: 1.0}),
    ],
)
def test_bad_options_name_their_field(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Sampler(replace(NEUTRAL, **{name: value}), 50)
