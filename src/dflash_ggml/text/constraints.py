"""The combined constraint of a chat request's grammar, response format and tools on the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .call_forms import GEMMA, TAGS, ToolFormat
from .grammar_spec import GrammarSpec, response_format_spec
from .harmony import HarmonyParser
from .tokenizer import Tokenizer
from .tool_grammar import Schemas, forced_call_grammar, harmony_grammar, inner_call_grammar
from .tools import NamedTool, ToolChoice


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar and where it applies: `after` these texts in sequence; with `repeat` after each further occurrence of the last.

    Attributes:
        is_turn: Whether it applies to the whole output, reasoning included.
    """

    spec: GrammarSpec
    after: tuple[str, ...] = ()
    repeat: bool = False
    is_turn: bool = False


def special_tags(tokenizer: Tokenizer) -> frozenset[str]:
    """The think and tool tags that are control tokens in a vocabulary."""
    ids = {tag: tokenizer.id_of(tag) for tag in (*TAGS.tokens, *HarmonyParser.tags, *GEMMA.tokens)}
    return frozenset(tag for tag, i in ids.items() if i is not None and tokenizer.is_control(i))


def chat_constraint(
    schemas: Schemas,
    choice: ToolChoice,
    form: ToolFormat,
    tags: frozenset[str],
    *,
    grammar: GrammarSpec | None = None,
    response_format: Mapping[str, Any] | None = None,
    parallel: bool = True,
    strict: bool = False,
) -> Constraint | None:
    """The constraint that combines all these options, or None.

    A forced tool choice constrains the answer to calls (one, unless `parallel`); a JSON response format with tool choice
    "auto" to calls or such an answer; `strict` with "auto" constrains every call to its tool's schema.

    Args:
        schemas: Tool name -> argument schema.

    Raises:
        ConfigError: Options contradict each other.
    """
    answer = response_format_spec(response_format)
    if grammar is not None and answer is not None:
        raise ConfigError("grammar and response_format exclude each other: give one")
    answer = answer or grammar
    several = parallel and not isinstance(choice, NamedTool)
    if isinstance(choice, NamedTool) or choice == "required":
        if answer is not None:
            raise ConfigError(
                "tool_choice: a forced call and a grammar or response_format exclude each other"
            )
        tools = {choice.name: schemas[choice.name]} if isinstance(choice, NamedTool) else schemas
        if form == "harmony":
            return Constraint(harmony_grammar(tools, None, tags), is_turn=True)
        return Constraint(forced_call_grammar(tools, form, several=several, special_tags=tags))
    callable_tools = bool(schemas) and choice == "auto"
    if answer is not None and callable_tools and answer.kind in ("json_schema", "json_object"):
        schema = answer.text or '{"type": "object"}'
        if form == "harmony":
            return Constraint(harmony_grammar(schemas, schema, tags), is_turn=True)
        calls = forced_call_grammar(schemas, form, several=several, special_tags=tags, answer=schema)
        return Constraint(calls)
    if answer is not None:
        return Constraint(answer)
    if callable_tools and strict and form == "harmony":
        return Constraint(harmony_grammar(schemas, "", tags), is_turn=True)
    if callable_tools and strict:
        begin = GEMMA.call if form == "gemma" else TAGS.call
        return Constraint(inner_call_grammar(schemas, form, special_tags=tags), after=(begin,), repeat=True)
    return None
