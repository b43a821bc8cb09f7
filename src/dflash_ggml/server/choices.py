"""Several answers to one request: `n` choices of every prompt, answered one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from ..session.answer import Answer
from ..session.events import SourceTotal, Usage, WidthUse
from ..session.prompts import Prepared
from .errors import bad_request

R = TypeVar("R", SourceTotal, WidthUse)

MAX_CHOICES = 128  # over all prompts of a request


def check_choices(n: int | None, prompts: int = 1, param: str = "n") -> int:
    """Check the number of answers per prompt.

    Raises:
        ApiError: It is below 1, or too large in total; the error names `param`.
    """
    n = 1 if n is None else n
    if n < 1:
        raise bad_request(f"{param}: {n} is below 1", param, "invalid_value")
    if n * prompts > MAX_CHOICES:
        asked = f"{n} answers" if prompts == 1 else f"{n} answers to each of {prompts} prompts"
        raise bad_request(f"{param}: {asked}, at most {MAX_CHOICES} in all", param, "invalid_value")
    return n


def alternative(prepared: Prepared, i: int) -> Prepared:
    """Choice i of a prompt: the seed is the request's plus i, so that choices differ and are reproducible."""
    sampling = prepared.request.sampling
    if i == 0 or sampling.seed is None:
        return prepared
    seeded = replace(sampling, seed=(sampling.seed + i) % (1 << 64))
    return replace(prepared, request=replace(prepared.request, sampling=seeded))


def total(usages: Sequence[Usage], n: int) -> Usage:
    """Totals over the choices of a request with `n` per prompt: a prompt's tokens count once, all else each time."""
    if len(usages) == 1:
        return usages[0]
    prompts = usages[::n]
    counts = {name: sum(getattr(u, name) for u in prompts) for name in ("prompt_n", "cached_n")}
    each = ("predicted_n", "reasoning_n", "steps", "draft_n", "draft_n_accepted", "prompt_ms", "predicted_ms")
    counts |= {name: sum(getattr(u, name) for u in usages) for name in each}
    return replace(
        usages[0],
        budget=max(u.budget for u in usages),
        widths=tuple(
            sorted(_sums("nodes", [use for u in usages for use in u.widths]), key=lambda use: use.nodes)
        ),
        sources=tuple(_sums("name", [source for u in usages for source in u.sources])),
        prompt_kept_n=None,
        score_ms=0.0,
        **counts,
    )


def _sums(key: str, records: Sequence[R]) -> Iterator[R]:
    """One record per value of the field `key`, with sums of the others; a prediction is the last one's."""
    groups: dict[Any, list[R]] = {}
    for record in records:
        groups.setdefault(getattr(record, key), []).append(record)
    for group in groups.values():
        summed = [f.name for f in fields(group[-1]) if f.name not in (key, "predicted_ms")]
        yield replace(group[-1], **{name: sum(getattr(record, name) for record in group) for name in summed})


def best(answers: Sequence[Answer], n: int) -> list[Answer]:
    """The n answers with the highest mean log-probability of a token, best first."""

    def mean(answer: Answer) -> float:
        values = [entry.logprob for entry in answer.logprobs if entry.logprob is not None]
        return sum(values) / len(values) if values else float("-inf")

    return sorted(answers, key=mean, reverse=True)[:n]
