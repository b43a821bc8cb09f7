"""Size limits of a grammar, checked before compiling.

The compiler recurses natively along chains of rules, and expands counted repetitions. It limits nested brackets itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ..errors import ConfigError

CHARS = 1 << 19
RULES = 5000
DEPTH = 200  # depth of chains of rules; the compiler's stack overflows at about 3,000
REPEATED = 10_000  # parts of an expression added by repetitions
_MOST = 10**9

# Open constructs end with the line, and no two parts of a pattern overlap: linear time on any text.
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
        _rules_size("grammar (gbnf)", _GBNF, text)  # repetitions are checked after conversion to Lark
    elif kind == "lark":
        if text.lstrip().startswith("{"):
            # the compiler would read it as its own JSON format, with unbounded schemas
            raise ConfigError("grammar (lark): it begins as JSON; rules are expected")
        check_size(_rules_size("grammar (lark)", _LARK, text), len(text), "grammar (lark)")


def check_size(size: int, written: int, kind: str) -> None:
    """Raise ConfigError for more than REPEATED parts added by repetitions."""
    if size > written + REPEATED:
        raise ConfigError(f"{kind}: counted repetitions of more than {REPEATED} parts in all")


def regex_size(pattern: str) -> int:
    """Expanded parts of a regular expression; without counted repetitions at most its length."""
    return _written_out(_regex_parts(pattern))


def _regex_parts(pattern: str) -> Iterator[int | str]:
    depth = 0  # depth of nested classes
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
    """Expanded size of a grammar's terminals and expressions; terminals are inlined. Visits every rule at its first use, like
    the compiler, and raises ConfigError for too many or too deep ones."""
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
            known[name] = 1  # the compiler refuses recursive terminals
            parts = []
            for part in rules[name]:  # no comprehension, which would add a Python frame per rule
                parts.append(size(part, depth + 1) if part in rules else part)
            known[name] = _written_out(parts) if name.isupper() else 0
        return known[name]

    return min(literals + sum([size(name, 1) for name in rules]), _MOST)


def _written_out(parts: Iterable[int | str]) -> int:
    """The expanded size of parts, given as sizes, brackets and counts."""
    sums, last = [0], 0
    for part in parts:
        if part in ("(", "["):
            sums.append(0)
            continue
        if part in (")", "]"):
            last = sums.pop()
            sums = sums or [0]  # an unmatched bracket, as after a nested class, closes all open ones
        elif isinstance(part, str):
            digits = (re.findall(r"\d+", part) or ["1"])[-1]
            last *= max((int(digits) if len(digits) < 10 else _MOST) - 1, 0)
        else:
            last = part
        sums[-1] = min(sums[-1] + last, _MOST)
    return min(sum(sums), _MOST)
