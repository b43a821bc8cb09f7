"""`--versus-plain`: the same prompt once more without drafts, to say what drafting was worth on this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from ..files.pairs import EMBEDDED_TARGET
from ..session.events import Finish, Progress, Usage
from ..session.hooks import Hooks
from ..session.prompts import Prepared
from ..session.requests import CompletionRequest
from ..session.session import Session, run_completion
from .report import Meter, Report, Steps

_NOTICED = 1.05  # a ratio of speeds that is no accident of timing


@dataclass(frozen=True, slots=True)
class Plain:
    """What plain decoding wrote, and the milliseconds of decoding it."""

    token_ids: list[int]
    ms: float

    @property
    def per_second(self) -> float:
        """Tokens per second; 0.0 when nothing was timed."""
        return 1e3 * len(self.token_ids) / self.ms if self.ms else 0.0


def decode_plainly(
    session: Session, prepared: Prepared, n: int, meter: Meter, should_stop: Callable[[], bool]
) -> Plain | None:
    """The n tokens that plain decoding gives for a prompt; None when stopped.

    Where plain decoding comes to an end earlier, because the texts forked, it goes on behind that end.
    """
    token_ids: list[int] = []
    ms = 0.0
    while len(token_ids) < n:
        steps = Steps()
        request = CompletionRequest(
            prompt=[*prepared.ids, *token_ids],
            sampling=prepared.request.sampling,
            max_tokens=n - len(token_ids),
            mode="plain",
            ignore_eos=prepared.request.ignore_eos,
        )
        hooks = Hooks(on_step=steps.add)
        with closing(run_completion(session, request, hooks=hooks, should_stop=should_stop)) as events:
            for event in events:
                if isinstance(event, Progress):
                    meter.tokens(event.done, event.total)
                else:
                    meter.clear()
                if isinstance(event, Usage):
                    ms += event.predicted_ms
                elif isinstance(event, Finish) and event.reason == "cancelled":
                    return None
        token_ids += steps.token_ids
    return Plain(token_ids, ms)


def versus_line(report: Report, plain: Plain, session: Session) -> str:
    """What just happened, for somebody who sees it for the first time."""
    if not report.usage.steps:
        return "too few tokens to compare drafting with plain decoding"
    what = "the same text" if plain.token_ids == report.steps.token_ids else "as many tokens"
    ratio = report.per_second / plain.per_second if plain.per_second else 0.0
    small = "small " if session.engine.config.model == EMBEDDED_TARGET else ""
    plain_steps = sum(use.steps for use in report.usage.widths if not use.nodes)
    if report.usage.mode == "auto" and 2 * plain_steps > report.usage.steps and ratio < _NOTICED:
        how = "plainly" if 10 * plain_steps >= 9 * report.usage.steps else "mostly plainly"
        verdict = f"drafting does not pay for this {small}model, and auto decoded {how}"
    elif ratio >= 1:
        verdict = f"drafting is {ratio:.2f} times as fast"
    else:
        verdict = f"plain is faster for this {small}model"
    return (
        f"every pass of the target gave {report.usage.tokens_per_step:.2f} tokens, {report.per_second:.1f} tokens/s; "
        f"plain decoding of {what}: {plain.per_second:.1f} tokens/s: on this machine {verdict}"
    )
