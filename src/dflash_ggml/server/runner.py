"""Runner: a session and its engine as a source of events for the worker threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..files.tensor_info import FILE_TYPES
from ..session.embedding import embed
from ..session.events import Event, Finish, Usage
from ..session.prompts import Prepared
from ..session.requests import ChatRequest, CompletionRequest
from ..session.session import Session, run_chat, run_completion
from .metrics import Metrics

Progress = Callable[[str, int, int], None]  # stage, done, total

FILL_MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


class Runner:
    """Owner of a session's engine. `events` and `embed` may run in `parallel` threads, `close` in one, the rest in any.

    With several slots the scheduler has its own thread. `remote_runner.RemoteRunner` is a runner in another process.

    Args:
        session: The engine and its scheduler.
        on_close: Called when the engine is freed.
    """

    def __init__(self, session: Session, on_close: Callable[[], None] | None = None) -> None:
        self.session = session
        self._on_close = on_close
        self.tokenizer = session.engine.tokenizer
        self.n_ctx: int = session.engine.n_ctx
        self.parallel: int = session.engine.parallel
        if self.parallel > 1:
            session.scheduler.start()

    def prepare(self, request: ChatRequest | CompletionRequest) -> Prepared:
        """Render and tokenise a request.

        Raises:
            ConfigError: The prompt cannot be rendered.
            ContextOverflowError: The prompt leaves no context for an answer.
        """
        return self.session.prepare(request)

    def count(self, request: ChatRequest | CompletionRequest) -> int:
        """Tokens of a request's prompt.

        Raises:
            ConfigError: The prompt cannot be rendered.
        """
        return self.session.count_tokens(request)

    def render(self, request: ChatRequest | CompletionRequest) -> str:
        """A request's prompt as text.

        Raises:
            ConfigError: The prompt cannot be rendered.
        """
        return self.session.prompts.make(request).text

    def events(self, prepared: Prepared, cancelled: Callable[[], bool]) -> Generator[Event, None, None]:
        """The session's events."""
        run = run_chat if isinstance(prepared.request, ChatRequest) else run_completion
        return run(self.session, prepared, should_stop=cancelled)

    def text_tokens(self, text: str | list[int], truncate: bool) -> tuple[int, ...]:
        """The tokens of a text by itself.

        Args:
            text: The text, or its tokens.
            truncate: Cut tokens beyond the context.

        Raises:
            ConfigError: There are none, or one is outside the vocabulary.
            ContextOverflowError: There are too many, without `truncate`.
        """
        if not truncate:
            return self.prepare(CompletionRequest(prompt=text)).ids
        # cut before tokenising; no text has so many characters per token
        request = CompletionRequest(prompt=text[: 64 * self.n_ctx])
        return self.session.prompts.make(request).ids[: self.n_ctx]

    def embed(self, ids: Sequence[int], cancelled: Callable[[], bool]) -> NDArray[np.float32]:
        """The mean of a text's hidden states, float32 [n_embd]; invalid if cancelled meanwhile."""
        return embed(self.session, ids, should_stop=cancelled)

    def info(self) -> dict[str, Any]:
        """Description for /props and the lists of models."""
        engine = self.session.engine
        metadata, path = engine.metadata, engine.config.model
        shapes: dict[str, tuple[int, ...]] = getattr(engine.params, "tensors", dict)()
        kind = metadata.get("general.file_type")
        return {
            "model_path": str(path),
            "model_size": path.stat().st_size if path.is_file() else 0,
            "architecture": metadata.get("general.architecture", ""),
            "file_type": FILE_TYPES[kind] if isinstance(kind, int) and kind < len(FILE_TYPES) else "unknown",
            "n_params": sum(math.prod(shape) for shape in shapes.values()),
            "n_embd": engine.params.n_embd,
            "n_ctx_train": engine.params.n_ctx_train,
            "n_ctx": engine.n_ctx,
            "parallel": self.parallel,
            "n_vocab": engine.n_vocab,
            "has_draft": bool(engine.sources),
            "prompt_scorer": self.session.prompts.scorer,
            "prefill_fp8": engine.prefill_fp8,
            "sources": list(engine.sources),
            "mode": engine.config.mode,
            "budget": engine.config.budget,
            "chat_template": self.session.templates.source,
            "bos_token": self._text(self.tokenizer.bos_id),
            "eos_token": self._text(self.tokenizer.eos_id),
            "build_info": f"dflash-ggml-{version('dflash-ggml')}",
        }

    def metadata(self) -> dict[str, Any]:
        """The model file's scalar keys."""
        items = self.session.engine.metadata.items()
        return {key: value for key, value in items if isinstance(value, (str, int, float))}

    def vocabulary(self) -> dict[str, Any]:
        """The names of special tokens, and the tokens that the tokenizer adds to a text."""
        tokenizer = self.tokenizer
        names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
        ids = {name: tokenizer.special_ids.get(key) for name, key in names.items()}
        texts = {name: None if i is None else tokenizer.tokens[i] for name, i in ids.items()}
        return {**texts, "chat_template": self.session.templates.source, "add_bos_token": tokenizer.add_bos}

    def skills(self) -> list[str]:
        """Capabilities of vocabulary and chat template beyond plain text: insert, tools, thinking."""
        found = ["insert"] if all(self.tokenizer.id_of(mark) is not None for mark in FILL_MARKS) else []
        try:
            template = self.session.templates.of(None)[0]
        except ConfigError:  # the file has no template
            return found
        thinks = template.is_harmony or template.tags.think in template.source
        return found + ["tools"] * template.supports_tools + ["thinking"] * thinks

    def load(self) -> dict[str, float]:
        """Totals over all steps since the start (see `Tally`), and graphs built and cached."""
        counts = self.session.engine.graph_counts()
        return {**asdict(self.session.scheduler.tally), "graphs": counts["kept"], "built": counts["graphs"]}

    def _text(self, token: int | None) -> str | None:
        return None if token is None else self.tokenizer.token_bytes(token).decode("utf-8", "replace")

    def close(self) -> None:
        """Write prefixes to disk, and free the engine's memory."""
        if self._on_close is not None:
            self._on_close()
        self.session.close()


def work(prepared: Prepared, metrics: Metrics) -> Callable[[Runner, Callable[[], bool]], Iterator[Any]]:
    """A worker's job: answers one request and counts it."""

    def run(runner: Runner, cancelled: Callable[[], bool]) -> Iterator[Any]:
        with closing(runner.events(prepared, cancelled)) as events:
            for event in events:
                if isinstance(event, Usage):
                    metrics.usage(event)
                elif isinstance(event, Finish):
                    metrics.finished(event.reason)
                yield event

    return run
