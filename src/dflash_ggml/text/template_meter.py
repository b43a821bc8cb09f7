"""What a chat template may use up while it runs: steps, time, and the length of every value.

The sandbox asks here before and after each operation; a value's weight is its characters, lists with all that they hold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, NoReturn, TypeVar, cast

import jinja2

VALUE = 1 << 24  # characters of a value, lists and what they hold included
ITEM = 64  # characters that an item of a list counts as, besides its own
DEPTH = 100  # of lists in lists: some of Python's own loops over them call themselves
STEPS = 1_000_000  # passes, operations and calls; long values cost more. A second or two in all
SECONDS = 3.0  # of this thread's time, where steps are slower than that
BITS = 1 << 14  # of an integer

PIECE = 1024  # characters that are worth a step
_LOOKS = 2000  # steps between looks at the clock
_T = TypeVar("_T")
VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
LISTS: tuple[type[Iterable[Any]], ...] = (list, tuple, set, frozenset, *VIEWS)
HOLDERS: tuple[type[Any], ...] = (dict, *LISTS, Mapping)
PLAIN = frozenset((bool, float, type(None)))


class Meter(threading.local):
    """What the template that runs in this thread has left."""

    left = 0
    look = 0
    end = 0.0


METER = Meter()


def metered(run: Callable[[], _T], steps: int = STEPS) -> _T:
    """The result of `run`, which may use templates of this environment. Raises TemplateError beyond the limits."""
    before = METER.left, METER.look, METER.end
    METER.left, METER.look, METER.end = steps, steps - _LOOKS, time.thread_time() + SECONDS
    try:
        return run()
    finally:
        METER.left, METER.look, METER.end = before


def spend(n: int) -> None:
    """Take n steps."""
    METER.left -= n
    if METER.left < METER.look:
        if METER.left < 0:
            refuse(f"it takes more than {STEPS} steps")
        if time.thread_time() > METER.end:
            refuse(f"it takes more than {SECONDS:g} s")
        METER.look = METER.left - _LOOKS


def refuse(message: str) -> NoReturn:
    """Raise TemplateError."""
    raise jinja2.TemplateError(message)


def fits(n: int) -> int:
    """`n` characters, if a value may have as many."""
    if n > VALUE:
        refuse(f"it makes a value of more than {VALUE} characters")
    return n


class Weighed(list[Any]):
    """A list made by the template, which cannot change it, with what it weighs and how deep it goes."""

    __slots__ = ("depth", "weight")
    depth: int
    weight: int


def weight_of(value: Any, depth: int = 0) -> int:
    """Characters of a value with all that it holds, however often it holds it."""
    kind = type(value)
    if kind is str:
        return len(value)
    if kind in PLAIN:
        return ITEM
    if kind is Weighed:
        if depth + value.depth > DEPTH:
            refuse(f"it makes a list that is nested deeper than {DEPTH}")
        return cast(Weighed, value).weight
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return ITEM + value.bit_length() // 3
    n = ITEM
    if isinstance(value, HOLDERS):
        if depth >= DEPTH:
            refuse(f"it makes a list that is nested deeper than {DEPTH}")
        n = fits(ITEM * (1 + len(value)))
        spend(1 + len(value) // 16)
        if isinstance(value, Mapping):
            for key, item in value.items():
                n = fits(n + weight_of(key, depth + 1) + weight_of(item, depth + 1))
        else:
            for item in value:
                n = fits(n + weight_of(item, depth + 1))
    elif isinstance(value, range):
        n += ITEM * len(value)
    return n


def depth_of(value: Any) -> int:
    """How deep lists go in each other."""
    if type(value) is Weighed:
        return value.depth
    if isinstance(value, Mapping):
        value = (*value.keys(), *value.values())
    return 1 + max((depth_of(item) for item in value), default=0) if isinstance(value, LISTS) else 0


def looked_through(value: Any) -> Any:
    """The value, for an operation that goes through all of it."""
    spend(weight_of(value) // PIECE)
    return value


def made_value(value: Any) -> Any:
    """A value that an operation has made."""
    weight = fits(weight_of(value))
    spend(1 + weight // PIECE)
    if type(value) is list:
        return as_weighed(value, weight, depth_of(value))
    if isinstance(value, int) and value.bit_length() > BITS:
        refuse(f"it makes an integer of more than {BITS} bits")
    return value


def as_weighed(values: list[Any], weight: int, depth: int) -> Weighed:
    """A copy of a list that knows its weight and depth."""
    made = Weighed(values)
    made.weight, made.depth = weight, depth
    return made


def as_list(value: Iterable[Any]) -> list[Any]:
    """A list of what an iterable gives, a step for each."""
    out = []
    for item in value:
        spend(1)
        out.append(item)
    return out


def loop_items(value: Any) -> Any:
    """What a loop goes through."""
    if not isinstance(value, Sized):
        value = as_list(value)
    spend(1 + len(value))
    return value


def part_of(value: Any) -> Any:
    """A slice, which holds what was there."""
    spend(1 + (len(value) // 64 if isinstance(value, Sized) else 0))
    return value


def concat_pieces(pieces: Iterable[str]) -> str:
    """The text of a macro or a block."""
    pieces = list(pieces)
    n = fits(sum(map(len, pieces)))
    spend(1 + n // PIECE)
    return "".join(pieces)


def joined_values(values: tuple[Any, ...]) -> str:
    """The texts of values, one behind the other."""
    return concat_pieces([value if type(value) is str else str(value) for value in values])
