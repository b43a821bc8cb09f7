"""Sinks of emitted tokens: text with stop strings, or an assistant's reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..text.chat_parser import ChatParser
from ..text.deltas import Delta
from ..text.stopping import StopStrings
from ..text.tokenizer import Tokenizer
from .events import Event, FinishReason, TextDelta, TokenLogprob
from .thinking import ThoughtLimit


class Sink:
    """Base of both kinds.

    `events` collects the output, `finish` is set when the output itself ends the answer, `forced` holds tokens to be forced
    next.
    """

    def __init__(self, tokenizer: Tokenizer, stops: StopStrings) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream()
        self._stops = stops
        self._entries: list[TokenLogprob] = []
        self.events: list[Event] = []
        self.finish: FinishReason | None = None
        self.forced: tuple[int, ...] = ()
        self.reasoning_n = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found in the visible text, if one was."""
        return self._stops.matched

    def _text_of(self, token: int) -> str:
        """Text completed by a token; empty for padding ids beyond the vocabulary."""
        return self._decoder.feed([token]) if token < self._tokenizer.n_vocab else ""


class TextSink(Sink):
    """Tokens in, TextDeltas out.

    Args:
        offset: Characters of text before the output.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], offset: int = 0) -> None:
        super().__init__(tokenizer, StopStrings(stop))
        self._text_in = self._text_out = offset

    def push(self, token: int, logprob: TokenLogprob | None) -> None:
        """Take the next token; `finish` is set when it completes a stop string."""
        if logprob is not None:
            self._entries.append(replace(logprob, offset=self._text_in))
        text = self._text_of(token)
        self._text_in += len(text)
        visible, stopped = self._stops.feed(text)
        self._say(visible)
        if stopped:
            self.finish = "stop"

    def flush(self, cut: bool = False) -> None:
        """End of the output: emit held-back text, unless a stop string ended it.

        Args:
            cut: Whether a limit ended it.
        """
        if self._stops.matched is None:
            visible, stopped = self._stops.feed(self._decoder.flush())
            self._say(visible if stopped else visible + self._stops.flush())

    def _say(self, text: str) -> None:
        self._text_out += len(text)
        if text:
            self.events.append(TextDelta(text, _settled(self._entries, self._text_out)))


class ChatSink(Sink):
    """Tokens in, the events of a ChatParser out.

    Args:
        tokenizer: The model's.
        parser: Splits the text.
        thought: The parser that finds the end of reasoning, a separate one if `parser` leaves it in the text.
        stops: Stop strings, for the visible text.
        one_call: Finish after the first tool call.
        limit: Tokens of reasoning, if they are limited.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: ChatParser,
        thought: ChatParser,
        stops: StopStrings,
        one_call: bool,
        limit: ThoughtLimit | None = None,
    ) -> None:
        super().__init__(tokenizer, stops)
        self._parser, self._thought, self._limit = parser, thought, limit
        self.forced = self._end_of_thought()
        self._one_call = one_call
        ids = {tokenizer.id_of(tag): tag for tag in parser.tags}
        # tags that are control tokens have no text of their own
        self._tags = {i: tag for i, tag in ids.items() if i is not None and tokenizer.is_control(i)}

    @property
    def n_calls(self) -> int:
        """Tool calls so far."""
        return self._parser.n_calls

    def _end_of_thought(self) -> tuple[int, ...]:
        """Tokens that end reasoning at its budget; an incomplete character is completed first."""
        if self._limit is None or not self._thought.in_reasoning:
            return ()
        most = self._limit.budget + (3 if self._decoder.in_character else 0)
        return self._limit.end if self.reasoning_n >= most else ()

    def push(self, token: int, logprob: TokenLogprob | None) -> None:
        """Take the next token; `finish` is set when it completes a stop string or the only call allowed, `forced` when it uses
        up the budget of reasoning."""
        parser = self._parser
        self.reasoning_n += self._thought.in_reasoning
        if logprob is not None and parser.in_text:
            self._entries.append(replace(logprob, offset=parser.text_in))
        tag = self._tags.get(token)
        text = self._text_of(token) if tag is None else self._decoder.flush()
        self._take(_read(parser, text, tag))
        if self._thought is not parser:
            _read(self._thought, text, tag)
        self.forced = self._end_of_thought()
        if not parser.in_text:
            # unsettled entries belonged to the tag
            self._entries.clear()
        if parser.stopped:
            self.finish = "stop"
        elif self._one_call and parser.n_calls and not parser.in_call:
            self.finish = "tool_calls"

    def flush(self, cut: bool = False) -> None:
        """End of the output: emit held-back text.

        Args:
            cut: Whether a limit ended it, not the model.
        """
        self._take(self._parser.feed(self._decoder.flush()) + self._parser.flush(cut))

    def _take(self, events: Sequence[Delta]) -> None:
        texts = [e for e in events if isinstance(e, TextDelta)]
        for event in events:
            if event is (texts[-1] if texts else None):
                event = replace(event, logprobs=_settled(self._entries, self._parser.text_out))
            self.events.append(event)


def _read(parser: ChatParser, text: str, tag: str | None) -> list[Delta]:
    """Parse a text followed by a control token."""
    return parser.feed(text) + ([] if tag is None else parser.mark(tag))


def _settled(entries: list[TokenLogprob], end: int) -> tuple[TokenLogprob, ...] | None:
    """Take the entries whose text begins before character `end`; None if there are none."""
    if not entries:
        return None
    n = sum(e.offset < end for e in entries)
    taken = tuple(entries[:n])
    del entries[:n]
    return taken or None
