"""Shared parts of the dialect readers: the normalised form, and typed access to fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...files.keys import KeyedFile, describe
from ...models.checks import MAX_WIDTH, in_range

DEFAULT_BLOCK = 16  # the formats' default block size


@dataclass(frozen=True, slots=True)
class Dialect:
    """A draft as its file declares it.

    `fields` are arguments of `DraftParams`; `names` maps normalised tensor names to those in the file.

    Attributes:
        interleaved: Rotary pairs are adjacent dimensions and must be reordered to half a head apart.
        is_offset: The table of a reduced vocabulary has offsets from the draft's ids to the target's, not the target's ids.
    """

    fields: dict[str, Any]
    names: dict[str, str]
    interleaved: bool = False
    is_offset: bool = False


def plain_only(file: KeyedFile, plain: Mapping[str, Any]) -> None:
    """Refuse values that need maths which the graph does not have."""
    for key, value in plain.items():
        if (found := file.get(key, type(value))) not in (None, value):
            raise file.error(f"key {key!r} is {describe(found)}, but only {value!r} is supported")


def unique(file: KeyedFile, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The mapping of new names to old ones, which must be one to one."""
    names: dict[str, str] = {}
    for new, old in pairs:
        if new in names:
            raise file.error(f"tensors {names[new]!r} and {old!r} are the same one, {new!r}")
        names[new] = old
    return names


def count(file: KeyedFile, key: str, high: int = MAX_WIDTH) -> int:
    """The integer under `key`, from 1 to `high`."""
    return in_range(file.error, f"key {key!r}", file.require(key, int), 1, high)
