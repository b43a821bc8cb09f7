"""Tests of real models' chat templates: we render what transformers renders."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dflash_ggml.errors import ConfigError
from dflash_ggml.text.chat_parser import ChatParser, reasoning_at_start
from dflash_ggml.text.deltas import ToolCallArgs
from dflash_ggml.text.template import ChatTemplate, normalise_messages, words_as_thought
from dflash_ggml.text.tools import check_tools
from reference.vendored import vendored

QWEN, GEMMA = "Qwen3.5-4B", "google-gemma-4-31B-it"
LAGUNA = ("poolside-Laguna-S-2.1", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {
        "type": "function",
        "function": {"name": name, "description": "Für <b> & Co", "parameters": parameters},
    }


TOOLS = [
    tool("seek", what={"type": "string"}, n={"type": "integer"}, where={"type": "object"}),
    tool("ping"),
]


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(*pairs: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in pairs]}


ASK, BRIEF = message("user", "  What is é & <b>?\n"), message("system", "Be brief. ")
SOUGHT = message(
    "assistant",
    "Let me see. ",
    **calls(("seek", {"what": 'a\n"b" </parameter>', "n": 3, "where": {"at": [1, None]}}), ("ping", {})),
)
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [ASK],
    "with a system message": [BRIEF, ASK],
    "an empty system message": [message("system", ""), ASK],
    "several turns": [BRIEF, ASK, message("assistant", "It is.\n\n"), message("user", "Why?")],
    "reasoning of an earlier turn": [ASK, message("assistant", "Yes", reasoning_content="\nHm. \n"), ASK],
    "reasoning in the text": [ASK, message("assistant", "<think>\nHm.\n</think>\n\nYes"), ASK],
    "reasoning of this turn": [ASK, message("assistant", "Yes ", reasoning_content="Hm.")],
    "an answer to be continued": [ASK, message("assistant", "It is not quite ")],
    "an answer of lines": [ASK, message("assistant", "One\n\n  two\n\t")],
    "an empty answer": [ASK, message("assistant", "")],
    "calls": [ASK, SOUGHT],
    "a call without words": [ASK, message("assistant", "", **calls(("ping", {})))],
    "results": [BRIEF, ASK, SOUGHT, message("tool", "found "), message("tool", '{"a": 1}')],
    "results and an answer": [ASK, SOUGHT, message("tool", "x"), message("assistant", "So it is."), ASK],
    "reasoning between calls": [
        ASK,
        message("assistant", "", reasoning_content="First this", **calls(("ping", {}))),
        message("tool", "pong"),
        message("assistant", " now ", reasoning_content="then that"),
    ],
    "a result quoted by the user": [message("user", "<tool_response>\nx\n</tool_response>"), ASK],
    "a late system message": [ASK, message("assistant", "Yes"), BRIEF, ASK],
    "no question": [BRIEF],
}
OPTIONS: list[dict[str, Any]] = [
    {"tools": tools, "enable_thinking": thinking, **end}
    for tools, thinking, end in itertools.product(
        ([], TOOLS),
        (None, True, False),
        (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
    )
]


@pytest.mark.parametrize("name", [QWEN, *LAGUNA, GEMMA])
def test_rendering_is_that_of_transformers(name: str) -> None:
    """Every conversation with every option, to the last blank; what one refuses, the other does."""
    reference = pytest.importorskip(
        "transformers.utils.chat_template_utils", reason="transformers is not installed (extra: test)"
    )
    source = vendored(f"templates/{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    n_texts = 0
    for (title, messages), options in itertools.product(CONVERSATIONS.items(), OPTIONS):
        if options.get("continue_final_message") and messages[-1]["role"] != "assistant":
            continue
        options = {k: v for k, v in options.items() if v is not None}
        rows = [words_as_thought(m) for m in messages] if name == GEMMA else messages
        try:
            ours = template.render(normalise_messages(messages), **options)
        except ConfigError:
            ours = None
        try:
            (theirs,), _ = reference.render_jinja_template(
                [rows], chat_template=source, bos_token="<s>", eos_token="</s>",
                **{**options, "tools": options["tools"] or None},
            )  # fmt: skip
        except Exception:  # noqa: BLE001 - the template's own refusals, or that there is nothing to continue
            theirs = None
        assert ours == theirs, f"{title}, {options}"
        n_texts += ours is not None
    assert n_texts >= 150


def test_the_template_of_qwen_declares_its_abilities() -> None:
    template = ChatTemplate(vendored(f"templates/{QWEN}.jinja").read_text(encoding="utf-8"))
    assert template.supports_thinking and template.supports_tools and template.tool_format == "xml"
    rows = normalise_messages([ASK])
    assert reasoning_at_start(template.render(rows)) == "open"
    assert reasoning_at_start(template.render(rows, enable_thinking=False)) == "closed"


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        (QWEN, "<think>\n", "\n</think>"),
        (LAGUNA[0], "<think>", "</think>"),
        (LAGUNA[1], "<think>\n", "\n</think>"),
        (LAGUNA[2], "<think>\n", "\n</think>"),
    ],
)
def test_thoughts_end_and_go_on_as_the_template_has_them(name: str, begin: str, end: str) -> None:
    template = ChatTemplate(vendored(f"templates/{name}.jinja").read_text(encoding="utf-8"))
    assert template.end_of_thought == end
    for thought in ({"reasoning_content": "Hm, so"}, {"content": "<think>Hm, so"}):
        rows = normalise_messages([BRIEF, ASK, {**message("assistant", ""), **thought}])
        for enabled in (True, False):
            text = template.render(rows, tools=TOOLS, continue_final_message=True, enable_thinking=enabled)
            assert text.endswith(f"{begin}Hm, so")
            whole = template.render(rows[:-1], tools=TOOLS, enable_thinking=True)
            assert text.startswith(whole.rstrip())


def test_calls_that_the_template_renders_are_read_back() -> None:
    """What a model is shown of its own calls is what the parser takes for calls."""
    template = ChatTemplate(vendored(f"templates/{QWEN}.jinja").read_text(encoding="utf-8"))
    before = template.render(normalise_messages([ASK]), tools=TOOLS, enable_thinking=False)
    after = template.render(normalise_messages([ASK, SOUGHT]), tools=TOOLS, add_generation_prompt=False)
    reply = after[len(before) - len("<think>\n\n</think>\n\n") :].partition("</think>\n\n")[2]
    parser = ChatParser(reasoning="closed", schemas=check_tools(TOOLS))
    events = parser.feed(reply.removesuffix("<|im_end|>\n")) + parser.flush()
    arguments = "".join(e.json for e in events if isinstance(e, ToolCallArgs) and e.index == 0)
    assert arguments == '{"what": "a\\n\\"b\\" </parameter>", "n": 3, "where": {"at": [1, null]}}'
    assert parser.n_calls == 2


@pytest.mark.parametrize("name", LAGUNA)
def test_the_templates_of_laguna(name: str) -> None:
    """Their declared abilities; calls that they render are read back."""
    template = ChatTemplate(vendored(f"templates/{name}.jinja").read_text(encoding="utf-8"))
    assert template.supports_thinking and template.supports_tools and template.tool_format == "keys"
    rows = normalise_messages([ASK])
    assert reasoning_at_start(template.render(rows, enable_thinking=True)) == "open"
    assert reasoning_at_start(template.render(rows, enable_thinking=False)) == "closed"
    options = {"tools": TOOLS, "enable_thinking": False}
    before = template.render(rows, **options)
    after = template.render(normalise_messages([ASK, SOUGHT]), **options, add_generation_prompt=False)
    assert after.startswith(before)
    reply = after[len(before) :].rstrip().removesuffix("</assistant>")
    parser = ChatParser(reasoning="closed", schemas=check_tools(TOOLS))
    events = parser.feed(reply) + parser.flush()
    arguments = "".join(e.json for e in events if isinstance(e, ToolCallArgs) and e.index == 0)
    assert arguments == '{"what": "a\\n\\"b\\" </parameter>", "n": 3, "where": {"at": [1, null]}}'
    assert parser.n_calls == 2
