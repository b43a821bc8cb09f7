"""Tests of chat templates: rendering, refusals, and one dialect of messages out of several."""

from __future__ import annotations

import pytest

from dflash_ggml.errors import ConfigError
from dflash_ggml.text.template import ChatTemplate, call_arguments, normalise_messages
from dflash_ggml.text.tools import check_tools, with_generic_tool_prompt
from reference.fake_engine import TEMPLATE, TOOL_TEMPLATE

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_rendering() -> None:
    template = ChatTemplate(TEMPLATE, eos_token="<|im_end|>")
    messages = normalise_messages([{"role": "user", "content": "hi"}])
    assert template.render(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert template.generation_header() == "<|im_start|>assistant\n"
    assert template.supports_thinking and not template.supports_tools


def test_continuing_the_last_message() -> None:
    template = ChatTemplate(TEMPLATE)
    messages = normalise_messages([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}])
    assert template.render(messages, continue_final_message=True).endswith("<|im_start|>assistant\nb ")
    with pytest.raises(ConfigError, match="last message of role 'assistant'"):
        template.render(messages[:1], continue_final_message=True)


def test_what_templates_expect_of_jinja() -> None:
    source = (
        "{% generation %}{{ messages | tojson }}{% endgeneration %}{% for m in messages %}{% continue %}x{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    assert ChatTemplate(source).render([{"role": "user", "content": "é<&>"}]) == (
        '[{"role": "user", "content": "é<&>"}]4'
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.here }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
        ("{% set _ = messages.append(1) %}", "refused"),
    ],
)
def test_refusals_are_one_clear_error(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_template_that_does_not_compile() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% if %}")


def test_dialects_become_one() -> None:
    out = normalise_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "r",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                ],
            },
            {"role": "function", "name": "f", "content": "2"},
            {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
        ]
    )
    assert out[0] == {"role": "system", "content": "ab"}
    assert out[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert (out[1]["content"], out[1]["reasoning_content"]) == ("", "r")
    assert out[2] == {"role": "tool", "content": "2", "name": "f"}
    assert out[3]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        (["hi"], r"messages\[0\]: expected an object"),
        ([{"role": "a robot", "content": "x"}], r"messages\[0\].role: 'a robot'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "text only"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
        ([{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}], "only an assistant"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], "object with a name"),
    ],
)
def test_bad_messages_are_named(messages: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        normalise_messages(messages)  # type: ignore[arg-type]


def test_calls_of_earlier_turns_render_with_their_arguments() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": "1", "b": [2]}'}}
    messages = normalise_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    text = ChatTemplate(TOOL_TEMPLATE).render(messages, tools=[TOOL])
    assert (
        "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2]\n</parameter>\n</function>"
        in text
    )
    assert text.endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        (None, {}),
        ("", {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": [1]}', {"a": [1]}),
        ('{"a": ', {"input": '{"a": '}),
        ("[1]", {"input": "[1]"}),
        ([1, "é"], {"input": '[1, "é"]'}),
        (3, {"input": "3"}),
        ("[" * 100_000, {"input": "[" * 100_000}),
    ],
)
def test_arguments_of_earlier_calls_are_always_an_object(given: object, arguments: object) -> None:
    """Also those of a call that was cut off."""
    assert call_arguments(given) == arguments


def test_generic_tool_prompt() -> None:
    messages = normalise_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
            {"role": "tool", "content": "4"},
        ]
    )
    rows = with_generic_tool_prompt(messages, [TOOL])
    assert [r["role"] for r in rows] == ["system", "assistant", "user"]
    assert rows[0]["content"].startswith("Be brief.\n\n") and '"name": "add"' in rows[0]["content"]
    assert '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>' in rows[1]["content"]
    assert rows[2]["content"] == "<tool_response>\n4\n</tool_response>"


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([{"type": "web_search"}], r"tools\[0\]"),
        ([{"type": "function", "function": {"name": "a<b"}}], "not a usable name"),
        ([TOOL, TOOL], "defined twice"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], "JSON schema object"),
    ],
)
def test_bad_tools_are_named(tools: list, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_tools(tools)
