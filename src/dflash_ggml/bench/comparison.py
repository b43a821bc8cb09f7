"""The suite `never-slower`: `auto` beside every fixed mode, on the same texts in turn.

Its worst text is sought apart from that: `auto` between two plain runs of the same text, again and again. The speed of a CPU that
others use too changes by a third from second to second, and the worst of many single timings is the unluckiest one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .measure import Job, Text, all_widths, by_prompt
from .prompts import Prompt, spread
from .rows import SWEEP, chosen_widths, grouped, lines, loops_note, speed_row
from .runner import Bench
from .sections import Row, Section, columns

BUDGETS = (3, 7, 15, 31)
BEFORE, BETWEEN, BEHIND = "plain, before", "auto, between", "plain, behind"
_SHOWN = ("versus_plain", "versus_plain_min", "length", "step_ms", "widths", "texts", "repeating")
COLUMNS = (
    *columns("temperature=temperature:1; setting=mode; rate=tokens/s, all texts:1; to_best=x best fixed:3"),
    *(column for column in SWEEP if column.key in _SHOWN),
)


def rate(texts: Sequence[Text]) -> float | None:
    """Tokens per second over all texts together."""
    ms = sum(text.decode_ms for text in texts)
    return 1e3 * sum(max(text.n - 1, 0) for text in texts) / ms if ms else None


def compared(texts: Sequence[Text], **first: object) -> list[Row]:
    """A row per mode for the texts of one setting; that of `auto` says how it did against the best of the others."""
    groups = grouped(texts)
    plain = groups.get("plain", [])
    rows = [speed_row(found, plain, **first, setting=m, rate=rate(found)) for m, found in groups.items()]
    fixed = [row for row in rows if row["setting"] != "auto" and row["rate"]]
    if fixed and rows[-1]["setting"] == "auto" and rows[-1]["rate"]:
        best = max(fixed, key=lambda row: row["rate"])
        rows[-1] |= {"best_fixed": best["setting"], "to_best": rows[-1]["rate"] / best["rate"]}
    return rows


@dataclass(frozen=True, slots=True)
class Worst:
    """The prompt on which `auto` did worst beside plain decoding, by the median of the rounds.

    same: what plain had beside itself, on the prompts where it differed most; None where that was not timed.
    """

    prompt: str
    times: float
    rounds: int
    same: tuple[float, float] | None

    def __str__(self) -> str:
        of = f"median of {self.rounds} rounds" if self.rounds > 1 else "timed once"
        noise = "" if self.same is None else f"; plain beside itself {self.same[0]:.3f} to {self.same[1]:.3f}"
        return f"on its worst text, {self.prompt}, {self.times:.3f} times plain ({of}{noise})"


def worst(texts: Sequence[Text]) -> Worst | None:
    """Of the texts of one temperature; None without both modes. Where none were made between two plain ones, a prompt's speed is
    the median of its rounds in each mode."""
    between: dict[str, dict[str, list[float]]] = {}
    for text in texts:
        if text.setting in (BEFORE, BETWEEN, BEHIND) and text.per_second is not None:
            between.setdefault(text.prompt, {}).setdefault(text.setting, []).append(1 / text.per_second)
    times: dict[str, float] = {}
    same: list[float] = []
    for prompt, of in between.items():
        # one that was cut off does not count
        rounds = list(zip(of.get(BEFORE, ()), of.get(BETWEEN, ()), of.get(BEHIND, ())))
        if rounds:
            times[prompt] = statistics.median((a + b) / 2 / auto for a, auto, b in rounds)
            same.append(statistics.median(a / b for a, _, b in rounds))
    if times:
        n = max(len(of.get(BEHIND, ())) for of in between.values())
        prompt = min(times, key=times.__getitem__)
        return Worst(prompt, times[prompt], n, (min(same), max(same)))
    plain = by_prompt([text for text in texts if text.setting == "plain"], statistics.median)
    found = [text for text in texts if text.setting == "auto"]
    auto = by_prompt(found, statistics.median)
    times = {prompt: auto[prompt] / plain[prompt] for prompt in auto if prompt in plain}
    if not times:
        return None
    prompt = min(times, key=times.__getitem__)
    return Worst(prompt, times[prompt], max(Counter(text.prompt for text in found).values()), None)


def verdict(texts: Sequence[Text], row: Row) -> str:
    """The note on auto's row of `compared`."""
    note, found = f"auto is {row['to_best']:.3f} times the best fixed mode, {row['best_fixed']}", worst(texts)
    if found is not None:
        note += f"; {found}"
    widths = all_widths(text for text in texts if text.setting == "auto")
    used = ", ".join(f"{n or 'plain'}: {steps}" for n, steps in sorted(widths.items()))
    return f"{note}; passes by nodes: {used}."


def never_slower_jobs(bench: Bench) -> list[Job]:
    """Every mode on every prompt at every temperature, then `auto` between two plain runs, twice as often and once more;
    end-of-generation tokens end no text, so that all are as long."""
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
    """`auto` between two plain runs of each prompt, in rounds with seeds of their own."""
    auto = bench.setting(BETWEEN, "auto", bench.budget, temperature)
    before, behind = (bench.setting(label, "plain", None, temperature) for label in (BEFORE, BEHIND))
    once = bench.jobs([auto], prompts, rounds=1, endless=True)
    return [
        replace(job, setting=setting, seed=job.seed + round_)
        for round_ in range(2 * bench.size.rounds + 1)
        for job in once
        for setting in (before, auto, behind)
    ]


def never_slower_report(bench: Bench, texts: Sequence[Text]) -> Section:
    """Rows by temperature and mode."""
    rows: list[Row] = []
    notes: list[str] = []
    auto: dict[str, list[Text]] = {}
    for t in sorted({text.temperature for text in texts}):
        same = [text for text in texts if text.temperature == t]
        modes = [text for text in same if text.setting not in (BEFORE, BETWEEN, BEHIND)]
        rows += (found := compared(modes, temperature=t))
        auto[f"temperature {t:g}"] = [text for text in same if text.setting == "auto"]
        if found and "to_best" in found[-1]:
            notes.append(f"Temperature {t:g}: {verdict(same, found[-1])}")
    what = "never-slower", "auto beside fixed modes", "temperature", "tokens/s"
    plot = lines(*what, rows, "temperature", "rate")
    notes += loops_note(texts)
    title, details = "Is auto ever slower?", chosen_widths(auto)
    return Section("never-slower", title, COLUMNS, rows, notes, plot, texts, details=details)
