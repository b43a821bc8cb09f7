"""Tools of all dialects as functions for the model, and the model's calls in the client's form.

Functions are passed unchanged; functions of a namespace get its name as prefix; a custom tool with free-text input is a
function with one string; tools declared by type (shells, editors) get that type's parameters. Tools that a service runs
itself are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from ..session.requests import NamedTool, ToolChoice
from ..text.json_text import well_formed_json
from .dialect import NO_PARAMETERS, chat_tool
from .errors import bad_request
from .known_tools import KNOWN, LOCAL_SHELL
from .notes import Notes
from .schema import Body, parse

Kind = Literal["function", "custom", "local_shell"]
QUIET = frozenset(("type", "defer_loading", "allowed_callers", "cache_control"))
Name = Annotated[str, Field(min_length=1, max_length=128)]


class Function(Body):
    """A function of OpenAI's endpoints."""

    quiet = QUIET | {"output_schema"}
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NestedFunction(Body):
    """A tool of chat completions."""

    quiet = QUIET
    function: Function


class CustomFormat(Body):
    """Input format of a custom tool: text, or a grammar."""

    type: Literal["text", "grammar"] = "text"
    syntax: str | None = None
    definition: str | None = None
    grammar: dict[str, Any] | None = None  # in chat completions nested in a `custom` object


class Custom(Body):
    """A tool with text input."""

    quiet = QUIET
    name: Name
    description: str | None = None
    format: CustomFormat | None = None


class Namespace(Body):
    """A group of functions."""

    quiet = frozenset(("type",))
    name: Name
    description: str | None = None
    tools: list[dict[str, Any]]


class AnthropicTool(Body):
    """A tool defined by Anthropic's clients."""

    quiet = QUIET | {"eager_input_streaming", "input_examples"}
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool: its definition for the model, and the client's name."""

    definition: dict[str, Any]
    own: str
    kind: Kind = "function"
    namespace: str | None = None

    @property
    def name(self) -> str:
        """The model's name of the tool."""
        return str(self.definition["function"]["name"])


@dataclass(slots=True)
class ToolSet:
    """The tools of one request by the model's names.

    Attributes:
        dropped: Names and types of omitted tools.
    """

    tools: dict[str, ClientTool] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)

    @property
    def definitions(self) -> tuple[dict[str, Any], ...]:
        """The tools in the form of chat templates."""
        return tuple(tool.definition for tool in self.tools.values())

    def add(self, tool: ClientTool, where: str, notes: Notes) -> None:
        """Add a tool; of two with the same name the first is kept."""
        if tool.name in self.tools:
            if self.tools[tool.name].definition != tool.definition:
                notes.ignore(f"{where} (a second {tool.name})")
            return
        self.tools[tool.name] = tool

    def drop(self, kind: str, name: Any, where: str, notes: Notes) -> None:
        """Omit a tool."""
        notes.ignore(where if notes.strict else f"tool {kind}", "nothing here runs it")
        self.dropped.update((kind, name) if isinstance(name, str) else (kind,))

    def kind(self, name: str) -> Kind:
        """The kind of a tool's calls; the model may call an unknown one."""
        return self.tools[name].kind if name in self.tools else "function"

    def own(self, name: str) -> tuple[str, str | None]:
        """The client's name of a tool and its namespace."""
        tool = self.tools.get(name)
        return (name, None) if tool is None else (tool.own, tool.namespace)

    def only(self, names: Iterable[str]) -> ToolSet:
        """The tools with these names."""
        wanted = set(names)
        return ToolSet({n: t for n, t in self.tools.items() if n in wanted}, self.dropped)


def flat_name(name: str, namespace: str | None) -> str:
    """The model's name of a function."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def openai_tools(tools: list[dict[str, Any]] | None, notes: Notes) -> ToolSet:
    """The tools of a request to chat completions or Responses.

    Raises:
        ApiError: A tool is malformed; it names it.
    """
    tool_set = ToolSet()
    for i, tool in enumerate(tools or ()):
        _add_openai(tool_set, tool, f"tools[{i}]", notes)
    return tool_set


def _add_openai(
    tool_set: ToolSet, tool: dict[str, Any], where: str, notes: Notes, inside: str | None = None
) -> None:
    kind = tool.get("type", "function")
    if kind == "function":
        if isinstance(tool.get("function"), dict):
            function = parse(NestedFunction, tool, notes, where).function
        else:
            function = parse(Function, tool, notes, where)
        definition = chat_tool(
            flat_name(function.name, inside),
            function.description,
            function.parameters or NO_PARAMETERS,
            function.strict,
        )
        tool_set.add(ClientTool(definition, function.name, namespace=inside), where, notes)
    elif kind == "custom":
        nested = isinstance(tool.get("custom"), dict)
        given, path = (tool["custom"], f"{where}.custom") if nested else (tool, where)
        custom = parse(Custom, given, notes, path)
        tool_set.add(ClientTool(_free_text(custom, inside), custom.name, "custom", inside), where, notes)
    elif kind == "namespace" and inside is None:
        space = parse(Namespace, tool, notes, where)
        for j, inner in enumerate(space.tools):
            _add_openai(tool_set, inner, f"{where}.tools[{j}]", notes, space.name)
    elif kind == "local_shell":
        definition = chat_tool(kind, *LOCAL_SHELL, None)
        tool_set.add(ClientTool(definition, kind, "local_shell"), where, notes)
    elif isinstance(kind, str):
        tool_set.drop(kind, tool.get("name") or tool.get("server_label"), where, notes)
    else:
        raise bad_request("the type of a tool is a string", f"{where}.type")


def _free_text(custom: Custom, inside: str | None) -> dict[str, Any]:
    """A custom tool as a function with one string, whose description includes the input format."""
    form, text = custom.format, "The whole input of the tool, as plain text."
    if form is not None and form.type == "grammar":
        inner = form.grammar or {"syntax": form.syntax, "definition": form.definition}
        text = f"The whole input of the tool; it must fit this {inner.get('syntax')} grammar:\n{inner.get('definition')}"
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": text}},
        "required": ["input"],
        "additionalProperties": False,
    }
    return chat_tool(flat_name(custom.name, inside), custom.description, schema, None)


def anthropic_tools(tools: list[dict[str, Any]] | None, notes: Notes) -> ToolSet:
    """The tools of a request to Messages.

    Raises:
        ApiError: A tool is malformed; it names it.
    """
    tool_set = ToolSet()
    for i, tool in enumerate(tools or ()):
        where, kind = f"tools[{i}]", tool.get("type") or "custom"
        if kind == "custom":
            own = parse(AnthropicTool, tool, notes, where)
            definition = chat_tool(own.name, own.description, own.input_schema, own.strict)
            tool_set.add(ClientTool(definition, own.name), where, notes)
            continue
        if not isinstance(kind, str):
            raise bad_request("the type of a tool is a string", f"{where}.type")
        known = next((KNOWN[k] for k in KNOWN if kind.startswith(k)), None)
        name = tool.get("name")
        if known is None or not isinstance(name, str) or not name:
            tool_set.drop(kind, name, where, notes)
        else:
            tool_set.add(ClientTool(chat_tool(name, *known, None), name), where, notes)
    return tool_set


def choose(choice: Any, tool_set: ToolSet, notes: Notes) -> tuple[ToolSet, ToolChoice]:
    """OpenAI's tool_choice, in either endpoint's form: the allowed tools, and the choice among them."""
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            inner = choice.get("allowed_tools")
            inner = inner if isinstance(inner, dict) else choice
            tools = inner.get("tools")
            names = [_chosen(t) for t in tools] if isinstance(tools, list) else []
            return pick(inner.get("mode"), None, tool_set.only(n for n in names if n), notes)
        if kind in ("auto", "none", "required", "any"):
            return pick(kind, None, tool_set, notes)
        return pick(None, _chosen(choice) or str(kind), tool_set, notes)
    return pick(choice, None, tool_set, notes)


def _chosen(choice: Any) -> str | None:
    """The name in a choice or in an entry of allowed_tools; None if there is none."""
    if not isinstance(choice, dict):
        return None
    inner = choice.get(choice["type"]) if isinstance(choice.get("type"), str) else None
    found = inner if isinstance(inner, dict) else choice
    name, space = found.get("name"), found.get("namespace")
    if not isinstance(name, str):
        return None
    return flat_name(name, space if isinstance(space, str) else None)


def pick(
    word: Any, named: str | None, tool_set: ToolSet, notes: Notes, param: str = "tool_choice"
) -> tuple[ToolSet, ToolChoice]:
    """The choice among the tools. A choice of an omitted tool becomes "auto".

    Args:
        word: The dialect's choice.
        named: The required tool, which takes precedence.
        tool_set: The tools.
        notes: Receives unsupported parts.
        param: The field, for errors.

    Raises:
        ApiError: The tool is unknown; the error names `param`.
    """
    if named is not None:
        if named in tool_set.tools:
            return tool_set, NamedTool(named)
        matching = [t.name for t in tool_set.tools.values() if t.own == named]
        if len(matching) == 1:
            return tool_set, NamedTool(matching[0])
        if named in tool_set.dropped:
            notes.ignore(param, f"{named} is not offered")
            return tool_set, "auto"
        raise bad_request(f"{param}: {named!r:.80} is not among the tools", param)
    if word in ("required", "any"):
        if not tool_set.tools and tool_set.dropped:
            notes.ignore(param, "none of the tools is offered")
            return tool_set, "auto"
        if not tool_set.tools:
            raise bad_request(f"tool_choice: {word!r} without tools", "tool_choice")
        return tool_set, "required"
    if word not in (None, "auto", "none"):
        raise bad_request(f"{param}: {word!r:.80} is none of auto, none, required", param)
    return tool_set, "none" if word == "none" else "auto"


def arguments_of(text: str) -> Any:
    """A call's arguments; truncated if max_tokens cut the call."""
    try:
        return from_json(well_formed_json(text) or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}


def free_text(arguments: str) -> str:
    """The text input of a custom tool's call, as far as complete; other calls are returned unchanged."""
    found = arguments_of(arguments)
    text = (found.get("input") if found else "") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


class FreeText:
    """Streams the text of a custom tool's call."""

    def __init__(self) -> None:
        self._n = 0

    def more(self, arguments: str, last: bool = False) -> str:
        """New text of the call.

        Args:
            arguments: The arguments so far.
        """
        found = arguments_of(arguments)
        if not last and not (isinstance(found, dict) and isinstance(found.get("input"), str)):
            return ""
        text = free_text(arguments)
        piece, self._n = text[self._n :], max(self._n, len(text))
        return piece


def shell_action(arguments: str) -> dict[str, Any]:
    """The action of a local_shell call."""
    found = arguments_of(arguments)
    given = found if isinstance(found, dict) else {}
    command = given.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    if isinstance(command, str):
        words = ["bash", "-lc", command]
    action: dict[str, Any] = {"type": "exec", "command": words, "env": {}}
    return action | {k: given[k] for k in ("timeout_ms", "working_directory") if given.get(k) is not None}
