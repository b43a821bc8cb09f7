"""Requests and events are plain data: they survive pickle and JSON, and no field can hold anything else."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ggml.errors import ConfigError
from dflash_ggml.session.events import StepReport, TextDelta, TokenLogprob
from dflash_ggml.session.requests import ChatRequest, CompletionRequest, GrammarSpec
from dflash_ggml.session.wire import EVENTS, REQUESTS, from_dict, to_dict

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
}


def is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def not_plain(hint: Any, where: str, free: bool = False) -> list[str]:
    """The places of an annotation at which something else than plain data may stand; `free`: JSON values may."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in SCALARS or origin is Literal or (free and hint is Any):
        return []
    if dataclasses.is_dataclass(hint):
        return fields_not_plain(hint)
    if is_union(hint):
        return [bad for option in args for bad in not_plain(option, where)]
    if origin is Mapping and args[0] in (str, int):
        return not_plain(args[1], where, free=args[0] is str)
    if (origin is tuple and args[-1] is Ellipsis) or origin is Sequence:
        return not_plain(args[0], where)
    return [f"{where}: {hint}"]


def fields_not_plain(kind: type) -> list[str]:
    hints = get_type_hints(kind)
    return [bad for name, hint in hints.items() for bad in not_plain(hint, f"{kind.__name__}.{name}")]


def values(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Values of an annotated type."""
    origin, args = get_origin(hint), get_args(hint)
    if name in VALID:
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


@pytest.mark.parametrize("kind", [*REQUESTS, *EVENTS], ids=lambda kind: kind.__name__)
def test_every_type_survives_pickle_and_json(kind: type) -> None:
    @settings(max_examples=40)
    @given(instances(kind))
    def survives(value: Any) -> None:
        assert pickle.loads(pickle.dumps(value)) == value
        text = json.dumps(to_dict(value))
        again = from_dict(json.loads(text))
        assert type(again) is kind and again == value and json.dumps(to_dict(again)) == text

    survives()


@pytest.mark.parametrize("kind", [*REQUESTS, *EVENTS], ids=lambda kind: kind.__name__)
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


def test_what_json_lacks() -> None:
    entry = TokenLogprob(7, b"\xe4\xb8", -math.inf, (), 3)
    data = to_dict(TextDelta("x", (entry,)))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert from_dict(data).logprobs == (entry,)


def test_what_is_refused() -> None:
    for bad in (object(), b"x", math.inf, {1: 2}, GrammarSpec("json_object")):
        with pytest.raises(ConfigError, match=r"messages\[0\]\['content'\]: .* is no plain data"):
            to_dict(ChatRequest(messages=[{"role": "user", "content": bad}]))
    with pytest.raises(ConfigError, match="type: 'Nothing' is no request or event"):
        from_dict({"type": "Nothing"})
    with pytest.raises(ConfigError, match="CompletionRequest: 'on_step' is not one of its fields"):
        from_dict({**to_dict(CompletionRequest(prompt="x")), "on_step": "x"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": ...}, "CompletionRequest: 'prompt' is missing"),
        ({"sampling": {"temperature": 0.5}}, "sampling: .* is no SamplingParams"),
        ({"sampling": {"type": "GrammarSpec"}}, "sampling: .* is no SamplingParams"),
        ({"grammar": {"type": "GrammarSpec"}}, "GrammarSpec: 'kind' is missing"),
        ({"stop": [{}]}, "stop: {} is no str"),
        ({"type": ["CompletionRequest"]}, "type: .* is no request or event"),
        ({"type": ...}, "type: None is no request or event"),
    ],
)
def test_objects_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    data = {**to_dict(CompletionRequest(prompt="x")), **change}
    with pytest.raises(ConfigError, match=words):
        from_dict({name: value for name, value in data.items() if value is not ...})


def test_numbers_that_json_lacks_come_back_as_numbers() -> None:
    report = StepReport((), (), (), (float("-inf"), 0.0), (), 0, (), "tree", {"draft": float("inf")})
    only = dataclasses.replace(report, log_probs=(float("-inf"),))
    for value in (report, only):
        assert from_dict(json.loads(json.dumps(to_dict(value)))) == value
