"""One generation from prepared token ids: prefill, decode, count; events out."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decode.sampling import Processor, Sampler
from .end_ban import EndBan
from .events import (
    Begin,
    Event,
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
from .prompt_state import PromptState
from .prompts import Prepared
from .row_keeper import RowKeeper
from .sinks import ChatSink, TextSink

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.place import Place
    from ..engine.step import Run, Step


@dataclass(frozen=True, slots=True)
class Wish:
    """What a generation beside others yields, among its events, where it wants a step of the engine: it is sent the Step."""

    run: Run


class Generation:
    """Runs once. grammar: processor to apply after the caller's own.

    beside: the engine is a place beside others, whose steps are made for all of them at once.
    """

    def __init__(
        self,
        state: PromptState,
        prepared: Prepared,
        sink: TextSink | ChatSink,
        *,
        hooks: Hooks,
        grammar: Processor | None = None,
        should_stop: Callable[[], bool] | None = None,
        beside: bool = False,
    ) -> None:
        self.engine: Engine | Place = state.engine
        self._beside = beside
        ids, options = list(prepared.ids), prepared.request
        self._state = state
        self._ids = ids
        self._prompt_text = prepared.text
        self._options = options
        self._sink = sink
        self._hooks = hooks
        self._boundaries = prepared.boundaries
        self._should_stop = should_stop
        room = self.engine.n_ctx - len(ids)
        wanted = options.max_tokens
        self._limit = room if wanted is None or wanted < 0 else min(wanted, room)
        needs_rows = options.logprobs is not None or bool(hooks.stopping_criteria)
        self._keeper = RowKeeper() if needs_rows else None
        first = [self._keeper] if self._keeper is not None else []
        # a grammar says itself when the answer may end
        grammars: list[Processor] = [grammar] if grammar is not None else self._unending()
        self._sampler = Sampler(
            options.sampling,
            self.engine.n_vocab,
            [*first, *hooks.logits_processor, *grammars],
            n_exempt=0 if options.penalize_prompt else len(ids),
        )
        self._text = np.empty(self.engine.n_ctx + 1, np.int32)  # prompt and output, for stopping criteria
        self._text[: len(ids)] = ids
        self._n_out = 0
        self._n_said = 0
        self._reason: FinishReason | None = None
        self._steps = self._draft_n = self._accepted_n = self._offered = 0
        self._mode = self._plan()
        self._widths: dict[int, list[float]] = {}  # steps, tokens and milliseconds by drafted nodes
        self._sources: dict[str, list[int]] = {}  # steps, nodes offered and kept by source
        self._prompt_ms = self._predicted_ms = 0.0
        self._cached_n = 0

    def _unending(self) -> list[Processor]:
        """The mask that keeps the answer from ending, for as long as the request wants that."""
        options = self._options
        if not (options.ignore_eos or options.min_tokens):
            return []
        until = None if options.ignore_eos else len(self._ids) + options.min_tokens
        n_vocab = self.engine.n_vocab
        ends = {i for i in (*self.engine.tokenizer.eog_ids, *options.stop_token_ids) if i < n_vocab}
        return [EndBan(ends, until)]

    def events(self, *, prompt_logprobs: bool = False) -> Generator[Any, Any, None]:
        """The events, in the order that module `events` promises; beside others a Wish before every step."""
        began = time.perf_counter()
        try:
            yield from self._prefill_rows(began) if prompt_logprobs else self._prefill(began)
            if self._reason is None and self._limit:
                yield from self._decode()
        except (Exception, KeyboardInterrupt):
            self._state.reset()  # an interrupt may have torn the state
            raise
        self._sink.flush(cut=self._reason != "stop")
        yield from self._drain()
        yield self._usage()
        reason = self._reason or "length"
        if reason == "stop" and isinstance(self._sink, ChatSink) and self._sink.n_calls:
            reason = "tool_calls"
        yield Finish(reason, self._sink.stop_string)

    def _prefill(self, began: float) -> Generator[Event, None, None]:
        self._cached_n = self._state.seek(self._ids)
        yield Begin(len(self._ids), self._cached_n)
        todo = len(self._ids) - self._cached_n
        done = self._cached_n
        for done in self._state.advance(self._ids, self._cached_n, self._boundaries, self._should_stop):
            yield Progress("prefill", done - self._cached_n, todo)
        if done < len(self._ids):
            self._reason = "cancelled"
        self._prompt_ms = (time.perf_counter() - began) * 1e3

    def _prefill_rows(self, began: float) -> Generator[Event, None, None]:
        yield Begin(len(self._ids), 0)
        tokenizer, n_top = self.engine.tokenizer, self._options.logprobs or 0
        # control tokens count as text where the prompt spells them out
        decoder = tokenizer.stream(special=tokenizer.decode(self._ids, special=True) == self._prompt_text)
        entries: list[TokenLogprob] = []
        row, offset = None, 0
        for rows in self._state.rows(self._ids):
            for next_row in rows:
                token = self._ids[len(entries)]
                if row is None:
                    entries.append(TokenLogprob(token, tokenizer.piece(token), None, (), offset))
                else:
                    entries.append(token_logprob(tokenizer, row, token, n_top, offset))
                offset += len(decoder.feed([token]))
                row = next_row
            yield Progress("prefill", len(entries), len(self._ids))
            if self._should_stop is not None and self._should_stop():
                self._reason = "cancelled"
                break
        self._prompt_ms = (time.perf_counter() - began) * 1e3
        yield PromptLogprobs(tuple(entries))

    def _decode(self) -> Generator[Any, Any, None]:
        options = self._options
        self._state.spent()
        steps: Any = (
            self._joined()
            if self._beside
            else self.engine.generate(**self._how(), should_stop=self._should_stop)
        )
        given: Step | None = None
        try:
            while True:
                began = time.perf_counter()
                step = steps.send(given) if given is not None else next(steps, None)
                given = None
                if isinstance(step, Wish):
                    given = yield step
                    self._predicted_ms += (time.perf_counter() - began) * 1e3
                    continue
                self._predicted_ms += (time.perf_counter() - began) * 1e3
                if step is None:
                    return
                self._count(step)
                if self._hooks.on_step is not None:
                    self._hooks.on_step(step)
                if options.return_steps:
                    yield StepReport.of(step, self.engine.tokenizer)
                yield from self._drain()
        finally:
            steps.close()

    def _how(self) -> dict[str, Any]:
        """What the engine is told of this generation."""
        options = self._options
        how = {"max_tokens": self._limit, "mode": options.mode, "budget": options.budget, "stop": self._take}
        return {"sampler": self._sampler, **how}

    def _joined(self) -> Generator[Any, Any, None]:
        """`Engine.generate` where the steps are made for several: each is wished for, and sent."""
        place: Any = self.engine
        run = place.begin(**self._how())
        step = place.first(run)
        while True:
            if run.finish is None and self._should_stop is not None and self._should_stop():
                run.finish = "cancelled"
            step.finish = run.finish
            yield step
            if step.finish:
                return
            step = yield Wish(run)

    def _take(self, token: int) -> bool:
        """Called by the engine for every emitted token, in text order, inside the walk; True ends it there."""
        tokenizer, options = self.engine.tokenizer, self._options
        row: Any = self._keeper.row if self._keeper is not None else None
        n = len(self._ids) + self._n_out
        if any(criterion(self._text[:n], row) for criterion in self._hooks.stopping_criteria):
            self._reason = "stop"
            return True
        self._text[n] = token
        self._n_out += 1
        if token in tokenizer.eog_ids or token in options.stop_token_ids:
            self._reason = "stop"
            return True
        self._n_said += 1
        entry = None
        if options.logprobs is not None:
            assert row is not None
            entry = token_logprob(tokenizer, row, token, options.logprobs)
        elif options.return_tokens:
            entry = TokenLogprob(token, tokenizer.piece(token), None, ())
        self._sink.push(token, entry)
        self._reason = self._sink.finish
        if self._reason is None and self._n_out >= self._limit:
            self._reason = "length"
        return self._reason is not None

    def _count(self, step: Step) -> None:
        if step.mode != "prefill":  # the first token comes from the prompt's own pass
            self._steps += 1
            use = self._widths.setdefault(step.n_draft, [0, 0, 0.0])
            use[0] += 1
            use[1] += len(step.tokens)
            use[2] += step.timings.total
        self._draft_n += step.n_draft
        for source in step.sources:
            total = self._sources.setdefault(source.name, [0, 0, 0])
            for i, n in enumerate((1, source.drafted, source.accepted)):
                total[i] += n
        self._offered = max(self._offered, step.n_draft)
        self._accepted_n += step.n_accepted
        if step.finish == "cancelled" and self._reason is None:
            self._reason = "cancelled"

    def _drain(self) -> Generator[Event, None, None]:
        events, self._sink.events = self._sink.events, []
        yield from merged(events)

    def _plan(self) -> str:
        """The mode that the request asks for."""
        mode = self._options.mode or self.engine.config.mode
        return mode if self.engine.sources else "plain"

    def _usage(self) -> Usage:
        budget = self._options.budget or self.engine.config.budget
        return Usage(
            prompt_n=len(self._ids),
            cached_n=self._cached_n,
            predicted_n=self._n_said,
            reasoning_n=self._sink.reasoning_n,
            steps=self._steps,
            draft_n=self._draft_n,
            draft_n_accepted=self._accepted_n,
            prompt_ms=self._prompt_ms,
            predicted_ms=self._predicted_ms,
            mode=self._mode,
            budget=0 if self._mode == "plain" else self._offered if self._mode == "chain" else budget,
            widths=tuple(self._width_uses()),
            sources=tuple(SourceTotal(name, *counts) for name, counts in self._sources.items()),
        )

    def _width_uses(self) -> Iterator[WidthUse]:
        engine = self.engine
        for nodes, (steps, tokens, ms) in sorted(self._widths.items()):
            expected = engine.expected_ms(nodes)
            yield WidthUse(nodes, int(steps), int(tokens), ms, expected)
