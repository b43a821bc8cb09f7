"""Interface of the server to the engine, in this process (`runner`) or in another (`remote_runner`)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..session.events import Event
from ..session.prompts import Prepared
from ..session.requests import ChatRequest, CompletionRequest

Progress = Callable[[str, int, int], None]  # stage, done, total


class Vocabulary(Protocol):
    """The part of `text.tokenizer.Tokenizer` that the paths use; see there."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def bos_ids(self) -> list[int]: ...

    def id_of(self, text: str) -> int | None: ...

    def encode(self, text: str, special: bool = True, most: int | None = None) -> list[int]: ...

    def pieces(self, tokens: Iterable[int]) -> list[bytes]: ...

    def decode_bytes(self, tokens: Iterable[int], special: bool = False) -> bytes: ...


class EngineSide(Protocol):
    """`events` and `embed` belong to the worker's threads, of which there may be `parallel`, `close` to one of them, the rest
    to any. `Runner` says what each does."""

    @property
    def parallel(self) -> int: ...

    @property
    def tokenizer(self) -> Vocabulary: ...

    @property
    def n_ctx(self) -> int: ...

    def prepare(self, request: ChatRequest | CompletionRequest) -> Prepared: ...

    def count(self, request: ChatRequest | CompletionRequest) -> int: ...

    def render(self, request: ChatRequest | CompletionRequest) -> str: ...

    def text_tokens(self, text: str | list[int], truncate: bool) -> tuple[int, ...]: ...

    def info(self) -> dict[str, Any]: ...

    def metadata(self) -> dict[str, Any]: ...

    def vocabulary(self) -> dict[str, Any]: ...

    def skills(self) -> list[str]: ...

    def load(self) -> dict[str, float]: ...

    def events(self, prepared: Prepared, cancelled: Callable[[], bool]) -> Generator[Event, None, None]: ...

    def embed(self, ids: Sequence[int], cancelled: Callable[[], bool]) -> NDArray[np.float32]: ...

    def close(self) -> None: ...
