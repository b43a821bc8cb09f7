"""Command-line options as text tables: one entry per option, continued by indented lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

_KINDS: dict[str, Any] = {"int": int, "float": float, "str": str, "path": Path}


def entries(table: str) -> Iterator[tuple[list[str], list[str], str]]:
    """Flags, further words, and the text after ` | ` of each entry."""
    for entry in table.replace("\n    ", " ").strip().splitlines():
        head, _, text = entry.partition(" | ")
        flags = [*takewhile(lambda word: word.startswith("-"), head.split())]
        yield flags, head.split()[len(flags) :], text


def add_table(add: Callable[..., Any], table: str, **kinds: Any) -> None:
    """Add options, such as `-c --ctx-size N int 0 | help`.

    After the flags come the value's name in the help (`_`: none), its parser and its default. Without them it is a
    switch.

    Args:
        kinds: Parsers besides int, float, str and path, by their name in the table: a function, or keywords of
            add_argument.
        add: A parser's or a group's add_argument.
    """
    for flags, value, text in entries(table):
        made = {**_KINDS, **kinds}[value[1]] if len(value) > 1 else {}
        options = dict(made) if isinstance(made, dict) else {"type": made}
        if not value:
            options["action"] = "store_true"
        elif value[0] != "_":
            options["metavar"] = value[0]
        if len(value) > 2:
            options["default"] = options.get("type", str)(value[2])
        add(*flags, **options, help=text)
