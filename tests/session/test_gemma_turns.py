"""Tests of Gemma 4's turns through a session, with its tags as control tokens and as visible ones: thoughts, calls, grammars."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.session.answer import Answer, Block
from dflash_ggml.session.events import Finish
from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import Session, run_chat
from dflash_ggml.text.tools import NamedTool
from reference.fake_engine import FakeEngine, byte_vocabulary
from reference.vendored import vendored

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "n": {"type": "integer"},
        "list": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    },
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}} for name in "fg"
)
# a model that is a hash ends no string that may continue
ENDING = {**SCHEMA, "properties": {"a": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}}}
BOUNDED = tuple({**tool, "function": {**tool["function"], "parameters": ENDING}} for tool in TOOLS)
STRICT = tuple({**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS)
THOUGHT = "<|channel>thought\nHm.\n<channel|>"
CALL = '<|tool_call>call:f{a:<|"|>x {"y"}<|"|>,n:3}<tool_call|>'


@pytest.fixture(scope="module", params=[3, 4], ids=["control", "visible"])
def session(request: pytest.FixtureRequest) -> Session:
    template = vendored("templates/google-gemma-4-31B-it.jinja").read_text(encoding="utf-8")
    vocabulary = byte_vocabulary(template=template, gemma=request.param)
    return Session(FakeEngine(tokenizer=vocabulary))  # type: ignore[arg-type]


def answer(session: Session, reply: str, **options: Any) -> Answer:
    session.engine.replies = [reply]  # type: ignore[attr-defined]
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
    return Answer.of(
        run_chat(session, ChatRequest(**{**base, "sampling": SamplingParams(temperature=0), **options}))
    )


def calls_of(found: Answer) -> list[Block]:
    return [block for block in found.blocks if block.kind == "tool"]


@pytest.mark.parametrize("mode", ["plain", "chain", "tree"])
def test_a_thought_and_a_call(session: Session, mode: Any) -> None:
    found = answer(session, f"{THOUGHT}{CALL}<|tool_response>", tools=TOOLS, mode=mode, enable_thinking=True)
    assert [(call.name, json.loads(call.text)) for call in calls_of(found)] == [
        ("f", {"a": 'x {"y"}', "n": 3})
    ]
    assert (found.reasoning, found.text, found.done()[1]) == ("Hm.", "", Finish("tool_calls"))


def test_thinking_is_the_templates_own_variable(session: Session) -> None:
    def prompt(**options: Any) -> str:
        return session.prepare(ChatRequest(messages=[{"role": "user", "content": "x"}], **options)).text

    assert prompt(enable_thinking=True).startswith("<|turn>system\n<|think|>\n")
    assert prompt(enable_thinking=False).endswith("<|turn>model\n<|channel>thought\n<channel|>")


def test_a_used_up_budget_ends_the_thought(session: Session) -> None:
    found = answer(
        session,
        "<|channel>thought\n" + "abcdfg" * 9,
        reasoning_budget=12,
        enable_thinking=True,
        ignore_eos=True,
    )
    assert found.reasoning.startswith("a") and len(found.reasoning) <= 12 and found.text


def test_a_thought_goes_on(session: Session) -> None:
    begun = {"role": "assistant", "content": "", "reasoning_content": "So"}
    rows = [{"role": "user", "content": "x"}, begun]
    found = answer(session, " it is<channel|>Yes<|im_end|>", messages=rows, continue_final_message=True)
    assert (found.reasoning, found.text) == (" it is", "Yes")


@pytest.mark.parametrize("choice", ["required", NamedTool("f")], ids=str)
@pytest.mark.parametrize("reply", [CALL, "No call.", '<|tool_call>call:f{n:3,a:<|"|>'])
def test_forced_calls_fit(session: Session, choice: Any, reply: str) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra: grammar)")
    tools, schema = (TOOLS, SCHEMA) if reply == CALL else (BOUNDED, ENDING)
    found = answer(session, reply, tools=tools, tool_choice=choice)
    whole = calls_of(found)
    if found.done()[1] == Finish("length"):  # it continues with a call; only the last one may be cut
        whole = whole[:-1]
    assert found.text == "" and whole
    for call in whole:
        assert call.name in (choice.name if isinstance(choice, NamedTool) else "fg")
        jsonschema.validate(json.loads(call.text), schema)
    if reply == CALL:
        assert json.loads(calls_of(found)[0].text) == {"a": 'x {"y"}', "n": 3}


@pytest.mark.parametrize("thinking", [False, True])
def test_strict_tools_bind_a_call_that_was_begun(session: Session, thinking: bool) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra: grammar)")
    reply = THOUGHT * thinking + CALL.replace("n:3", 'm:3,list:["u"]')
    found = answer(session, reply, tools=STRICT, enable_thinking=thinking)
    assert found.reasoning == "Hm." * thinking
    (call, *_) = calls_of(found)
    assert call.name == "f" and call.text.startswith('{"a":"x {\\"y\\"}"') and '"m"' not in call.text
