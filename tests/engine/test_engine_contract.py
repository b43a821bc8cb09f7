"""Contract of prefill and generate, run against the real engine and the fake one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_ggml.errors import ConfigError, ContextOverflowError, DeviceError
from reference.engine_kit import PROMPT, fresh, generate, sampler, steps

MODES = [None, "auto", "plain", "chain", "tree"]
ANY = {"plain", "tree"}
KINDS = {None: ANY, "auto": ANY, "plain": {"plain"}, "chain": {"chain"}, "tree": {"tree"}}
SEEDED = {"temperature": 1.0, "seed": 7}


# --- prefill


def test_an_empty_engine(contracted: Any) -> None:
    assert contracted.tokens == [] and contracted.n_tokens == 0 and contracted.pending is None
    with pytest.raises(ConfigError, match="no logits: call prefill"):
        _ = contracted.logits


def test_prefill_appends_and_leaves_logits(contracted: Any) -> None:
    contracted.prefill(PROMPT[:2])
    contracted.prefill(PROMPT[2:])
    assert contracted.tokens == PROMPT and contracted.n_tokens == 5 and contracted.pending is None
    row = contracted.logits.copy()
    assert row.shape == (contracted.n_vocab,) and row.dtype == np.float32
    assert np.array_equal(fresh(contracted).logits, row)
    assert not np.array_equal(fresh(contracted, [3, 1, 4, 1, 6]).logits, row)


def test_prefill_reports_every_row(contracted: Any) -> None:
    """The rows after each token of several batches are those of one token at a time, and the state is the same."""
    ids, rows, alone = [i % 50 for i in range(40)], [], []
    contracted.prefill(ids[:3])
    contracted.prefill(ids[3:], take_row=rows.append)
    tokens = generate(contracted, max_tokens=8)
    contracted.reset()
    for token in ids:
        contracted.prefill([token])
        alone.append(contracted.logits.copy())
    np.testing.assert_allclose(rows, alone[3:], atol=2e-4)
    assert generate(contracted, max_tokens=8) == tokens


def test_tokens_are_a_copy(contracted: Any) -> None:
    contracted.prefill(PROMPT)
    contracted.tokens.append(9)
    assert contracted.tokens == PROMPT


def test_prefill_of_nothing_changes_nothing(contracted: Any) -> None:
    contracted.prefill(PROMPT)
    row = contracted.logits.copy()
    contracted.prefill([])
    assert contracted.tokens == PROMPT and np.array_equal(contracted.logits, row)


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([1] * 124, ContextOverflowError, r"Requested tokens \(129\) exceed context window of 128"),
        ([1, 99_999], ConfigError, "token id 99999 is outside the vocabulary"),
        ([-1], ConfigError, "token id -1 is outside the vocabulary"),
    ],
)
def test_what_cannot_be_prefilled_is_refused_before_work(
    contracted: Any, ids: list[int], error: type[Exception], words: str
) -> None:
    contracted.prefill(PROMPT)
    row = contracted.logits.copy()
    with pytest.raises(error, match=words):
        contracted.prefill(ids)
    assert contracted.tokens == PROMPT and np.array_equal(contracted.logits, row)


def test_progress_comes_after_every_batch(contracted: Any) -> None:
    seen: list[tuple[int, int]] = []
    contracted.prefill([1] * 40, lambda done, total: seen.append((done, total)))
    assert seen == [(16, 40), (32, 40), (40, 40)]


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_prefill_can_be_stopped_between_batches(contracted: Any, batches: int) -> None:
    ids = [i % 50 for i in range(40)]
    row = fresh(contracted, ids).logits.copy()
    contracted.reset()
    answers = iter([False] * batches)
    contracted.prefill(ids, should_stop=lambda: next(answers, True))
    assert contracted.tokens == ids[: 16 * batches]
    with pytest.raises(ConfigError, match="no logits"):
        _ = contracted.logits
    contracted.prefill(ids[16 * batches :])
    assert np.array_equal(contracted.logits, row)


def test_prefill_drops_the_pending_token(contracted: Any) -> None:
    tokens = generate(fresh(contracted), max_tokens=6)
    contracted.prefill([2])
    assert contracted.tokens == [*PROMPT, *tokens[:-1], 2] and contracted.pending is None


# --- generate: what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens: 0 is below 1"),
        ({"max_tokens": -3}, "max_tokens: -3 is below 1"),
        ({"budget": 0}, r"budget: 0 is outside 1\.\.31"),
        ({"budget": 32}, r"budget: 32 is outside 1\.\.31"),
        ({"mode": "quick"}, "mode: 'quick' is none of auto, plain, chain, tree"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_work(
    contracted: Any, options: dict[str, Any], words: str
) -> None:
    contracted.prefill(PROMPT)
    with pytest.raises(ConfigError, match=words):
        next(steps(contracted, **options))
    assert contracted.tokens == PROMPT and contracted.pending is None
    assert len(generate(contracted, max_tokens=4)) == 4


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_modes_that_need_a_draft(make_engine: Any, mode: str) -> None:
    engine = make_engine(draft=None, spec=())
    assert not engine.has_draft
    engine.prefill(PROMPT)
    with pytest.raises(ConfigError, match=f"mode {mode} needs a draft"):
        next(steps(engine, mode=mode))
    kinds = [step.mode for step in steps(engine, max_tokens=5)]
    assert kinds == ["prefill", *["plain"] * 4]


def test_generate_needs_logits(contracted: Any) -> None:
    with pytest.raises(ConfigError, match="no logits: call prefill first"):
        next(steps(contracted))
    generate(fresh(contracted), max_tokens=3)
    with pytest.raises(ConfigError, match="no logits: call prefill first"):
        next(steps(contracted))


def test_a_full_context_is_refused(contracted: Any) -> None:
    contracted.prefill([1] * 128)
    with pytest.raises(ContextOverflowError, match="the context window of 128 tokens is full"):
        next(steps(contracted))


# --- generate: what comes out


@pytest.mark.parametrize("mode", MODES)
def test_the_shape_of_steps(contracted: Any, mode: Any) -> None:
    contracted.prefill(PROMPT)
    pending, tokens, seen = None, [], []
    for step in steps(contracted, max_tokens=40, mode=mode):
        seen.append(step)
        assert step.tokens and step.logits is None
        if step.mode in ("prefill", "plain"):
            assert (len(step.tokens), step.tree, step.path) == (1, None, ())
            assert step.n_draft == step.n_accepted == 0
        else:
            tree = step.tree
            assert 1 <= step.n_draft == tree.n_nodes <= contracted.config.budget
            ends_with_a_drafted_one = len(step.path) > len(step.tokens)
            assert not ends_with_a_drafted_one or step.finish
            assert step.n_accepted == len(step.path) - 1 == len(step.tokens) - 1 + ends_with_a_drafted_one
            assert step.path[0] == 0 and tree.parents[0] == -1
            assert [int(tree.parents[node]) for node in step.path[1:]] == list(step.path[:-1])
            assert [int(tree.tokens[node]) for node in step.path] == [pending, *step.tokens][: len(step.path)]
        times = step.timings
        assert min(times.draft, times.tree, times.verify, times.commit, times.host) >= 0
        tokens += step.tokens
        pending = step.tokens[-1]
        assert contracted.tokens == [*PROMPT, *tokens[:-1]] and contracted.pending == pending
    assert seen[0].mode == "prefill" and {step.mode for step in seen[1:]} <= KINDS[mode]
    assert len(tokens) == 40 and [step.finish for step in seen] == [None] * (len(seen) - 1) + ["length"]


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "sampled"])
def test_output_is_the_same_in_every_mode(contracted: Any, sampling: dict[str, Any]) -> None:
    tokens = generate(fresh(contracted), max_tokens=60, mode="plain", sampling=sampling)
    for mode in MODES:
        assert generate(fresh(contracted), max_tokens=60, mode=mode, sampling=sampling) == tokens
    assert generate(fresh(contracted), max_tokens=60, budget=3, sampling=sampling) == tokens
    assert len(set(tokens)) > 1


def test_seeds_differ(contracted: Any) -> None:
    tokens = [
        generate(fresh(contracted), max_tokens=30, sampling={"temperature": 1.5, "seed": s}) for s in range(3)
    ]
    assert tokens[0] != tokens[1] != tokens[2]


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_a_stop_inside_a_step(contracted: Any, mode: str) -> None:
    tokens = generate(fresh(contracted), max_tokens=20)
    for n in range(1, 12):
        seen: list[int] = []

        def stop(token: int, seen: list[int] = seen, n: int = n) -> bool:
            seen.append(token)
            return len(seen) == n

        found = list(steps(fresh(contracted), stop=stop, mode=mode))
        assert [t for step in found for t in step.tokens] == seen == tokens[:n]
        assert [step.finish for step in found] == [None] * (len(found) - 1) + ["stop"]
        assert contracted.tokens == [*PROMPT, *tokens[: n - 1]] and contracted.pending == tokens[n - 1]


def test_a_token_that_ends_the_generation_ends_it(contracted: Any) -> None:
    end = min(contracted.tokenizer.eog_ids)
    contracted.prefill(PROMPT)
    (step,) = contracted.generate(sampler(contracted, logit_bias={end: 1000.0}))
    assert (step.tokens, step.finish, contracted.pending) == ((end,), "stop", end)


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_cancelling_between_steps(contracted: Any, mode: str) -> None:
    answers = iter([False] * 3)
    contracted.prefill(PROMPT)
    found = list(steps(contracted, mode=mode, should_stop=lambda: next(answers, True)))
    assert [step.finish for step in found] == [None, None, None, "cancelled"]
    tokens = [t for step in found for t in step.tokens]
    assert contracted.tokens == [*PROMPT, *tokens[:-1]] and contracted.pending == tokens[-1]


def test_what_has_ended_is_not_cancelled(contracted: Any) -> None:
    contracted.prefill(PROMPT)
    assert [s.finish for s in steps(contracted, max_tokens=1, should_stop=lambda: True)] == ["length"]


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_closing_the_generator_keeps_the_state(contracted: Any, mode: str) -> None:
    tokens = generate(fresh(contracted), max_tokens=110)  # more than four steps of 31 nodes can give
    running = steps(fresh(contracted), mode=mode)
    first = [t for _ in range(4) for t in next(running).tokens]
    running.close()
    assert (
        contracted.tokens == [*PROMPT, *first[:-1]]
        and contracted.pending == first[-1] == tokens[len(first) - 1]
    )
    contracted.prefill([contracted.pending])
    assert first + generate(contracted, max_tokens=110 - len(first)) == tokens


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_the_contexts_end_ends_it(contracted: Any, mode: str) -> None:
    contracted.prefill([i % 50 for i in range(120)])
    found = list(steps(contracted, mode=mode, max_tokens=50))
    assert sum(len(step.tokens) for step in found) == 8 and found[-1].finish == "length"
    assert contracted.n_tokens == 127


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_rows_are_kept_when_asked_for(contracted: Any, mode: str) -> None:
    first = fresh(contracted).logits.copy()
    found = list(steps(contracted, mode=mode, keep_logits=True, max_tokens=25))
    rows = [row for step in found for row in step.logits]
    tokens = [t for step in found for t in step.tokens]
    assert [len(step.logits) for step in found] == [len(step.tokens) for step in found]
    assert all(row.shape == (contracted.n_vocab,) and row.dtype == np.float32 for row in rows)
    assert [int(row.argmax()) for row in rows] == tokens and np.array_equal(rows[0], first)
    assert np.allclose(rows[10], fresh(contracted, [*PROMPT, *tokens[:10]]).logits, atol=1e-4)


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_the_sampler_sees_the_true_history(contracted: Any, mode: str) -> None:
    seen: list[list[int]] = []

    def look(history: Any, scores: Any) -> Any:
        seen.append([int(token) for token in history])
        scores[:] = scores  # its own to change
        return scores

    contracted.prefill(PROMPT)
    tokens = generate(contracted, mode=mode, max_tokens=30, processors=[look], sampling=SEEDED)
    assert seen == [PROMPT + tokens[:n] for n in range(30)]


@pytest.mark.parametrize("mode", ["plain", "tree"])
@pytest.mark.parametrize("calls", range(1, 9))
def test_a_sampler_that_raises_leaves_the_state_whole(contracted: Any, mode: str, calls: int) -> None:
    left = iter([None] * calls)

    def fail(history: Any, scores: Any) -> Any:
        if next(left, "none") == "none":
            raise RuntimeError("mine")
        return scores

    tokens = generate(fresh(contracted), max_tokens=40)
    running, heard = steps(fresh(contracted), mode=mode, processors=[fail]), []
    with pytest.raises(RuntimeError, match="mine"):
        for step in running:
            heard += step.tokens
    open_end = [] if contracted.pending is None else [contracted.pending]
    assert contracted.tokens + open_end == [*PROMPT, *heard] and heard == tokens[: len(heard)]
    contracted.prefill(tokens[len(contracted.tokens) - len(PROMPT) : 20])
    assert generate(contracted, max_tokens=20) == tokens[20:]


# --- an interrupt inside a pass


@pytest.mark.parametrize("while_", ["prefill", "generate"])
def test_an_interrupt_inside_a_pass_asks_for_a_reset(
    contracted: Any, monkeypatch: pytest.MonkeyPatch, interrupt_passes: Any, while_: str
) -> None:
    tokens = generate(fresh(contracted), max_tokens=20)
    running = steps(fresh(contracted), mode="plain")
    if while_ == "generate":
        next(running)
    interrupt_passes(contracted)
    with pytest.raises(KeyboardInterrupt):
        next(running) if while_ == "generate" else contracted.prefill([1])
    monkeypatch.undo()
    for call in (lambda: contracted.prefill([1]), lambda: next(steps(contracted)), contracted.snapshot):
        with pytest.raises(DeviceError, match=r"inconsistent .* call reset\(\)"):
            call()
    assert generate(fresh(contracted), max_tokens=20) == tokens
