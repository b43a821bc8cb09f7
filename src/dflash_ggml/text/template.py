"""Chat templates: message normalisation, sandboxed rendering, and detection of tool and thinking formats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2

from ..errors import ConfigError
from .call_forms import GEMMA, TAGS, Tags, ToolFormat
from .chat_parser import reasoning_at_start
from .harmony import described, is_harmony, prepared
from .json_text import loads
from .roles import Renders, probe
from .template_sandbox import compiled, rendered

WORDS = 500  # characters of a template's error message
_ROLE = re.compile(
    r"[A-Za-z][\w.-]{0,63}"
)  # role names are written into the prompt, so they must not contain marks

# Sentinel, removed before tokenising. A template that trims removes its blank.
_CONTINUE_MARK = "\x00continue\x00 "


def _words(error: Exception) -> str:
    """An exception's message, shortened to one line."""
    message = str(error.message if isinstance(error, jinja2.TemplateError) and error.message else error)
    words = " ".join(message.split()) or type(error).__name__
    at = f" (line {error.lineno})" if isinstance(error, (jinja2.TemplateSyntaxError, SyntaxError)) else ""
    return (words if len(words) <= WORDS else words[:WORDS] + " ...") + at


class ChatTemplate:
    """A model's chat template, compiled once.

    Args:
        source: jinja2 text.
        bos_token, eos_token: Texts of the tokens ("" if none).

    Raises:
        ConfigError: It does not compile.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        try:
            self._template = compiled(source)
        except Exception as error:  # noqa: BLE001 - jinja2 may raise anything for invalid input
            raise ConfigError(f"chat template does not compile: {_words(error)}") from None

    @property
    def supports_tools(self) -> bool:
        """Whether the template itself renders tool definitions."""
        return "tools" in self.source

    @property
    def tool_format(self) -> ToolFormat:
        """Format of the model's calls: "xml" (`<function=..>` with parameters), "keys" (the name, then `<arg_key>` and
        `<arg_value>`), "harmony" (messages to `functions.`), "gemma" (`call:` and the name) or "json" (name and arguments)."""
        if self.is_harmony:
            return "harmony"
        if self.tags is GEMMA:
            return "gemma"
        return "xml" if "<function=" in self.source else "keys" if "<arg_key>" in self.source else "json"

    @property
    def tags(self) -> Tags:
        """The model's tags around reasoning and calls."""
        return GEMMA if GEMMA.call in self.source else TAGS

    @property
    def is_harmony(self) -> bool:
        """Whether it is a harmony template (see `harmony`)."""
        return is_harmony(self.source)

    @property
    def supports_thinking(self) -> bool:
        """Whether the template reacts to enable_thinking."""
        return "enable_thinking" in self.source

    @cached_property
    def end_of_thought(self) -> str:
        """The end of reasoning, up to the closing tag."""
        thought, answer = "qzxj-thought", "qzxj-answer"
        asked = {"role": "user", "content": "x"}
        answered = {"role": "assistant", "content": answer, "reasoning_content": thought}
        try:
            text = self.render([asked, answered], add_generation_prompt=False, enable_thinking=True)
        except ConfigError:
            text = ""
        between = text.partition(thought)[2].partition(answer)[0]
        end, tag, _ = between.partition(self.tags.end_think)
        return end + tag if tag and not end.strip() else "\n" + self.tags.end_think

    @cached_property
    def renders(self) -> Renders:
        """Its capabilities with respect to roles."""
        return probe(self.render)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: As `normalise_messages` returns them.
            tools: Definitions of tools.
            add_generation_prompt: Open the assistant's message at the end.
            continue_final_message: End inside the last message, or its open reasoning, instead of opening a new one;
                trailing blanks stay if the template keeps them.
            kwargs: Further variables of the template.

        Raises:
            ConfigError: The template refuses the conversation; with the template's message.
        """
        rows = [words_as_thought(m) if self.tags is GEMMA else dict(m) for m in messages]
        thought = None
        if continue_final_message:
            if not rows or rows[-1]["role"] != "assistant":
                raise ConfigError("messages: continuing needs a last message of role 'assistant'")
            thought = last_thought(rows[-1], self.tags)
            if thought is None:
                rows[-1]["content"] += _CONTINUE_MARK
            else:
                rows[-1].update(content="", reasoning_content=thought + _CONTINUE_MARK)
                kwargs["enable_thinking"] = True
            add_generation_prompt = False
        if self.is_harmony:
            rows, tools = prepared(rows), described(tools)
        scope: dict[str, Any] = {"bos_token": self.bos_token, "eos_token": self.eos_token, "documents": None}
        scope |= {"tools": [dict(t) for t in tools] or None, **kwargs}
        merged = self.tags is GEMMA and "tool_call_id" not in self.source
        scope |= {
            "messages": with_responses(rows) if merged else rows,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = rendered(self._template, scope)
        except Exception as error:  # noqa: BLE001 - a template is third-party code
            raise ConfigError(f"messages: the chat template refused them: {_words(error)}") from None
        if continue_final_message:
            head, mark, tail = text.rpartition(_CONTINUE_MARK.rstrip())
            if not mark and thought is not None:  # it does not render reasoning, but the model generates it
                head = self.render(rows[:-1], tools=tools, **kwargs)
                is_open = reasoning_at_start(head, self.tags) == "open"
                return head + ("" if is_open else f"{self.tags.think}\n") + thought
            if not mark:
                raise ConfigError(
                    "messages: the chat template does not render the last assistant message verbatim"
                )
            text = head if tail.startswith(" ") else head.rstrip()
        return text

    def generation_header(self) -> str:
        """Text that opens the assistant's turn ("" if unknown)."""
        probe = [{"role": "user", "content": "x"}]
        try:
            closed, opened = self.render(probe, add_generation_prompt=False), self.render(probe)
        except ConfigError:
            return ""
        return opened[len(closed) :] if opened.startswith(closed) else ""


def words_as_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its text before calls moved into reasoning: Gemma's template would render it after the results."""
    if not message.get("tool_calls") or not message["content"].strip():
        return dict(message)
    parts = (message.get("reasoning_content"), message["content"])
    return {**message, "content": "", "reasoning_content": "\n\n".join(text for text in parts if text)}


def with_responses(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for Gemma templates that expect results, and the following answer, as parts of the call's message."""
    out: list[dict[str, Any]] = []
    for row in rows:
        last = out[-1] if out else {}
        if row["role"] == "tool" and last.get("tool_calls"):
            named = (
                c["function"]["name"] for c in last["tool_calls"] if c.get("id") == row.get("tool_call_id")
            )
            name = next(named, row.get("name") or "unknown")
            done = [*last.get("tool_responses", ()), {"name": name, "response": row["content"]}]
            out[-1] = {**last, "tool_responses": done}
        elif row["role"] == "assistant" and not row.get("tool_calls") and last.get("tool_responses"):
            out[-1] = {**last, "content": row["content"]}
        else:
            out.append(row)
    return out


def last_thought(message: Mapping[str, Any], tags: Tags = TAGS) -> str | None:
    """The open reasoning at the end of an assistant's message, as `reasoning_content` or text after its tag; None without."""
    content: str = message["content"]
    head, tag, rest = content.partition(tags.think)
    if message.get("tool_calls"):
        return None
    if tag and not head.strip() and tags.end_think not in rest:
        return rest.lstrip("\n")
    return None if content.strip() else message.get("reasoning_content") or None


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Normalise messages: plain-text content, tool-call arguments as mappings, unknown roles kept.

    "developer" becomes "system", "function" becomes "tool", text parts are joined, a legacy function_call becomes a
    tool call.

    Raises:
        ConfigError: A message is malformed; the error names the field.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ConfigError("messages: expected a non-empty list of messages")
    return [_normalise_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _normalise_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where}: expected an object with role and content")
    given = message.get("role")
    role = {"developer": "system", "function": "tool"}.get(str(given), given)
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise ConfigError(f"{where}.role: {given!r} is not the name of a role, such as 'user'")
    out: dict[str, Any] = {"role": role, "content": content_text(message.get("content"), f"{where}.content")}
    calls = message.get("tool_calls") or []
    if message.get("function_call"):
        calls = [*calls, {"function": message["function_call"]}]
    if calls:
        if role != "assistant":
            raise ConfigError(f"{where}.tool_calls: only an assistant message can carry tool calls")
        out["tool_calls"] = [_normalise_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            out[key] = message[key]
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None:
        out["reasoning_content"] = str(reasoning)
    return out


def content_text(content: Any, where: str) -> str:
    """The text of a message's content: a string, None, or a list of text parts.

    Raises:
        ConfigError: There are other parts.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ConfigError(f"{where}: expected a string or a list of text parts")
    pieces = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            pieces.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            pieces.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ConfigError(
                f"{where}[{i}]: part of type {kind!r} is not supported, this model takes text only"
            )
    return "".join(pieces)


def call_arguments(value: Any) -> dict[str, Any]:
    """Arguments of an earlier call as the object that templates iterate over, from an object or its JSON text.

    Anything else, such as the text of a truncated call, becomes the member `input` of one.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        found = loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"input": text}


def _normalise_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where}.function: expected an object with a name")
    arguments = call_arguments(function.get("arguments"))
    out = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id") is not None:
        out["id"] = call["id"]
    return out
