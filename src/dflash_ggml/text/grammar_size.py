"""How large a regular expression becomes when its counted repetitions are written out, as the compiler does."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import ConfigError

REPEATED = 10_000  # parts of an expression beyond those that are written down
_MOST = 10**9

_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}|~(\d+)(\.\.)?(\d*)")
_CLASS = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]?", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|.)?", re.DOTALL)
_OPEN = re.compile(r"\((?:\?[^:()]*:?)?")


def check_size(size: int, written: int, kind: str) -> None:
    """Raise ConfigError for more than REPEATED parts beyond those written."""
    if size > written + REPEATED:
        raise ConfigError(f"{kind}: counted repetitions of more than {REPEATED} parts in all")


def regex_size(pattern: str) -> int:
    """Parts of a regular expression, those of a repetition as often as it has them; not more than it has characters
    where nothing is counted."""
    return _sum(pattern, _regex_part)


def _regex_part(text: str, at: int) -> tuple[int, int]:
    """Index behind the part that begins at `at`, and its size."""
    char = text[at]
    found = _CLASS.match(text, at) if char == "[" else _ESCAPE.match(text, at) if char == "\\" else None
    return (found.end(), 1) if found else (at + 1, char not in "|^$*+?")


def _sum(text: str, part: Callable[[str, int], tuple[int, int]]) -> int:
    """The size of a text of parts, groups and counts."""
    sums, last, at = [0], 0, 0
    while at < len(text):
        if text[at] == "(":
            sums.append(0)
            at = _OPEN.match(text, at).end()  # type: ignore[union-attr]
            continue
        if text[at] == ")":
            last, at = sums.pop() if len(sums) > 1 else 0, at + 1
        elif text[at] in "{~" and (count := _COUNT.match(text, at)):
            low, _, high, fewest, _, most = count.groups()
            digits = high or low or most or fewest or "1"
            n = int(digits) if len(digits) < 10 else _MOST
            last, at = last * max(n - 1, 0), count.end()
        else:
            at, last = part(text, at)
        sums[-1] = min(sums[-1] + last, _MOST)
    return min(sum(sums), _MOST)


def terminals_size(bodies: dict[str, str], written: Callable[[str], int]) -> int:
    """All terminals of a Lark grammar: they are put into each other. bodies: by name; written: a literal's size."""
    known: dict[str, int] = {}
    name = re.compile(r'[A-Za-z_][\w-]*|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|.', re.DOTALL)

    def part(text: str, at: int) -> tuple[int, int]:
        found = name.match(text, at)
        assert found is not None
        word = found[0]
        if word[0] in '"/':
            return found.end(), written(word)
        return found.end(), size(word) if word in bodies else 0

    def size(word: str) -> int:
        if word not in known:
            known[word] = 1  # one that leads to itself is refused by the compiler
            known[word] = _sum(bodies[word], part)
        return known[word]

    return min(sum(map(size, bodies)), _MOST)
