"""`Llama._ctx`: llama.h's view of a context, one sequence, token by token, on the engine behind a `Llama`."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from .handles import handle_for
from .model import LlamaModel

llama_token = ctypes.c_int32
llama_pos = ctypes.c_int32
llama_seq_id = ctypes.c_int32


class llama_batch(ctypes.Structure):
    """Tokens of one pass: ids, positions, sequences, and for which of them logits are wanted. Layout of llama.h."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(llama_token)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(llama_pos)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(llama_seq_id))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def new_batch(n_tokens: int, n_seq_max: int) -> llama_batch:
    """An empty batch with room for so many tokens; its memory lives as long as it does."""
    ids = [(llama_seq_id * max(n_seq_max, 1))() for _ in range(n_tokens)]
    rows = (ctypes.POINTER(llama_seq_id) * n_tokens)(
        *(ctypes.cast(i, ctypes.POINTER(llama_seq_id)) for i in ids)
    )
    arrays = ((llama_token * n_tokens)(), (llama_pos * n_tokens)(), (ctypes.c_int32 * n_tokens)())
    flags = (ctypes.c_int8 * n_tokens)()
    batch = llama_batch(0, arrays[0], None, arrays[1], arrays[2], rows, flags)
    batch._memory = (ids, rows, arrays, flags)
    return batch


class HasContext(Protocol):
    """What a LlamaContext needs of a Llama."""

    n_tokens: int
    n_batch: int
    n_threads: int
    n_seq_max: int
    context_params: Any
    _model: LlamaModel
    _n_vocab: int
    _requires_eval: bool

    @property
    def _input_ids(self) -> npt.NDArray[np.intc]: ...
    def _logits_at(self, ids: list[int], places: Sequence[int]) -> npt.NDArray[np.single]: ...
    def n_ctx(self) -> int: ...
    def pooling_type(self) -> int: ...
    def reset(self) -> None: ...


class LlamaContext:
    """A context as llama.h sees it. `ctx` is a handle for the `llama_*` functions; made by a Llama only."""

    model: LlamaModel
    ctx: int | None
    memory: int | None
    _llama: weakref.ref[Any]
    _rows: npt.NDArray[np.single]
    _row_of: dict[int, int]  # place in the last batch -> row

    def __init__(self, *, model: Any = None, params: Any = None, verbose: bool = True) -> None:
        raise ConfigError(
            "LlamaContext: a context comes with its Llama; open one and take llm.ctx or llm._ctx"
        )

    @classmethod
    def of(cls, llama: Any) -> LlamaContext:
        """The context of a Llama, which it does not keep alive."""
        self = cls.__new__(cls)
        self._bind(llama)
        return self

    def _bind(self, llama: Any) -> None:
        self._llama = weakref.ref(llama)
        self.model = llama._model
        self.ctx = self.memory = handle_for(self)
        self._rows = np.empty((0, llama._n_vocab), np.single)
        self._row_of = {}

    @property
    def llama(self) -> HasContext:
        """The Llama. Raises ConfigError when it is gone."""
        llama: HasContext | None = self._llama()
        if llama is None:
            raise ConfigError("this context's Llama is gone")
        return llama

    def n_ctx(self) -> int:
        return self.llama.n_ctx()

    def pooling_type(self) -> int:
        return self.llama.pooling_type()

    def kv_cache_clear(self) -> None:
        self.llama.reset()

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """Forget the positions from p0 on; False for a piece out of the middle, which cannot be taken out."""
        llama = self.llama
        n, start = llama.n_tokens, max(p0, 0)
        if 0 <= p1 < n and start < p1:
            return False
        llama.n_tokens = min(n, start)
        llama._requires_eval = True
        return True

    def decode(self, batch: Any) -> None:
        """As evaluate. Raises RuntimeError where the context is full."""
        if code := self.evaluate(batch):
            raise RuntimeError(
                f"llama_decode returned {code}: the batch does not fit a context of {self.n_ctx()} tokens"
            )

    def evaluate(self, batch: Any) -> int:
        """Evaluate a batch (llama_batch or LlamaBatch): one sequence, positions rising from one that is known.

        0, or 1 where the context is full.
        Raises ConfigError for several sequences, embeddings or gaps.
        """
        batch = getattr(batch, "batch", batch)
        llama, n = self.llama, int(batch.n_tokens)
        if not batch.token or n < 1:
            raise ConfigError(
                "llama_decode: expected a batch of one or more token ids; embeddings are not taken"
            )
        if batch.n_seq_id and any(batch.n_seq_id[i] != 1 or batch.seq_id[i][0] != 0 for i in range(n)):
            raise ConfigError("llama_decode: this context has one sequence, of id 0")
        start = batch.pos[0] if batch.pos else llama.n_tokens
        if not 0 <= start <= llama.n_tokens or (
            batch.pos and any(batch.pos[i] != start + i for i in range(n))
        ):
            raise ConfigError("llama_decode: positions must rise by one from one that follows a known token")
        if start + n > llama.n_ctx():
            return 1
        wanted = [i for i in range(n) if batch.logits[i]] if batch.logits else [n - 1]
        ids = [*llama._input_ids[:start].tolist(), *batch.token[:n]]
        self._rows = llama._logits_at(ids, [start + i for i in wanted])
        self._row_of = {place: row for row, place in enumerate(wanted)}
        return 0

    def get_logits(self) -> Any:
        """Pointer to the rows of the last batch, float [n wanted, n_vocab]; they live until the next one."""
        return self._rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def row(self, i: int) -> npt.NDArray[np.single]:
        """Logits of the i-th token of the last batch, float32 [n_vocab]; below 0: of the wanted ones, from the end."""
        row = len(self._rows) + i if i < 0 else self._row_of.get(i, -1)
        if not 0 <= row < len(self._rows):
            raise ConfigError(
                f"llama_get_logits_ith: no logits were asked for at place {i} of the last batch"
            )
        return self._rows[row]

    def get_logits_ith(self, i: int) -> Any:
        """Pointer to `row`."""
        return self.row(i).ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def reset_timings(self) -> None:
        """Nothing: timings come with every answer."""

    def print_timings(self) -> None:
        """Nothing: timings come with every answer."""

    def close(self) -> None:
        """Nothing: the Llama closes."""


class LlamaBatch:
    """A llama_batch with a Python face. embd must be 0."""

    def __init__(self, *, n_tokens: int, embd: int = 0, n_seq_max: int = 1, verbose: bool = True) -> None:
        if embd:
            raise ConfigError("LlamaBatch: embd must be 0, this engine takes token ids")
        self.batch = new_batch(n_tokens, n_seq_max)

    def n_tokens(self) -> int:
        return self.batch.n_tokens

    def reset(self) -> None:
        self.batch.n_tokens = 0

    def set_batch(self, batch: Sequence[int], n_past: int, logits_all: bool) -> None:
        """Tokens from position n_past on; logits for all of them, or for the last."""
        self.reset()
        self._add(batch, n_past, 0, logits_all)

    def add_sequence(self, batch: Sequence[int], seq_id: int, logits_all: bool) -> None:
        """Tokens of a sequence, from its position 0, behind those that are there."""
        self._add(batch, 0, seq_id, logits_all)

    def _add(self, tokens: Sequence[int], first: int, seq_id: int, logits_all: bool) -> None:
        room, n = len(self.batch._memory[3]), self.batch.n_tokens
        if n + len(tokens) > room:
            raise ConfigError(f"LlamaBatch: {n + len(tokens)} tokens do not fit {room}")
        for i, token in enumerate(tokens):
            at = n + i
            self.batch.token[at], self.batch.pos[at] = int(token), first + i
            self.batch.n_seq_id[at], self.batch.seq_id[at][0] = 1, seq_id
            self.batch.logits[at] = logits_all or i == len(tokens) - 1
        self.batch.n_tokens = n + len(tokens)

    def close(self) -> None:
        """Nothing: the memory goes with the object."""
