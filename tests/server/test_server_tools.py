"""Tests of tools of all kinds as the model sees them, and of calls as clients expect them back."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from dflash_ggml.server.errors import ApiError
from dflash_ggml.server.notes import Notes
from dflash_ggml.server.tools import (
    FreeText,
    anthropic_tools,
    choose,
    free_text,
    openai_tools,
    pick,
    shell_action,
)
from dflash_ggml.session.requests import NamedTool
from dflash_ggml.text.tools import check_tools

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
SPACE = {"type": "namespace", "name": "maths", "tools": [ADD, {"type": "custom", "name": "prove"}]}


def test_names_of_a_namespace_are_distinct() -> None:
    tool_set = openai_tools([ADD, SPACE, {**SPACE, "name": "mcp__x__"}], Notes())
    assert list(tool_set.tools) == ["add", "maths__add", "maths__prove", "mcp__x__add", "mcp__x__prove"]
    assert tool_set.own("maths__add") == ("add", "maths") and tool_set.own("invented") == ("invented", None)
    assert (tool_set.kind("maths__prove"), tool_set.kind("invented")) == ("custom", "function")
    assert set(check_tools(tool_set.definitions)) == set(tool_set.tools)


def test_the_first_of_two_tools_with_a_name_stays() -> None:
    notes = Notes()
    other = {**ADD, "description": "another"}
    assert (
        openai_tools([ADD, ADD, other], notes).tools["add"].definition["function"].get("description") is None
    )
    assert notes.header == "ignored: tools[] (a second add)"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "function"}, "tools[0].name"),
        ({"type": "function", "function": {"name": 3}}, "tools[0].function.name"),
        ({"type": "custom", "custom": {}}, "tools[0].custom.name"),
        ({"type": "namespace", "name": "n", "tools": [{}]}, "tools[0].tools[0].name"),
        ({"type": 3}, "tools[0].type"),
        ({"name": "f", "parameters": "none"}, "tools[0].parameters"),
    ],
)
def test_malformed_tools_are_named(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        openai_tools([tool], Notes())
    assert caught.value.param == param


def test_tools_that_a_type_stands_for() -> None:
    notes = Notes()
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20241022", "name": "str_replace_editor"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1},
        {"type": "mcp_toolset", "mcp_server_name": "m"},
    ]
    tool_set = anthropic_tools(tools, notes)
    assert list(tool_set.tools) == ["bash", "str_replace_editor", "str_replace_based_edit_tool", "memory"]
    schemas = check_tools(tool_set.definitions)
    assert "undo_edit" in (schemas["str_replace_editor"].typed("command").values or ())
    assert "undo_edit" not in (schemas["str_replace_based_edit_tool"].typed("command").values or ())
    assert notes.header == (
        "ignored: tool computer_20250124 (nothing here runs it), tool mcp_toolset (nothing here runs it)"
    )


def test_a_choice_of_a_tool_that_was_left_out_leaves_the_choice_to_the_model() -> None:
    notes = Notes()
    tool_set = openai_tools([{"type": "web_search"}], notes)
    assert choose({"type": "web_search"}, tool_set, notes)[1] == "auto"
    assert choose("required", tool_set, notes)[1] == "auto"
    assert "tool_choice" in notes.header
    with pytest.raises(ApiError, match="'other' is not among"):
        choose({"type": "function", "name": "other"}, tool_set, notes)


def test_choices_name_a_tool_by_its_own_name() -> None:
    tool_set, notes = openai_tools([SPACE], Notes()), Notes()
    assert choose({"type": "function", "name": "add"}, tool_set, notes)[1] == NamedTool("maths__add")
    chosen = {"type": "function", "name": "add", "namespace": "maths"}
    assert choose(chosen, tool_set, notes)[1] == NamedTool("maths__add")
    some, choice = choose({"type": "allowed_tools", "mode": "auto", "tools": [chosen]}, tool_set, notes)
    assert (list(some.tools), choice) == (["maths__add"], "auto")
    with pytest.raises(ApiError, match="none of auto"):
        pick("sometimes", None, tool_set, notes)


def test_a_grammar_of_a_custom_tool_is_shown_to_the_model() -> None:
    flat = {
        "type": "custom",
        "name": "p",
        "format": {"type": "grammar", "syntax": "regex", "definition": "a+"},
    }
    nested = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    for tool in (flat, {"type": "custom", "custom": {"name": "p", "format": nested}}):
        definition = openai_tools([tool], Notes()).definitions[0]
        assert "regex grammar:\na+" in json.dumps(definition).replace("\\n", "\n")


@pytest.mark.parametrize("text", ["", "plain", 'q"\\ \n\t é \U0001f600 /', "a" * 300])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_text_in_pieces_is_the_text(text: str, ascii_only: bool) -> None:
    """However the arguments are cut, within an escape too."""
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    growing = FreeText()
    pieces = [growing.more(arguments[:n]) for n in range(len(arguments) + 1)]
    assert "".join(pieces) == text and growing.more(arguments, last=True) == ""


def test_a_structured_call_comes_whole_at_its_end() -> None:
    arguments, growing = '{"other": 1}', FreeText()
    assert [growing.more(arguments[:n]) for n in range(len(arguments))] == [""] * len(arguments)
    assert growing.more(arguments, last=True) == arguments == free_text(arguments)


def test_calls_go_back_in_their_own_shape() -> None:
    assert free_text('{"input": "a\\nb"}') == "a\nb"
    assert free_text('{"input": "a') == "a" and free_text('{"inp') == "" and free_text("[]") == "[]"
    shell = {"type": "exec", "command": ["ls"], "env": {}}
    assert shell_action('{"command": ["ls"]}') == shell
    assert shell_action('{"command": "ls | wc", "timeout_ms": 9}') == {
        **shell,
        "command": ["bash", "-lc", "ls | wc"],
        "timeout_ms": 9,
    }
    assert shell_action('{"comm') == {**shell, "command": []}
