"""The report of pass costs on this machine, measured anew, and of break-even acceptance lengths."""

from __future__ import annotations

from typing import Any, get_args

from ..engine.engine import Engine
from ..policy.break_even import break_even, where_it_pays
from ..policy.costs import Pass
from .sections import Column, Plot, Row, Section, Series, columns


def costs_report(engine: Engine) -> Section:
    """A row per pass, with a column per measured context; `engine` was loaded with calibrate "always"."""
    points, budget = engine.costs.points(), engine.config.budget
    depth = engine.drafter.depth if engine.drafter else 0
    contexts = sorted({point.context for point in points if point.kind == "plain"})
    steps = {context: break_even(engine.costs, budget, depth, context) for context in contexts}
    rows: dict[tuple[str, int], Row] = {}
    for point in points:
        row = rows.setdefault((point.kind, point.width), {"pass": point.kind, "columns": point.width})
        row[f"ms_{point.context}"] = point.ms
    for context, found in steps.items():
        for step in found:
            # unmeasured widths have rows too, interpolated between the others
            row = rows.setdefault(("verify", step.columns), {"pass": "verify", "columns": step.columns})
            row |= {"nodes": step.nodes, "most": step.reach, f"step_ms_{context}": step.ms}
            row |= {f"length_{context}": step.length}
            row |= {f"pays_{context}": step.length if step.can_pay else None}
    order = get_args(Pass)
    shown = [*columns("pass=pass; columns=columns:0; nodes=nodes:0")]
    shown += [Column(f"ms_{context}", f"ms at {context:,}", 3) for context in contexts]
    shown += [Column(f"pays_{context}", f"pays from, at {context:,}", 2) for context in contexts]
    shown += columns("most=at most:0")
    sorted_rows = sorted(rows.values(), key=lambda row: (order.index(row["pass"]), row["columns"]))
    notes = [f"Behind {n:,} tokens {where_it_pays(found)}." for n, found in steps.items() if found]
    if not points:
        why = "There was no time for a single pass: nothing is kept."
        return Section("calibrate", "Costs of passes", shown, [], [why])
    notes += [
        "Pays from: tokens per step, the target's own included, above which a draft with this verify pass is faster than plain "
        "decoding; at most: what the longest path gives. Bookkeeping between passes is learned while decoding.",
        f"Kept in {engine.costs_file}."
        if engine.costs_file
        else "Not kept: the cache folder cannot be written.",
    ]
    return Section("calibrate", "Costs of passes", shown, sorted_rows, notes, _plots(steps))


def _plots(steps: dict[int, list[Any]]) -> list[Plot]:
    """Break-even tokens per step by nodes, and the maximum."""
    lines = [
        Series(f"needed at {n:,} tokens", [s.nodes for s in found], [s.length for s in found])
        for n, found in steps.items()
        if len(found) > 1
    ]
    if not lines:
        return []
    found = next(found for found in steps.values() if len(found) > 1)
    lines.append(Series("most that a step can give", [s.nodes for s in found], [s.reach for s in found]))
    title = "Where drafting begins to pay"
    return [Plot("pays", title, "tree nodes without the root", "tokens per step", lines, log_x=True)]
