"""Tests of create_chat_completion: shapes, reasoning, tools in every tool_choice, response formats. Toy engine."""

from __future__ import annotations

import json
import warnings
from typing import Any

import jsonschema
import pytest

from dflash_ggml.errors import ConfigError
from dflash_ggml.llama.chat_handlers import register_chat_completion_handler
from reference.fake_engine import TOOL_TEMPLATE
from reference.toy_llama import ToyLlama

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["c", "f"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
PING = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, PING]
NAMED = {"type": "function", "function": {"name": "weather"}}
HI = [{"role": "user", "content": "hi"}]
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nSan José\n</parameter>\n<parameter=unit>\nc\n</parameter>\n"
    "</function>\n</tool_call>"
)
GENERIC_CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "San José", "unit": "c"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("toy") / "toy.gguf"
    path.touch()
    return str(path)


@pytest.fixture
def plain(model_path: str) -> ToyLlama:
    """Its template knows no tools, its vocabulary no tool tags: as the embedded demo pair."""
    return ToyLlama(model_path, call_tags=False)


@pytest.fixture
def llm(model_path: str) -> ToyLlama:
    """Template and vocabulary in the manner of Qwen3.5."""
    return ToyLlama(model_path, toy_template=TOOL_TEMPLATE)


def added_up(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message and reason that a stream amounts to."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk" and chunk["id"] == chunks[0]["id"]
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        message["role"] = delta.get("role", message["role"])
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({k: v for k, v in call.items() if k != "index"})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": chunks[-1]["choices"][0]["finish_reason"]}


def both_ways(llm: ToyLlama, reply: str, messages: Any = HI, **options: Any) -> dict[str, Any]:
    """The choice of a plain answer, after checking that the stream gives the same."""
    options = {"temperature": 0, "max_tokens": 400, **options}
    llm.toy.replies = [reply]
    body = llm.create_chat_completion(messages, **options)
    llm.toy.replies = [reply]
    chunks = list(llm.create_chat_completion(messages, stream=True, **options))
    streamed = added_up(chunks)
    (choice,) = body["choices"]
    message = choice["message"]
    assert streamed["finish_reason"] == choice["finish_reason"]
    assert streamed["message"]["content"] == (message["content"] or "")
    assert streamed["message"]["reasoning_content"] == message.get("reasoning_content", "")
    calls = message.get("tool_calls", [])
    assert [c["function"] for c in streamed["message"]["tool_calls"]] == [c["function"] for c in calls]
    assert (
        chunks[0]["choices"][0]["delta"] == {"role": "assistant"} and chunks[-1]["choices"][0]["delta"] == {}
    )
    assert chunks[-1]["usage"]["completion_tokens"] == body["usage"]["completion_tokens"]
    return choice


# --- shapes


def test_shape_of_an_answer(plain: ToyLlama) -> None:
    plain.toy.replies = ["Hello"]
    out = plain.create_chat_completion(HI)
    assert out["id"].startswith("chatcmpl-") and out["object"] == "chat.completion"
    assert set(out) == {"id", "object", "created", "model", "choices", "usage", "timings"}
    (choice,) = out["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello"},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert out["usage"]["total_tokens"] == out["usage"]["prompt_tokens"] + out["usage"]["completion_tokens"]


def test_shape_of_a_stream(plain: ToyLlama) -> None:
    plain.toy.replies = ["Hello"]
    chunks = list(plain.create_chat_completion(HI, stream=True))
    assert set(chunks[0]) == {"id", "model", "created", "object", "choices"}
    for chunk in chunks:
        assert set(chunk["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and "timings" in chunks[-1]


def test_logprobs(plain: ToyLlama) -> None:
    choice = both_ways(plain, "<think>no</think>\n\nyes é", logprobs=True, top_logprobs=2)
    content = choice["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode().lstrip("\n") == "yes é"
    assert all(len(e["top_logprobs"]) == 2 and e["logprob"] <= 0 for e in content)
    assert choice["logprobs"]["refusal"] is None


def test_errors_of_a_stream_surface_at_the_first_next(plain: ToyLlama) -> None:
    stream = plain.create_chat_completion([{"role": "user", "content": "x" * 2000}], stream=True)
    with pytest.raises(ValueError, match=r"Requested tokens \(\d+\) exceed context window of 1024"):
        next(stream)


def test_unknown_keywords_are_refused(plain: ToyLlama) -> None:
    with pytest.raises(TypeError, match="'templature'"):
        plain.create_chat_completion(HI, templature=0)


# --- reasoning


def test_reasoning_is_split_from_content(plain: ToyLlama, llm: ToyLlama) -> None:
    choice = both_ways(plain, "<think>\nhm\n</think>\n\nHello")
    assert choice["message"] == {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
    # this template opens the block itself
    choice = both_ways(llm, "hm\n</think>\n\nHello")
    assert choice["message"]["reasoning_content"] == "hm" and choice["message"]["content"] == "Hello"


def test_thinking_is_switched_off_by_the_template(llm: ToyLlama) -> None:
    for options in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        choice = both_ways(llm, "Hello", **options)
        assert choice["message"] == {"role": "assistant", "content": "Hello"}


def test_a_budget_ends_the_thought(llm: ToyLlama) -> None:
    for options, thought in (
        ({"reasoning_budget": 3}, "abc"),
        ({"reasoning_budget": -1}, "abcdfgabcdfg"),
        ({"reasoning_effort": "low", "max_tokens": 64}, "abcd"),
    ):
        choice = both_ways(llm, "abcdfgabcdfg</think>x<|im_end|>", **{"max_tokens": 30, **options})
        assert choice["message"]["reasoning_content"] == thought and choice["message"]["content"]
    with pytest.raises(ConfigError, match=r"^reasoning_budget: "):
        llm.create_chat_completion(HI, reasoning_budget=-2)


def test_a_thought_goes_on(llm: ToyLlama) -> None:
    messages = [*HI, {"role": "assistant", "content": "", "reasoning_content": "I was"}]
    options = {"chat_template_kwargs": {"continue_final_message": True}}
    choice = both_ways(llm, " ok</think>yes", messages, **options)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (" ok", "yes")


def test_stop_strings_do_not_look_into_the_reasoning(llm: ToyLlama) -> None:
    choice = both_ways(llm, "a STOP b</think>c STOP d", stop=["STOP"])
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("a STOP b", "c ")
    assert choice["finish_reason"] == "stop"


def test_usage_counts_reasoning(llm: ToyLlama) -> None:
    llm.toy.replies = ["abcd</think>x"]
    out = llm.create_chat_completion(HI, temperature=0)
    assert out["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert out["usage"]["completion_tokens"] == 6


# --- tools


def test_auto_parses_what_the_model_writes(llm: ToyLlama) -> None:
    choice = both_ways(llm, f"look\n</think>\n\nOn it.\n\n{CALL}\n{CALL}", tools=TOOLS, tool_choice="auto")
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("On it.", "look")
    assert choice["finish_reason"] == "tool_calls" and "function_call" not in message
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    for call in message["tool_calls"]:
        assert call["type"] == "function" and call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "San José", "unit": "c"}


def test_auto_without_a_call_is_a_plain_answer(llm: ToyLlama) -> None:
    choice = both_ways(llm, "</think>just text", tools=TOOLS)
    assert choice["message"]["content"] == "just text" and choice["finish_reason"] == "stop"


def test_none_leaves_calls_in_the_text(llm: ToyLlama) -> None:
    choice = both_ways(llm, f"</think>{CALL}", tools=TOOLS, tool_choice="none")
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    assert (
        "weather" not in llm.detokenize(llm._input_ids.tolist(), special=True).decode().split("assistant")[0]
    )


def test_one_call_only(llm: ToyLlama) -> None:
    choice = both_ways(llm, f"</think>{CALL}{CALL}", tools=TOOLS, parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"


def ending(llm: ToyLlama) -> Any:
    """A processor with a liking for ends of values, which the toy model would hardly find by chance."""

    def like(ids: Any, scores: Any) -> Any:
        text = llm.detokenize(ids[-20:].tolist()).decode("utf-8", "replace")
        for marker in ("\n</parameter>\n", '"', "</tool_call>"):
            n = max(k for k in range(len(marker)) if text.endswith(marker[:k]))
            scores[llm.tokenize(marker[n].encode())[0]] += 4 + 4 * n
        scores[llm.token_eos()] += 9
        return scores

    return like


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tool_choice", ["required", NAMED])
@pytest.mark.parametrize("known", [True, False])
def test_forced_calls_fit_their_schema(
    llm: ToyLlama, plain: ToyLlama, known: bool, tool_choice: Any, seed: int
) -> None:
    """The toy model knows nothing of tools, so a call in its output comes from the grammar."""
    pytest.importorskip("llguidance")
    model = llm if known else plain
    options: dict[str, Any] = {
        "temperature": 1,
        "seed": seed,
        "max_tokens": 900,
        "logits_processor": [ending(model)],
    }
    model.toy.replies = ["a thought</think>" if known else ""]
    out = model.create_chat_completion(HI, tools=TOOLS, tool_choice=tool_choice, **options)
    (choice,) = out["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] is None
    for call in message["tool_calls"]:
        tool = next(t for t in TOOLS if t["function"]["name"] == call["function"]["name"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), tool["function"]["parameters"])
    if tool_choice is NAMED:
        (call,) = message["tool_calls"]
        assert call["id"] == f"call__0_weather_{out['id'].removeprefix('chat')}"
        assert message["function_call"] == call["function"] and call["function"]["name"] == "weather"


@pytest.mark.parametrize("seed", range(4))
def test_strict_tools_in_auto(llm: ToyLlama, seed: int) -> None:
    pytest.importorskip("llguidance")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    llm.toy.replies = ["free { thought</think>Free text. <tool_call>"]
    choice = llm.create_chat_completion(
        HI, tools=[strict], temperature=1, seed=seed, max_tokens=900, logits_processor=[ending(llm)]
    )["choices"][0]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Free text.", "free { thought")
    assert choice["finish_reason"] == "tool_calls"
    for call in message["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])


def test_json_or_a_call(llm: ToyLlama) -> None:
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {"tools": TOOLS, "response_format": {"type": "json_object"}}
    assert both_ways(llm, '</think>{"a": 1}', **options)["message"]["content"] == '{"a": 1}'
    assert both_ways(llm, f"</think>{CALL}", **options)["finish_reason"] == "tool_calls"


def test_forced_call_keeps_what_the_model_wanted_to_say(llm: ToyLlama) -> None:
    pytest.importorskip("llguidance")
    choice = both_ways(llm, f"hm</think>\n\n{CALL}", tools=TOOLS, tool_choice=NAMED)
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "city": "San José",
        "unit": "c",
    }
    assert choice["message"]["reasoning_content"] == "hm"


def test_templates_without_tools_get_a_generic_prompt(plain: ToyLlama) -> None:
    choice = both_ways(plain, f"Sure.\n{GENERIC_CALL}", tools=TOOLS)
    assert choice["message"]["content"] == "Sure."
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "city": "San José",
        "unit": "c",
    }
    prompt = plain.detokenize(plain._input_ids.tolist()).decode()
    assert "Tells the weather." in prompt and '<tool_call>\n{"name": "tool name"' in prompt


def test_functions_of_the_old_api(llm: ToyLlama) -> None:
    functions = [t["function"] for t in TOOLS]
    choice = both_ways(llm, f"</think>{CALL}", functions=functions)
    assert choice["message"]["function_call"]["name"] == "weather"
    choice = both_ways(llm, f"</think>{CALL}", functions=functions, function_call="none")
    assert "function_call" not in choice["message"]


def test_results_go_back_to_the_model(llm: ToyLlama) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "pong"},
    ]
    both_ways(llm, "</think>ok", messages, tools=TOOLS)
    assert "<function=ping>" in llm.detokenize(llm._input_ids.tolist()).decode()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"tools": TOOLS, "tool_choice": {"function": {"name": "nope"}}},
            "Tool choice 'nope' not found in tools.",
        ),
        ({"tools": TOOLS, "tool_choice": {"name": "weather"}}, "tool_choice: {'name': 'weather'}"),
        ({"tools": TOOLS, "tool_choice": 3}, "tool_choice: 3"),
        ({"tools": [{"type": "mcp"}]}, r"tools\[0\]"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "exclude each other"),
        ({"mode": "fast"}, "mode: 'fast'"),
        ({"budget": 0}, "budget"),
        (
            {"response_format": {"type": "json_object"}, "tools": TOOLS, "tool_choice": "required"},
            "exclude each other",
        ),
    ],
)
def test_bad_requests_are_named(llm: ToyLlama, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        llm.create_chat_completion(HI, **options)


# --- response formats

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["ok", "n", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(5))
def test_json_schema_holds_after_free_thinking(llm: ToyLlama, seed: int) -> None:
    pytest.importorskip("llguidance")
    llm.toy.replies = ["no { json here</think>"]
    out = llm.create_chat_completion(
        HI,
        temperature=1,
        seed=seed,
        max_tokens=900,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        logit_bias=dict.fromkeys(llm.tokenize(b" \n\t"), -5.0) | dict.fromkeys(llm.tokenize(b",]}"), 4.0),
    )
    (choice,) = out["choices"]
    assert choice["message"]["reasoning_content"] == "no { json here"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert choice["finish_reason"] == "stop"


def test_json_object_and_schema_shorthand(plain: ToyLlama) -> None:
    pytest.importorskip("llguidance")
    assert json.loads(
        both_ways(plain, '{"a": [1]}', response_format={"type": "json_object"})["message"]["content"]
    )
    choice = both_ways(plain, "12", response_format={"type": "json_object", "schema": {"type": "integer"}})
    assert choice["message"]["content"] == "12"


NUMBERS = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
BY_REFERENCE = {"$ref": "#/$defs/N", "$defs": {"N": {"properties": {"n": NUMBERS}, "required": ["n"]}}}


def test_a_tool_by_reference_and_what_cannot_be_bound(llm: ToyLlama) -> None:
    """Arguments behind a bare reference have their types; a keyword without a grammar is a warning, if it would bind."""
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": {"name": "f", "parameters": BY_REFERENCE}}]
    reply = (
        "</think><tool_call>\n<function=f>\n<parameter=n>\n[2, 2]\n</parameter>\n</function>\n</tool_call>"
    )
    with pytest.warns(UserWarning, match=r"tools: f: n: uniqueItems \(not enforced\)"):
        choice = both_ways(llm, reply, tools=tools, tool_choice="required")
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"n": [2, 2]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = both_ways(llm, reply, tools=tools)
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"n": [2, 2]}


def test_a_forced_call_ends_though_the_model_writes_a_line_behind_it(llm: ToyLlama) -> None:
    pytest.importorskip("llguidance")
    choice = both_ways(llm, f"</think>{CALL}\n", tools=[WEATHER], tool_choice="required")
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"response_format": {"type": "json_object", "schema": {"properties": {"n": {"$ref": "#/$defs/x"}}}}}, "n: .*names no"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}]}, "f: .*names no"),
        ({"response_format": {"type": "json_object", "schema": {"properties": {"n": {"type": "x"}}}}}, "response_format: n: "),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_schema_is_named(llm: ToyLlama, options: dict[str, Any], words: str) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(ConfigError, match=words):
        llm.create_chat_completion(HI, **options)


# --- handlers


def test_handlers_of_the_users_own(plain: ToyLlama, model_path: str) -> None:
    seen: dict[str, Any] = {}

    def handler(*, llama: Any, messages: Any, **kwargs: Any) -> Any:
        seen.update(kwargs)
        return llama.create_completion("abc", max_tokens=3, stream=kwargs["stream"])

    llm = ToyLlama(model_path, chat_handler=handler)
    assert llm.create_chat_completion(HI, top_k=7, seed=3)["object"] == "text_completion"
    assert (seen["top_k"], seen["seed"], seen["temperature"]) == (7, 3, 0.2)

    register_chat_completion_handler("test-format")(handler)
    assert ToyLlama(model_path, chat_format="test-format").create_chat_completion(HI)["choices"]
    with pytest.raises(ValueError, match="already registered"):
        register_chat_completion_handler("test-format")(handler)


def test_chatml_by_name(model_path: str) -> None:
    llm = ToyLlama(model_path, toy_template=TOOL_TEMPLATE, chat_format="chatml")
    llm.toy.replies = ["x"]
    assert llm.create_chat_completion(HI)["choices"][0]["message"] == {"role": "assistant", "content": "x"}


def test_openai_types(plain: ToyLlama) -> None:
    pytest.importorskip("openai")
    plain.toy.replies = ["Hello", "Hello"]
    assert plain.create_chat_completion_openai_v1(HI).choices[0].message.content == "Hello"
    chunks = list(plain.create_chat_completion_openai_v1(HI, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [], "tool_choice": NAMED}, "there are no tools"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice 'perhaps' is none of .* taken as auto"),
    ],
)
def test_choices_without_meaning_are_left_out_with_a_warning(
    llm: ToyLlama, options: dict[str, Any], words: str
) -> None:
    llm.toy.replies = ["</think>\n\nfine"]
    with pytest.warns(UserWarning, match=words) as caught:
        out: Any = llm.create_chat_completion(HI, temperature=0, **options)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert out["choices"][0]["message"]["content"] == "fine"


def test_any_is_required(llm: ToyLlama) -> None:
    pytest.importorskip("llguidance")
    out: Any = llm.create_chat_completion(HI, tools=[PING], tool_choice="any", enable_thinking=False)
    assert out["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "ping"
