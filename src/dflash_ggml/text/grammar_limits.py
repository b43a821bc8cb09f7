"""What a grammar's text may be before it is compiled: the compiler calls itself once per rule that leads to a rule."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..errors import ConfigError
from .grammar_size import check_size, regex_size, terminals_size

CHARS = 1 << 19
RULES = 5000
DEPTH = 200  # of rules that lead to rules; the compiler's stack ends at some 3,000

# Strings, regular expressions, character classes and comments, in which names are no references.
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|\[(?:[^\]\\\n]|\\.)*\]|#[^\n]*|//[^\n]*')
_HEAD = re.compile(r"^[ \t]*[!?]?([A-Za-z_][\w-]*)(?:\[[^\]\n]*\])?(?:\.\d+)?[ \t]*(?:::=|:)", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][\w-]*")


def check_text(kind: str, text: str) -> None:
    """Raise ConfigError for a grammar that is too long; of GBNF and Lark, also for too many or too deep rules."""
    if len(text) > CHARS:
        raise ConfigError(f"grammar ({kind}): {len(text)} characters, at most {CHARS} are allowed")
    if kind == "regex":
        check_size(regex_size(text), len(text), "grammar (regex)")
    if kind not in ("gbnf", "lark"):
        return
    rules = _rules(text)
    if len(rules) > RULES:
        raise ConfigError(f"grammar ({kind}): {len(rules)} rules, at most {RULES} are allowed")
    if _depth(rules) > DEPTH:
        raise ConfigError(f"grammar ({kind}): rules lead to rules more than {DEPTH} deep")
    if kind == "lark":
        if text.lstrip().startswith(
            "{"
        ):  # the compiler would take it for its own JSON, with schemas unbounded
            raise ConfigError("grammar (lark): it begins as JSON; rules are expected")
        literals = sum(regex_size(word[0]) for word in _QUOTED.finditer(text) if word[0][0] == "/")
        terminals = {name: body for name, body in _bodies(text).items() if name.isupper()}
        check_size(literals + terminals_size(terminals, _literal_size), len(text), "grammar (lark)")


def _literal_size(word: str) -> int:
    return regex_size(word) if word[0] == "/" else len(word)


def _bodies(text: str) -> dict[str, str]:
    """Rule -> what follows its name."""
    heads = list(_HEAD.finditer(_QUOTED.sub(lambda found: " " * len(found[0]), text)))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {head[1]: text[head.end() : end] for head, end in zip(heads, ends, strict=False)}


def _rules(text: str) -> dict[str, list[str]]:
    """Rule -> the rules that it names, in order."""
    text = _QUOTED.sub(" ", text)
    heads = list(_HEAD.finditer(text))
    if not heads:
        return {}
    ends = [head.start() for head in heads[1:]] + [len(text)]
    names = {head[1] for head in heads}
    bodies = ((head[1], _NAME.findall(text, head.end(), end)) for head, end in zip(heads, ends, strict=True))
    return {name: [found for found in body if found in names] for name, body in bodies}


def _depth(rules: dict[str, list[str]]) -> int:
    """The longest way that a search takes which enters every rule where it meets it first."""
    seen: set[str] = set()
    deepest = 0
    for first in rules:
        todo: list[Iterator[str]] = [iter([first])]
        while todo:
            name = next(todo[-1], None)
            if name is None:
                todo.pop()
            elif name not in seen:
                seen.add(name)
                todo.append(iter(rules[name]))
                deepest = max(deepest, len(todo) - 1)
    return deepest
