"""Measurement of one generation, and statistics over several runs."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from ..cli.report import STAGES
from ..config import Mode
from ..decode.sampling import Sampler
from ..decode.sampling_params import SamplingParams
from ..engine.slot import Slot
from ..session.events import WidthUse
from .prompts import Prompt


class Interrupted(Exception):
    """Ctrl-C was pressed: the current run was aborted."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A decoding configuration that a suite compares. server: the address of another server, None for ours."""

    label: str
    mode: Mode = "plain"
    budget: int | None = None
    temperature: float = 0.0
    server: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A planned run: a prompt as token ids, at most n tokens. `text` is sent to other servers. endless: continue after
    end-of-generation tokens. answer: text contained in a right answer. score_ms: time of selecting the prompt's tokens,
    part of the time to the first one."""

    prompt: Prompt
    ids: Sequence[int]
    text: str
    setting: Setting
    n: int
    seed: int = 1
    endless: bool = False
    answer: str = ""
    score_ms: float = 0.0


@dataclass(slots=True)
class Run:
    """The result of one run. Times are wall milliseconds.

    n: tokens, the end-of-generation token too. ttft_ms: from the beginning of the prefill to the first token. decode_ms: from
    the first token to the last. steps: target passes after the prompt's own. accepted: drafted steps by how many drafted
    tokens they kept; widths: steps by the nodes that they offered; uses: the same with their tokens and times. step_ms: sums over
    the steps. repeats: see `repeats`.
    """

    prompt: str
    style: str
    setting: str
    prompt_n: int
    n: int
    ttft_ms: float
    decode_ms: float
    temperature: float = 0.0
    prefill_ms: float = 0.0
    steps: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    accepted: dict[int, int] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)
    uses: tuple[WidthUse, ...] = ()
    step_ms: dict[str, float] = field(default_factory=dict)
    repeats: bool = False
    finish: str = ""
    cached_n: int = 0
    answered: bool | None = None

    @property
    def fresh_ttft_ms(self) -> float | None:
        """`ttft_ms` of a run with output; None when a server had more than a tenth of the prompt in its cache."""
        return self.ttft_ms if self.n and 10 * self.cached_n <= self.prompt_n else None

    @property
    def per_second(self) -> float | None:
        """Tokens per second after the first one, None without a second."""
        return 1e3 * (self.n - 1) / self.decode_ms if self.n > 1 and self.decode_ms > 0 else None

    @property
    def length(self) -> float | None:
        """Acceptance length: tokens per target pass, its own included; None without a pass."""
        return (self.n - 1) / self.steps if self.steps else None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        found = asdict(self)
        for name in ("ttft_ms", "decode_ms", "prefill_ms"):
            found[name] = round(found[name], 3)
        found["step_ms"] = {name: round(ms, 3) for name, ms in self.step_ms.items()}
        for use in found["uses"]:
            use["ms"] = round(use["ms"], 3)
            use["predicted_ms"] = None if use["predicted_ms"] is None else round(use["predicted_ms"], 4)
        return found


def repeats(tokens: Sequence[int], period: int = 32, share: float = 0.5) -> bool:
    """Whether at least `share` of the tokens repeat those 1..`period` tokens before: loops inflate acceptance."""
    n = len(tokens)
    return any(
        sum(tokens[i] == tokens[i - p] for i in range(p, n)) >= share * n
        for p in range(1, min(period, n - 1) + 1)
    )


def decode(slot: Slot, job: Job, should_stop: Callable[[], bool]) -> Run:
    """Prefill a job's prompt into an emptied slot and decode. Raises Interrupted when `should_stop` returns True."""
    slot.reset()
    slot.forget()
    began = time.perf_counter()
    slot.prefill(job.ids, should_stop=should_stop)
    if slot.n_tokens < len(job.ids):
        raise Interrupted
    return go_on(slot, job, should_stop, (time.perf_counter() - began) * 1e3)


def go_on(slot: Slot, job: Job, should_stop: Callable[[], bool], prefill_ms: float = 0.0) -> Run:
    """Decode after the job's prompt in the slot. Raises Interrupted if `should_stop` is true."""
    setting = job.setting
    sampler = Sampler(SamplingParams(temperature=setting.temperature, seed=job.seed), slot.n_vocab)
    began = first = last = time.perf_counter()
    tokens: list[int] = []
    accepted: Counter[int] = Counter()
    uses: dict[int, list[float]] = {}  # steps, tokens, milliseconds by drafted nodes
    step_ms = dict.fromkeys(STAGES, 0.0)
    finish = ""
    steps = slot.generate(
        sampler,
        max_tokens=job.n,
        mode=setting.mode,
        budget=setting.budget,
        stop=(lambda token: False) if job.endless else None,
        should_stop=should_stop,
    )
    with closing(steps):
        for step in steps:
            last = time.perf_counter()
            tokens += step.tokens
            finish = step.finish or ""
            if step.mode == "prefill":
                first = last
                continue
            if step.n_draft:
                accepted[step.n_accepted] += 1
            parts = {stage: getattr(step.timings, stage) for stage in STAGES}
            use = uses.setdefault(step.n_draft, [0, 0, 0.0])
            for i, more in enumerate((1, len(step.tokens), sum(parts.values()))):
                use[i] += more
            for stage, ms in parts.items():
                step_ms[stage] += ms
    if finish == "cancelled":
        raise Interrupted
    widths = {nodes: int(use[0]) for nodes, use in sorted(uses.items())}
    return Run(
        prompt=job.prompt.id,
        style=job.prompt.style,
        setting=setting.label,
        prompt_n=len(job.ids),
        n=len(tokens),
        ttft_ms=job.score_ms + prefill_ms + (first - began) * 1e3,
        decode_ms=(last - first) * 1e3,
        temperature=setting.temperature,
        prefill_ms=prefill_ms,
        steps=sum(widths.values()),
        draft_n=sum(width * n for width, n in widths.items()),
        draft_n_accepted=sum(kept * n for kept, n in accepted.items()),
        accepted=dict(sorted(accepted.items())),
        widths=widths,
        uses=tuple(
            WidthUse(nodes, int(n), int(got), ms, slot.engine.expected_ms(nodes, slot.n_tokens))
            for nodes, (n, got, ms) in sorted(uses.items())
        ),
        step_ms=step_ms,
        repeats=repeats(tokens),
        finish=finish,
        answered=_has(slot.engine.tokenizer.decode(tokens), job.answer) if job.answer else None,
    )


def _has(text: str, answer: str) -> bool:
    """Whether an answer occurs in a text as a whole word."""
    return re.search(rf"\b{re.escape(answer)}\b", text, re.IGNORECASE) is not None


def summary(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Median, mean and spread of measurements; None without any."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    middle = {"median": statistics.median(found), "mean": statistics.fmean(found)}
    return {**middle, "min": min(found), "max": max(found), "n": len(found)}


def ratios(runs: Iterable[Run], base: Iterable[Run]) -> dict[str, Any] | None:
    """Speed of runs relative to `base`, prompt by prompt, averaged over repetitions."""
    ours, theirs = by_prompt(runs), by_prompt(base)
    return summary(ours[p] / theirs[p] for p in ours if p in theirs)


def by_prompt(
    runs: Iterable[Run], of_rounds: Callable[[Sequence[float]], float] = statistics.fmean
) -> dict[str, float]:
    """Tokens per second of each prompt, by default the mean of its repetitions."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run.per_second is not None:
            found.setdefault(run.prompt, []).append(run.per_second)
    return {prompt: of_rounds(speeds) for prompt, speeds in found.items()}


def mean_length(runs: Iterable[Run]) -> float | None:
    """Acceptance length over all passes of a run, the mean over runs."""
    found = [run.length for run in runs if run.length is not None]
    return statistics.fmean(found) if found else None


def by_depth(runs: Iterable[Run]) -> list[float]:
    """Share of the drafted steps that kept at least 1, 2, 3, ... drafted tokens."""
    kept: Counter[int] = Counter()
    for run in runs:
        kept.update(run.accepted)
    total = kept.total()
    depths = range(1, max(kept, default=0) + 1)
    return [sum(n for k, n in kept.items() if k >= depth) / total for depth in depths]


def all_widths(runs: Iterable[Run]) -> Counter[int]:
    """Steps by the nodes that they offered, 0 for plain ones."""
    found: Counter[int] = Counter()
    for run in runs:
        found.update(run.widths)
    return found


def all_uses(runs: Iterable[Run]) -> list[WidthUse]:
    """The steps of all runs by width, narrowest first; predicted: the mean of the final predictions, weighted by steps."""
    found: dict[int, list[WidthUse]] = {}
    for run in runs:
        for use in run.uses:
            found.setdefault(use.nodes, []).append(use)
    merged = []
    for nodes, uses in sorted(found.items()):
        known = [(use.predicted_ms, use.steps) for use in uses if use.predicted_ms is not None]
        steps = sum(n for _, n in known)
        predicted = sum(ms * n for ms, n in known) / steps if steps else None
        tokens, ms = sum(use.tokens for use in uses), sum(use.ms for use in uses)
        merged.append(WidthUse(nodes, sum(use.steps for use in uses), tokens, ms, predicted))
    return merged


def step_times(runs: Iterable[Run]) -> dict[str, float] | None:
    """Mean milliseconds of each part of a step."""
    found = [run for run in runs if run.steps]
    steps = sum(run.steps for run in found)
    return {s: sum(t.step_ms[s] for t in found) / steps for s in STAGES} if steps else None
