"""llama.h's batch of tokens, and llama-cpp-python's wrapper of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ..errors import ConfigError

llama_token = llama_pos = llama_seq_id = ctypes.c_int32


class llama_batch(ctypes.Structure):
    """Tokens of one pass: ids, positions, sequences, and flags for logits. Layout of llama.h."""

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
    """An empty batch for so many tokens, which owns its memory."""
    ids = [(llama_seq_id * max(n_seq_max, 1))() for _ in range(n_tokens)]
    pointer = ctypes.POINTER(llama_seq_id)
    rows = (pointer * n_tokens)(*(ctypes.cast(i, pointer) for i in ids))
    tokens, positions, counts = ((ctypes.c_int32 * n_tokens)() for _ in range(3))
    flags = (ctypes.c_int8 * n_tokens)()
    batch = llama_batch(0, tokens, None, positions, counts, rows, flags)
    batch._memory = (ids, rows, tokens, positions, counts, flags)
    return batch


class LlamaBatch:
    """llama-cpp-python's wrapper of a llama_batch. embd must be 0."""

    def __init__(self, *, n_tokens: int, embd: int = 0, n_seq_max: int = 1, verbose: bool = True) -> None:
        if embd:
            raise ConfigError("LlamaBatch: embd must be 0, this engine takes token ids")
        self.batch, self._room = new_batch(n_tokens, n_seq_max), n_tokens

    def n_tokens(self) -> int:
        """Tokens in the batch."""
        return self.batch.n_tokens

    def reset(self) -> None:
        """Empty the batch."""
        self.batch.n_tokens = 0

    def set_batch(self, batch: Sequence[int], n_past: int, logits_all: bool) -> None:
        """Tokens from position n_past on; logits for all of them, or for the last."""
        self.reset()
        self._add(batch, n_past, 0, logits_all)

    def add_sequence(self, batch: Sequence[int], seq_id: int, logits_all: bool) -> None:
        """Append tokens of a sequence, from position 0."""
        self._add(batch, 0, seq_id, logits_all)

    def _add(self, tokens: Sequence[int], first: int, seq_id: int, logits_all: bool) -> None:
        n = self.batch.n_tokens
        if n + len(tokens) > self._room:
            raise ConfigError(f"LlamaBatch: {n + len(tokens)} tokens do not fit {self._room}")
        for i, token in enumerate(tokens):
            at = n + i
            self.batch.token[at], self.batch.pos[at] = int(token), first + i
            self.batch.n_seq_id[at], self.batch.seq_id[at][0] = 1, seq_id
            self.batch.logits[at] = logits_all or i == len(tokens) - 1
        self.batch.n_tokens = n + len(tokens)

    def close(self) -> None:
        """No effect: the memory is freed with the object."""
