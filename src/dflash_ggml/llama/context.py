"""`Llama._ctx`: one sequence on an engine, evaluated call by call, and llama.h's interface to it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..decode.sampling import Sampler
from ..errors import ConfigError, DeviceError
from ..session.generation import Generation
from ..session.prefix_cache import common_prefix
from ..session.processors import RowKeeper
from ..session.session import Session
from ..session.slots import CachedSlot
from .handles import handle_for
from .model import LlamaModel
from .opening import open_engine
from .options import LlamaOptions
from .state import LlamaState

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.step import Step

T = TypeVar("T")


class TokenGeneration(Generation):
    """The tokens after a prompt as events, until `ends` is true."""

    def __init__(self, ids: Sequence[int], sampler: Sampler, ends: Callable[[int], bool]) -> None:
        super().__init__(ids, {"sampler": sampler, "max_tokens": None, "stop": ends})

    def take(self, step: Step) -> None:
        """Emit the tokens of a step, without one that ended the generation."""
        self.events.extend(step.tokens[:-1] if step.finish == "stop" else step.tokens)


def llama_model_default_params() -> SimpleNamespace:
    """Parameters of a LlamaModel; only n_gpu_layers and main_gpu have an effect."""
    return SimpleNamespace(n_gpu_layers=0, main_gpu=0)


def llama_context_default_params() -> SimpleNamespace:
    """The effective parameters of a LlamaContext; others can be set without effect."""
    return SimpleNamespace(n_ctx=512, n_batch=2048, n_ubatch=512, n_threads=None)


class LlamaContext:
    """A context of a Llama, or with its own engine for plain decoding. It is closed with its model.

    Attributes:
        ctx: A handle for the `llama_*` functions.
        n_tokens: Number of evaluated input_ids.
    """

    ctx: int | None

    def __init__(self, *, model: LlamaModel, params: Any = None, verbose: bool = True) -> None:
        if params is None:
            raise ConfigError(
                "LlamaContext: a context comes with its Llama; open one and take llm.ctx or llm._ctx"
            )
        chosen: dict[str, Any] = {name: getattr(params, name) for name in ("n_ctx", "n_batch", "n_threads")}
        chosen |= {name: getattr(model.params, name, 0) for name in ("n_gpu_layers", "main_gpu")}
        options = LlamaOptions(model.path_model, **chosen, draft_model=False)
        options.check()
        self._bind(options, model, open_engine(options))
        self.params, self.verbose = params, verbose

    @classmethod
    def of(cls, options: LlamaOptions, model: LlamaModel, engine: Engine | None) -> LlamaContext:
        """The context of a Llama; engine None: one without weights."""
        self = cls.__new__(cls)
        self._bind(options, model, engine)
        return self

    def _bind(self, options: LlamaOptions, model: LlamaModel, engine: Engine | None) -> None:
        from ..ggml.device import physical_cores

        self.model, self.options, self._engine = model, options, engine
        self._session = None if engine is None else Session(engine, cache_bytes=options.prefix_cache_bytes)
        n_ctx = self._n_ctx = engine.n_ctx if engine else options.n_ctx or model.n_ctx_train()
        self.n_batch = min(n_ctx, options.n_batch)
        self.n_ubatch, self.n_seq_max = min(self.n_batch, options.n_ubatch), options.n_seq_max
        # one pool for single tokens and batches
        self.n_threads: int = engine.device.n_threads if engine else options.threads or physical_cores()
        self.n_tokens, self.requires_eval = 0, True
        self.input_ids: npt.NDArray[np.intc] = np.zeros(n_ctx, np.intc)
        self.scores_buffer: npt.NDArray[np.single] | None = None
        self._rows = np.empty((0, model.n_vocab()), np.single)
        self._row_of: dict[int, int] = {}  # index in the last batch -> row
        self.ctx = self.memory = handle_for(self)
        model.contexts.add(self)

    default_params = staticmethod(llama_context_default_params)

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            ConfigError: The model is closed, or was opened with vocab_only.
        """
        if self._engine is None:
            raise self._no_weights()
        return self._engine

    @property
    def session(self) -> Session:
        """The session on the engine, for typed requests.

        Raises:
            ConfigError: The model is closed, or was opened with vocab_only.
        """
        if self._session is None:
            raise self._no_weights()
        return self._session

    def _no_weights(self) -> ConfigError:
        if self.options.vocab_only:
            return ConfigError("this Llama was opened with vocab_only=True: it has no weights")
        return ConfigError("this Llama is closed; open the model again")

    def between_steps(self, work: Callable[[], None]) -> None:
        """Run a function while no slot is in use: ends this thread's unfinished stream, and waits for other threads'."""
        if self._session is None:
            work()
        else:
            self._session.scheduler.run_on_slot(lambda slot: work())

    def close(self) -> None:
        """Free the engine; a second call does nothing."""
        try:
            self.between_steps(self.free)
        except DeviceError:  # nothing was running
            self.free()

    def free(self) -> None:
        """Free the engine without waiting for streams."""
        engine, self._engine, self._session, self.ctx = getattr(self, "_engine", None), None, None, None
        if engine is not None:
            engine.close()

    def __del__(self) -> None:
        self.free()

    # --- evaluation, one call at a time

    @property
    def ids(self) -> npt.NDArray[np.intc]:
        """The evaluated tokens."""
        return self.input_ids[: self.n_tokens]

    @property
    def scores(self) -> npt.NDArray[np.single]:
        """Logits by position, single [n_ctx or n_batch, n_vocab]; only filled with logits_all, allocated on use."""
        if self.scores_buffer is None:
            rows = self._n_ctx if self.options.logits_all else self.n_batch
            self.scores_buffer = np.zeros((rows, self.model.n_vocab()), np.single)
        return self.scores_buffer

    def reset(self) -> None:
        """Empty the context.

        Raises:
            ConfigError: The model is closed.
        """
        if not self.options.vocab_only:
            _ = self.session
        self.between_steps(lambda: self.follow([]))
        self.requires_eval = True

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the evaluated ones.

        Raises:
            ContextOverflowError: They do not fit.
            ConfigError: The model is closed, or an id is outside the vocabulary.
        """
        more = [int(t) for t in tokens]
        self.on_slot(lambda slot: self._evaluate(slot, self.ids.tolist() + more), len(more))

    def on_slot(self, work: Callable[[CachedSlot], T], more: int = 0) -> T:
        """Run a function between two steps on the slot with the longest prefix of the context, with rows for `more` tokens."""
        ids = self.ids.tolist()
        return self.session.scheduler.run_on_slot(work, ids, len(ids) + more + 1)

    def _evaluate(self, slot: CachedSlot, ids: list[int]) -> None:
        """Load exactly ids into a slot, with the logits of the last one."""
        # with logits_all, logits of earlier tokens are stored
        known = common_prefix(self.ids, ids) if self.options.logits_all else len(ids)
        slot.load(ids[:known])
        for i, row in enumerate(slot.extend(ids[known:]), known):
            self.scores[i] = row
        self.follow(ids)

    def follow(self, ids: Sequence[int]) -> None:
        """Set the context to these evaluated tokens."""
        self.n_tokens, self.requires_eval = 0, False
        self._append(ids)

    def _append(self, ids: Sequence[int]) -> None:
        self.input_ids[self.n_tokens : self.n_tokens + len(ids)] = ids
        self.n_tokens += len(ids)

    def _logits_at(self, ids: list[int], positions: Sequence[int]) -> npt.NDArray[np.single]:
        """Evaluate exactly ids; returns the logits after these ascending positions, float32 [n positions, n_vocab].

        Between the first and the last of them passes have 32 tokens.
        """
        rows = np.empty((len(positions), self.model.n_vocab()), np.single)

        def work(slot: CachedSlot) -> None:
            at = positions[0] + 1 if positions else len(ids)
            row_of = {position: row for row, position in enumerate(positions)}
            stop = positions[-1] + 1 if positions else at
            slot.load(ids[:at])
            rows[:1] = slot.logits
            for position, row in enumerate(slot.extend(ids[at:stop]), at):
                if position in row_of:
                    rows[row_of[position]] = row
            slot.load(ids)
            self.follow(ids)

        self.on_slot(work, max(len(ids) - self.n_tokens, 0))
        return rows

    def draw(self, sampler: Sampler, idx: int | None) -> int:
        """A token from the logits after the last evaluated token, or after position `idx`.

        Raises:
            ConfigError: `idx` needs logits_all, or the model is closed.
        """
        n = self.n_tokens
        if idx is not None and (at := idx % n) != n - 1:
            if not self.options.logits_all:
                raise ConfigError("sample: idx needs a model opened with logits_all=True")
            return sampler.sample(self.scores[at], self.ids[: at + 1].tolist())

        def work(slot: CachedSlot) -> int:
            if not slot.holds(self.ids):
                self._evaluate(slot, self.ids.tolist())
            return sampler.sample(slot.logits, self.ids.tolist())

        return self.on_slot(work)

    def stream(
        self, ids: list[int], sampler: Sampler, keeper: RowKeeper | None, criteria: tuple[Any, ...]
    ) -> Generator[int, None, None]:
        """Evaluate ids, then yield generated tokens; n_tokens counts the tokens before the yielded one.

        Args:
            ids: The tokens to continue.
            sampler: Draws the tokens.
            keeper: Keeps each token's logits, for `criteria` and logits_all.
            criteria: (ids so far, logits after them) -> whether to stop.
        """
        ids = list(ids)
        self.on_slot(lambda slot: self._evaluate(slot, ids), max(len(ids) - self.n_tokens, 0))
        if len(ids) >= self._n_ctx:
            return
        text, n = np.empty(self._n_ctx + 1, np.intc), len(ids)
        text[:n] = ids

        def ends(token: int) -> bool:
            nonlocal n
            ended = False
            if keeper is not None and keeper.row is not None:
                if self.options.logits_all:
                    self.scores[n - 1] = keeper.row
                ended = any(c(text[:n], keeper.row) for c in criteria)
            text[n] = token
            n += 1
            return ended

        try:
            with closing(self.session.scheduler.run(TokenGeneration(ids, sampler, ends))) as tokens:
                last: list[int] = []
                for token in tokens:
                    self._append(last)
                    yield token
                    last = [token]  # evaluated once the next one is requested
                self._append(last)
        finally:
            self.requires_eval = True

    def state(self, slot: CachedSlot, seed: int) -> LlamaState:
        """The evaluated context, with a seed."""
        if slot.tokens != self.ids.tolist():
            self._evaluate(slot, self.ids.tolist())
        snapshot = slot.slot.snapshot() if self.n_tokens else None
        kept = self.n_tokens if self.options.logits_all else 0
        scores = self.scores[:kept].copy() if kept else np.empty((0, self.model.n_vocab()), np.single)
        size = 0 if snapshot is None else snapshot.nbytes
        return LlamaState(self.input_ids.copy(), scores, self.n_tokens, snapshot, size, seed)

    def restore(self, state: LlamaState, then: Callable[[], None]) -> None:
        """Restore a saved context, and call `then` before the next step.

        Raises:
            ConfigError: The state is from a model of another shape.
        """

        def work(slot: CachedSlot) -> None:
            if state.llama_state is None:
                slot.reset()
            else:
                slot.restore(state.llama_state)
            if self.options.logits_all and len(state.scores):
                self.scores[: len(state.scores)] = state.scores
            self.input_ids, self.n_tokens = state.input_ids.copy(), state.n_tokens
            self.requires_eval = True
            then()

        self.on_slot(work, max(state.n_tokens - self.n_tokens, 0))

    # --- llama.h's interface

    def n_ctx(self) -> int:
        """Context window in tokens."""
        return self._n_ctx

    def pooling_type(self) -> int:
        """See `Llama.pooling_type`."""
        return self.options.pooling_type

    def kv_cache_clear(self) -> None:
        """Empty the context."""
        self.reset()

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove the positions from p0 on; False for a range in the middle, which cannot be removed."""
        n, start = self.n_tokens, max(p0, 0)
        if 0 <= p1 < n and start < p1:
            return False
        self.n_tokens, self.requires_eval = min(n, start), True
        return True

    def decode(self, batch: Any) -> None:
        """Evaluate a batch as `evaluate` does.

        Raises:
            RuntimeError: The context is full.
        """
        if code := self.evaluate(batch):
            raise RuntimeError(
                f"llama_decode returned {code}: the batch does not fit a context of {self.n_ctx()} tokens"
            )

    def evaluate(self, batch: Any) -> int:
        """Evaluate a batch (llama_batch or LlamaBatch): one sequence, positions rising from one that is known.

        Returns:
            0, or 1 where the context is full.

        Raises:
            ConfigError: The batch has several sequences, embeddings or gaps.
        """
        batch = getattr(batch, "batch", batch)
        n, known = int(batch.n_tokens), self.n_tokens
        if not batch.token or n < 1:
            raise ConfigError(
                "llama_decode: expected a batch of one or more token ids; embeddings are not taken"
            )
        if batch.n_seq_id and any(batch.n_seq_id[i] != 1 or batch.seq_id[i][0] != 0 for i in range(n)):
            raise ConfigError("llama_decode: this context has one sequence, of id 0")
        start = batch.pos[0] if batch.pos else known
        if not 0 <= start <= known or (batch.pos and any(batch.pos[i] != start + i for i in range(n))):
            raise ConfigError("llama_decode: positions must rise by one from one that follows a known token")
        if start + n > self.n_ctx():
            return 1
        wanted = [i for i in range(n) if batch.logits[i]] if batch.logits else [n - 1]
        ids = [*self.ids[:start].tolist(), *batch.token[:n]]
        self._rows = self._logits_at(ids, [start + i for i in wanted])
        self._row_of = {position: row for row, position in enumerate(wanted)}
        return 0

    def get_logits(self) -> Any:
        """Pointer to the logits of the last batch, float [n requested, n_vocab]; valid until the next one."""
        return self._rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def row(self, i: int) -> npt.NDArray[np.single]:
        """Logits of the i-th token of the last batch, float32 [n_vocab]; negative: of the requested ones, from the end."""
        row = len(self._rows) + i if i < 0 else self._row_of.get(i, -1)
        if not 0 <= row < len(self._rows):
            raise ConfigError(
                f"llama_get_logits_ith: no logits were requested at position {i} of the last batch"
            )
        return self._rows[row]

    def get_logits_ith(self, i: int) -> Any:
        """Pointer to `row`."""
        return self.row(i).ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def reset_timings(self) -> None:
        """No effect: timings are part of every answer."""

    print_timings = reset_timings
