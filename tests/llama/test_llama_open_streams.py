"""Tests of calls while a stream is open: in its thread they end it, in another they wait, from inside a step they are
refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.errors import ConfigError, DflashError
from dflash_ggml.llama.state import LlamaState
from reference.fake_engine import FakeEngine, FakeSlot
from reference.toy_llama import ToyLlama

GUARD_S = 3  # nothing here takes long; what hangs fails instead of holding up the tests
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "toy.gguf"
    file.touch()
    return str(file)


@pytest.fixture
def llm(path: str) -> ToyLlama:
    return ToyLlama(path)


STREAMS: dict[str, Callable[[ToyLlama], Iterator[Any]]] = {
    "completion": lambda llm: llm("abc", max_tokens=50, temperature=0, stream=True),
    "chat": lambda llm: llm.create_chat_completion(USER, max_tokens=50, temperature=0, stream=True),
    "generate": lambda llm: llm.generate([97, 98, 99], temp=0),
}
# each on a model that holds [72, 105] and was given its state
CALLS: dict[str, Callable[[ToyLlama, LlamaState], Any]] = {
    "reset": lambda llm, state: llm.reset(),
    "eval": lambda llm, state: llm.eval([65]),
    "sample": lambda llm, state: llm.sample(temp=0),
    "generate": lambda llm, state: next(llm.generate([65, 66], temp=0)),
    "save_state": lambda llm, state: llm.save_state(),
    "load_state": lambda llm, state: llm.load_state(state),
    "create_completion": lambda llm, state: llm("xyz", max_tokens=3, temperature=0),
    "create_chat_completion": lambda llm, state: llm.create_chat_completion(
        USER, max_tokens=3, temperature=0
    ),
    "set_cache": lambda llm, state: llm.set_cache(None),
    "close": lambda llm, state: llm.close(),
}


def prepared(llm: ToyLlama) -> LlamaState:
    llm.eval([72, 105])
    return llm.save_state()


def outcome(value: Any) -> Any:
    """What a call gave, without what differs from call to call."""
    if isinstance(value, dict):
        return value["choices"]
    return (value.n_tokens, value.llama_state) if isinstance(value, LlamaState) else value


def in_thread(call: Callable[[], Any]) -> Any:
    """The call's result from a thread of its own; TimeoutError if it hangs."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((True, call()))
        except Exception as error:  # noqa: BLE001 - handed on below
            results.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(GUARD_S)
    if not results:
        raise TimeoutError("the call hangs")
    good, value = results[0]
    if not good:
        raise value
    return value


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", STREAMS)
def test_a_call_ends_the_open_stream_of_its_thread(llm: ToyLlama, path: str, kind: str, name: str) -> None:
    """It works as if the stream had stopped there; the stream reports that it was cut off and changes nothing."""
    state = prepared(llm)
    stream = STREAMS[kind](llm)
    next(stream), next(stream)
    n_tokens, ids = llm.n_tokens, llm._input_ids.tolist()
    given = outcome(CALLS[name](llm, state))
    after = (llm.n_tokens, llm._input_ids.tolist())
    with pytest.raises(DflashError, match="cut off"):
        next(stream)
    assert (llm.n_tokens, llm._input_ids.tolist()) == after
    fresh = ToyLlama(path)
    fresh.eval(ids)
    assert fresh.n_tokens == n_tokens and outcome(CALLS[name](fresh, state)) == given
    assert after == (fresh.n_tokens, fresh._input_ids.tolist())
    if name != "close":
        assert outcome(llm("more", max_tokens=5, temperature=0)) == outcome(
            fresh("more", max_tokens=5, temperature=0)
        )


@pytest.mark.parametrize("name", CALLS)
def test_a_stream_whose_thread_has_ended_gives_way(llm: ToyLlama, name: str) -> None:
    state = prepared(llm)
    stream = STREAMS["completion"](llm)

    def call() -> None:
        in_thread(lambda: next(stream))  # ends while this thread lives, so that their identities differ
        CALLS[name](llm, state)

    in_thread(call)
    with pytest.raises(DflashError, match="cut off"):
        next(stream)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_for_the_stream_of_another_thread(llm: ToyLlama, path: str, name: str) -> None:
    state = prepared(llm)
    stream = STREAMS["generate"](llm)
    tokens = [next(stream)]
    order: list[str] = []
    other = threading.Thread(target=lambda: (CALLS[name](llm, state), order.append("other")), daemon=True)
    other.start()
    other.join(0.2)  # time to do damage
    tokens += [next(stream) for _ in range(20)]
    assert llm._input_ids.tolist() == [97, 98, 99, *tokens[:-1]]
    order.append("stream")
    stream.close()
    other.join(GUARD_S)
    assert order == ["stream", "other"]
    fresh = ToyLlama(path).generate([97, 98, 99], temp=0)
    assert tokens == [next(fresh) for _ in range(21)]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_from_inside_a_step_is_refused(llm: ToyLlama, name: str) -> None:
    state = prepared(llm)
    expected = outcome(llm("abc", max_tokens=9, temperature=0))
    refused: list[str] = []

    def meddle(ids: Any, scores: Any) -> Any:
        with pytest.raises(ConfigError, match="inside a step"):
            CALLS[name](llm, state)
        refused.append(name)
        return scores

    assert outcome(llm("abc", max_tokens=9, temperature=0, logits_processor=[meddle])) == expected
    assert len(refused) == 9


def test_an_unreferenced_model_does_not_wait(path: str) -> None:
    """Collected with an open stream of another thread still in it, it is closed without a turn."""
    llm = ToyLlama(path)
    engine, stream, let_go = llm.toy, STREAMS["generate"](llm), threading.Event()
    holder = threading.Thread(target=lambda: (next(stream), let_go.wait(GUARD_S)), daemon=True)
    holder.start()
    while llm.n_tokens < 3:
        let_go.wait(0.01)
    in_thread(llm.__del__)
    let_go.set()
    assert engine.closed


def test_states_are_cached_within_the_lock(llm: ToyLlama) -> None:
    """The state that a cache keeps is that of the output just emitted, whatever comes next."""
    from dflash_ggml.llama.cache import LlamaRAMCache

    cache = LlamaRAMCache()
    llm.set_cache(cache)
    stream = STREAMS["completion"](llm)
    text = "".join(chunk["choices"][0]["text"] for chunk in stream)
    ((key, state),) = cache.cache_state.items()
    assert list(key) == state.input_ids[: state.n_tokens].tolist() == list(state.llama_state.tokens)
    assert llm.detokenize(list(key)).decode() == ("abc" + text)[: len(llm.detokenize(list(key)))]


class TornSlot(FakeSlot):
    """An interrupt comes in the middle of a pass, which leaves the state inconsistent as in the real engine."""

    def _row(self, *args: Any) -> Any:
        engine: Any = self.engine
        if engine.interrupt:
            engine.interrupt, self._inconsistent = False, True
            raise KeyboardInterrupt
        return super()._row(*args)


class TornEngine(FakeEngine):
    interrupt = False

    def make_slot(self, rows: int) -> FakeSlot:
        return TornSlot(self, rows)


@pytest.mark.parametrize("name", ["eval", "generate"])
def test_an_interrupt_does_not_affect_later_calls(llm: ToyLlama, path: str, name: str) -> None:
    class TornLlama(ToyLlama):
        def _open_engine(self) -> Any:
            toy = super()._open_engine()
            return TornEngine(config=toy.config, tokenizer=toy.tokenizer)

    inconsistent = TornLlama(path)
    for model in (inconsistent, llm):
        model.eval([72, 105])
    engine: Any = inconsistent.toy
    stream = inconsistent.generate([65], temp=0, reset=False)
    if name == "generate":
        next(stream)
    engine.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        next(stream) if name == "generate" else inconsistent.eval([65])
    n = inconsistent.n_tokens
    llm.eval(inconsistent._input_ids.tolist()[2:])
    for model in (inconsistent, llm):
        model.eval([66])
    assert inconsistent.n_tokens == llm.n_tokens == n + 1
    assert inconsistent.sample(temp=0) == llm.sample(temp=0)
