"""Reports of suites: tables, notes and plots; as plain text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .measure import Run

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: the key of its values, its heading, how a number is written. `digits` None: as it is."""

    key: str
    title: str
    digits: int | None = None

    def show(self, row: Row) -> str:
        """The value of a row as text, empty where there is none."""
        value = row.get(self.key)
        if value is None or value is False:
            return ""
        if value is True:
            return "yes"
        return str(value) if self.digits is None else f"{value:,.{self.digits}f}"

    @property
    def is_number(self) -> bool:
        """Whether the column stands to the right."""
        return self.digits is not None


def columns(table: str) -> tuple[Column, ...]:
    """Columns from `key=title` or `key=title:digits`, with `; ` between."""
    parts = (entry.partition("=") for entry in table.split("; "))
    split = ((key, *title.partition(":")) for key, _, title in parts)
    return tuple(Column(key, title, int(digits) if digits else None) for key, title, _, digits in split)


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a plot, with the spread of its points where there is one; or a kind of part of every bar."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture. levels: horizontal lines with a name. mark: a point (x, y) with a name.

    bars: names of the bars; then every series is a part of each of them, stacked.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    levels: Sequence[tuple[str, float]] = ()
    mark: tuple[str, float, float] | None = None
    log_x: bool = False
    bars: Sequence[str] | None = None


@dataclass(slots=True)
class Section:
    """The report of a suite. forced: set when the accepted length was set by hand, which the heading then says.

    details: a table that files have and a terminal has not.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    runs: Sequence[Run] = ()
    forced: str | None = None
    details: Section | None = None

    @property
    def heading(self) -> str:
        """The title, and that acceptance was forced, if it was."""
        forced = f": FORCED ACCEPTANCE, not model text ({self.forced})" if self.forced else ""
        return f"{self.title}{forced}"

    def cells(self) -> list[list[str]]:
        """The table as text, its headings first; columns that are empty in every row are left out."""
        shown = [c for c in self.columns if any(c.show(row) for row in self.rows)]
        return [[c.title for c in shown], *([c.show(row) for c in shown] for row in self.rows)]

    def aligned(self) -> list[bool]:
        """For each column of `cells` whether it stands to the right."""
        return [c.is_number for c in self.columns if any(c.show(row) for row in self.rows)]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "title": self.title,
            "forced_acceptance": self.forced,
            "rows": self.rows,
            "notes": self.notes,
            **({self.details.name: self.details.rows} if self.details else {}),
            "texts": [run.as_dict() for run in self.runs],
        }


def plain(section: Section) -> str:
    """A section for a terminal or a file, without control characters."""
    cells, right = section.cells(), section.aligned()
    sizes = [max(map(len, column)) for column in zip(*cells)]
    padded = ([c.rjust(n) if r else c.ljust(n) for c, n, r in zip(row, sizes, right)] for row in cells)
    lines = ["  ".join(row).rstrip() for row in padded]
    return "\n".join([section.heading, *(f"  {line}" for line in lines), *(f"  {n}" for n in section.notes)])


def markdown(facts: Sequence[tuple[str, str]], sections: Sequence[Section], state: str) -> str:
    """A whole report as Markdown."""
    lines = ["# dflash-bench", "", *([f"**{state}**", ""] if state else [])]
    lines += ["| | |", "|---|---|", *(f"| {name} | {_escaped(value)} |" for name, value in facts)]
    for section in with_details(sections):
        cells, right = section.cells(), section.aligned()
        lines += ["", f"## {section.heading}", ""]
        lines += ["| " + " | ".join(map(_escaped, cells[0])) + " |"]
        lines += ["|" + "|".join("---:" if r else "---" for r in right) + "|"]
        lines += ["| " + " | ".join(map(_escaped, row)) + " |" for row in cells[1:]]
        lines += [part for note in section.notes for part in ("", note)]
    return "\n".join(lines) + "\n"


def with_details(sections: Sequence[Section]) -> list[Section]:
    """Sections, each with its details behind it."""
    return [part for section in sections for part in (section, section.details) if part is not None]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
