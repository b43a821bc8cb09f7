"""Tests of the pipe to the engine process: requests, events and errors arrive as they were sent."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the server extra is not installed")

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling_params import SamplingParams
from dflash_ggml.errors import (
    ConfigError,
    ContextOverflowError,
    DeviceError,
    DflashError,
    ModelFileError,
    NonFiniteError,
    NoRoomError,
)
from dflash_ggml.server.errors import ApiError, EngineLost
from dflash_ggml.server.messages import (
    Answer,
    Call,
    Cancel,
    Failed,
    Item,
    Named,
    Order,
    Prompt,
    prompt_of,
)
from dflash_ggml.server.opening import Opener
from dflash_ggml.server.pipe import Pipe, convert
from dflash_ggml.session.events import Event, StepReport, TextDelta, TokenLogprob
from dflash_ggml.session.prompts import Prepared
from dflash_ggml.session.requests import ChatRequest, CompletionRequest
from dflash_ggml.text.prompt_selection import Choice, Selection
from dflash_ggml.text.tokenizer import TooManyTokens

KINDS = [ChatRequest, CompletionRequest, *get_args(Event)]
SCALARS = (NoneType, bool, int, float, str, bytes)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
# fields that refuse some values of their type
VALID = {
    "budget": st.none() | st.integers(1),
    "logprobs": st.none() | st.integers(0),
    "reasoning_budget": st.none() | st.integers(-1),
    "prompt_keep": st.none() | st.floats(0.0, 1.0, exclude_min=True),
}


def is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def not_plain(hint: Any, where: str, free: bool = False) -> list[str]:
    """The parts of an annotation that allow something else than plain data; `free`: JSON values may."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in SCALARS or origin is Literal or (free and hint is Any):
        return []
    if dataclasses.is_dataclass(hint):
        return fields_not_plain(hint)
    if is_union(hint):
        return [bad for option in args for bad in not_plain(option, where)]
    if origin is Mapping and args[0] in (str, int):
        return not_plain(args[1], where, free=args[0] is str)
    if origin in (tuple, Sequence):
        return [bad for part in args if part is not Ellipsis for bad in not_plain(part, where)]
    return [f"{where}: {hint}"]


def fields_not_plain(kind: type) -> list[str]:
    hints = get_type_hints(kind)
    return [bad for name, hint in hints.items() for bad in not_plain(hint, f"{kind.__name__}.{name}")]


def values(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Values of an annotated type."""
    origin, args = get_origin(hint), get_args(hint)
    if name in VALID and hint in (int | None, float | None):
        return VALID[name]
    if dataclasses.is_dataclass(hint):
        return instances(hint)
    if is_union(hint):
        return st.one_of(*(values(option) for option in args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is Mapping:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is Sequence:
        return st.lists(values(args[0]), max_size=3)
    if hint is float:
        return st.floats(allow_nan=False)
    return json_values if hint is Any else st.from_type(hint)


def instances(kind: type) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: values(hint, name) for name, hint in get_type_hints(kind).items()})


def sent(message: Any, kind: Any) -> Any:
    """What arrives at the other end."""
    ours, theirs = map(Pipe, multiprocessing.Pipe())
    ours.send(message)
    return theirs.receive(kind)


def test_the_end_of_a_pipe() -> None:
    ours, theirs = map(Pipe, multiprocessing.Pipe())
    assert not theirs.wait(0)
    ours.close()
    assert theirs.wait(0)
    with pytest.raises(EOFError):
        theirs.receive(bool)
    with pytest.raises(OSError, match="Broken pipe"):
        theirs.send(True)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_request_and_event_arrives_as_it_was_sent(kind: type) -> None:
    ours, theirs = map(Pipe, multiprocessing.Pipe())

    @settings(max_examples=40)
    @given(instances(kind))
    def arrives(value: Any) -> None:
        assert pickle.loads(pickle.dumps(value)) == value
        ours.send(Item(7, Named.of(value)))
        again = convert(theirs.receive(Answer).value, Named).value()
        assert type(again) is kind and again == value

    arrives()


@pytest.mark.parametrize("kind", [*KINDS, Prepared], ids=lambda kind: kind.__name__)
def test_no_field_can_hold_anything_but_plain_data(kind: type) -> None:
    assert fields_not_plain(kind) == []


@dataclasses.dataclass
class Odd:
    good: Mapping[str, Any]
    call: Callable[[int], bool] | None
    array: np.ndarray
    inside: tuple[object, ...]
    anything: Any


def test_the_walk_finds_what_is_not_plain() -> None:
    found = [bad.partition(":")[0] for bad in fields_not_plain(Odd)]
    assert found == ["Odd.call", "Odd.array", "Odd.inside", "Odd.anything"]


def test_a_call_with_a_request_and_its_prompt() -> None:
    sampling = SamplingParams(logit_bias={5: -math.inf, 6: 1.5}, seed=2**64 - 1)
    request = ChatRequest(
        messages=[{"role": "user", "content": "a\ud800é", "big": 10**30}],
        tools=({"function": {"parameters": {"maximum": -(2**70), "1": None}}},),
        sampling=sampling,
    )
    choice = Choice("a scorer", 0.1, ((5, 6), (6, 9)), (0, 2), 1, ((0, 9),))
    prepared = Prepared(
        request,
        "text",
        (1, 2, 3),
        (1,),
        0,
        "open",
        Selection((1, 2, 3), ((0, 2), (5, 6)), 9, 0.5, choice=choice),
    )
    call = sent(Call(3, "events", [Named.of(request), *prompt_of(prepared)]), Order)
    assert isinstance(call, Call) and (call.id, call.method) == (3, "events")
    assert Prepared(convert(call.args[0], Named).value(), *convert(call.args[1:], Prompt)) == prepared
    assert sent(Cancel(3), Order) == Cancel(3)


def test_an_opener_arrives_with_its_configuration() -> None:
    config = EngineConfig(Path("m.gguf"), Path("d.gguf"), gpu_memory=0.9, spec=("suffix",))
    for gpu_memory in (0.9, 23 << 30, None):
        config = dataclasses.replace(config, gpu_memory=gpu_memory)
        opener = Opener(config, 1 << 40, SamplingParams(logit_bias={1: -math.inf}), "on", Path("/cache"))
        assert convert(sent(Call(0, "open", [opener]), Call).args[0], Opener) == opener


def test_numbers_that_json_lacks_arrive_as_numbers() -> None:
    entry = TokenLogprob(7, b"\xe4\xb8", -math.inf, (), 3)
    report = StepReport((), (), (), (-math.inf, 0.0), (), 0, (), "tree", {"draft": math.inf})
    for value in (TextDelta("x", (entry,)), report):
        assert sent(Named.of(value), Named).value() == value


@pytest.mark.parametrize(
    "bad",
    [
        ["Nothing", {}],
        ["CompletionRequest", {}],
        ["CompletionRequest", {"prompt": {}}],
        ["CompletionRequest", {"prompt": "x", "stop": [{}]}],
        ["CompletionRequest", {"prompt": "x", "grammar": {}}],
        ["CompletionRequest", {"prompt": "x", "budget": 0}],
        ["TextDelta", []],
        ["TextDelta", {"text": 5}],
        ["TextDelta"],
        {"kind": "TextDelta"},
    ],
)
def test_what_does_not_fit_is_refused(bad: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        sent(bad, Named).value()


@pytest.mark.parametrize("bad", [object(), {1, 2, object()}, 1j])
def test_what_is_no_plain_data_is_not_sent(bad: Any) -> None:
    with pytest.raises(TypeError):
        sent(Named.of(ChatRequest(messages=[{"role": "user", "content": bad}])), Named)


ERRORS = [
    ConfigError("prompt: it is empty"),
    ContextOverflowError("too long", 9, 8),
    ContextOverflowError("too long"),
    ModelFileError("x.gguf: damaged"),
    DeviceError("out of memory"),
    DflashError("no"),
    NonFiniteError("NaN"),
    NoRoomError("full"),
    EngineLost("gone"),
    TooManyTokens(70_000),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_errors_that_were_raised_on_purpose_are_the_same_on_the_other_side(error: Exception) -> None:
    class More(type(error)):  # type: ignore[misc]
        """A kind that the other side need not know."""

    for given_error in (error, More(*error.args)):
        failed = sent(Failed.of(1, given_error), Answer)
        got = failed.error()
        assert failed.is_expected and type(got) is type(error) and str(got) == str(error)
    assert vars(sent(Failed.of(1, error), Answer).error()) == vars(error)


def test_other_errors_are_a_500_that_names_their_kind() -> None:
    failed = sent(Failed.of(1, ZeroDivisionError("secret")), Answer)
    got = failed.error()
    assert isinstance(got, ApiError) and (got.status, got.code) == (500, "internal_error")
    assert "ZeroDivisionError" in got.message and "secret" not in got.message and not failed.is_expected
