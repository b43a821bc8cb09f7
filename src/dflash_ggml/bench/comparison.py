"""Is `auto` ever slower than a fixed mode? All modes on the same texts, in turn: what the suite `never-slower` reports."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from .measure import Job, Text, all_widths, by_prompt
from .prompts import spread
from .rows import SWEEP, chosen_widths, grouped, lines, loops_note, speed_row
from .runner import Bench
from .sections import Column, Row, Section

BUDGETS = (3, 7, 15, 31)
COLUMNS = (
    Column("rate", "tokens/s, all texts", 1),
    Column("to_best", "x best fixed", 3),
    *(column for column in SWEEP if column.key in ("versus_plain", "versus_plain_min", "length", "step_ms")),
    *(column for column in SWEEP if column.key in ("widths", "texts", "repeating")),
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


def verdict(texts: Sequence[Text], row: Row) -> str:
    """What is to be said of auto's row of `compared`. A text's speed is the median of its rounds: on a CPU, plain decoding of the
    same 200 tokens differs by some per cent between two rounds, and the worst of many single timings says little."""
    plain = by_prompt([text for text in texts if text.setting == "plain"], statistics.median)
    rounds = [text for text in texts if text.setting == "auto"]
    auto = by_prompt(rounds, statistics.median)
    both = {prompt: auto[prompt] / plain[prompt] for prompt in auto if prompt in plain}
    said = f"auto is {row['to_best']:.3f} times the best fixed mode, {row['best_fixed']}"
    if both:
        worst = min(both, key=both.__getitem__)
        said += f"; on its worst text, {worst}, {both[worst]:.3f} times plain"
        most = max(Counter(text.prompt for text in rounds).values())
        said += f" ({f'median of {most} rounds' if most > 1 else 'timed once'})"
    widths = all_widths(text for text in texts if text.setting == "auto")
    used = ", ".join(f"{n or 'plain'}: {steps}" for n, steps in sorted(widths.items()))
    return f"{said}; passes by nodes: {used}."


def never_slower_jobs(bench: Bench) -> list[Job]:
    """Every mode on every prompt at every temperature; end-of-generation tokens end no text, so that all are as long."""
    if not bench.engine.has_draft:
        return []
    prompts = spread(list(bench.prompts), bench.size.prompts)
    temperatures = [t for t in (0.0, 0.8, 1.2) if t in bench.size.temperatures] or [0.0]
    return [job for t in temperatures for job in bench.jobs(bench.modes(BUDGETS, t), prompts, endless=True)]


def never_slower_report(bench: Bench, texts: Sequence[Text]) -> Section:
    """Rows by temperature and mode."""
    rows: list[Row] = []
    notes: list[str] = []
    auto: dict[str, list[Text]] = {}
    for t in sorted({text.temperature for text in texts}):
        same = [text for text in texts if text.temperature == t]
        rows += (found := compared(same, temperature=t))
        auto[f"temperature {t:g}"] = [text for text in same if text.setting == "auto"]
        if "to_best" in found[-1]:
            notes.append(f"Temperature {t:g}: {verdict(same, found[-1])}")
    columns = [Column("temperature", "temperature", 1), Column("setting", "mode"), *COLUMNS]
    plot = lines(
        "never-slower", "auto beside fixed modes", "temperature", "tokens/s", rows, "temperature", "rate"
    )
    notes += loops_note(texts)
    title, details = "Is auto ever slower?", chosen_widths(auto)
    return Section("never-slower", title, columns, rows, notes, plot, texts, details=details)
