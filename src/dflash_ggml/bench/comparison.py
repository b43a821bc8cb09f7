"""The suite `never-slower`: `auto` compared with every fixed mode, on the same prompts alternately.

The worst prompt is measured separately: `auto` between two plain runs, repeatedly. The speed of a shared CPU changes by
a third from second to second, and the worst of many single timings is the most disturbed one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .measure import Job, Run, all_widths, by_prompt
from .prompts import Prompt, spread
from .rows import SWEEP, chosen_widths, grouped, lines, loops_note, speed_row
from .runner import Bench
from .sections import Row, Section, columns

BUDGETS = (3, 7, 15, 31)
BEFORE, BETWEEN, BEHIND = "plain, before", "auto, between", "plain, behind"
_SHOWN = ("versus_plain", "versus_plain_min", "length", "step_ms", "widths", "texts", "repeating")
COLUMNS = (
    *columns("temperature=temperature:1; setting=mode; rate=tokens/s, all runs:1; to_best=x best fixed:3"),
    *(column for column in SWEEP if column.key in _SHOWN),
)


def rate(runs: Sequence[Run]) -> float | None:
    """Total tokens per second over all runs."""
    ms = sum(run.decode_ms for run in runs)
    return 1e3 * sum(max(run.n - 1, 0) for run in runs) / ms if ms else None


def compared(runs: Sequence[Run], **first: object) -> list[Row]:
    """A row per mode for the runs of one setting; `auto`'s row has a comparison with the best of the others."""
    groups = grouped(runs)
    plain = groups.get("plain", [])
    rows = [speed_row(found, plain, **first, setting=m, rate=rate(found)) for m, found in groups.items()]
    fixed = [row for row in rows if row["setting"] != "auto" and row["rate"]]
    if fixed and rows[-1]["setting"] == "auto" and rows[-1]["rate"]:
        best = max(fixed, key=lambda row: row["rate"])
        rows[-1] |= {"best_fixed": best["setting"], "to_best": rows[-1]["rate"] / best["rate"]}
    return rows


@dataclass(frozen=True, slots=True)
class Worst:
    """The prompt on which `auto` was worst relative to plain decoding, by the median of the repetitions.

    same: ratio of two plain runs on the prompt where they differed most; None if not timed.
    """

    prompt: str
    times: float
    rounds: int
    same: tuple[float, float] | None

    def __str__(self) -> str:
        of = f"median of {self.rounds} rounds" if self.rounds > 1 else "timed once"
        noise = "" if self.same is None else f"; plain beside itself {self.same[0]:.3f} to {self.same[1]:.3f}"
        return f"on its worst prompt, {self.prompt}, {self.times:.3f} times plain ({of}{noise})"


def worst(runs: Sequence[Run]) -> Worst | None:
    """The worst prompt of one temperature's runs; None without both modes. Without runs between two plain ones, a prompt's speed
    is the median of its repetitions in each mode."""
    between: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if run.setting in (BEFORE, BETWEEN, BEHIND) and run.per_second is not None:
            between.setdefault(run.prompt, {}).setdefault(run.setting, []).append(1 / run.per_second)
    times: dict[str, float] = {}
    same: list[float] = []
    for prompt, of in between.items():
        # truncated runs do not count
        rounds = list(zip(of.get(BEFORE, ()), of.get(BETWEEN, ()), of.get(BEHIND, ())))
        if rounds:
            times[prompt] = statistics.median((a + b) / 2 / auto for a, auto, b in rounds)
            same.append(statistics.median(a / b for a, _, b in rounds))
    if times:
        n = max(len(of.get(BEHIND, ())) for of in between.values())
        prompt = min(times, key=times.__getitem__)
        return Worst(prompt, times[prompt], n, (min(same), max(same)))
    plain = by_prompt([run for run in runs if run.setting == "plain"], statistics.median)
    found = [run for run in runs if run.setting == "auto"]
    auto = by_prompt(found, statistics.median)
    times = {prompt: auto[prompt] / plain[prompt] for prompt in auto if prompt in plain}
    if not times:
        return None
    prompt = min(times, key=times.__getitem__)
    return Worst(prompt, times[prompt], max(Counter(run.prompt for run in found).values()), None)


def verdict(runs: Sequence[Run], row: Row) -> str:
    """The note on auto's row of `compared`."""
    note, found = f"auto is {row['to_best']:.3f} times the best fixed mode, {row['best_fixed']}", worst(runs)
    if found is not None:
        note += f"; {found}"
    widths = all_widths(run for run in runs if run.setting == "auto")
    used = ", ".join(f"{n or 'plain'}: {steps}" for n, steps in sorted(widths.items()))
    return f"{note}; passes by nodes: {used}."


def never_slower_jobs(bench: Bench) -> list[Job]:
    """Every mode on every prompt at every temperature, then `auto` between two plain runs, twice as often and once more;
    end-of-generation tokens do not end a run, so that all are as long."""
    if not bench.engine.has_draft:
        return []
    prompts = spread(list(bench.prompts), bench.size.prompts)
    temperatures = [t for t in (0.0, 0.8, 1.2) if t in bench.size.temperatures] or [0.0]
    found = []
    for t in temperatures:
        found += bench.jobs(bench.modes(BUDGETS, t), prompts, endless=True)
        found += _between(bench, prompts, t)
    return found


def _between(bench: Bench, prompts: Sequence[Prompt], temperature: float) -> list[Job]:
    """`auto` between two plain runs of each prompt, repeated with different seeds."""
    auto = bench.setting(BETWEEN, "auto", bench.budget, temperature)
    before, behind = (bench.setting(label, "plain", None, temperature) for label in (BEFORE, BEHIND))
    once = bench.jobs([auto], prompts, rounds=1, endless=True)
    return [
        replace(job, setting=setting, seed=job.seed + round_)
        for round_ in range(2 * bench.size.rounds + 1)
        for job in once
        for setting in (before, auto, behind)
    ]


def never_slower_report(bench: Bench, runs: Sequence[Run]) -> Section:
    """Rows by temperature and mode."""
    rows: list[Row] = []
    notes: list[str] = []
    auto: dict[str, list[Run]] = {}
    for t in sorted({run.temperature for run in runs}):
        same = [run for run in runs if run.temperature == t]
        modes = [run for run in same if run.setting not in (BEFORE, BETWEEN, BEHIND)]
        rows += (found := compared(modes, temperature=t))
        auto[f"temperature {t:g}"] = [run for run in same if run.setting == "auto"]
        if found and "to_best" in found[-1]:
            notes.append(f"Temperature {t:g}: {verdict(same, found[-1])}")
    what = "never-slower", "auto beside fixed modes", "temperature", "tokens/s"
    plot = lines(*what, rows, "temperature", "rate")
    notes += loops_note(runs)
    title, details = "Is auto ever slower?", chosen_widths(auto)
    return Section("never-slower", title, COLUMNS, rows, notes, plot, runs, details=details)
