"""Merging of the bodies of several choices into one: choices numbered, usage summed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

COUNTS = ("cache_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted", "steps")


def merged(bodies: Iterable[dict[str, Any]], n: int) -> dict[str, Any]:
    """One body of several, n for each prompt; of one body it is that one.

    In `usage` a prompt's tokens count once, as OpenAI counts them, all else each time. `timings` are sums over all choices,
    also of the times, which overlap; rates are of the sums.
    """
    bodies = list(bodies)
    if len(bodies) == 1:
        return bodies[0]
    choices = [{**choice, "index": i} for i, body in enumerate(bodies) for choice in body["choices"]]
    one = {**bodies[0], "choices": choices, "usage": _usage([body["usage"] for body in bodies], n)}
    if all("timings" in body for body in bodies):
        one["timings"] = _timings([body["timings"] for body in bodies])
    return one


def _usage(usages: Sequence[dict[str, Any]], n: int) -> dict[str, Any]:
    total = {
        name: _sum(usages[::n] if name.startswith("prompt_") else usages, name)
        for name in usages[0]
        if name != "total_tokens"
    }
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    return {name: total[name] for name in usages[0]}


def _sum(parts: Sequence[dict[str, Any]], name: str) -> Any:
    values = [part[name] for part in parts]
    if isinstance(values[0], dict):
        return {inner: _sum(values, inner) for inner in values[0]}
    return sum(values)


def _timings(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total = {**parts[0], **{name: _sum(parts, name) for name in COUNTS}}
    for what in ("prompt", "predicted"):
        ms = total[f"{what}_ms"] = round(_sum(parts, f"{what}_ms"), 3)
        total[f"{what}_per_second"] = round(1000 * total[f"{what}_n"] / ms, 2) if ms > 0 else 0.0
    total["tokens_per_step"] = _mean(parts, "tokens_per_step")
    total["budget"] = max(part["budget"] for part in parts)
    total["widths"] = _by(parts, "widths", "nodes", _width)
    total["sources"] = _by(parts, "sources", "name", _source)
    return total


def _by(
    parts: Sequence[dict[str, Any]],
    name: str,
    key: str,
    join: Callable[[Sequence[dict[str, Any]]], dict[str, Any]],
) -> list[dict[str, Any]]:
    """The entries of a list in each part, those with one key joined."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for entry in (entry for part in parts for entry in part[name]):
        found.setdefault(entry[key], []).append(entry)
    return [join(found[value]) for value in (sorted(found) if name == "widths" else found)]


def _width(uses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    means = {name: _mean(uses, name) for name in ("tokens_per_step", "step_ms")}
    return {**uses[-1], "steps": _sum(uses, "steps"), **means}


def _source(uses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {**uses[0], **{name: _sum(uses, name) for name in ("steps", "draft_n", "draft_n_accepted")}}


def _mean(parts: Sequence[dict[str, Any]], name: str) -> float:
    """Of a figure per step, over all steps."""
    steps = _sum(parts, "steps")
    return round(sum(part[name] * part["steps"] for part in parts) / steps, 3) if steps else 0.0
