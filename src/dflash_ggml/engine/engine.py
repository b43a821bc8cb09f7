"""The engine: a target, maybe a draft, and the sequence they decode; prefill, generations, snapshots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from ..config import EngineConfig, Mode
from ..decode.adaptive import Experience
from ..decode.controller import controller
from ..decode.sampling import Sampler
from ..decode.sequence import Sequence
from ..drafts.suffix import NAME
from ..errors import ConfigError, ContextOverflowError, DeviceError
from ..models.target import Target
from ..state.memory import SCRATCH
from ..state.snapshot import Snapshot, Tensors
from .loading import Loaded, Progress, load, no_host_memory
from .step import Run, Step, Stepper

T = TypeVar("T")


class Engine:
    """One sequence on one target and, if given, one draft.

    One call at a time: a call that would change the state while another runs, or while a generation is suspended, is refused
    by name, from whatever thread it comes.
    """

    def __init__(self, config: EngineConfig, loaded: Loaded) -> None:
        self.config, self.n_ctx, self.memory = config, loaded.n_ctx, loaded.memory
        self.tokenizer, self.metadata = loaded.tokenizer, loaded.metadata
        self.passes, self.drafter, self.copies = loaded.passes, loaded.drafter, loaded.copies
        self.batches = loaded.batches
        self.device, self.costs, self.costs_file = loaded.device, loaded.costs, loaded.costs_file
        self.n_vocab = self.params.n_vocab
        self._lent = self.passes.rows.lend(self.passes.n_rows)
        self.sequence = Sequence(first_slot=self._lent.start)
        self.experience = Experience()
        self.stepper = Stepper(self.passes, self.drafter, self.costs, self.copies)
        # tokens whose K/V rows outlive a reset or restore, until the next write
        self._rows: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._owner: str | None = None  # who may change the state now
        self._passing = threading.RLock()  # held while a pass may run, so that closing waits for it
        self._in_pass = False
        self._closed = self._closing = False

    @classmethod
    def load(
        cls, config: EngineConfig, progress: Progress | None = None, calibration_seconds: float | None = None
    ) -> Engine:
        """Open the files and bring the weights to the device; `progress(stage, done, total)` in bytes.

        calibration_seconds: how long costs may be measured, if they are; None: 1.5 s on a GPU, 1 s on the CPU.
        Raises ModelFileError, ConfigError, or DeviceError when something does not fit.
        """
        loaded = load(config, progress, calibration_seconds)
        # one that was only found may have been left out
        return cls(replace(config, draft=loaded.draft), loaded)

    # ---- the committed prefix

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model; see `sources` for all that drafts."""
        return self.drafter is not None

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of what drafts: the model's kind, suffix for copies; none where decoding is plain."""
        model = () if self.drafter is None else (self.drafter.name,)
        return (*model, *(() if self.copies is None else (NAME,)))

    @property
    def tokens(self) -> list[int]:
        """The committed tokens, a copy."""
        return list(self.sequence.tokens)

    @property
    def n_tokens(self) -> int:
        return self.sequence.n_tokens

    @property
    def params(self) -> Target:
        """Sizes of the target."""
        return self.passes.target

    @property
    def pending(self) -> int | None:
        """The token that was emitted last and is not committed."""
        return self.sequence.pending

    @property
    def logits(self) -> np.ndarray:
        """Logits float32 [n_vocab] after the last committed token; there after `prefill` only."""
        if self.sequence.logits is None:
            raise ConfigError("no logits: call prefill first")
        return self.sequence.logits

    def reset(self) -> None:
        """Forget the sequence."""
        with self._owning("reset"), self._passing:
            self._open()
            sequence = self.sequence
            rows = () if sequence.torn else max(self._rows, tuple(sequence.tokens), key=len)
            sequence.torn, self._rows = True, ()
            sequence.clear()
            self.passes.state.reset()
            if self.drafter:
                self.drafter.reset(sequence)
            sequence.torn, self._rows = False, rows

    def forget(self) -> None:
        """Forget the texts that copies are made from: what is measured may not copy from the same answer written before."""
        if self.copies:
            self.copies.forget()

    def check_ids(self, ids: Items[int]) -> None:
        """Raise ConfigError when an id is outside the vocabulary."""
        bad = next((i for i in ids if not 0 <= i < self.n_vocab), None)
        if bad is not None:
            raise ConfigError(f"token id {bad} is outside the vocabulary of {self.n_vocab}")

    def prefill(
        self,
        ids: Items[int],
        progress: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        take_row: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        """Append `ids` to the committed tokens, a batch at a time (see `batches`); `progress(done, total)` in tokens.

        take_row gets the logits float32 [n_vocab] after every token; a batch's lie on the device together, so give few ids.
        With `should_stop` true between two batches it returns early: `tokens` then tells how far it came.
        Raises ContextOverflowError before any work when they do not fit, ConfigError for an id outside the vocabulary.
        """
        with self._owning("prefill"):
            self._usable()
            wanted = self.n_tokens + len(ids)
            if wanted > self.n_ctx:
                raise ContextOverflowError(
                    f"Requested tokens ({wanted}) exceed context window of {self.n_ctx}"
                )
            self.check_ids(ids)
            if len(ids):
                self._guarded(self._take_in)
                self.sequence.pending = self.sequence.logits = None
            done = 0
            while done < len(ids):
                if should_stop and should_stop():
                    return
                part = ids[done : done + self.batches.next(len(ids) - done)]
                done += len(part)
                self._guarded(partial(self._prefill_batch, part, done == len(ids), take_row))
                if progress:
                    progress(done, len(ids))

    def _prefill_batch(
        self, ids: Items[int], is_last: bool, take_row: Callable[[np.ndarray], None] | None
    ) -> None:
        sequence, append = self.sequence, self.drafter.append if self.drafter else None
        self.passes.bucket(sequence.slots(len(ids)).stop)
        sequence.torn, self._rows = True, ()
        began = time.perf_counter()
        graph = self.passes.linear(sequence, ids, append, outputs="every" if take_row else "last")
        if self.drafter:
            self.drafter.prefilled(sequence, len(ids), append is not None)
        sequence.tokens.extend(ids)
        sequence.torn = False
        self.device.synchronize()  # a GPU would be batches behind, with progress that is none
        self.batches.took(len(ids), time.perf_counter() - began)
        rows = [self.passes.logits_row(graph, i) for i in range(len(ids))] if take_row else []
        if is_last:
            sequence.logits = rows[-1] if rows else self.passes.logits_row(graph)
        for row in rows:
            take_row(row)  # type: ignore[misc]

    def _take_in(self) -> None:
        """Let the draft see the last committed tokens before anything else is committed behind them."""
        if self.drafter and self.sequence.unseen:
            self.drafter.take_in(self.sequence)

    # ---- beside the sequence

    def hidden_states(
        self,
        ids: Items[int],
        take: Callable[[np.ndarray], None],
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Give `take` the target's hidden states after the output norm for a text of its own, float32 [tokens, n_embd] a batch.

        The sequence, its snapshots and the draft stay as they are. It ends early when `should_stop` is true between batches.
        Raises ContextOverflowError, ConfigError as prefill does, and for no ids.
        """
        with self._owning("hidden_states"):
            self._usable()
            if not len(ids):
                raise ConfigError("hidden_states: there are no tokens")
            if len(ids) > self.n_ctx:
                raise ContextOverflowError(
                    f"Requested tokens ({len(ids)}) exceed context window of {self.n_ctx}"
                )
            self.check_ids(ids)
            self._guarded(partial(self._aside, ids, take, should_stop))

    def _aside(
        self,
        ids: Items[int],
        take: Callable[[np.ndarray], None],
        should_stop: Callable[[], bool] | None,
    ) -> None:
        """Run ids in cache rows behind all that are held; of those, rows are copied away only where room is short."""
        state, sequence, n = self.passes.state, self.sequence, len(ids)
        held = sequence.first_slot + max(len(self._rows), sequence.n_tokens)
        other = Sequence(first_slot=min(held, self._lent.stop - n))
        tensors = Tensors(self.device, state.live_tensors, state.kv.slices, other.first_slot)
        rows = tensors.read_rows(held - other.first_slot)
        saved = Snapshot((), tensors.read_live(), rows, np.zeros(0, bool), None)
        sequence.torn = True
        try:
            state.reset()
            while other.n_tokens < n:
                if should_stop and should_stop():
                    return
                at = other.n_tokens
                part = ids[at : at + self.batches.next(n - at)]
                take(self.passes.hidden_rows(self.passes.linear(other, part, outputs="hidden")))
                other.tokens.extend(part)
        finally:
            tensors.write(saved)
            sequence.torn = False

    # ---- decoding

    def generate(
        self,
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        mode: Mode | None = None,
        budget: int | None = None,
        stop: Callable[[int], bool] | None = None,
        should_stop: Callable[[], bool] | None = None,
        keep_rows: bool = False,
    ) -> Generator[Step, None, None]:
        """Decode from `logits` until `stop(token)` (None: an end-of-generation token), `max_tokens` or the context's end.

        `should_stop` is asked between steps. However it ends, also by closing the generator, `tokens` then holds the prompt
        and all emitted tokens but the last, which is `pending`. Raises ConfigError for options that do not fit. Until it has
        ended or been closed, other calls that would change the state are refused.
        """
        with self._owning("a generation"):
            run = self._run(sampler, max_tokens, mode, budget, stop, keep_rows)
            self._rows = ()
            step = self._guarded(partial(self.stepper.first, run))
            while True:
                if run.finish is None and should_stop and should_stop():
                    run.finish = "cancelled"
                step.finish = run.finish
                yield step
                if step.finish:
                    return
                (step,) = self._guarded(partial(self.stepper.step, [run]))

    def _run(self, sampler, max_tokens, mode, budget, stop, keep_rows) -> Run:
        """The options of a generation, checked."""
        self._usable()
        _ = self.logits
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens: {max_tokens} is below 1")
        if budget is not None and not 1 <= budget <= self.config.budget:
            raise ConfigError(
                f"budget: {budget} is outside 1..{self.config.budget}, what the engine was loaded with"
            )
        room = self.n_ctx - self.n_tokens
        if room < 1:
            raise ContextOverflowError(f"the context window of {self.n_ctx} tokens is full")
        depth = self.drafter.depth if self.drafter else 0
        chosen = controller(
            self._mode(mode),
            budget or self.config.budget,
            depth,
            self.config.chain_seed,
            self.experience,
            self.copies,
        )
        self.sequence.sampler, self.sequence.text = sampler, self.tokens
        limit = room if max_tokens is None else min(max_tokens, room)
        ends = stop or self.tokenizer.eog_ids.__contains__
        return Run(self.sequence, chosen, limit, ends, keep_rows)

    def _mode(self, mode: Mode | None) -> Mode:
        """The mode of a generation."""
        mode = mode or self.config.mode
        if mode != "auto" or not self.config.reproducible:
            return mode
        return "tree" if self.device.info.is_gpu and self.drafter else "plain"

    def _guarded(self, work: Callable[[], T]) -> T:
        """Run passes, during which nobody may close the engine."""
        with self._passing:
            self._usable()
            self._in_pass = True
            try:
                return work()
            finally:
                self._in_pass = False

    # ---- snapshots

    def snapshot(self, with_rows: bool = True) -> Snapshot:
        """A copy of the committed state, for `restore`; the pending token is not part of it.

        Without its K/V rows a snapshot is small and good for as long as the cache still holds the same tokens' rows.
        """
        with self._owning("snapshot"), self._passing:
            self._usable()
            self._take_in()
            sequence, tensors = self.sequence, self._tensors()
            seen = self.drafter.seen(sequence) if self.drafter else np.zeros(sequence.n_tokens, bool)
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
        """Whether `restore` would work: rows are in the snapshot, or still in the cache."""
        held = self._rows or self.sequence.tokens
        return snapshot.rows is not None or tuple(held[: len(snapshot.tokens)]) == snapshot.tokens

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this engine. Raises ConfigError when its K/V rows are gone or its shape differs."""
        with self._owning("restore"), self._passing:
            self._open()
            sequence = self.sequence
            if not self.can_restore(snapshot):
                raise ConfigError("the K/V rows of this snapshot are gone; prefill its tokens again")
            n = len(snapshot.tokens)
            self._tensors().check(snapshot)
            if n > self.n_ctx:
                raise ConfigError("snapshot: taken from a model or context of another shape")
            rows = snapshot.tokens
            if snapshot.rows is None:
                rows = max(self._rows, tuple(sequence.tokens), key=len)
            sequence.torn, self._rows = True, ()
            sequence.clear()
            self._tensors().write(snapshot)
            if self.drafter:
                self.drafter.restore_seen(sequence, snapshot.in_draft)
            sequence.tokens += snapshot.tokens
            sequence.logits, self._rows, sequence.torn = snapshot.logits, rows, False

    def _tensors(self) -> Tensors:
        state = self.passes.state
        caches = [*state.kv.slices, *(self.drafter.rows if self.drafter else ())]
        rings = self.drafter.rings if self.drafter else ()
        return Tensors(self.device, state.live_tensors, caches, self.sequence.first_slot, rings)

    # ---- life

    @property
    def nbytes(self) -> dict[str, int]:
        """Device bytes by part, named as in the memory plan, and the graphs' scratch."""
        draft = self.drafter.nbytes if self.drafter else {}
        return {**self.passes.nbytes, **draft, SCRATCH: self.passes.workspace.nbytes}

    def expected_ms(self, nodes: int) -> float | None:
        """What a step that verifies `nodes` drafted nodes (0: a plain one) is expected to take now; None if nothing is known."""
        context = self.n_tokens
        if nodes == 0 or not self.sources:
            return self.costs.of("plain", 1, context)
        columns = self.drafter.depth + 1 if self.drafter else 0
        return self.costs.drafted([nodes], columns, context)[nodes] or None

    def run_counts(self) -> dict[str, int]:
        """Graphs built and graph runs so far."""
        return {"graphs": self.passes.graphs.builds, "runs": self.passes.graphs.runs}

    @contextmanager
    def _owning(self, what: str) -> Iterator[None]:
        """Alone with the state until the end, or ConfigError that names who is. Host memory that ends is a DeviceError."""
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
            # whoever comes here is the owner; no lock, which the garbage collector could find taken by its own thread
            self._owner = None

    def _open(self) -> None:
        if self._closed or self._closing:
            raise DeviceError("the engine is closed")

    def _usable(self) -> None:
        self._open()
        if self.sequence.torn:
            raise DeviceError(
                "the state was torn by an interrupt or error inside a pass; call reset() and prefill again"
            )

    def close(self) -> None:
        """Free the device memory; the engine is of no use afterwards. Waits for a pass under way in another thread."""
        self._closing = (
            True  # a lock goes to who comes first: a call of many passes would take it again and again
        )
        try:
            with self._passing:
                if self._in_pass:
                    raise ConfigError(
                        "close: called from inside a step of this engine; end the generation first"
                    )
                if self._closed:
                    return
                self._closed = True
                self.passes.rows.give_back(self._lent)
                if self.drafter:
                    self.drafter.close()
                self.passes.close()
                self.device.close()
        finally:
            self._closing = self._closed

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
