"""A slot: one sequence on an engine, with its cache rows and its state index."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

import numpy as np

from ..config import EngineConfig, Mode
from ..decode.sampling import Sampler
from ..decode.sequence import Sequence
from ..drafts.drafter import Drafter
from ..drafts.prompt_lookup import PromptLookup
from ..errors import ConfigError, ContextOverflowError, DeviceError, NonFiniteError
from ..ggml.device import Device
from ..ggml.graph import Graph
from ..policy.plan import plan_of
from ..state.memory import padded
from ..state.pool import UNIT
from ..state.snapshot import RowBlock, Snapshot
from ..text.tokenizer import Tokenizer
from .accept import NAN
from .batches import BatchSizes
from .kv_rows import KvRows
from .loading import no_host_memory
from .passes import TargetPasses
from .step import Step, Stepper, Verify

if TYPE_CHECKING:
    from typing_extensions import Unpack  # `typing` has it from Python 3.11 on

T = TypeVar("T")


class Options(TypedDict, total=False):
    """How a sequence is decoded.

    Attributes:
        max_tokens: The most tokens that are emitted (None: until the context is full).
        mode, budget: Speculation settings (None: the engine's).
        stop: Whether a token ends the generation (None: an end-of-generation token does).
        keep_logits: Steps carry the target's logits.
    """

    max_tokens: int | None
    mode: Mode | None
    budget: int | None
    stop: Callable[[int], bool] | None
    keep_logits: bool


class Claim:
    """Held by one call, or by one generation until it has ended or been closed; others are refused, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: str | None = None

    @contextmanager
    def by(self, what: str) -> Iterator[None]:
        """Exclusive access for the call named `what`, until the context ends; a MemoryError in it becomes a DeviceError.

        Raises:
            ConfigError: Another call holds the slot; it names that one.
            DeviceError: Host memory ran out.
        """
        with self._lock:
            owner = self._owner
            if owner is None:
                self._owner = what
        if owner is not None:
            advice = "close it first" if owner == "a generation" else "wait for its end"
            raise ConfigError(f"{what}: {owner} is running on this engine; {advice}")
        try:
            yield
        except MemoryError as error:
            raise no_host_memory(what) from error
        finally:
            # the caller is the owner here; no lock, which the garbage collector could find taken by its own thread
            self._owner = None


class Shared(Protocol):
    """An engine as its slots see it."""

    config: EngineConfig
    n_ctx: int
    n_vocab: int
    tokenizer: Tokenizer
    metadata: dict[str, Any]
    batches: BatchSizes
    passes: TargetPasses
    drafter: Drafter | None
    device: Device
    stepper: Stepper
    over: int  # cache rows of a sequence beyond its tokens
    passing: threading.RLock  # held while a pass may run, so that closing waits for it

    def alive(self) -> None:
        """Raise once the engine is closed.

        Raises:
            DeviceError: The engine is closed.
        """
        ...

    def held(self) -> AbstractContextManager[None]:
        """Context for passes."""
        ...

    def step(self, sequences: Items[Sequence], verify: Verify | None = None) -> list[Step | Exception]:
        """Step sequences of different slots once."""
        ...

    def expected_ms(self, nodes: int, context: int) -> float | None:
        """Expected milliseconds of a step that verifies `nodes` drafted nodes; None if unknown."""
        ...

    def compact(self, n: int, rows: range | None) -> bool:
        """Move slots so that the range `rows` can grow to n, or a new range of n fits (None); False if there are too few rows."""
        ...

    def closed(self, state_index: int) -> None:
        """The slot with this state index was closed."""
        ...


class Slot:
    """A sequence on an engine: prefill it, restore snapshots of it, and decode it, alone by `generate` or batched by
    `Engine.step`.

    One call at a time: a call that would change the sequence while another runs, or while `generate` is suspended, raises an
    error that names the other, from any thread. Calls on other slots of the engine wait for the current pass.

    Args:
        rows: Its cache rows, allocated by the engine.
        lookup: Prompt lookup for this slot's sequences.
    """

    def __init__(self, engine: Shared, sequence: Sequence, rows: range, lookup: PromptLookup | None) -> None:
        self.engine, self.sequence, self.lookup = engine, sequence, lookup
        self.kv = KvRows(engine.passes, engine.drafter, sequence, rows, engine.over, engine.compact)
        self.n_ctx, self.n_vocab, self.tokenizer = engine.n_ctx, engine.n_vocab, engine.tokenizer
        self._claim = Claim()  # exclusive access to the sequence

    @property
    def state_index(self) -> int:
        """Index of its recurrent state in the engine."""
        return self.sequence.state_index

    @property
    def room(self) -> int:
        """Tokens that can still be committed without more cache rows."""
        return self.kv.room

    @property
    def tokens(self) -> list[int]:
        """The committed tokens, a copy."""
        return list(self.sequence.tokens)

    @property
    def n_tokens(self) -> int:
        """Committed tokens."""
        return self.sequence.n_tokens

    @property
    def pending(self) -> int | None:
        """The token emitted last, not yet committed."""
        return self.sequence.pending

    @property
    def logits(self) -> np.ndarray:
        """Logits float32 [n_vocab] after the last committed token; only available after `prefill`."""
        if self.sequence.logits is None:
            raise ConfigError("no logits: call prefill first")
        return self.sequence.logits

    def reset(self) -> None:
        """Forget the sequence."""
        with self._claim.by("reset"), self.engine.passing:
            self._reset()

    def _reset(self) -> None:
        self._check_open()
        sequence = self.sequence
        inconsistent, sequence.inconsistent = sequence.inconsistent, True
        kept = () if inconsistent else max(self.kv.kept, tuple(sequence.tokens), key=len)
        self.kv.kept = ()
        self.kv.forget(inconsistent)
        sequence.clear()
        self.engine.passes.state.reset(sequence.state_index)
        if self.engine.drafter:
            self.engine.drafter.reset(sequence)
        sequence.inconsistent, self.kv.kept = False, kept

    def grow(self, n: int) -> bool:
        """Extend the cache rows to n tokens, moving them if needed; False if no contiguous range is large enough."""
        with self._claim.by("grow"), self.engine.passing:
            self._check_open()
            return self.kv.grow(n)

    # ---- prefill

    def check_ids(self, ids: Items[int]) -> None:
        """Refuse ids outside the vocabulary.

        Raises:
            ConfigError: It names the first one.
        """
        bad = next((i for i in ids if not 0 <= i < self.n_vocab), None)
        if bad is not None:
            raise ConfigError(f"token id {bad} is outside the vocabulary of {self.n_vocab}")

    def prefill(
        self,
        ids: Items[int],
        progress: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        take_row: Callable[[np.ndarray], None] | None = None,
        join: Callable[[Verify], None] | None = None,
    ) -> None:
        """Append `ids` to the committed tokens, one batch at a time (see `batches`).

        Args:
            ids: Tokens after the committed ones.
            progress: Called with tokens done and in total, after each batch.
            should_stop: Called between batches; when it returns true the call returns early, and `tokens` shows the progress.
            take_row: Called with the logits float32 [n_vocab] after every token; a batch's logits are on the device at once,
                so pass few ids.
            join: Called with a function that runs all ids as one batch, for `Engine.step`, which steps other sequences in
                the same pass; see `Engine.can_join`.

        Raises:
            ContextOverflowError: The ids do not fit; nothing was run.
            ConfigError: An id is outside the vocabulary.
            NonFiniteError: The logits are NaN: the sequence is inconsistent then.
        """
        with self._claim.by("prefill"):
            self._prefill(ids, progress, should_stop, take_row, join)

    def _prefill(
        self,
        ids: Items[int],
        progress: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        take_row: Callable[[np.ndarray], None] | None = None,
        join: Callable[[Verify], None] | None = None,
    ) -> None:
        self._check_usable()
        wanted = self.n_tokens + len(ids)
        if wanted > self.n_ctx:
            raise ContextOverflowError(f"Requested tokens ({wanted}) exceed context window of {self.n_ctx}")
        self.check_ids(ids)
        self._guarded(partial(self.kv.need, wanted))
        if len(ids):
            self._guarded(self._take_in)
            self.sequence.pending = self.sequence.logits = None
        done = 0
        while done < len(ids):
            if should_stop and should_stop():
                return
            n = len(ids) if join else self.engine.batches.next(len(ids) - done)
            part = ids[done : done + n]
            done += n
            batch = partial(self._prefill_batch, part, done == len(ids), take_row)
            self._guarded(partial(self._prefill_with, batch, join) if join else batch)
            if progress:
                progress(done, len(ids))

    def _prefill_with(self, batch: Callable[..., Graph], join: Callable[[Verify], None]) -> None:
        """Run a batch in the pass of other sequences, or alone if none joined. A batch with NaN logits runs once more, alone: a
        column of another sequence may have contaminated it."""
        before = self.n_tokens
        join(lambda *forest: batch(forest=forest))
        if self.n_tokens == before:
            self._check_usable()  # no pass was interrupted
            batch()
        elif self.sequence.inconsistent:
            tokens = self.tokens
            self._reset()
            self._prefill(tokens)

    def _prefill_batch(
        self,
        ids: Items[int],
        is_last: bool,
        take_row: Callable[[np.ndarray], None] | None,
        forest: tuple[Any, ...] = (),
    ) -> Graph:
        """forest: arguments of `TargetPasses.verify` for sequences in the same pass. Raises NonFiniteError if there are none."""
        sequence, append = self.sequence, self.engine.drafter.append if self.engine.drafter else None
        passes, n = self.engine.passes, len(ids)
        passes.bucket(sequence.rows(n).stop)
        self.kv.overwrite(n)
        sequence.inconsistent = True
        self.kv.writes(sequence.n_tokens + n)
        began = time.perf_counter()
        if forest:
            graph = passes.joined(sequence, ids, append, *forest)
        else:
            graph = passes.linear(sequence, ids, append, outputs="every" if take_row else "last")
        if self.engine.drafter:
            self.engine.drafter.prefilled(sequence, n, append is not None)
        sequence.tokens.extend(ids)
        sequence.inconsistent = False
        self.engine.device.synchronize()  # a GPU would lag batches behind the reported progress
        if not forest:
            self.engine.batches.took(n, time.perf_counter() - began)
        last = n - 1 if take_row else forest[0].width if forest else 0
        is_nan = passes.is_nan(graph, last)
        sequence.nonfinite_from = sequence.n_tokens - n if is_nan else None
        self.kv.clear_nonfinite()
        if is_nan and not forest:
            raise NonFiniteError(NAN)
        rows = [passes.logits_row(graph, i) for i in range(n)] if take_row else []
        if is_last:
            sequence.logits = rows[-1] if rows else passes.logits_row(graph, last)
        for row in rows:
            take_row(row)  # type: ignore[misc]
        return graph

    def _take_in(self) -> None:
        """Let the draft see the last committed tokens before anything else is committed behind them."""
        if self.engine.drafter and self.sequence.unseen:
            self.engine.drafter.take_in([self.sequence])

    # ---- passes outside the sequence

    def hidden_states(
        self,
        ids: Items[int],
        take: Callable[[np.ndarray], None],
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Compute hidden states (after the output norm) of unrelated tokens; `take` gets each batch's, float32 [tokens, n_embd].

        The sequence, its snapshots and the draft stay unchanged. Ends early when `should_stop` is true between batches.

        Raises:
            ContextOverflowError, NonFiniteError: As `prefill` does.
            ConfigError: There are no ids, or one is outside the vocabulary.
        """
        with self._claim.by("hidden_states"):
            self._check_usable()
            if not len(ids):
                raise ConfigError("hidden_states: there are no tokens")
            if len(ids) > self.n_ctx:
                raise ContextOverflowError(
                    f"Requested tokens ({len(ids)}) exceed context window of {self.n_ctx}"
                )
            self.check_ids(ids)
            self._guarded(partial(self.kv.need, len(ids)))
            self._guarded(partial(self._hidden_states, ids, take, should_stop))

    def _hidden_states(
        self, ids: Items[int], take: Callable[[np.ndarray], None], should_stop: Callable[[], bool] | None
    ) -> None:
        """Run ids in free cache rows after the sequence's own; those are copied away only if too few are free.

        Attention also reads the rest of the first and the last tile of rows: the rows begin on a range boundary, with zeros
        before and after.
        """
        state, sequence, kv, n = self.engine.passes.state, self.sequence, self.kv, len(ids)
        held = sequence.first_row + max(len(kv.kept), sequence.n_tokens)
        touched = sequence.first_row + kv.touched
        assert kv.allocated is not None
        first = min(padded(held, UNIT), (kv.allocated.stop - n) // UNIT * UNIT)
        other = Sequence(first_row=first, state_index=sequence.state_index)
        tensors = replace(kv.tensors(draft=False), first_row=first)
        rows = tensors.read_rows(max(held - first, 0))
        tokens, windows = tuple(sequence.tokens), tensors.read_rings(sequence.n_tokens)
        saved = Snapshot(tokens, tensors.read_live(), None, np.zeros(0, bool), None, rings=windows)
        sequence.inconsistent, was_clean = True, kv.is_clean
        written = kv.writes(max(kv.touched, first - sequence.first_row + n))
        try:
            state.reset(sequence.state_index)
            tensors.clear_rows(0, max(min(touched - first, kv.visible(n)), 0))
            if not was_clean:
                tensors.clear_rings(0)
            while other.n_tokens < n:
                if should_stop and should_stop():
                    return
                at = other.n_tokens
                part = ids[at : at + self.engine.batches.next(n - at)]
                hidden = self.engine.passes.hidden_rows(
                    self.engine.passes.linear(other, part, outputs="hidden")
                )
                if np.isnan(hidden[-1, 0]):
                    raise NonFiniteError(NAN)
                take(hidden)
                other.tokens.extend(part)
        finally:
            self.engine.device.synchronize()
            tensors.clear_rows(0, n)
            tensors.clear_rings(sequence.n_tokens)
            tensors.write_rows(rows, held - first)
            tensors.write(saved)
            sequence.inconsistent = False
            kv.writes(written)

    def _guarded(self, work: Callable[[], T]) -> T:
        """Run work that may run passes on the device; closing the engine waits for it."""
        with self.engine.held():
            self._check_usable()
            return work()

    # ---- snapshots

    def snapshot(self, with_rows: bool = True) -> Snapshot:
        """A copy of the committed state, without the pending token, for `restore`.

        Without its K/V rows a snapshot is small, and valid while the cache still holds the same tokens' rows.
        """
        with self._claim.by("snapshot"), self.engine.passing:
            self._check_usable()
            self._take_in()
            sequence, tensors = self.sequence, self.kv.tensors()
            seen = (
                self.engine.drafter.seen(sequence)
                if self.engine.drafter
                else np.zeros(sequence.n_tokens, bool)
            )
            return Snapshot(
                tuple(sequence.tokens),
                tensors.read_live(),
                tensors.read_rows(sequence.n_tokens) if with_rows else None,
                seen,
                None if sequence.logits is None else sequence.logits.copy(),
                tensors.types,
                tensors.read_rings(sequence.n_tokens),
            )

    def can_restore(self, snapshot: Snapshot) -> bool:
        """Whether `restore` would work: the rows are in the snapshot or still in the cache."""
        held = self.kv.kept or self.sequence.tokens
        return snapshot.rows is not None or tuple(held[: len(snapshot.tokens)]) == snapshot.tokens

    @property
    def row_nbytes(self) -> int:
        """Bytes of a token's K/V rows in a snapshot."""
        return self.kv.tensors().row_nbytes

    def buffers(self, n: int, n_states: int) -> Counter[int]:
        """Number of host buffers of each size that so many snapshots with the K/V rows of n tokens in all take."""
        return self.kv.tensors().buffers(n, n_states)

    def completed(self, snapshot: Snapshot, known: Items[RowBlock] = ()) -> Snapshot:
        """The snapshot completed with its K/V rows, so that any slot can restore it.

        Args:
            known: The K/V rows of its first tokens that are in host memory already.

        Raises:
            ConfigError: The other rows are no longer on the device.
        """
        with self.engine.passing:
            self._check_open()
            if snapshot.rows is not None:
                return snapshot
            if not self.can_restore(snapshot):
                raise ConfigError("the K/V rows of this snapshot are gone; prefill its tokens again")
            tensors = self.kv.tensors()
            more = tensors.read_rows(len(snapshot.tokens), sum(block.n_tokens for block in known))
            return replace(snapshot, rows=(*known, *more), types=tensors.types)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this engine.

        Raises:
            ConfigError: Its K/V rows are gone or its shape differs.
        """
        with self._claim.by("restore"), self.engine.passing:
            self._check_open()
            sequence = self.sequence
            if not self.can_restore(snapshot):
                raise ConfigError("the K/V rows of this snapshot are gone; prefill its tokens again")
            n = len(snapshot.tokens)
            self.kv.tensors().check(snapshot)
            if n > self.n_ctx:
                raise ConfigError("snapshot: taken from a model or context of another shape")
            kept, inconsistent = snapshot.tokens, sequence.inconsistent
            if snapshot.rows is None and not inconsistent:
                kept = max(self.kv.kept, tuple(sequence.tokens), key=len)
            sequence.inconsistent, self.kv.kept = True, ()
            self.kv.forget(inconsistent, 0 if snapshot.rows is not None else n)
            sequence.clear()
            self.kv.tensors().write(snapshot)
            if self.engine.drafter:
                self.engine.drafter.restore_seen(sequence, snapshot.in_draft)
            sequence.tokens += snapshot.tokens
            sequence.logits, self.kv.kept, sequence.inconsistent = snapshot.logits, kept, False

    # ---- decode

    def generate(
        self, sampler: Sampler, *, should_stop: Callable[[], bool] | None = None, **options: Unpack[Options]
    ) -> Generator[Step, None, None]:
        """Decode from `logits` until a token ends the generation, `max_tokens` are emitted or the context is full.

        Afterwards, also if the generator is closed, `tokens` holds the prompt and all emitted tokens but the last, which is
        `pending`. Until then other calls that would change the state raise an error.

        Args:
            sampler: Draws the tokens.
            should_stop: Called between steps; true cancels the generation.
            options: See `Options`.

        Yields:
            The steps, each with the tokens it emitted.

        Raises:
            ConfigError: An option does not fit.
        """
        with self._claim.by("a generation"):
            sequence = self._begin(sampler, **options)
            step: Step | Exception = self._guarded(partial(self.engine.stepper.first, sequence))
            while True:
                if isinstance(step, Exception):
                    raise step
                if sequence.finish is None and should_stop and should_stop():
                    sequence.finish = "cancelled"
                step.finish = sequence.finish
                yield step
                if step.finish:
                    return
                (step,) = self.engine.step([sequence])

    def begin(self, sampler: Sampler, *, forced: Items[int] = (), **options: Unpack[Options]) -> Sequence:
        """Begin a generation as `generate` does, for `first` and `Engine.step`.

        Args:
            forced: Its first tokens.
        """
        with self._claim.by("begin"):
            sequence = self._begin(sampler, **options)
            sequence.forced = list(forced)
            return sequence

    def first(self) -> Step:
        """The first token of a generation, drawn from the prefill logits."""
        with self._claim.by("first"):
            return self._guarded(partial(self.engine.stepper.first, self.sequence))

    def resume(self, sequence: Sequence) -> None:
        """Continue a preempted sequence here, once a snapshot of it is restored.

        Raises:
            ConfigError: The slot holds other tokens than the sequence.
        """
        with self._claim.by("resume"):
            self._check_usable()
            here = self.sequence
            if sequence.tokens != here.tokens:
                raise ConfigError("resume: the slot holds other tokens than the sequence")
            sequence.first_row, sequence.end_row = here.first_row, here.end_row
            sequence.state_index, sequence.unseen, sequence.logits = here.state_index, (), None
            sequence.inconsistent, sequence.nonfinite_from, sequence.draft_nonfinite = False, None, False
            self.sequence = self.kv.sequence = sequence
            self.lookup = sequence.lookup or self.lookup
            self._guarded(self.kv.overwrite)

    def _begin(
        self,
        sampler: Sampler,
        max_tokens: int | None = None,
        mode: Mode | None = None,
        budget: int | None = None,
        stop: Callable[[int], bool] | None = None,
        keep_logits: bool = False,
    ) -> Sequence:
        """Check a generation's options and set them on the sequence."""
        self._check_usable()
        _ = self.logits
        config, sequence, drafter = self.engine.config, self.sequence, self.engine.drafter
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens: {max_tokens} is below 1")
        if budget is not None and not 1 <= budget <= config.budget:
            raise ConfigError(
                f"budget: {budget} is outside 1..{config.budget}, what the engine was loaded with"
            )
        room = self.n_ctx - self.n_tokens
        if room < 1:
            raise ContextOverflowError(f"the context window of {self.n_ctx} tokens is full")
        mode, budget = self._mode(mode), budget or config.budget
        plan_of(mode, budget, drafter.depth if drafter else 0, config.chain_seed, self.lookup is not None)
        sequence.mode, sequence.budget, sequence.chain_seed = mode, budget, config.chain_seed
        sequence.sampler, sequence.history, sequence.lookup = sampler, self.tokens, self.lookup
        sequence.limit = room if max_tokens is None else min(max_tokens, room)
        sequence.ends, sequence.keep_logits = stop or self.tokenizer.eog_ids.__contains__, keep_logits
        sequence.finish, sequence.isolated, sequence.notes, sequence.forced = None, False, None, []
        self._guarded(self.kv.overwrite)
        return sequence

    def _mode(self, mode: Mode | None) -> Mode:
        """The mode of a generation."""
        mode = mode or self.engine.config.mode
        if mode != "auto" or not self.engine.config.reproducible:
            return mode
        return "tree" if self.engine.device.info.is_gpu and self.engine.drafter else "plain"

    # ---- for the engine

    def prepare(self) -> None:
        """Ensure cache rows for a step.

        Raises:
            NoRoomError: There are too few.
            DeviceError: A pass was interrupted.
        """
        self._check_usable()
        self.kv.need(self.n_tokens + 1)

    def recompute(self) -> Exception | None:
        """Prefill all but the last token again and make that one pending; returns the error if that failed."""
        sequence = self.sequence
        *tokens, pending = sequence.tokens
        kept = sequence.history, sequence.sampler, sequence.undraftable, sequence.statistics, sequence.notes
        sequence.history = []  # the kept list is restored below
        try:
            self._reset()
            self._prefill(tokens)
        except Exception as error:  # noqa: BLE001 - it concerns this sequence alone
            sequence.inconsistent = True
            return error
        finally:
            sequence.history, sequence.sampler, sequence.undraftable, sequence.statistics, sequence.notes = (
                kept
            )
        sequence.pending, sequence.logits = pending, None
        return None

    def _check_open(self) -> None:
        """Raises DeviceError if this slot or its engine is closed."""
        self.engine.alive()
        if self.kv.allocated is None:
            raise DeviceError("this slot is closed")

    def _check_usable(self) -> None:
        self._check_open()
        if self.sequence.inconsistent:
            raise DeviceError(
                "the state is inconsistent after an interrupt or error inside a pass; call reset() and prefill again"
            )

    def close(self) -> None:
        """Give the slot back. A preempted sequence keeps what `resume` needs."""
        with self._claim.by("close"), self.engine.passing:
            if self.kv.allocated is not None:
                try:
                    self.kv.release()
                    if self.lookup:
                        self.lookup.leave()
                finally:
                    self.engine.closed(self.sequence.state_index)

    def forget(self) -> None:
        """Forget the tokens that prompt lookup proposes from, so that a measurement does not look up its previous output."""
        with self.engine.passing:  # a step of any slot may be searching them
            if self.lookup:
                self.lookup.forget()
