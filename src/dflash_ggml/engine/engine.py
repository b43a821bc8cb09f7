"""The engine: a target, maybe a draft, and the slots whose sequences are decoded on them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace

from ..config import EngineConfig
from ..decode.sequence import Sequence
from ..drafts.prompt_lookup import NAME
from ..errors import ConfigError, DeviceError, NonFiniteError, NoRoomError
from ..policy.policy import Policy
from .loading import Loaded, Progress, load
from .passes import allocated
from .slot import Slot
from .step import Step, Stepper, Verify


class Engine:
    """A target and, if given, a draft. `open` gives slots; `step` decodes the sequences of one or more of them in one pass."""

    def __init__(self, config: EngineConfig, loaded: Loaded) -> None:
        self.config, self.n_ctx, self.memory = config, loaded.memory.n_ctx, loaded.memory
        self.tokenizer, self.metadata = loaded.tokenizer, loaded.metadata
        self.passes, self.drafter, self.over = loaded.passes, loaded.drafter, loaded.over
        self.batches, self.lookup = loaded.batches, loaded.prompt_lookup
        self.device, self.costs, self.costs_file = loaded.device, loaded.costs, loaded.costs_file
        self.scorer = loaded.scorer
        self.n_vocab, self.params = self.passes.target.n_vocab, self.passes.target
        depth = self.drafter.depth if self.drafter else 0
        self.policy = Policy(depth, self.costs, self.device.is_gpu, self.passes.most_columns)
        self.stepper = Stepper(self.passes, self.drafter, self.policy)
        self.passing = threading.RLock()  # held while a pass may run, so that closing waits for it
        self.in_pass = False
        self._closed = self._closing = False
        self._slots: dict[int, Slot] = {}  # by state index

    @classmethod
    def load(
        cls, config: EngineConfig, progress: Progress | None = None, calibration_seconds: float | None = None
    ) -> Engine:
        """Open the files and bring the weights to the device.

        Args:
            progress: Called as `progress(stage, done, total)`, in bytes.
            calibration_seconds: Time limit for measuring costs; None for 1.5 s on a GPU, 1 s on a CPU.

        Raises:
            ModelFileError: A file is damaged, or the draft does not fit.
            ConfigError, DeviceError: Options exclude each other, or something does not fit the device.
        """
        loaded = load(config, progress, calibration_seconds)
        # a draft found by name may have been left out
        scorer = config.scorer if loaded.scorer else None
        return cls(replace(config, draft=loaded.draft, scorer=scorer), loaded)

    # ---- slots

    @property
    def parallel(self) -> int:
        """Sequences that can be decoded in one batch."""
        return self.passes.state.n_states

    @property
    def slots(self) -> list[Slot]:
        """The open slots."""
        return [self._slots[index] for index in sorted(self._slots)]

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model; see `sources` for all that drafts."""
        return self.drafter is not None

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of drafted tokens: the draft model's kind, and prompt lookup; empty for plain decoding."""
        model = () if self.drafter is None else (self.drafter.name,)
        return (*model, *(() if self.lookup is None else (NAME,)))

    def open(self, room: int | None = None) -> Slot:
        """Open a slot, with cache rows for `room` tokens to begin with.

        Args:
            room: Tokens; None for an equal share of all rows, or the largest free range.

        Raises:
            NoRoomError: No slot, or not as many rows, are free.
        """
        with self.passing:
            self.alive()
            index = next((i for i in range(self.parallel) if i not in self._slots), None)
            if index is None:
                raise NoRoomError(f"all {self.parallel} slots are taken (--parallel)")
            pool = self.passes.rows
            if room is None:
                room = max(min(self.n_ctx // self.parallel, pool.longest - self.over), 1)
            rows = self._allocate(min(room, self.n_ctx) + self.over)
            sequence = Sequence(first_row=rows.start, end_row=rows.stop, state_index=index)
            lookup = None if self.lookup is None else self.lookup.beside()
            slot = self._slots[index] = Slot(self, sequence, rows, lookup)
            slot.reset()
            return slot

    def _allocate(self, n: int) -> range:
        """n cache rows, for which slots may move. Raises NoRoomError."""
        try:
            return self.passes.rows.allocate(n)
        except NoRoomError:
            if not self.compact(n, None):
                raise
            return self.passes.rows.allocate(n)

    def compact(self, n: int, rows: range | None) -> bool:
        """Move slots so that the range `rows` can grow to n, or a new range of n fits (None); False if there are too few rows."""
        moves = self.passes.rows.compacted(n, rows)
        for now, to in moves or ():
            next(slot for slot in self._slots.values() if slot.kv.allocated == now).kv.move(to)
        return moves is not None

    def closed(self, state_index: int) -> None:
        """The slot with this state index was closed."""
        del self._slots[state_index]

    # ---- decode

    @property
    def prefill_fp8(self) -> bool:
        """Whether matmuls of prompts run with 8-bit floats: their K/V rows and states are not exactly the target's own."""
        return bool(self.passes.fp8)

    @property
    def can_join(self) -> bool:
        """Whether `Slot.prefill` can step other sequences in its pass."""
        return self.passes.can_join and not self.config.reproducible

    @property
    def joins(self) -> bool:
        """Whether a shared pass is faster than two. Not on a CPU, where columns and padding cost the same in any pass
        (bench/notes-serving.md)."""
        return self.device.is_gpu and self.can_join

    def step(self, sequences: Items[Sequence], verify: Verify | None = None) -> list[Step | Exception]:
        """Step sequences of different slots once, in one pass where they can share it.

        Args:
            verify: Runs the pass together with a prefill batch; nothing is drafted then.

        Returns:
            Per sequence its step, or the error that it alone failed with: its sampler's, or NoRoomError, which leaves the
            sequence unchanged.

        Raises:
            DeviceError: The engine is closed, or the pass itself broke.
        """
        with self.held():
            came: dict[int, Step | Exception] = {}
            batch: list[Sequence] = []
            alone: list[Sequence] = []
            for sequence in sequences:
                if error := self._unready(sequence):
                    came[id(sequence)] = error
                elif sequence.isolated or not self.passes.takes_several:
                    alone.append(sequence)
                else:
                    batch.append(sequence)
            # once all have their rows: for those of the last the first may have moved
            for sequence in (*batch, *alone):
                self._slots[sequence.state_index].kv.overwrite()
            for part in (batch, *([sequence] for sequence in alone)):
                if part:
                    came.update(zip(map(id, part), self._step_batch(part, verify if part is batch else None)))
            return [came[id(sequence)] for sequence in sequences]

    def _unready(self, sequence: Sequence) -> Exception | None:
        """The error that keeps a sequence from being stepped; None if it is ready."""
        slot = self._slots.get(sequence.state_index)
        if slot is None or slot.sequence is not sequence:
            return ConfigError("the slot of this sequence is closed; resume it in another one")
        try:
            slot.prepare()
        except DeviceError as error:
            return error
        if sequence.pending is None:
            return ConfigError("this generation has failed or was never begun by `first`; begin another one")
        return None

    def _step_batch(self, batch: list[Sequence], verify: Verify | None) -> list[Step | Exception]:
        """One step of a batch. Sequences with NaN logits are stepped once more, alone and without a tree: an overflowing column
        may contaminate the whole batch of a kernel. If every solo retry succeeds, they stay isolated, since recomputing a
        sequence in every step is too expensive."""
        slots = [self._slots[s.state_index] for s in batch]
        try:
            steps = self.stepper.step(batch, self._idle(batch), verify is not None, verify)
        finally:
            for slot in slots:
                slot.kv.clear_nonfinite()
        failed = [isinstance(step, NonFiniteError) for step in steps]
        if True not in failed:
            return steps
        steps = [self._retry(slot, step, len(batch) > 1) for slot, step in zip(slots, steps)]
        if len(batch) > 1 and not any(isinstance(step, NonFiniteError) for step in steps):
            for sequence, has_failed in zip(batch, failed):
                sequence.isolated |= has_failed
        return steps

    def _retry(self, slot: Slot, step: Step | Exception, batched: bool) -> Step | Exception:
        """Step a sequence again, alone, after NaN logits."""
        sequence = slot.sequence
        if not isinstance(step, NonFiniteError) or (sequence.inconsistent and not batched):
            return step
        if sequence.inconsistent and (error := slot.recompute()):
            return error
        try:
            (step,) = self.stepper.step([sequence], self._idle([sequence]), plain=True)
        finally:
            slot.kv.clear_nonfinite()
        return step

    def _idle(self, batch: Items[Sequence]) -> list[Sequence]:
        """The sequences of open slots that are not stepped."""
        return [slot.sequence for slot in self._slots.values() if slot.sequence not in batch]

    def expected_ms(self, nodes: int, context: int) -> float | None:
        """Expected milliseconds of a step that verifies `nodes` drafted nodes; None if unknown."""
        return self.policy.expected_ms(nodes if self.sources else 0, context)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context for passes; closing the engine waits for them.

        Raises:
            DeviceError: The engine is closed.
        """
        with self.passing:
            self.alive()
            before, self.in_pass = self.in_pass, True
            try:
                yield
            finally:
                self.in_pass = before

    # ---- life

    @property
    def nbytes(self) -> dict[str, int]:
        """Device bytes by part, named as in the memory plan, and the graphs' scratch."""
        of_scorer = self.scorer.nbytes if self.scorer else {}
        return allocated(self.passes, self.drafter.nbytes if self.drafter else {}, of_scorer)

    def graph_counts(self) -> dict[str, int]:
        """Graphs built so far, and graphs that are kept; from any thread, also while a pass runs."""
        graphs = self.passes.graphs
        of_scorer = self.scorer.passes.graphs.builds if self.scorer else 0
        return {"graphs": graphs.builds + of_scorer, "kept": len(graphs)}

    def run_counts(self) -> dict[str, int]:
        """As `graph_counts`, and graph runs so far; not while another thread runs a pass, which may build or drop graphs."""
        return {**self.graph_counts(), "runs": self.passes.graphs.runs}

    def alive(self) -> None:
        """Raise once the engine is closed.

        Raises:
            DeviceError: The engine is closed.
        """
        if self._closed or self._closing:
            raise DeviceError("the engine is closed")

    def close(self) -> None:
        """Free the device memory; the engine is of no use afterwards. Waits for a pass under way in another thread."""
        # set first: a call of many passes would take the lock again and again
        self._closing = True
        try:
            with self.passing:
                if self.in_pass:
                    raise ConfigError(
                        "close: called from inside a step of this engine; end the generation first"
                    )
                if self._closed:
                    return
                for slot in self.slots:
                    slot.kv.allocated = None
                self._closed, self._slots = True, {}
                for part in (self.drafter, self.scorer, self.passes):
                    if part is not None:
                        part.close()
                self.device.close()
        finally:
            self._closing = self._closed

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
