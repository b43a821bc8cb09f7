"""Limits of a grammar's text, checked before it is compiled.

The compiler calls itself once per rule that leads to a rule, until its native stack ends, and writes counted repetitions
out. It bounds brackets in brackets itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ..errors import ConfigError

CHARS = 1 << 19
RULES = 5000
DEPTH = 200  # of rules that lead to rules; the compiler's stack ends at some 3,000
REPEATED = 10_000  # parts of an expression beyond those that are written down
_MOST = 10**9

# What is left open ends with its line, and no two parts of a pattern can share a run: text of any kind takes linear time.
_NAME = r"[A-Za-z_][\w-]*"
_STRING = r'"(?:[^"\\\n]|\\.)*"?'
_SLASHES = r"/(?:[^/\\\n]|\\.)+/?"
_BLANK = r"[^\S\n]*"
_ATTRIBUTES = r'\[(?:"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|[^\]"/\n])*\]'
_COUNT = r"\{[\d\s,]*\}"
_LARK = re.compile(
    rf"^{_BLANK}[!?]?(?P<head>{_NAME})"
    rf"(?=(?:{_BLANK}::{_BLANK}_)?(?:{_BLANK}{_ATTRIBUTES})?(?:{_BLANK}\.\d+)?{_BLANK}:(?!:))"
    rf"|(?P<quoted>{_STRING}|{_SLASHES})|#[^\n]*|//[^\n]*|::{_BLANK}\w+|(?P<name>{_NAME})"
    rf"|(?P<count>{_COUNT}|~\s*\d+(?:\s*\.\.\s*\d*)?)|(?P<group>[()\[\]])",
    re.MULTILINE,
)
_GBNF = re.compile(
    rf"{_STRING}|\[(?:[^\]\\\n]|\\.)*\]?|#[^\n]*|(?P<head>{_NAME}(?=\s*::=))|(?P<name>{_NAME})"
)
_REGEX = re.compile(
    rf"(?P<open>\[\^?\]?)|(?P<close>\])|(?P<group>\((?:\?(?:P?<\w*>|[\w-]*:?))?|\))|(?P<count>{_COUNT})"
    r"|(?P<none>[|^$*+?])|\\(?:[pPxuU]\{[^}]{0,99}\}|.)?|.",
    re.DOTALL,
)


def check_text(kind: str, text: str) -> None:
    """Raise ConfigError for a grammar that is too long; of GBNF and Lark, also for too many or too deep rules."""
    if len(text) > CHARS:
        raise ConfigError(f"grammar ({kind}): {len(text)} characters, at most {CHARS} are allowed")
    if kind == "regex":
        check_size(regex_size(text), len(text), "grammar (regex)")
    elif kind == "gbnf":
        _rules_size("grammar (gbnf)", _GBNF, text)  # what it repeats is seen once it is Lark
    elif kind == "lark":
        if text.lstrip().startswith("{"):
            # the compiler would take it for its own JSON, with schemas unbounded
            raise ConfigError("grammar (lark): it begins as JSON; rules are expected")
        check_size(_rules_size("grammar (lark)", _LARK, text), len(text), "grammar (lark)")


def check_size(size: int, written: int, kind: str) -> None:
    """Raise ConfigError for more than REPEATED parts beyond those written."""
    if size > written + REPEATED:
        raise ConfigError(f"{kind}: counted repetitions of more than {REPEATED} parts in all")


def regex_size(pattern: str) -> int:
    """Parts of a regular expression, those of a repetition as often as it has them; not more than it has characters
    where nothing is counted."""
    return _written_out(_regex_parts(pattern))


def _regex_parts(pattern: str) -> Iterator[int | str]:
    depth = 0  # of classes in each other
    for found in _REGEX.finditer(pattern):
        kind = found.lastgroup
        if kind == "open":
            depth += 1
        elif depth:
            depth -= kind == "close"
            if not depth:
                yield 1
        elif kind == "group":
            yield found[0][0]
        elif kind == "count":
            yield found[0]
        else:
            yield int(kind != "none")


def _rules_size(what: str, token: re.Pattern[str], text: str) -> int:
    """All terminals and expressions of a grammar; terminals are put into each other. Follows every rule where it is met
    first, as the compiler does, and raises ConfigError for too many or too deep ones."""
    rules: dict[str, list[int | str]] = {"": []}
    body, literals = rules[""], 0
    for found in token.finditer(text):
        kind = found.lastgroup
        if kind == "head":
            body = rules.setdefault(found[kind], [])
        elif kind == "quoted":
            is_regex = found[0][0] == "/"
            body.append(regex_size(found[0]) if is_regex else len(found[0]))
            literals += regex_size(found[0]) if is_regex else 0
        elif kind is not None:
            body.append(found[0])
    if len(rules) - 1 > RULES:
        raise ConfigError(f"{what}: {len(rules) - 1} rules, at most {RULES} are allowed")
    known: dict[str, int] = {}

    def size(name: str, depth: int) -> int:
        if depth > DEPTH:
            raise ConfigError(f"{what}: rules lead to rules more than {DEPTH} deep")
        if name not in known:
            known[name] = 1  # one that leads to itself is refused by the compiler
            parts = []
            for part in rules[name]:  # no comprehension: a frame of Python's per rule is enough
                parts.append(size(part, depth + 1) if part in rules else part)
            known[name] = _written_out(parts) if name.isupper() else 0
        return known[name]

    return min(literals + sum([size(name, 1) for name in rules]), _MOST)


def _written_out(parts: Iterable[int | str]) -> int:
    """The size of parts that are given by their sizes, brackets and counts."""
    sums, last = [0], 0
    for part in parts:
        if part in ("(", "["):
            sums.append(0)
            continue
        if part in (")", "]"):
            last = sums.pop()
            sums = sums or [0]  # one too many, as behind a class within a class, closes all before it
        elif isinstance(part, str):
            digits = (re.findall(r"\d+", part) or ["1"])[-1]
            last *= max((int(digits) if len(digits) < 10 else _MOST) - 1, 0)
        else:
            last = part
        sums[-1] = min(sums[-1] + last, _MOST)
    return min(sum(sums), _MOST)
