"""`--versus-plain`: decode the prompt again without drafts, to measure drafting's speedup on this machine.

A one-second measurement is unreliable on a shared machine. So short answers are decoded several more times alternately in both
ways, and the median ratio counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from ..config import Mode
from ..files.pairs import EMBEDDED_TARGET
from ..session.hooks import Hooks
from ..session.prompts import Prepared
from ..session.requests import CompletionRequest
from ..session.session import Session, run_completion
from .report import Meter, Report, Steps
from .writer import write_answer

_NOTICED = 1.05  # significant ratio of speeds
ENOUGH = 3.0  # seconds of decoding after which no further repetition begins
ROUNDS = 7  # most repetitions


@dataclass(frozen=True, slots=True)
class Plain:
    """A repeated answer, decoded plainly by default, with its milliseconds."""

    token_ids: list[int]
    ms: float

    @property
    def per_second(self) -> float:
        """Tokens per second; 0.0 when nothing was timed."""
        return 1e3 * len(self.token_ids) / self.ms if self.ms else 0.0


def decode_again(
    session: Session,
    prepared: Prepared,
    n: int,
    meter: Meter,
    should_stop: Callable[[], bool],
    mode: Mode | None = "plain",
) -> Plain | None:
    """Decode n tokens for a prompt, plainly or in another mode (None: the engine's); None if stopped.

    An earlier end of generation is ignored, so that both answers have the same length.
    """
    token_ids: list[int] = []
    ms = 0.0
    while len(token_ids) < n:
        steps = Steps()
        request = CompletionRequest(
            prompt=[*prepared.ids, *token_ids],
            sampling=prepared.request.sampling,
            max_tokens=n - len(token_ids),
            mode=mode,
            ignore_eos=prepared.request.ignore_eos,
        )
        hooks = Hooks(on_step=steps.add)
        with closing(run_completion(session, request, hooks=hooks, should_stop=should_stop)) as events:
            usage, finish = write_answer(events, None, meter.tokens).done()
        meter.clear()
        if finish.reason == "cancelled":
            return None
        ms += usage.predicted_ms
        token_ids += steps.token_ids
    return Plain(token_ids, ms)


def compared(
    session: Session,
    prepared: Prepared,
    drafted: float,
    plain: Plain,
    meter: Meter,
    should_stop: Callable[[], bool],
) -> list[float]:
    """Speedups of drafting over plain decoding, by repetition; if stopped, of those so far.

    Args:
        drafted: Milliseconds of the first run.
        plain: The plain run after it; further repetitions follow while the total is below ENOUGH seconds.
    """
    n, spent = len(plain.token_ids), drafted + plain.ms
    found = [plain.ms / drafted] if drafted else []
    while found and len(found) < ROUNDS and spent < 1e3 * ENOUGH:
        ms = dict[Mode | None, float]()
        for mode in (None, "plain") if len(found) % 2 == 0 else ("plain", None):  # type: Mode | None
            # otherwise prompt lookup would find the earlier answer
            session.scheduler.run_on_slot(lambda slot: slot.slot.forget())
            again = decode_again(session, prepared, n, meter, should_stop, mode)
            if again is None or not again.ms:
                return found
            ms[mode] = again.ms
        found.append(ms["plain"] / ms[None])
        spent += sum(ms.values())
    return found


def versus_line(report: Report, plain: Plain, session: Session, rounds: Sequence[float] = ()) -> str:
    """The result in one line.

    Args:
        rounds: Result of `compared`.
    """
    if not report.usage.steps:
        return "too few tokens to compare drafting with plain decoding"
    what = "the same text" if plain.token_ids == report.steps.token_ids else "as many tokens"
    ratio = report.per_second / plain.per_second if plain.per_second else 0.0
    by_turns = ""
    if len(rounds) > 1:
        ratio = statistics.median(rounds)
        by_turns = f" ({len(rounds)} times by turns: {min(rounds):.2f} to {max(rounds):.2f}, {ratio:.2f} in the middle)"
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
        f"plain decoding of {what}: {plain.per_second:.1f} tokens/s: on this machine {verdict}{by_turns}"
    )
