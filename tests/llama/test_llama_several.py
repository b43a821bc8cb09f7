"""Tests of Llama with several prompts or choices: each equals its solo call, in order, with n_seq_max of them at a time."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.errors import ConfigError, DflashError
from dflash_ggml.llama.cache import LlamaRAMCache
from dflash_ggml.llama.merged import merged
from reference.toy_llama import ToyLlama

PROMPTS = ["hello", "once upon a time", "def f(x):", "a" * 90, "the end"]
CHATS = [[{"role": "user", "content": f"question {i}"}] for i in range(3)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("toy") / "toy.gguf"
    path.touch()
    return str(path)


def text(body: dict[str, Any], i: int = 0) -> str:
    return str(body["choices"][i]["text"])


@pytest.mark.parametrize("n_seq_max", [1, 2, 4])
def test_each_of_a_list_is_what_it_would_be_alone(model_path: str, n_seq_max: int) -> None:
    llm = ToyLlama(model_path, n_seq_max=n_seq_max)
    bodies = llm.create_completions(PROMPTS, max_tokens=20, seed=5, temperature=0.7)
    for prompt, body in zip(PROMPTS, bodies):
        alone = ToyLlama(model_path).create_completion(prompt, max_tokens=20, seed=5, temperature=0.7)
        assert text(body) == text(alone) and body["usage"] == alone["usage"]
    assert llm.n_seq_max == n_seq_max
    if n_seq_max > 1:
        steps = [slots for kind, slots, *_ in llm.toy.log if kind == "step"]
        assert 1 < max(map(len, steps)) <= n_seq_max
        assert not any(slot.busy for slot in llm.session.slots.all)


@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_choices_differ_and_can_be_had_again(model_path: str, n_seq_max: int) -> None:
    llm = ToyLlama(model_path, n_seq_max=n_seq_max)
    body = llm.create_completion("hello", n=3, seed=7, temperature=1.0, max_tokens=15)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    again = [llm.create_completion("hello", seed=7 + i, temperature=1.0, max_tokens=15) for i in range(3)]
    assert [text(body, i) for i in range(3)] == [text(one) for one in again]
    assert len({text(one) for one in again}) == 3
    assert body["usage"]["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in again)


def test_a_list_of_prompts_is_one_body(model_path: str) -> None:
    llm = ToyLlama(model_path, n_seq_max=2)
    body = llm(["hello", "the end"], n=2, seed=1, max_tokens=8)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    both = llm.create_completions(["hello", "the end"], n=2, seed=1, max_tokens=8)
    assert [text(b, i) for b in both for i in range(2)] == [text(body, i) for i in range(4)]
    ids = llm.tokenize(b"hello")
    assert text(llm(ids, seed=1, max_tokens=8)) == text(llm([ids], seed=1, max_tokens=8))


def test_conversations(model_path: str) -> None:
    llm = ToyLlama(model_path, n_seq_max=3)
    bodies = llm.create_chat_completions(CHATS, n=2, seed=3, max_tokens=10)
    for chat, body in zip(CHATS, bodies):
        for i in range(2):
            alone = llm.create_chat_completion(chat, seed=3 + i, max_tokens=10)
            assert body["choices"][i]["message"] == alone["choices"][0]["message"]


def test_seeds_of_the_constructor_go_on(model_path: str) -> None:
    one, other = (ToyLlama(model_path, seed=11, n_seq_max=n) for n in (1, 3))
    for llm in (one, other):
        llm.create_completions(PROMPTS[:2], max_tokens=5)
    assert one._seed == other._seed
    assert text(one("hello", max_tokens=9)) == text(other("hello", max_tokens=9))


def test_what_cannot_be_is_refused(model_path: str) -> None:
    llm = ToyLlama(model_path, n_seq_max=2)
    with pytest.raises(ConfigError, match="n: expected 1 or more"):
        llm("hello", n=0)
    with pytest.raises(ConfigError, match="one answer at a time"):
        llm("hello", n=2, stream=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'best_of'"):
        llm.create_completions(["hello"], best_of=2)
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        llm.create_completions(["hello", [99999], "the end"], max_tokens=5)
    assert text(llm("hello", max_tokens=5, seed=1)) == text(
        ToyLlama(model_path)("hello", max_tokens=5, seed=1)
    )


def test_a_call_from_inside_a_step_is_refused(model_path: str) -> None:
    llm = ToyLlama(model_path, n_seq_max=2)

    def meddle(step: Any) -> None:
        llm("hello")

    with pytest.raises(ConfigError, match="inside a step"):
        llm.create_completions(["hello", "the end"], on_step=meddle)


def test_a_stream_that_was_left_open_ends(model_path: str) -> None:
    llm = ToyLlama(model_path, n_seq_max=2)
    stream = llm("hello", stream=True, max_tokens=50)
    next(stream)
    assert len(llm.create_completions(PROMPTS[:3], max_tokens=5)) == 3
    assert text(llm("hello", max_tokens=5, seed=1)) == text(
        ToyLlama(model_path)("hello", max_tokens=5, seed=1)
    )


def test_another_threads_calls_run_beside_the_list(model_path: str) -> None:
    llm = ToyLlama(model_path, n_seq_max=2)
    began, waiting, others = threading.Event(), threading.Event(), list[Any]()

    def other() -> None:
        began.wait(20)
        waiting.set()
        others.append(llm("the end", max_tokens=40, seed=1))
        others.append(llm.embed("hello"))

    def of_the_list(step: Any) -> None:
        began.set()
        waiting.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    bodies = llm.create_completions(PROMPTS[:3], max_tokens=25, seed=5, on_step=of_the_list)
    thread.join(20)
    alone = ToyLlama(model_path)
    assert text(others[0]) == text(alone("the end", max_tokens=40, seed=1))
    assert others[1] == alone.embed("hello")
    assert [text(b) for b in bodies] == [text(alone(p, max_tokens=25, seed=5)) for p in PROMPTS[:3]]


def test_a_handler_that_does_more_than_prompt_answers_one_by_one(model_path: str) -> None:
    def handler(llama: Any, messages: Any, **options: Any) -> Any:
        llama.eval([1, 2])
        body = llama.create_completion(messages[-1]["content"], max_tokens=9, seed=options["seed"])
        return {**body, "n_tokens": llama.n_tokens}

    llm = ToyLlama(model_path, n_seq_max=2, chat_handler=handler)
    bodies = llm.create_chat_completions(CHATS, seed=4)
    alone = ToyLlama(model_path, chat_handler=handler)
    for chat, body in zip(CHATS, bodies):
        other = alone.create_chat_completion(chat, seed=4)
        assert text(body) == text(other)


def test_an_interrupt_ends_all_within_a_step(model_path: str) -> None:
    llm, steps = ToyLlama(model_path, n_seq_max=2), list[Any]()

    def interrupt(step: Any) -> None:
        steps.append(step)
        if len(steps) == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        llm.create_completions([*PROMPTS, *PROMPTS], max_tokens=300, temperature=1.0, on_step=interrupt)
    assert 3 <= len(steps) < 12
    assert sum(entry[0] == "read" for entry in llm.toy.log) <= 4  # type: ignore[attr-defined]
    assert text(llm("hello", max_tokens=5, seed=1)) == text(
        ToyLlama(model_path)("hello", max_tokens=5, seed=1)
    )


def test_a_call_that_dies_ends_alone(model_path: str) -> None:
    """A BaseException, like the panic of a library, is reported as an error of its call; the others continue."""

    class Panic(BaseException):
        pass

    llm, steps = ToyLlama(model_path, n_seq_max=2), list[Any]()

    def panic(step: Any) -> None:
        steps.append(step)
        if len(steps) == 5:
            raise Panic

    with pytest.raises(DflashError, match="Panic") as caught:
        llm.create_completions(PROMPTS, max_tokens=30, temperature=1.0, on_step=panic)
    assert isinstance(caught.value.__cause__, Panic) and len(steps) > 12


@pytest.mark.parametrize("seed", [-1, 0xFFFFFFFF])
def test_each_choice_draws_afresh_for_a_random_seed(model_path: str, seed: int) -> None:
    llm = ToyLlama(model_path, n_seq_max=3)
    twice = [llm("hello", n=3, seed=seed, temperature=1.0, max_tokens=30) for _ in range(2)]
    assert len({text(body, i) for body in twice for i in range(3)}) == 6
    assert llm._drawn(0xFFFFFFFE, 3) == [0xFFFFFFFE, 0, 1]  # none of them is the one that asks for entropy


def test_a_prompt_counts_once_and_times_are_of_all(model_path: str) -> None:
    llm = ToyLlama(model_path)
    both = llm(["hello", "the end"], n=2, seed=1, max_tokens=8)
    ones = [ToyLlama(model_path)(p, seed=1 + i, max_tokens=8) for p in ("hello", "the end") for i in range(2)]
    usage, timings = both["usage"], both["timings"]
    assert usage["prompt_tokens"] == ones[0]["usage"]["prompt_tokens"] + ones[2]["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in ones)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert list(usage) == list(ones[0]["usage"]) and list(timings) == list(ones[0]["timings"])
    for name in ("predicted_n", "steps", "draft_n", "draft_n_accepted"):
        assert timings[name] == sum(one["timings"][name] for one in ones)
    assert timings["steps"] == sum(use["steps"] for use in timings["widths"])
    assert timings["tokens_per_step"] == pytest.approx(
        sum(use["steps"] * use["tokens_per_step"] for use in timings["widths"]) / timings["steps"], abs=0.01
    )
    assert [use["nodes"] for use in timings["widths"]] == sorted({use["nodes"] for use in timings["widths"]})


def test_what_is_merged_of_steps_is_weighted_by_them() -> None:
    def body(steps: int, per_step: float, ms: float) -> dict[str, Any]:
        width = {"nodes": 7, "steps": steps, "tokens_per_step": per_step, "step_ms": ms, "predicted_ms": ms}
        source = {"name": "dflash", "steps": steps, "draft_n": 7 * steps, "draft_n_accepted": steps}
        counts = {"cache_n": 1, "prompt_n": 4, "predicted_n": int(steps * per_step), "steps": steps}
        times = {"prompt_ms": 10.0, "predicted_ms": steps * ms, "tokens_per_step": per_step, "budget": steps}
        drafted = {"draft_n": 7 * steps, "draft_n_accepted": steps, "widths": [width], "sources": [source]}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        return {"choices": [{"index": 0}], "usage": usage, "timings": {**counts, **times, **drafted}}

    one = merged([body(1, 2.0, 10.0), body(3, 4.0, 30.0)], 2)
    assert one["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    timings = one["timings"]
    assert (timings["prompt_per_second"], timings["predicted_per_second"]) == (400.0, 140.0)
    assert timings["tokens_per_step"] == 3.5 and timings["budget"] == 3
    width = {"nodes": 7, "steps": 4, "tokens_per_step": 3.5, "step_ms": 25.0, "predicted_ms": 30.0}
    assert timings["widths"] == [width]
    assert timings["sources"] == [{"name": "dflash", "steps": 4, "draft_n": 28, "draft_n_accepted": 4}]


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_seeds_go_on_behind_conversations(model_path: str, seed: int | None, n_seq_max: int) -> None:
    one, llm = ToyLlama(model_path, seed=11), ToyLlama(model_path, seed=11, n_seq_max=n_seq_max)
    alone = [one.create_chat_completion(chat, seed=seed, max_tokens=5) for chat in CHATS * 3]
    bodies = llm.create_chat_completions(CHATS * 3, seed=seed, max_tokens=5)
    assert [b["choices"][0]["message"] for b in bodies] == [a["choices"][0]["message"] for a in alone]
    assert llm._seed == one._seed


def test_statistics_of_each_are_printed(model_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    llm = ToyLlama(model_path, n_seq_max=2, verbose=True)
    llm.create_completions(PROMPTS[:3], max_tokens=5)
    assert capsys.readouterr().err.count("dflash-ggml: prompt") == 3


def test_unsupported_options_of_batched_prompts_warn_once(model_path: str) -> None:
    llm = ToyLlama(model_path, n_seq_max=2, logits_all=True)
    llm("hello", max_tokens=5, seed=1)
    scores = llm.scores.copy()
    with pytest.warns(UserWarning, match="logits_all: scores are not kept") as caught:
        llm.create_completions(PROMPTS[:2], max_tokens=5)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert np.array_equal(llm.scores, scores) and scores.any()
    cache = LlamaRAMCache()
    llm.set_cache(cache)
    with pytest.warns(UserWarning, match="set_cache: the cache is neither asked nor filled") as caught:
        llm.create_completion("hello", n=2, max_tokens=5)
    assert len(caught) == 1 and "logits_all" not in str(caught[0].message) and not cache.cache_state
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.create_completions(PROMPTS[:2], max_tokens=5)
        llm.create_completions(PROMPTS[:1], max_tokens=5)
    assert len(cache.cache_state) == 1 and not np.array_equal(llm.scores, scores)
