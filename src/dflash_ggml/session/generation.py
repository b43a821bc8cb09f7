"""One generation from prompt to finish, as plain state: the scheduler prefills and steps, and hands each step to it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decode.sampling import Processor, Sampler
from .events import (
    Begin,
    Finish,
    FinishReason,
    Progress,
    PromptLogprobs,
    SourceTotal,
    StepReport,
    TokenLogprob,
    Usage,
    WidthUse,
    merged,
)
from .hooks import Hooks
from .logprobs import token_logprob
from .processors import EndBan, RowKeeper
from .prompts import Prepared
from .sinks import ChatSink, TextSink
from .slots import CachedSlot, Logits

if TYPE_CHECKING:
    from ..decode.sequence import Sequence as Decoding
    from ..engine.engine import Engine
    from ..engine.step import Step
    from ..state.snapshot import Snapshot


RESERVE = 256  # answer tokens to reserve cache rows for at once
LEAST_RESERVE = 32  # if too few are free


class Generation:
    """A prompt and its continuation; a subclass turns it into events.

    It waits without a slot, prefills with one, and decodes once it has a sequence.

    Args:
        ids: The prompt.
        options: Decoding options for `CachedSlot.begin`; "max_tokens": 0 only prefills.
        boundaries: Positions at which messages start.
        first_answer: Position at which the assistant's first message starts.
        should_stop: Called once per step; true cancels.

    Attributes:
        preempted: Its snapshot while others have the cache rows.
        remaining: Tokens still to prefill.
        since: Arrival in seconds.
        lacks_rows: It lacks cache rows.
        runs_ahead: It continues while its caller does not wait.
        reader: The thread that last requested an event.
    """

    wants_prompt_logits = False
    is_scoring = False  # waits for the prompt scorer, not for a slot

    def __init__(
        self,
        ids: Sequence[int],
        options: dict[str, Any],
        boundaries: Sequence[int] = (),
        first_answer: int = 0,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.events: deque[Any] = deque()
        self.error: Exception | None = None
        self.ended = self.abandoned = self.is_awaited = self.runs_ahead = False
        self.reader = threading.current_thread()
        self.should_stop = should_stop
        self.ids, self.options = list(ids), options
        self.boundaries, self.first_answer = boundaries, first_answer
        self.remaining, self.since = len(self.ids), time.perf_counter()
        self.slot: CachedSlot | None = None
        self.sequence: Decoding | None = None
        self.preempted: Snapshot | None = None
        self.lacks_rows = False
        self.mark = 0.0  # start of the current lap

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt is being prefilled."""
        return self.slot is not None and self.sequence is None

    @property
    def is_decoding(self) -> bool:
        """Whether it emits tokens."""
        return self.slot is not None and self.sequence is not None

    def reservations(self) -> tuple[int, ...]:
        """Tokens to reserve cache rows for: preferred, and minimum."""
        n = len(self.ids) if self.preempted is None else len(self.preempted.tokens)
        limit = self.options["max_tokens"]
        return tuple(n + (more if limit is None else min(limit, more)) for more in (RESERVE, LEAST_RESERVE))

    def begin(self, cached: int) -> None:
        """The prompt is about to be prefilled after `cached` tokens."""

    def prefilled(self, logits: list[Logits] | None) -> None:
        """A chunk was prefilled.

        Args:
            logits: After each of its tokens, where `wants_prompt_logits`.
        """

    def take(self, step: Step) -> None:
        """A step was decoded."""

    def finish(self, cancelled: bool = False) -> None:
        """The generation has ended or was cancelled."""

    def lap(self) -> float:
        """Milliseconds since the last call, or since its caller resumed reading."""
        before, self.mark = self.mark, time.perf_counter()
        return (self.mark - before) * 1e3


def answer_limit(engine: Engine, prepared: Prepared) -> int:
    """The most tokens that an answer can have."""
    room, wanted = engine.n_ctx - len(prepared.ids), prepared.request.max_tokens
    return room if wanted is None or wanted < 0 else min(wanted, room)


class RequestGeneration(Generation):
    """A generation that answers a request: text events, statistics, finish.

    Args:
        grammar: Logits processor applied after the caller's own.
    """

    def __init__(
        self,
        engine: Engine,
        prepared: Prepared,
        sink: TextSink | ChatSink,
        *,
        hooks: Hooks,
        grammar: Processor | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        request, n = prepared.request, len(prepared.ids)
        self._tokenizer, self._config, self._request = engine.tokenizer, engine.config, request
        self._prefill_fp8 = engine.prefill_fp8
        self._expected_ms = engine.expected_ms
        self._prompt_text, self._sink, self._hooks = prepared.text, sink, hooks
        self._limit = answer_limit(engine, prepared)
        self._keeper = RowKeeper() if request.logprobs is not None or hooks.stopping_criteria else None
        # a grammar itself decides when the answer may end
        ends = self._end_bans(engine, n) if grammar is None else [grammar]
        first = [] if self._keeper is None else [self._keeper]
        sampler = Sampler(
            request.sampling,
            engine.n_vocab,
            [*first, *hooks.logits_processor, *ends],
            n_exempt=0 if request.penalize_prompt else n,
        )
        decoding = {"mode": request.mode, "budget": request.budget, "max_tokens": self._limit}
        super().__init__(
            prepared.ids,
            {"sampler": sampler, "stop": self._ends, "forced": sink.forced, **decoding},
            prepared.boundaries,
            prepared.first_answer,
            should_stop,
        )
        self.wants_prompt_logits = bool(getattr(request, "prompt_logprobs", False))
        self._text = np.empty(engine.n_ctx + 1, np.int32)  # prompt and output, for stopping criteria
        self._text[:n] = prepared.ids
        self._n_out = self._n_decoded = self._cached_n = 0
        self._reason: FinishReason | None = None
        self._steps = self._draft_n = self._accepted_n = self._widest = 0
        mode = request.mode or engine.config.mode
        self._mode = mode if engine.sources else "plain"
        self._widths: dict[int, list[float]] = {}  # steps, tokens and milliseconds by drafted nodes
        self._sources: dict[str, list[int]] = {}  # steps, nodes proposed and accepted by source
        self._sent_n = prepared.sent_n
        self._score_ms = 0.0 if prepared.selection is None else prepared.selection.score_ms
        self._prompt_ms, self._predicted_ms = self._score_ms, 0.0
        self._entries: list[TokenLogprob] = []  # of the prompt
        self._last_logits: Logits | None = None
        # control tokens count as text if the prompt contains them
        self._spelt = self._tokenizer.stream(
            special=self.wants_prompt_logits
            and self._tokenizer.decode(self.ids, special=True) == self._prompt_text
        )
        self._offset = 0

    def _end_bans(self, engine: Engine, n_prompt: int) -> list[Processor]:
        """The mask that keeps the answer from ending, as the request specifies."""
        request = self._request
        if not (request.ignore_eos or request.min_tokens):
            return []
        until = None if request.ignore_eos else n_prompt + request.min_tokens
        ends = {*engine.tokenizer.eog_ids, *request.stop_token_ids}
        return [EndBan({i for i in ends if i < engine.n_vocab}, until)]

    # ---- called by the scheduler

    def begin(self, cached: int) -> None:
        """Report how much of the prompt was in the prefix cache."""
        self._cached_n = cached
        self.events.append(Begin(self._sent_n, cached))

    def prefilled(self, logits: list[Logits] | None) -> None:
        """Report progress, and the prompt's log-probabilities if requested."""
        for row in logits or ():
            self._add_prompt_entry(row)
        self._prompt_ms += self.lap()
        todo = len(self.ids) - self._cached_n
        self.events.append(Progress("prefill", todo - self.remaining, todo))
        if logits is not None and not self.remaining:
            self.events.append(PromptLogprobs(tuple(self._entries)))

    def _add_prompt_entry(self, row: Logits) -> None:
        token, before = self.ids[len(self._entries)], self._last_logits
        if before is None:
            entry = TokenLogprob(token, self._tokenizer.piece(token), None, (), self._offset)
        else:
            n_top = self._request.logprobs or 0
            entry = token_logprob(self._tokenizer, before, token, n_top, self._offset)
        self._entries.append(entry)
        self._offset += len(self._spelt.feed([token]))
        self._last_logits = row

    def take(self, step: Step) -> None:
        """Count a step and emit its text."""
        self._predicted_ms += self.lap()
        if step.mode != "prefill":  # the first token comes from the prefill pass
            self._steps += 1
            use = self._widths.setdefault(step.n_draft, [0, 0, 0.0])
            for i, more in enumerate((1, len(step.tokens), step.timings.total)):
                use[i] += more
        self._draft_n += step.n_draft
        for source in step.sources:
            total = self._sources.setdefault(source.name, [0, 0, 0])
            for i, n in enumerate((1, source.drafted, source.accepted)):
                total[i] += n
        self._widest = max(self._widest, step.n_draft)
        self._accepted_n += step.n_accepted
        if self._hooks.on_step is not None:
            self._hooks.on_step(step)
        if self._request.return_steps:
            self.events.append(StepReport.of(step, self._tokenizer))
        self._drain()

    def finish(self, cancelled: bool = False) -> None:
        """Emit held-back text, the usage and the finish reason."""
        if cancelled and self._reason is None:
            self._reason = "cancelled"
        self._sink.flush(cut=self._reason != "stop")
        self._drain()
        reason: FinishReason = self._reason or "length"
        if reason == "stop" and isinstance(self._sink, ChatSink) and self._sink.n_calls:
            reason = "tool_calls"
        self.events.extend((self._usage(), Finish(reason, self._sink.stop_string)))
        if self._hooks.on_end is not None and self.slot is not None:
            self._hooks.on_end(self.slot)

    # ---- tokens and statistics

    def _ends(self, token: int) -> bool:
        """Called by the engine inside the step for every emitted token, in order; True ends the generation there."""
        tokenizer, request = self._tokenizer, self._request
        assert self.sequence is not None
        forced = self.sequence.forced
        is_forced = bool(forced)  # by no logits
        row: Any = None if self._keeper is None else self._keeper.row
        n = len(self.ids) + self._n_out
        if not is_forced and any(
            criterion(self._text[:n], row) for criterion in self._hooks.stopping_criteria
        ):
            self._reason = "stop"
            return True
        self._text[n] = token
        self._n_out += 1
        if token in tokenizer.eog_ids or token in request.stop_token_ids:
            self._reason = "stop"
            return True
        self._n_decoded += 1
        entry = None
        if request.logprobs is not None and is_forced:
            entry = TokenLogprob(token, tokenizer.piece(token), 0.0, ())
        elif request.logprobs is not None:
            assert row is not None
            entry = token_logprob(tokenizer, row, token, request.logprobs)
        elif request.return_tokens:
            entry = TokenLogprob(token, tokenizer.piece(token), None, ())
        self._sink.push(token, entry)
        if not is_forced:
            forced += self._sink.forced
        self._reason = self._sink.finish
        if self._reason is None and self._n_out >= self._limit:
            self._reason = "length"
        return self._reason is not None

    def _drain(self) -> None:
        events, self._sink.events = self._sink.events, []
        self.events.extend(merged(events))

    def _usage(self) -> Usage:
        budget = self._request.budget or self._config.budget
        return Usage(
            prompt_n=self._sent_n,
            cached_n=self._cached_n,
            predicted_n=self._n_decoded,
            reasoning_n=self._sink.reasoning_n,
            steps=self._steps,
            draft_n=self._draft_n,
            draft_n_accepted=self._accepted_n,
            prompt_ms=self._prompt_ms,
            predicted_ms=self._predicted_ms,
            mode=self._mode,
            budget=0 if self._mode == "plain" else self._widest if self._mode == "chain" else budget,
            widths=tuple(self._width_uses()),
            sources=tuple(SourceTotal(name, *counts) for name, counts in self._sources.items()),
            prompt_kept_n=None if self._sent_n == len(self.ids) else len(self.ids),
            score_ms=self._score_ms,
            prefill_fp8=self._prefill_fp8,
        )

    def _width_uses(self) -> Iterator[WidthUse]:
        for nodes, (steps, tokens, ms) in sorted(self._widths.items()):
            expected = None if self.slot is None else self._expected_ms(nodes, self.slot.slot.n_tokens)
            yield WidthUse(nodes, int(steps), int(tokens), ms, expected)
