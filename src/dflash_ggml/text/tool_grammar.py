"""Grammars that force a tool call: any of several tools, or one by name, with arguments that match its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import harmony
from .bounded_schema import bounded_schema
from .call_forms import FORMS, GEMMA, TAGS, CallForm, ToolFormat
from .grammar import JSON_OPTIONS
from .grammar_spec import GrammarSpec, dump_schema, load_schema
from .tool_schema import Argument, Arguments, ToolSchema

Schemas = Mapping[str, ToolSchema]

# White space between calls and after the last one, as models emit it; bounded, so that they end.
_LINES = ("lead: /\\n{0,2}/", "gap: /[ \\t\\r\\n]{0,4}/")


def forced_call_grammar(
    schemas: Schemas,
    form: ToolFormat,
    *,
    several: bool,
    special_tags: frozenset[str] = frozenset(),
    answer: str | None = None,
) -> GrammarSpec:
    """A grammar of one call (or `several`) of the tools in `schemas` (name -> arguments) and nothing else.

    Args:
        form: The model's call format.
        special_tags: Tags that are control tokens of the vocabulary.
        answer: A JSON schema (JSON text): a text that matches it may take the place of the calls.
    """
    blocks = "block (gap block)* gap" if several else "block"
    start = f"start: lead {blocks if answer is None else f'({blocks} | answer)'}"
    more = [] if answer is None else [f"answer: {_json(load_schema(answer))}"]
    rules = [start, *_LINES, f"block: CALL {_inside(form)} END_CALL"]
    return _grammar(rules, schemas, form, special_tags, more)


def inner_call_grammar(
    schemas: Schemas, form: ToolFormat, *, special_tags: frozenset[str] = frozenset()
) -> GrammarSpec:
    """Grammar of a voluntary call from its opening tag to the closing tag."""
    return _grammar([f"start: {_inside(form)} END_CALL"], schemas, form, special_tags)


def harmony_grammar(schemas: Schemas, answer: str | None, special_tags: frozenset[str]) -> GrammarSpec:
    """Grammar of a whole harmony turn: reasoning and messages to the user, then one call, or an answer.

    Args:
        answer: A JSON schema (JSON text) for the answer, empty for any text; None: a call is required.
    """
    marks = (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, harmony.END)
    start, channel, constrain, message, end = (m if m in special_tags else _quote(m) for m in marks)
    lines = [
        "%llguidance {}",
        f"start: before* (call{'' if answer is None else ' | final'})",
        f'before: {channel} ("analysis" | "commentary") {message} text {end} {start} "assistant"',
        "text: /(?s:.*)/",
        f'kind: (" json" | " "? {constrain} "json")?',  # apart from the recipient's name
    ]
    if answer is not None:
        value = _json(load_schema(answer)) if answer else "text"
        lines.append(f'final: {channel} "final" {"kind" if answer else ""} {message} {value}')
    for i, (name, schema) in enumerate(schemas.items()):
        to = harmony.NAMESPACE + name
        head = f'{_quote(" to=" + to)} {channel} "commentary" | {channel} {_quote("commentary to=" + to)}'
        lines += [
            f"call_{i}: ({head}) kind {message} args_{i}",
            f"args_{i}: {_json({**schema.parameters, 'type': 'object'})}",
        ]
    lines.append(f"call: {' | '.join(f'call_{i}' for i in range(len(schemas)))}")
    return GrammarSpec("lark", "\n".join(lines) + "\n")


def _inside(form: ToolFormat) -> str:
    """Rules between the tags around a call."""
    return "call" if form in ("keys", "gemma") else '"\\n" call "\\n"'


def _grammar(
    start: list[str],
    schemas: Schemas,
    form: ToolFormat,
    special_tags: frozenset[str],
    more: Sequence[str] = (),
) -> GrammarSpec:
    outer = GEMMA if form == "gemma" else TAGS
    for name, tag in (("END_CALL", outer.end_call), ("CALL", outer.call)):
        start = [line.replace(name, tag if tag in special_tags else _quote(tag)) for line in start]
    rules, names, tags = list(more), [], FORMS.get(form, FORMS["xml"])
    mark = outer.text if outer.text in special_tags else _quote(outer.text)
    for i, (name, schema) in enumerate(schemas.items()):
        arguments = None if form == "json" else schema.arguments()
        if form == "gemma":
            rules += _marked_rules(i, name, arguments, schema.parameters, mark)
        elif arguments is None:
            rules += _json_rules(i, name, schema)
        else:
            rules += _tagged_rules(i, name, arguments, schema.parameters, tags)
        names.append(f"call_{i}")
    head = ["%llguidance {}", *start, f"call: {' | '.join(names)}", "line: /\\n?/"]
    if form != "gemma":
        head.append(f"text[suffix={_quote(tags.rule_end)}]: /(?s:.*)/ & ~/(?s:.*)({tags.forbidden})(?s:.*)/")
    elif outer.text in special_tags:
        head += [f"text: TEXT {mark}", "TEXT: /(?s:.*)/"]
    else:
        head.append(f"text[suffix={mark}]: /(?s:.*)/")
    return GrammarSpec("lark", "\n".join(head + rules) + "\n")


def _json_rules(i: int, name: str, schema: ToolSchema) -> list[str]:
    head = '{"name": ' + json.dumps(name, ensure_ascii=False) + ', "arguments": '
    return [
        f'call_{i}: {_quote(head)} args_{i} "}}"',
        f"args_{i}: {_json({**schema.parameters, 'type': 'object'})}",
    ]


def _marked_rules(
    i: int, name: str, arguments: Arguments | None, root: Mapping[str, Any], mark: str
) -> list[str]:
    """Rules of Gemma's object: text between marks, all else as JSON; plain JSON if arguments cannot be constrained separately."""
    call = f"call_{i}: {_quote(f'call:{name}')}"
    if arguments is None:
        return [f"{call} args_{i}", f"args_{i}: {_json({**root, 'type': 'object'})}"]
    rules, named, more = [], list(arguments.named.items()), ""
    if arguments.others is not None:
        taken = "|".join(map(_pattern, arguments.named))
        rules.append(f"KEY_{i}: /[\\w.$-]{{1,200}}/" + (f" & ~/({taken})/" if taken else ""))
        rules.append(f'more_{i}: KEY_{i} ":" {_marked(arguments.others, root, mark)}')
        more = f'("," more_{i})*'
    firsts: list[str] = []  # what the object may begin with; required arguments end these
    for j, (key, argument) in enumerate(named):
        written = key if re.fullmatch(r"[\w.$-]+", key) else _quote(key)
        rules.append(f"p_{i}_{j}: {_quote(written + ':')} {_marked(argument, root, mark)}")
        behind = f"behind_{i}_{j + 1}" if j + 1 < len(named) else more
        if j:
            rules.append(f'behind_{i}_{j}: ("," p_{i}_{j}){"" if argument.required else "?"} {behind}')
        if not any(a.required for _, a in named[:j]):
            firsts.append(f"p_{i}_{j} {behind}")
    if not any(argument.required for _, argument in named):
        firsts += [f"more_{i} {more}"] * bool(more) + ['""']
    return [f'{call} "{{" ({" | ".join(firsts)}) "}}"', *rules]


def _marked(argument: Argument, root: Mapping[str, Any], mark: str) -> str:
    typed = argument.typed
    if typed.types and "string" not in typed.types:
        return _json(argument.schema, root)
    if typed.values:
        words = [
            f"{mark} {_quote(v)} {mark}" if isinstance(v, str) else _quote(json.dumps(v))
            for v in typed.values
        ]
        return f"({' | '.join(words)})"
    return f'({mark} text | "null")' if "null" in typed.types else f"{mark} text"


def _tagged_rules(
    i: int, name: str, arguments: Arguments, root: Mapping[str, Any], tags: CallForm
) -> list[str]:
    """Rules of arguments between tags: declared ones, in order, then any other allowed ones."""
    parts, rules = [], []

    def rule(label: str, key: str, argument: Argument) -> None:
        value = _value(argument, root, tags.rule_end)
        rules.append(f"{label}: {tags.rule_key.format(key)} {value} {tags.behind}")

    for j, (key, argument) in enumerate(arguments.named.items()):
        parts.append(f"p_{i}_{j}" if argument.required else f"p_{i}_{j}?")
        rule(f"p_{i}_{j}", _quote(key), argument)
    if arguments.others is not None:
        parts.append(f"more_{i}*")
        taken = "|".join(map(_pattern, arguments.named))
        rules.append(f"KEY_{i}: /[^<>\\n]{{1,200}}/" + (f" & ~/({taken})/" if taken else ""))
        rule(f"more_{i}", f"KEY_{i}", arguments.others)
    return [f"call_{i}: {tags.rule_name.format(_quote(name))} {' '.join(parts)} {tags.close}", *rules]


def _value(argument: Argument, root: Mapping[str, Any], end: str) -> str:
    typed = argument.typed
    if typed.types and "string" not in typed.types:
        return f"{_json(argument.schema, root)} {_quote(end)}"
    if typed.values:
        words = [v if isinstance(v, str) else json.dumps(v) for v in typed.values]
        return f"({' | '.join(_quote(w) for w in words)}) {_quote(end)}"
    return "text"


def _pattern(word: str) -> str:
    """A word as a regular expression between slashes."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in word)


def _json(schema: Any, root: Mapping[str, Any] | None = None) -> str:
    """A JSON value of a schema, in a Lark rule; root: document of its references, if not the schema itself."""
    made = bounded_schema(schema, root)
    if isinstance(made, bool):
        made = {"anyOf": []} if not made else {}
    return f"%json {dump_schema({**made, 'x-guidance': JSON_OPTIONS})}"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
