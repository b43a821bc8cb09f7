"""Several answers to one request: `n` choices of every prompt, answered one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..session.answer import Answer
from ..session.events import SourceTotal, Usage, WidthUse
from ..session.prompts import Prepared
from .errors import bad_request

MAX_CHOICES = 128  # of all prompts of a request together


def check_choices(n: int | None, prompts: int = 1, param: str = "n") -> int:
    """How many answers a prompt gets; raises ApiError naming `param` for none, or too many in all."""
    n = 1 if n is None else n
    if n < 1:
        raise bad_request(f"{param}: {n} is below 1", param, "invalid_value")
    if n * prompts > MAX_CHOICES:
        asked = f"{n} answers" if prompts == 1 else f"{n} answers to each of {prompts} prompts"
        raise bad_request(f"{param}: {asked}, at most {MAX_CHOICES} in all", param, "invalid_value")
    return n


def alternative(prepared: Prepared, i: int) -> Prepared:
    """Choice i of a prompt: the same with the request's seed plus i, so that it differs and can be had again."""
    sampling = prepared.request.sampling
    if i == 0 or sampling.seed is None:
        return prepared
    seeded = replace(sampling, seed=(sampling.seed + i) % (1 << 64))
    return replace(prepared, request=replace(prepared.request, sampling=seeded))


def total(usages: Sequence[Usage], n: int) -> Usage:
    """Sums over the choices of a request with `n` for each prompt: a prompt's tokens count once, all else each time."""
    if len(usages) == 1:
        return usages[0]
    counts: dict[str, Any] = {
        name: sum(getattr(u, name) for u in usages)
        for name in ("predicted_n", "reasoning_n", "steps", "draft_n", "draft_n_accepted")
    }
    times = {name: sum(getattr(u, name) for u in usages) for name in ("prompt_ms", "predicted_ms")}
    first = usages[::n]
    by_width: dict[int, list[WidthUse]] = {}
    for use in (use for u in usages for use in u.widths):
        by_width.setdefault(use.nodes, []).append(use)
    widths = (
        WidthUse(
            nodes,
            sum(u.steps for u in uses),
            sum(u.tokens for u in uses),
            sum(u.ms for u in uses),
            uses[-1].predicted_ms,
        )
        for nodes, uses in sorted(by_width.items())
    )
    by_source: dict[str, list[SourceTotal]] = {}
    for source in (source for u in usages for source in u.sources):
        by_source.setdefault(source.name, []).append(source)
    sources = (
        SourceTotal(
            name,
            sum(t.steps for t in found),
            sum(t.draft_n for t in found),
            sum(t.draft_n_accepted for t in found),
        )
        for name, found in by_source.items()
    )
    return Usage(
        prompt_n=sum(u.prompt_n for u in first),
        cached_n=sum(u.cached_n for u in first),
        mode=usages[0].mode,
        budget=max(u.budget for u in usages),
        widths=tuple(widths),
        sources=tuple(sources),
        **counts,
        **times,
    )


def best(answers: Sequence[Answer], n: int) -> list[Answer]:
    """The n answers with the highest mean log-probability of a token, best first."""

    def mean(answer: Answer) -> float:
        values = [entry.logprob for entry in answer.logprobs if entry.logprob is not None]
        return sum(values) / len(values) if values else float("-inf")

    return sorted(answers, key=mean, reverse=True)[:n]
