"""Progress bar and tables on a terminal (rich, the extra `bench`); plain lines otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from ..cli.streams import named
from .runner import Lines
from .sections import Section, plain


def progress(stream: TextIO) -> Lines:
    """A bar if the stream is a terminal and rich is installed."""
    if not stream.isatty():
        return Lines(stream)
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return Lines(stream)

    class Bar(Lines):
        """One bar per suite, removed when it ends."""

        def begin(self, name: str, total: int) -> None:
            """Show the bar."""
            self._bar = Progress(
                TextColumn("{task.fields[suite]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),  # names of prompts and servers
                console=Console(file=stream),
                transient=True,
            )
            self._task = self._bar.add_task("", total=total, suite=name)
            self._bar.start()

        def at(self, done: int, what: str) -> None:
            """Update it."""
            self._bar.update(self._task, completed=done, description=what)

        def end(self) -> None:
            """Remove it."""
            self._bar.stop()

    return Bar(stream)


def show(section: Section, stream: TextIO) -> None:
    """A section's table and notes."""
    with named():
        if stream.isatty():
            try:
                return _rich(section, stream)
            except ImportError:
                pass
        print(plain(section), end="\n\n", file=stream, flush=True)


def _rich(section: Section, stream: TextIO) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells, right = section.cells(), section.aligned()
    style = "bold red" if section.forced else "bold"
    console = Console(file=stream)
    console.print(Text(section.heading, style))
    for block in blocks(cells, right, console.width):
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for at in block:
            table.add_column(Text(cells[0][at]), justify="right" if right[at] else "left", overflow="fold")
        for row in cells[1:]:
            table.add_row(*(Text(row[at]) for at in block))
        console.print(table)
    for note in section.notes:
        console.print(Text(note, "dim"))
    console.print()


def blocks(cells: Sequence[Sequence[str]], right: Sequence[bool], width: int) -> list[list[int]]:
    """Columns of a table in blocks of so many characters: those that name a row in every block, the others distributed."""
    sizes = [max(map(len, column)) + 3 for column in zip(*cells)]
    names = list(range(1 + (right.index(False) if False in right else 0)))
    found = [names]
    for at in range(len(names), len(sizes)):
        if len(found[-1]) > len(names) and sum(sizes[i] for i in [*found[-1], at]) > width:
            found.append(names)
        found[-1] = [*found[-1], at]
    return found


def say(text: str) -> None:
    """Print a line on stderr."""
    print(f"dflash-bench: {text}", file=sys.stderr, flush=True)
