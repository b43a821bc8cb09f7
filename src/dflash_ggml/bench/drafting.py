"""The suite `drafts`: gains on each set of prompts by mode, greedy and sampled, with acceptance by depth."""

from __future__ import annotations

from collections.abc import Sequence

from .measure import Job, Run, by_depth, by_prompt, mean_length
from .prompts import spread
from .rows import SWEEP, chosen_widths, grouped, loops_note, speed_row
from .runner import Bench
from .sections import Column, Row, Section

TREES = (7, 15, 31)
TEMPERATURES = (0.0, 0.7)
_DEPTHS = 8
_ALL = "all sets"


def drafting_jobs(bench: Bench) -> list[Job]:
    """Every setting on every prompt, at both temperatures; only plain without drafts."""
    prompts = spread(list(bench.prompts), bench.size.prompts)
    drafts = bool(bench.engine.sources)
    return [job for t in TEMPERATURES for job in bench.jobs(bench.modes(TREES, t, drafts), prompts)]


def drafting_report(bench: Bench, runs: list[Run]) -> Section:
    """A row per set, temperature and setting; then over all sets."""
    styles = list(dict.fromkeys(run.style for run in runs))
    rows: list[Row] = []
    chosen: dict[str, Sequence[Run]] = {}
    for style in [*styles, *([_ALL] if len(styles) > 1 else [])]:
        for t in TEMPERATURES:
            here = [x for x in runs if x.temperature == t and style in (x.style, _ALL)]
            groups = grouped(here)
            plain = groups.get("plain", [])
            for name, found in groups.items():
                first = {"style": style, "temperature": t, "setting": name}
                rows.append(speed_row(found, plain, **first))
            if style == styles[-1] or style == _ALL:
                chosen[f"{style}, T {t}"] = groups.get("auto", [])
    columns = [Column("style", "set"), Column("temperature", "T", 1), Column("setting", "mode"), *SWEEP]
    drafts = " and ".join(bench.engine.sources) or "nothing"
    notes = [f"What drafts: {drafts}.", *_by_depth(runs), *_tree_and_chain(runs), *loops_note(runs)]
    return Section(
        "drafts", "What drafting is worth", columns, rows, notes, [], runs, details=chosen_widths(chosen)
    )


def _tree_and_chain(runs: Sequence[Run]) -> list[str]:
    """The tree of 15 nodes compared with the chain of the same draft, prompt by prompt."""
    found = []
    for t in TEMPERATURES:
        groups = grouped([run for run in runs if run.temperature == t])
        tree, chain = groups.get("tree 15", []), groups.get("chain", [])
        ours, theirs = by_prompt(tree), by_prompt(chain)
        both = ours.keys() & theirs.keys()
        lengths = mean_length(tree), mean_length(chain)
        if both and all(lengths):
            ratio = sum(ours[p] / theirs[p] for p in both) / len(both)
            longer = (lengths[0] or 0) / (lengths[1] or 1)
            found.append(
                f"At T {t} a tree of 15 is {ratio:.2f} times as fast as the chain, with {longer:.2f} times its tokens a pass."
            )
    return found


def _by_depth(runs: Sequence[Run]) -> list[str]:
    """Acceptance by depth of the chain and of a tree."""
    found = []
    for t in TEMPERATURES:
        for name in ("chain", "tree 15"):
            kept = by_depth(x for x in runs if x.temperature == t and x.setting == name)[:_DEPTHS]
            if kept:
                shares = ", ".join(f"{share:.0%}" for share in kept)
                found.append(f"Drafted steps of {name} at T {t} that keep depth 1, 2, ...: {shares}.")
    return found
