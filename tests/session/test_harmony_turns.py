"""Tests of gpt-oss's turns through a session: effort, budgets, grammars, log-probabilities. A reply is what the fake model
prefers to emit."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.session.answer import Answer, Block
from dflash_ggml.session.events import Finish, TextDelta
from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import Session, run_chat
from dflash_ggml.text.tools import NamedTool
from reference.fake_engine import FakeEngine, byte_vocabulary
from reference.vendored import vendored

USER = {"role": "user", "content": "hello"}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 8},
        "n": {"type": "integer"},
    },  # bounded: the model is a hash
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}} for name in "fg"
)
STRICT = tuple({**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS)
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


@pytest.fixture(scope="module")
def session() -> Session:
    template = vendored("templates/openai-gpt-oss-120b.jinja").read_text(encoding="utf-8")
    return Session(FakeEngine(tokenizer=byte_vocabulary(template=template, harmony=True)))  # type: ignore[arg-type]


def chat(**options: Any) -> ChatRequest:
    sampling = SamplingParams(temperature=0)
    return ChatRequest(**{"messages": [USER], "sampling": sampling, "max_tokens": 300, **options})


def answer(session: Session, reply: str, **options: Any) -> Answer:
    session.engine.replies = [reply]  # type: ignore[attr-defined]
    return Answer.of(run_chat(session, chat(**options)))


def calls_of(found: Answer) -> list[Block]:
    return [block for block in found.blocks if block.kind == "tool"]


@pytest.mark.parametrize("mode", ["plain", "chain", "tree"])
def test_the_end_of_a_message_does_not_end_the_turn(session: Session, mode: Any) -> None:
    reply = THOUGHT + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + THOUGHT
    found = answer(session, reply + FINAL + "Yes<|return|>", mode=mode)
    assert (found.reasoning, found.text) == ("Hm.\n\nHm.", "I look.\n\nYes")
    assert found.done()[1] == Finish("stop")


def test_a_call_ends_it(session: Session) -> None:
    found = answer(session, THOUGHT + TO_F + '{"a": "x"}<|call|>more', tools=TOOLS)
    assert [(call.name, call.text) for call in calls_of(found)] == [("f", '{"a": "x"}')]
    assert found.reasoning == "Hm." and found.done()[1] == Finish("tool_calls")


@pytest.mark.parametrize(
    ("option", "level"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "max"}, "high"),
        ({"enable_thinking": False}, "low"),
        ({"enable_thinking": True}, "medium"),
        ({"chat_template_kwargs": {"reasoning_effort": "medium"}, "enable_thinking": False}, "medium"),
    ],
)
def test_effort_reaches_the_template(session: Session, option: dict[str, Any], level: str) -> None:
    prepared = session.prepare(chat(**option))
    assert f"Reasoning: {level}\n" in prepared.text and prepared.reasoning == "open"
    assert session.thought_limit(prepared) is None


def test_a_used_up_budget_ends_the_thought(session: Session) -> None:
    reply = "<|channel|>analysis<|message|>" + "abcdfg" * 9
    found = answer(session, reply, reasoning_budget=5, ignore_eos=True)
    assert found.reasoning == "abcdf" and found.text
    end = session.tokenizer.encode("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert found.done()[0].reasoning_n == 5 + 1 and len(end) > 10


def test_a_thought_and_an_answer_go_on(session: Session) -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "So"}
    found = answer(
        session, " it is<|end|><|start|>assistant" + FINAL + "Yes<|return|>",
        messages=[USER, thought], continue_final_message=True,
    )  # fmt: skip
    assert (found.reasoning, found.text) == (" it is", "Yes")
    begun = {"role": "assistant", "content": "It is"}
    found = answer(session, " so<|return|>", messages=[USER, begun], continue_final_message=True)
    assert (found.reasoning, found.text) == ("", " so")


def test_log_probabilities_are_of_the_visible_text(session: Session) -> None:
    session.engine.replies = [THOUGHT + FINAL + "Yes<|return|>"]  # type: ignore[attr-defined]
    deltas = [e for e in run_chat(session, chat(logprobs=1)) if isinstance(e, TextDelta)]
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert b"".join(entry.data for entry in entries) == b"Yes"
    assert [entry.offset for entry in entries] == [0, 1, 2]


# ---- what binds an answer


@pytest.mark.parametrize("choice", ["required", NamedTool("f")], ids=str)
@pytest.mark.parametrize("thought", ["", THOUGHT])
@pytest.mark.parametrize(
    "head", [TO_F, " to=functions.f<|channel|>commentary json<|message|>", FINAL, "Hello"]
)
def test_a_forced_call_comes(session: Session, choice: Any, thought: str, head: str) -> None:
    """After as many thoughts as the model has, with arguments that fit, whatever it prefers to emit."""
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra: grammar)")
    found = answer(
        session,
        thought + head + '{"b": 1, "a": "x"}<|call|>',
        tools=TOOLS,
        tool_choice=choice,
        reasoning_budget=40,
    )
    assert found.done()[1] == Finish("tool_calls") and len(calls_of(found)) == 1
    assert calls_of(found)[0].name in (choice.name if isinstance(choice, NamedTool) else "fg")
    jsonschema.validate(json.loads(calls_of(found)[0].text), SCHEMA)


def test_a_willing_model_is_let(session: Session) -> None:
    """What fits comes as the model writes it."""
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra: grammar)")
    written = THOUGHT + "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant" + TO_F
    for options in (
        {"tool_choice": "required", "tools": TOOLS},
        {"tools": STRICT},
        {"tools": TOOLS, "response_format": FORMAT},
    ):
        found = answer(session, written + '{"a": "x", "n": 3}<|call|>', **options)
        assert [(call.name, json.loads(call.text)) for call in calls_of(found)] == [("f", {"a": "x", "n": 3})]
        assert (found.reasoning, found.text) == ("Hm.", "One moment.")
    for options in ({"tools": STRICT}, {}):
        assert answer(session, THOUGHT + FINAL + "Just words.<|return|>", **options).text == "Just words."


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["alone", "or a call"])
@pytest.mark.parametrize("head", [FINAL, "<|channel|>final <|constrain|>json<|message|>"])
def test_a_format_binds_the_final_message(session: Session, tools: Any, head: str) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra: grammar)")
    found = answer(
        session, THOUGHT + head + '{"a": "x"} and so on<|return|>', tools=tools, response_format=FORMAT
    )
    assert (found.reasoning, json.loads(found.text)) == ("Hm.", {"a": "x"})


def test_strict_arguments_fit(session: Session) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra: grammar)")
    found = answer(session, THOUGHT + TO_F + '{"b": 1, "a": "x"}<|call|>', tools=STRICT)
    assert found.done()[1] == Finish("tool_calls")
    jsonschema.validate(json.loads(calls_of(found)[0].text), SCHEMA)
