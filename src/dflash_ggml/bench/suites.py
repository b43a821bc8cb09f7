"""The suites by name: the runs that each makes, and its report.

A new suite is a function for each of the two and an entry in `SUITES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cli.report import STAGES
from ..config import MAX_BUDGET
from .comparison import BUDGETS, never_slower_jobs, never_slower_report
from .drafting import TREES, drafting_jobs, drafting_report
from .measure import Job, Run, Setting, all_widths, by_depth, mean_length, summary
from .needles import needle_jobs, needle_report
from .prompts import Prompt, spread
from .rows import (
    SPEED,
    SWEEP,
    by_length,
    cache_note,
    chosen_widths,
    grouped,
    lines,
    loops_note,
    speed_row,
    spread_of,
)
from .runner import Bench, Size
from .sections import Column, Plot, Row, Section, Series, columns


@dataclass(frozen=True, slots=True)
class Suite:
    """jobs: the runs to make. report: tables and notes for the runs, which may be fewer than planned.

    budgets: the trees that it needs, so that the engine is loaded for them. everyday: part of `quick` and `full`.
    against: whether it runs against other servers.
    """

    about: str
    jobs: Callable[[Bench], list[Job]]
    report: Callable[[Bench, list[Run]], Section]
    budgets: Callable[[Size], Sequence[int]] = lambda size: ()
    everyday: bool = True
    against: bool = False


def _some(bench: Bench) -> list[Prompt]:
    return spread(list(bench.prompts), bench.size.prompts)


# ---- speed by mode


def speed_jobs(bench: Bench) -> list[Job]:
    """Every mode on every prompt, and the other servers."""
    return bench.jobs([*bench.modes(), *bench.others()], _some(bench))


def speed_report(bench: Bench, runs: list[Run]) -> Section:
    """A row per mode and server; where a step's time goes."""
    groups = grouped(runs)
    plain = groups.get("plain", [])
    rows = [speed_row(found, plain, setting=name) for name, found in groups.items()]
    timed = [row for row in rows if row["stages_ms"]]
    plots = []
    if timed:
        names = [row["setting"] for row in timed]
        parts = [Series(s, range(len(timed)), [row["stages_ms"][s] for row in timed]) for s in STAGES]
        plots.append(Plot("step", "Where a step's time goes", "", "ms per target pass", parts, bars=names))
    notes = [*loops_note(runs), *cache_note(runs)]
    if bench.servers:
        how = "tokens by their usage, from the first chunk to the last"
        notes.append(f"Other servers are timed at their stream: {how}.")
    if not bench.engine.has_draft:
        notes.append("There is no draft: plain decoding only.")
    shown, auto = [*columns("setting=mode"), *SPEED], chosen_widths({"": groups.get("auto", [])})
    return Section("speed", "Speed by mode", shown, rows, notes, plots, runs, details=auto)


# ---- budget


def budget_jobs(bench: Bench) -> list[Job]:
    """Plain, trees of all budgets, auto."""
    settings = bench.modes(bench.size.budgets)
    return bench.jobs([s for s in settings if s.mode != "chain"], _some(bench))


def chosen_budget(auto: Sequence[Run]) -> int | None:
    """The most frequent number of nodes in `auto`'s passes; 0: plain."""
    widths = all_widths(auto)
    return widths.most_common(1)[0][0] if widths else None


def budget_report(bench: Bench, runs: list[Run]) -> Section:
    """A row per budget; auto's most frequent choice and the fastest are marked."""
    groups = grouped(runs)
    plain, auto = groups.get("plain", []), groups.get("auto", [])
    chosen = chosen_budget(auto)
    rows = []
    for name, found in groups.items():
        budget = 0 if name == "plain" else int(name[5:]) if name.startswith("tree ") else None
        is_chosen = chosen is not None and budget == chosen
        rows.append(speed_row(found, plain, setting=name, budget=budget, chosen=is_chosen))
    swept = [row for row in rows if row["budget"] is not None and "speed" in row]
    notes, plots = loops_note(runs), []
    trees = [row for row in swept if row["budget"]]
    if trees:
        best = max(swept, key=lambda row: row["speed"])
        notes.insert(0, f"Fastest of the sweep in the median: {best['setting']}.")
        values = ([row[k] for row in trees] for k in ("budget", "speed", "speed_min", "speed_max"))
        line = Series("trees (median, range over runs)", *values)
        beside = [row for row in rows if row["setting"] in ("plain", "auto") and "speed" in row]
        levels = [(row["setting"], row["speed"]) for row in beside]
        mark = None
        if chosen is not None:
            share = all_widths(auto)[chosen] / all_widths(auto).total()
            what = f"{chosen} nodes" if chosen else "plain"
            notes.insert(0, f"auto chose {what} in {share:.0%} of its passes.")
            speeds = {row["budget"]: row["speed"] for row in trees}
            at = speeds.get(chosen, summary(run.per_second for run in auto))
            at = at["median"] if isinstance(at, dict) else at
            mark = (f"chosen by auto: {chosen}", chosen, at) if chosen and at else None
        title = "Speed by budget" + (": auto chose plain" if chosen == 0 else "")
        axes = "tree nodes without the root", "tokens/s"
        plots.append(Plot("budget", title, *axes, [line], levels, mark, log_x=True))
    shown = [*columns("setting=mode; chosen=chosen by auto"), *SWEEP]
    details = chosen_widths({"": auto})
    return Section("budget", "Budget sweep", shown, rows, notes, plots, runs, details=details)


# ---- temperature


def temperature_jobs(bench: Bench) -> list[Job]:
    """Plain, chain, a tree of 15 and auto at every temperature."""
    n = bench.size.prompts
    prompts = spread(list(bench.prompts), max(min(2, n), n * 2 // 3))
    return [job for t in bench.size.temperatures for job in bench.jobs(bench.modes((15,), t), prompts)]


def temperature_report(bench: Bench, runs: list[Run]) -> Section:
    """Rows by temperature and mode."""
    rows = []
    for t in sorted({run.temperature for run in runs}):
        groups = grouped([run for run in runs if run.temperature == t])
        plain = groups.get("plain", [])
        rows += [speed_row(found, plain, temperature=t, setting=name) for name, found in groups.items()]
    plot = lines(
        "temperature", "Speed by temperature", "temperature", "tokens/s", rows, "temperature", "speed"
    )
    shown = [*columns("temperature=temperature:1; setting=mode"), *SWEEP]
    return Section("temperature", "Temperature sweep", shown, rows, loops_note(runs), plot, runs)


# ---- sweeps over the length of the prompt


def lengths(bench: Bench, room: int) -> list[int]:
    """The sweep's lengths that leave `room` tokens of the context."""
    longest = bench.engine.n_ctx - room
    return [n for n in bench.size.lengths if n <= longest] or [max(longest, 1)]


def filled_jobs(bench: Bench, settings: Callable[[], Sequence[Setting]], n: int, turns: int) -> list[Job]:
    """Every length with every setting, `turns` runs each."""
    found = []
    for length in lengths(bench, n):
        for turn in range(turns):
            chosen = list(settings())
            for j in range(len(chosen)):
                found.append(bench.filled(length, turn, chosen[(turn + j) % len(chosen)], n))
    return found


def context_jobs(bench: Bench) -> list[Job]:
    """Plain and the swept mode after prompts of every length."""
    return filled_jobs(bench, bench.swept, bench.size.n, 1 + bench.size.rounds)


def context_report(bench: Bench, runs: list[Run]) -> Section:
    """Rows by length and mode."""
    groups = by_length(runs)
    plain = {n: found for n, name, found in groups if name == "plain"}
    rows = [speed_row(found, plain.get(n, []), context=n, setting=name) for n, name, found in groups]
    axes = "tokens of context", "tokens/s"
    plot = lines("context", "Speed by context", *axes, rows, "context", "speed", True)
    shown = [*columns("context=context:0; setting=mode"), *SWEEP]
    notes = [*loops_note(runs), "Contexts are this benchmark's prompts, concatenated."]
    return Section("context", "Context sweep", shown, rows, notes, plot, runs)


def _by_length(
    runs: list[Run], name: str, value: Callable[[Run], float | None], setting: str | None = None
) -> list[Row]:
    """A row per length and setting with the spread of one figure."""
    return [
        {
            "context": n,
            "setting": setting or own,
            **spread_of(name, summary(map(value, found))),
            "texts": len(found),
        }
        for n, own, found in by_length(runs)
    ]


def prefill_jobs(bench: Bench) -> list[Job]:
    """One token after prompts of every length."""
    return filled_jobs(bench, lambda: [bench.setting("plain", "plain")], 1, 2 * bench.size.rounds + 1)


def prefill_report(bench: Bench, runs: list[Run]) -> Section:
    """A row per length."""
    rows = _by_length(runs, "speed", lambda t: 1e3 * t.prompt_n / t.prefill_ms, "prefill")
    drafted = " The draft takes its part of every pass." if bench.engine.has_draft else ""
    plot = lines("prefill", "Prefill", "tokens of prompt", "tokens/s", rows, "context", "speed", True)
    shown = [*columns("context=prompt:0"), *SPEED[:3], *columns("texts=runs:0")]
    notes = [f"At most {bench.engine.batches.most} tokens a pass.{drafted}"]
    return Section("prefill", "Prefill", shown, rows, notes, plot, runs)


def ttft_jobs(bench: Bench) -> list[Job]:
    """One token after prompts of every length, by us and by the other servers, unless prompts are chats."""
    others = [] if bench.chat else bench.others()
    return filled_jobs(bench, lambda: [bench.swept()[-1], *others], 1, 2 * bench.size.rounds + 1)


def ttft_report(bench: Bench, runs: list[Run]) -> Section:
    """Rows by length."""
    rows = _by_length(runs, "ttft_ms", lambda t: t.fresh_ttft_ms)
    title, axes = "Time to first token", ("tokens of prompt", "ms to the first token")
    plot = lines("ttft", title, *axes, rows, "context", "ttft_ms", True)
    shown = columns(
        "context=prompt:0; setting=mode; ttft_ms=first token ms:1; ttft_ms_min=min:1; ttft_ms_max=max:1; texts=runs:0"
    )
    notes = cache_note(runs)
    if len({run.setting for run in runs}) > 1:
        notes.insert(0, "Ours in this process, other servers over HTTP.")
    return Section("ttft", title, shown, rows, notes, plot, runs)


# ---- acceptance


def acceptance_jobs(bench: Bench) -> list[Job]:
    """Chain and trees, once: acceptance does not depend on the clock."""
    settings = [s for s in bench.modes(tuple(sorted({15, bench.budget}))) if s.mode in ("chain", "tree")]
    return bench.jobs(settings, spread(list(bench.prompts), bench.size.acceptance), 1)


def acceptance_report(bench: Bench, runs: list[Run]) -> Section:
    """Tokens per pass by style: the mean of the runs, and of those that do not loop in any setting."""
    groups = grouped(runs)
    looping = {run.prompt for run in runs if run.repeats}
    styles = list(dict.fromkeys(run.style for run in runs))
    picks: list[tuple[str, Callable[[Run], bool]]] = [
        *((style, lambda run, style=style: run.style == style) for style in styles),
        ("all", lambda run: True),
        ("all that do not loop", lambda run: run.prompt not in looping),
    ]
    rows = []
    for name, pick in picks:
        row: Row = {"style": name}
        for setting, found in groups.items():
            row[setting] = mean_length(filter(pick, found))
        chosen = {run.prompt for run in runs if pick(run)}
        chain, tree = row.get("chain"), row.get(f"tree {bench.budget}")
        row |= {"gain": 100 * (tree / chain - 1) if chain and tree else None}
        rows.append(row | {"texts": len(chosen), "repeating": len(chosen & looping)})
    gain = f"gain=% tree {bench.budget} over chain:0; texts=prompts:0; repeating=that loop:0"
    shown = [*columns("style=style"), *(Column(name, name, 2) for name in groups), *columns(gain)]
    curves = [(name, by_depth(found)) for name, found in groups.items()]
    series = [Series(name, range(1, len(y) + 1), [100 * v for v in y]) for name, y in curves if y]
    plots = []
    if series:
        axes = "depth in the draft", "% of steps that keep this depth"
        plots.append(Plot("depth", "Acceptance by depth", *axes, series))
    notes = ["Tokens per target pass, the target's own included."]
    return Section("acceptance", "Acceptance by style", shown, rows, notes, plots, runs)


_NEVER = "auto beside plain, chain and trees at three temperatures; long, and only when named"
_SWEEP = "a sweep over tree sizes, what auto chooses marked"
_BY_STYLE = "tokens per pass by style of prompt"
SUITES = {
    "speed": Suite("tokens per second by mode", speed_jobs, speed_report, lambda size: (31,), against=True),
    "budget": Suite(_SWEEP, budget_jobs, budget_report, lambda size: size.budgets),
    "temperature": Suite(
        "a sweep over temperatures", temperature_jobs, temperature_report, lambda size: (15,)
    ),
    "context": Suite("a sweep over lengths of context", context_jobs, context_report),
    "prefill": Suite("tokens per second of prompts", prefill_jobs, prefill_report),
    "ttft": Suite("time to the first token", ttft_jobs, ttft_report, against=True),
    "acceptance": Suite(_BY_STYLE, acceptance_jobs, acceptance_report, lambda size: (15,)),
    "never-slower": Suite(
        _NEVER, never_slower_jobs, never_slower_report, lambda size: BUDGETS, everyday=False
    ),
    "drafts": Suite(
        "plain, chain, trees and auto by set of prompts, greedy and sampled, acceptance by depth; only when named",
        drafting_jobs,
        drafting_report,
        lambda size: TREES,
        everyday=False,
    ),
    "needles": Suite(
        "questions on long documents, prefilled whole and in part (--prompt-keep); only when named",
        needle_jobs,
        needle_report,
        everyday=False,
    ),
}


def named(names: str) -> tuple[list[str], bool]:
    """The suites named by an option, and whether they are to be small; KeyError for an unknown name."""
    everyday = [name for name, suite in SUITES.items() if suite.everyday]
    found: dict[str, None] = {}
    for name in names.split(","):
        chosen = everyday if name in ("quick", "full") else [name]
        found |= {n: None for n in chosen if SUITES[n]}
    return list(found), "quick" in names.split(",")


def largest_budget(names: Sequence[str], size: Size, budget: int) -> int:
    """The largest tree that these suites decode with."""
    return min(MAX_BUDGET, max([budget, *(b for name in names for b in SUITES[name].budgets(size))]))
