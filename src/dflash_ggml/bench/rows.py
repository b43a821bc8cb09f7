"""Rows and plots shared by suites: summaries of a setting's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .measure import Run, all_uses, all_widths, mean_length, ratios, step_times, summary
from .sections import Plot, Row, Section, Series, columns

SPEED = columns(
    "speed=tokens/s:1; speed_min=min:1; speed_max=max:1; versus_plain=x plain:2; versus_plain_min=worst:2; length=tokens/pass:2; "
    "step_ms=ms/pass:2; ttft_ms=first token ms:1; widths=nodes a pass; texts=runs:0; repeating=that loop:0"
)
CHOICES = columns(
    "group=runs; nodes=nodes:0; steps=steps:0; share=%:1; tokens_per_step=tokens/step:2; ms=ms:3; predicted_ms=predicted ms:3"
)
SWEEP = tuple(column for column in SPEED if column.key != "ttft_ms")


def spread_of(name: str, values: dict[str, Any] | None) -> Row:
    """A summary as the cells of a row: NAME is the median."""
    if values is None:
        return {}
    return {name: values["median"], **{f"{name}_{k}": v for k, v in values.items() if k != "median"}}


def speed_row(runs: Sequence[Run], plain: Sequence[Run], **first: object) -> Row:
    """The cells of SPEED for the runs of one setting; `plain`: the same prompts without drafts."""
    widths, times, ours = all_widths(runs), step_times(runs), any(run.steps for run in runs)
    common = ", ".join(f"{w}: {n / widths.total():.0%}" for w, n in widths.most_common(3))
    used = common if len(widths) > 1 else str(next(iter(widths))) if any(widths) else ""
    return {
        **first,
        **spread_of("speed", summary(run.per_second for run in runs)),
        **(spread_of("versus_plain", ratios(runs, plain)) if runs is not plain else {}),
        "length": mean_length(runs),
        "step_ms": sum(times.values()) if times else None,
        "stages_ms": times,
        **spread_of("ttft_ms", summary(run.fresh_ttft_ms for run in runs)),
        "widths": used,
        "width_counts": dict(sorted(widths.items())),
        "texts": len(runs),
        "repeating": sum(run.repeats for run in runs) if ours else None,
    }


def chosen_widths(groups: Mapping[str, Sequence[Run]]) -> Section | None:
    """Choices of `auto` in groups of runs: a row per width, with measured and predicted milliseconds."""
    rows: list[Row] = []
    for name, runs in groups.items():
        uses = all_uses(runs)
        total = sum(use.steps for use in uses)
        for use in uses:
            per_step = {"tokens_per_step": use.tokens / use.steps, "ms": use.ms / use.steps}
            share = {"steps": use.steps, "share": 100 * use.steps / total}
            rows.append(
                {"group": name, "nodes": use.nodes, **share, **per_step, "predicted_ms": use.predicted_ms}
            )
    return Section("auto_choices", "What auto chose", CHOICES, rows) if rows else None


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by setting, in the order of their first run but plain first."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.setting, []).append(run)
    order = ["plain", "chain", *sorted((n for n in found if n.startswith("tree ")), key=lambda n: int(n[5:]))]
    rank = {name: i for i, name in enumerate([*order, "auto"])}
    return {name: found[name] for name in sorted(found, key=lambda n: rank.get(n, len(rank)))}


def loops_note(runs: Sequence[Run]) -> list[str]:
    """A warning when runs repeat themselves."""
    ours = [run for run in runs if run.steps]
    looping = sum(run.repeats for run in ours)
    note = f"{looping} of {len(ours)} runs repeat themselves, which flatters acceptance."
    return [note] if looping else []


def cache_note(runs: Sequence[Run]) -> list[str]:
    """Note on runs left out because a server had the prompt cached."""
    cached = sum(run.n > 0 and run.fresh_ttft_ms is None for run in runs)
    note = f"{cached} of {len(runs)} first tokens are not counted: the server had the prompt in its cache."
    return [note] if cached else []


def by_length(runs: Sequence[Run]) -> list[tuple[int, str, list[Run]]]:
    """Runs by the requested length of their prompt and by setting; other servers count their own tokens."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(int(run.prompt.partition(" ")[0]), []).append(run)
    return [(n, name, group) for n in sorted(found) for name, group in grouped(found[n]).items()]


def lines(
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    rows: Sequence[Row],
    x: str,
    y: str,
    log_x: bool = False,
) -> list[Plot]:
    """A plot with a line per setting over a column of the rows; none for fewer than two points."""
    found = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        points = [row for row in rows if row["setting"] == setting and row.get(y) is not None]
        keys = [x, y, *(key for key in (f"{y}_min", f"{y}_max") if all(key in row for row in points))]
        columns = ([row[key] for row in points] for key in keys)
        found.append(Series(setting, *columns))
    if max((len(series.x) for series in found), default=0) < 2:
        return []
    return [Plot(name, title, x_label, y_label, found, log_x=log_x)]
