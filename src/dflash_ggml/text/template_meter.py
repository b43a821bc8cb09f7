"""Limits of a running chat template: steps, time, and the length of every value.

The sandbox calls it before and after each operation; a value's weight is its characters, including all members of lists.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NoReturn, TypeVar

import jinja2

VALUE = 1 << 24  # largest weight of a value, in characters, members included
ITEM = 64  # weight of a list item besides its own characters
DEPTH = 100  # nesting of lists: some of Python's own functions recurse
STEPS = 1_000_000  # loop passes, operations and calls; long values cost more. A second or two in total
SECONDS = 3.0  # seconds of this thread's CPU time, if steps are slower
BITS = 1 << 14  # bits of an integer
WIDTH = 1000  # width for padding, wrapping and indenting
PIECE = 1024  # characters scanned per step
NEW = 128  # characters created per step: bounds the total memory

_LOOKS = 2000  # steps between checks of the clock
_T = TypeVar("_T")
VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_LISTS: tuple[type[Any], ...] = (list, tuple, set, frozenset, *VIEWS)
_PLAIN = frozenset((bool, float, type(None)))
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\S+")


class Meter(threading.local):
    """Remaining steps and time of the template running in this thread."""

    left = 0
    look = 0
    end = 0.0


METER = Meter()


def metered(run: Callable[[], _T]) -> _T:
    """The result of `run`, with limits for templates of this environment.

    Raises:
        TemplateError: A limit is exceeded.
    """
    before = METER.left, METER.look, METER.end
    METER.left, METER.look, METER.end = STEPS, STEPS - _LOOKS, time.thread_time() + SECONDS
    try:
        return run()
    finally:
        METER.left, METER.look, METER.end = before


def spend(n: int) -> None:
    """Count n steps."""
    METER.left -= n
    if METER.left < METER.look:
        if METER.left < 0:
            refuse(f"it takes more than {STEPS} steps")
        if time.thread_time() > METER.end:
            refuse(f"it takes more than {SECONDS:g} s")
        METER.look = max(METER.left - _LOOKS, 0)


def refuse(message: str) -> NoReturn:
    """Raise TemplateError."""
    raise jinja2.TemplateError(message)


def fits(n: int) -> int:
    """`n`, if a value may have as many characters."""
    if n > VALUE:
        refuse(f"it makes a value of more than {VALUE} characters")
    return n


def weight_of(value: Any, depth: int = 0) -> int:
    """Weight of a value with all members, repetitions included."""
    kind = type(value)
    if kind is str:
        return len(value)
    if kind in _PLAIN:
        return ITEM
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return ITEM + value.bit_length() // 3
    if isinstance(value, range):
        return ITEM * (1 + len(value))
    held = value
    if kind is not list and not isinstance(value, _LISTS):
        if kind is not dict and not isinstance(value, Mapping):
            return ITEM
        held = (*value, *value.values())
    if depth >= DEPTH:
        refuse(f"it makes a list that is nested deeper than {DEPTH}")
    n = fits(ITEM * (1 + len(value)))
    spend(1 + len(value) // 16)
    for item in held:
        n += len(item) if type(item) is str else weight_of(item, depth + 1)
        if n > VALUE:
            fits(n)
    return n


def count_scanned(value: Any) -> Any:
    """The value, counted as scanned."""
    spend(weight_of(value) // PIECE)
    return value


def made(value: Any) -> Any:
    """A new value, counted; iterators become lists."""
    if isinstance(value, str):
        spend(1 + fits(len(value)) // NEW)
    elif isinstance(value, int):
        spend(1)
        if value.bit_length() > BITS:
            refuse(f"it makes an integer of more than {BITS} bits")
    else:
        if isinstance(value, Iterator):
            value = list(stepped(value))
        spend(1 + fits(weight_of(value)) // PIECE)
    return value


def stepped(value: Iterable[Any]) -> Iterator[Any]:
    """Items of an iterable, a step for each."""
    spend(1)
    for item in value:
        spend(1)
        yield item


def loop_items(value: Any) -> Any:
    """Items of a loop, a step for each pass: counted in advance if they are few, else with checks of the clock."""
    if not hasattr(value, "__len__") or len(value) >= _LOOKS:
        return stepped(value)
    spend(1 + len(value))
    return value


def part_of(value: Any) -> Any:
    """A slice of a value."""
    spend(1 + size(value) // ITEM)
    return value


def concat(pieces: Iterable[str]) -> str:
    """The text of a macro or a block."""
    pieces = list(pieces)
    spend(1 + fits(sum(map(len, pieces))) // NEW)
    return "".join(pieces)


def joined(values: tuple[Any, ...]) -> str:
    """The concatenated texts of values."""
    return concat([value if type(value) is str else str(count_scanned(value)) for value in values])


def size(value: Any) -> int:
    """Items or characters; for a number itself, as a width."""
    return len(value) if isinstance(value, Sized) else abs(value) if isinstance(value, int) else 0


def widths(text: str) -> int:
    """The sum of all numbers in a format, which may be widths."""
    return sum(int(number) if len(number) < 10 else VALUE + 1 for number in _NUMBER.findall(text))


def check_format(text: Any, values: Any) -> None:
    """Check a `%` format, whose `*` takes widths from the values."""
    numbers = widths(text)
    if "*" in text and isinstance(values, tuple):
        numbers += sum(size(value) for value in values if isinstance(value, int))
    fits(len(text) + numbers + text.count("%") * weight_of(values))


def check_growth(name: str, value: Any, others: tuple[Any, ...]) -> None:
    """Refuse a filter or string method that would create a too long value."""
    if name in ("center", "ljust", "rjust", "zfill"):
        fits(max(map(size, others), default=0))
    elif name == "expandtabs":
        fits(len(value) + value.count("\t") * sum(map(size, others)))
    elif name == "replace" and len(others) > 1:
        value, old, new = (str(v) for v in (value, *others[:2]))
        fits(len(value) + value.count(old) * len(new))
    elif name == "join":
        fits(weight_of(value) + sum(map(weight_of, others)) + size(value) * sum(map(size, others)))
    elif name == "indent":
        fits(weight_of(value) + (1 + str(value).count("\n")) * (4 + sum(map(size, others))))
    elif name == "list":
        fits(ITEM * size(value))
    elif name == "format":
        check_format(str(value), others)
    elif name == "translate":
        table = others[0] if others and isinstance(others[0], Mapping) else {}
        fits(len(value) * max(map(weight_of, table.values()), default=1))
    elif name in ("split", "rsplit", "splitlines") and len(value) * ITEM > VALUE:
        mark = next((v for v in others if isinstance(v, str) and v), None)
        n = value.count(mark) if mark else sum(1 for _ in _WORD.finditer(value))
        fits((n + value.count("\n")) * ITEM)
