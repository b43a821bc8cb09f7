"""The target's own output as training text, saved after each batch, so that an interrupted run resumes. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError
from .corpus import Rows, joined, load_rows
from .recipe import TargetSizes

KEPT = "own-text.npz"
BEGUN = "own-text-begun.npz"
TURNS = "turns"  # folder of user turns
_CONTENT = "CONTENT"  # stands for a user turn in the template
Report = Callable[[str], None]


class Writes(Protocol):
    """Interface of a generating target; `TargetModel` implements it."""

    sizes: TargetSizes

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts, no special ones added."""
        ...

    def render(self, messages: list[dict[str, Any]], answer: bool) -> str:
        """Messages in the chat format."""
        ...

    def write(
        self,
        prompts: list[list[int]],
        length: int,
        temperatures: Sequence[float],
        batch: int,
        seed: int,
        done: int,
        report: Report,
    ) -> Iterator[Rows]:
        """The rows of each batch, for all prompts but the first `done` in its order."""
        ...


def write_rows(
    target: Writes,
    folder: Path,
    prompts: list[list[int]],
    length: int,
    temperatures: Sequence[float],
    batch: int,
    seed: int,
    report: Report,
    stop: Callable[[], bool],
) -> Rows:
    """The target's output for each prompt, also saved in the folder as `KEPT`; while incomplete as `BEGUN`.

    Resumes from the folder's file.

    Raises:
        KeyboardInterrupt: `stop` became true; after a batch.
        ConfigError: The folder's file is from other prompts or options.
    """
    begun, mark = folder / BEGUN, _mark(target, prompts, length, temperatures, seed)
    parts: list[Rows] = []
    done = 0
    if begun.exists():
        parts, done = [load_rows(begun)], _done(begun, mark)
        report(f"text: going on from {begun}, {done} of {len(prompts)} rows")
    folder.mkdir(parents=True, exist_ok=True)
    for rows in target.write(prompts, length, temperatures, batch, seed, done, report):
        parts = [joined([*parts, rows])]
        done = min(done + batch, len(prompts))
        _save(begun, parts[0], done, mark)
        report(f"text: {done} of {len(prompts)} rows")
        if done < len(prompts) and stop():
            report(f"text: kept in {begun}; the same command goes on")
            raise KeyboardInterrupt
    parts[0].save(folder / KEPT)
    begun.unlink(missing_ok=True)
    return parts[0]


def write_turns(
    target: Writes,
    folder: Path,
    n: int,
    length: int,
    batch: int,
    seed: int,
    report: Report,
    stop: Callable[[], bool],
) -> list[list[int]]:
    """Prompts of user turns that the target generates itself, at temperature 1, from its chat template's opening of one.

    Turns that do not end within `length` tokens are left out, and so are repeated ones. Resumes as `write_rows` does.

    Raises:
        KeyboardInterrupt: `stop` became true; after a batch.
        ConfigError: The template or the target has no such turn.
    """
    parts = target.render([{"role": "user", "content": _CONTENT}], True).split(_CONTENT)
    if len(parts) != 2:
        raise ConfigError("--own-turns: the chat template does not give a user turn's text once")
    opening, closing = target.encode(parts)
    kept = folder / TURNS / KEPT
    if kept.exists():
        rows = load_rows(kept)
        report(f"text: the user turns of {kept} are used")
    else:
        report(f"text: {n} user turns first")
        heat = [1.0] * n
        rows = write_rows(target, folder / TURNS, [opening] * n, length, heat, batch, seed, report, stop)
    found = {
        tuple(row[start : stop - 1].tolist())
        for row, start, stop in zip(rows.ids, rows.start, rows.stop)
        if row[stop - 1] == target.sizes.eos
    }
    if not found:
        raise ConfigError(f"--own-turns: no user turn of the target's ends within {length} tokens")
    return [[*opening, *turn, *closing] for turn in sorted(found)]


def _mark(
    target: Writes, prompts: list[list[int]], length: int, temperatures: Sequence[float], seed: int
) -> str:
    """A hash of everything that determines the output, without the batch size."""
    all_of_it = json.dumps([asdict(target.sizes), prompts, length, list(temperatures), seed])
    return hashlib.sha1(all_of_it.encode(), usedforsecurity=False).hexdigest()


def _save(path: Path, rows: Rows, done: int, mark: str) -> None:
    """Uncompressed, since it is written after every batch."""
    beside = path.with_name(f"{path.name}.part")
    with beside.open("wb") as file:
        np.savez(
            file, ids=rows.ids, start=rows.start, stop=rows.stop, done=np.array(done), mark=np.array(mark)
        )
    beside.replace(path)


def _done(path: Path, mark: str) -> int:
    """Number of finished prompts in the incomplete file."""
    with np.load(path, allow_pickle=False) as file:
        if str(file.get("mark")) != mark:
            raise ConfigError(
                f"{path}: begun with another target, texts or options; give those again, take its rows with --data, "
                "or remove it"
            )
        return int(file["done"])
