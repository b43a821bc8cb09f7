"""A place on the device for one text: what is done with that text, and what others must leave alone meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from ..config import EngineConfig, Mode
from ..decode.adaptive import Experience
from ..decode.controller import controller
from ..decode.costs import Costs
from ..decode.sampling import Sampler
from ..decode.sequence import Sequence
from ..drafts.drafter import Drafter
from ..drafts.suffix import NAME, Copies
from ..errors import ConfigError, ContextOverflowError, DeviceError, NoRoomError
from ..ggml.device import Device
from ..models.target import Target
from ..state.snapshot import Snapshot, Tensors
from ..text.tokenizer import Tokenizer
from .batches import BatchSizes
from .loading import no_host_memory
from .passes import TargetPasses
from .side_by_side import SideBySide
from .step import Run, Step

T = TypeVar("T")


class Shared(Protocol):
    """What the places of an engine share: all that an engine is, beside the text of its own."""

    config: EngineConfig
    n_ctx: int
    n_vocab: int
    tokenizer: Tokenizer
    metadata: dict[str, Any]
    batches: BatchSizes
    passes: TargetPasses
    drafter: Drafter | None
    device: Device
    costs: Costs
    experience: Experience
    stepper: SideBySide
    over: int  # cache rows of a text beyond its tokens
    passing: threading.RLock  # held while a pass may run, so that closing waits for it
    in_pass: bool

    def alive(self) -> None:
        """Raises DeviceError once the engine is closed."""
        ...

    def others(self, runs: Items[Run]) -> list[Sequence]:
        """The sequences of open places but those of the runs."""
        ...

    def left(self, place: Place) -> None:
        """A place was closed."""
        ...


class Place:
    """A text on an engine: a lane of its recurrent state, a range of its cache rows, and what was written there.

    One call at a time: a call that would change the text while another runs, or while a generation is suspended, is refused
    by name, from whatever thread it comes. Calls on other places of the engine wait for the pass that is under way.
    """

    def __init__(self, engine: Shared, sequence: Sequence, rows: range, copies: Copies | None) -> None:
        """`rows`: lent by the engine."""
        self.engine, self.sequence, self.copies = engine, sequence, copies
        self.config, self.n_ctx, self.n_vocab = engine.config, engine.n_ctx, engine.n_vocab
        self.tokenizer, self.metadata, self.batches = engine.tokenizer, engine.metadata, engine.batches
        self._begin(rows)

    def _begin(self, rows: range) -> None:
        self._lent: range | None = rows
        # tokens whose K/V rows outlive a reset or restore, until the next write
        self._rows: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._owner: str | None = None  # who may change the state now

    # ---- the committed prefix

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model; see `sources` for all that drafts."""
        return self.engine.drafter is not None

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of what drafts: the model's kind, suffix for copies; none where decoding is plain."""
        model = () if self.engine.drafter is None else (self.engine.drafter.name,)
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
        return self.engine.passes.target

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
        with self._owning("reset"), self.engine.passing:
            self._there()
            sequence = self.sequence
            rows = () if sequence.torn else max(self._rows, tuple(sequence.tokens), key=len)
            sequence.torn, self._rows = True, ()
            sequence.clear()
            self.engine.passes.state.reset(sequence.lane)
            if self.engine.drafter:
                self.engine.drafter.reset(sequence)
            sequence.torn, self._rows = False, rows

    def forget(self) -> None:
        """Forget the texts that copies are made from: what is measured may not copy from the same answer written before."""
        if self.copies:
            self.copies.forget()

    @property
    def lane(self) -> int:
        """Which of the engine's lanes; the passes of a text that is alone in the first are those of an engine with one."""
        return self.sequence.lane

    @property
    def first_slot(self) -> int:
        """The cache row of its first token."""
        return self.sequence.first_slot

    @property
    def room(self) -> int:
        """Tokens that can still be committed to the rows it has."""
        return 0 if self._lent is None else len(self._lent) - self.engine.over - self.n_tokens

    def grow(self, n: int) -> bool:
        """Have rows for a text of n tokens, which may move them; False where the engine has not as many left in one piece."""
        with self._owning("grow"), self.engine.passing:
            self._there()
            return self._grow(n)

    def _grow(self, n: int) -> bool:
        rows, pool, n = self._lent, self.engine.passes.rows, n + self.engine.over
        assert rows is not None
        if len(rows) >= n:
            return True
        longer = pool.extend(rows, n)
        if longer is None:
            longer = self._move(n)
        if longer is not None:
            self._lent, self.sequence.end_slot = longer, longer.stop
        return longer is not None

    def _move(self, n: int) -> range | None:
        """Take the text's rows to a range of n rows elsewhere; None where there is none."""
        rows, pool, sequence, drafter = (
            self._lent,
            self.engine.passes.rows,
            self.sequence,
            self.engine.drafter,
        )
        assert rows is not None
        try:
            longer = pool.lend(n)
        except NoRoomError:
            return None
        held = max(len(self._rows), sequence.n_tokens)
        kept = Snapshot((), (), self._tensors().read_rows(held), np.zeros(0, bool), None)
        seen = drafter.seen(sequence) if drafter else None
        if drafter:
            drafter.leave(sequence)
        sequence.first_slot, sequence.end_slot = longer.start, longer.stop
        self._tensors().write(kept)
        if drafter and seen is not None:
            drafter.restore_seen(sequence, seen)
        pool.give_back(rows)
        return longer

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
            self._have_rows(wanted)
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

    def _have_rows(self, n: int) -> None:
        """Have rows for a text of n tokens. Raises NoRoomError."""
        if not self._grow(n):
            raise NoRoomError(f"no cache rows for {n} tokens are left in one piece beside other texts")

    def _prefill_batch(
        self, ids: Items[int], is_last: bool, take_row: Callable[[np.ndarray], None] | None
    ) -> None:
        sequence, append = self.sequence, self.engine.drafter.append if self.engine.drafter else None
        self.engine.passes.bucket(sequence.slots(len(ids)).stop)
        sequence.torn, self._rows = True, ()
        began = time.perf_counter()
        graph = self.engine.passes.linear(sequence, ids, append, outputs="every" if take_row else "last")
        if self.engine.drafter:
            self.engine.drafter.prefilled(sequence, len(ids), append is not None)
        sequence.tokens.extend(ids)
        sequence.torn = False
        self.engine.device.synchronize()  # a GPU would be batches behind, with progress that is none
        self.batches.took(len(ids), time.perf_counter() - began)
        rows = [self.engine.passes.logits_row(graph, i) for i in range(len(ids))] if take_row else []
        if is_last:
            sequence.logits = rows[-1] if rows else self.engine.passes.logits_row(graph)
        for row in rows:
            take_row(row)  # type: ignore[misc]

    def _take_in(self) -> None:
        """Let the draft see the last committed tokens before anything else is committed behind them."""
        if self.engine.drafter and self.sequence.unseen:
            self.engine.drafter.take_in(self.sequence)

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
            self._have_rows(len(ids))
            self._guarded(partial(self._aside, ids, take, should_stop))

    def _aside(
        self,
        ids: Items[int],
        take: Callable[[np.ndarray], None],
        should_stop: Callable[[], bool] | None,
    ) -> None:
        """Run ids in cache rows behind all that are held; of those, rows are copied away only where room is short."""
        state, sequence, n = self.engine.passes.state, self.sequence, len(ids)
        held = sequence.first_slot + max(len(self._rows), sequence.n_tokens)
        assert self._lent is not None
        other = Sequence(first_slot=min(held, self._lent.stop - n), lane=sequence.lane)
        live, rings = state.live(sequence.lane), [kept for ring in state.rings for kept in ring.kept]
        caches, lane = state.kv.slices, sequence.lane
        tensors = Tensors(self.engine.device, live, caches, other.first_slot, rings, lane)
        rows = tensors.read_rows(held - other.first_slot)
        text, windows = tuple(sequence.tokens), tensors.read_rings(sequence.n_tokens)
        saved = Snapshot(text, tensors.read_live(), rows, np.zeros(0, bool), None, rings=windows)
        sequence.torn = True
        try:
            state.reset(sequence.lane)
            while other.n_tokens < n:
                if should_stop and should_stop():
                    return
                at = other.n_tokens
                part = ids[at : at + self.batches.next(n - at)]
                take(self.engine.passes.hidden_rows(self.engine.passes.linear(other, part, outputs="hidden")))
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
            step = self._guarded(partial(self.engine.stepper.first, run))
            while True:
                if run.finish is None and should_stop and should_stop():
                    run.finish = "cancelled"
                step.finish = run.finish
                yield step
                if step.finish:
                    return
                step = self._guarded(partial(self._one_step, run))

    def _one_step(self, run: Run) -> Step:
        self.ready()
        (step,) = self.engine.stepper.step_each([run], self.engine.others([run]))
        if isinstance(step, Exception):
            raise step
        return step

    def ready(self) -> None:
        """Have what a step needs. Raises NoRoomError, or DeviceError after one that broke."""
        self._usable()
        self._have_rows(self.n_tokens + 1)

    def begin(
        self,
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        mode: Mode | None = None,
        budget: int | None = None,
        stop: Callable[[int], bool] | None = None,
        keep_rows: bool = False,
    ) -> Run:
        """A generation as `generate` has it, for `first` and `Engine.step`."""
        with self._owning("begin"):
            run = self._run(sampler, max_tokens, mode, budget, stop, keep_rows)
            self._rows = ()
            return run

    def first(self, run: Run) -> Step:
        """The first token of a generation that was begun, which the prompt's own pass gave."""
        with self._owning("first"):
            step = self._guarded(partial(self.engine.stepper.first, run))
            step.finish = run.finish
            return step

    def resume(self, run: Run) -> None:
        """Go on here with a run whose place was closed, once a snapshot of its text is restored. Raises ConfigError where the
        texts differ."""
        with self._owning("resume"):
            self._usable()
            left, here = run.sequence, self.sequence
            if left.tokens != here.tokens:
                raise ConfigError("resume: the place holds another text than the run")
            here.pending, here.text, here.sampler, here.logits = left.pending, left.text, left.sampler, None
            here.undraftable, here.statistics = left.undraftable, left.statistics
            run.sequence, self.copies = here, run.copies

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
        depth = self.engine.drafter.depth if self.engine.drafter else 0
        chosen = controller(
            self._mode(mode),
            budget or self.config.budget,
            depth,
            self.config.chain_seed,
            self.engine.experience,
            self.copies,
        )
        self.sequence.sampler, self.sequence.text = sampler, self.tokens
        limit = room if max_tokens is None else min(max_tokens, room)
        ends = stop or self.tokenizer.eog_ids.__contains__
        return Run(self.sequence, chosen, limit, ends, self.copies, keep_rows)

    def _mode(self, mode: Mode | None) -> Mode:
        """The mode of a generation."""
        mode = mode or self.config.mode
        if mode != "auto" or not self.config.reproducible:
            return mode
        return "tree" if self.engine.device.info.is_gpu and self.engine.drafter else "plain"

    def _guarded(self, work: Callable[[], T]) -> T:
        """Run passes, during which nobody may close the engine."""
        with self.engine.passing:
            self._usable()
            self.engine.in_pass = True
            try:
                return work()
            finally:
                self.engine.in_pass = False

    # ---- snapshots

    def snapshot(self, with_rows: bool = True) -> Snapshot:
        """A copy of the committed state, for `restore`; the pending token is not part of it.

        Without its K/V rows a snapshot is small and good for as long as the cache still holds the same tokens' rows.
        """
        with self._owning("snapshot"), self.engine.passing:
            self._usable()
            self._take_in()
            sequence, tensors = self.sequence, self._tensors()
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
        """Whether `restore` would work: rows are in the snapshot, or still in the cache."""
        held = self._rows or self.sequence.tokens
        return snapshot.rows is not None or tuple(held[: len(snapshot.tokens)]) == snapshot.tokens

    def completed(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot with its K/V rows, so that it is good anywhere. Raises ConfigError where they are no longer here."""
        with self.engine.passing:
            self._there()
            if snapshot.rows is not None:
                return snapshot
            if not self.can_restore(snapshot):
                raise ConfigError("the K/V rows of this snapshot are gone; prefill its tokens again")
            tensors = self._tensors()
            return replace(snapshot, rows=tensors.read_rows(len(snapshot.tokens)), types=tensors.types)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this engine. Raises ConfigError when its K/V rows are gone or its shape differs."""
        with self._owning("restore"), self.engine.passing:
            self._there()
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
            if self.engine.drafter:
                self.engine.drafter.restore_seen(sequence, snapshot.in_draft)
            sequence.tokens += snapshot.tokens
            sequence.logits, self._rows, sequence.torn = snapshot.logits, rows, False

    def _tensors(self) -> Tensors:
        state = self.engine.passes.state
        caches = [*state.kv.slices, *(self.engine.drafter.rows if self.engine.drafter else ())]
        drafter, lane = self.engine.drafter, self.sequence.lane
        rings = [kept for ring in state.rings for kept in ring.kept]
        rings += [(t, rows, rows) for t, rows in (drafter.rings if drafter else ())]
        return Tensors(self.engine.device, state.live(lane), caches, self.sequence.first_slot, rings, lane)

    def expected_ms(self, nodes: int) -> float | None:
        """What a step that verifies `nodes` drafted nodes (0: a plain one) is expected to take now; None if nothing is known."""
        context = self.n_tokens
        if nodes == 0 or not self.sources:
            return self.engine.costs.of("plain", 1, context)
        columns = self.engine.drafter.depth + 1 if self.engine.drafter else 0
        return self.engine.costs.drafted([nodes], columns, context)[nodes] or None

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

    def _there(self) -> None:
        """Raises DeviceError where this place is closed."""
        self.engine.alive()
        if self._lent is None:
            raise DeviceError("this place is closed")

    def _usable(self) -> None:
        self._there()
        if self.sequence.torn:
            raise DeviceError(
                "the state was torn by an interrupt or error inside a pass; call reset() and prefill again"
            )

    def close(self) -> None:
        """Give the place back. What a suspended run holds of its text stays, for `resume`."""
        with self._owning("close"), self.engine.passing:
            if self._lent is not None:
                self._leave()
                self.engine.left(self)

    def _leave(self) -> None:
        """Give the rows back."""
        assert self._lent is not None
        if self.engine.drafter:
            self.engine.drafter.leave(self.sequence)
        if self.copies:
            self.copies.leave()
        self.engine.passes.rows.give_back(self._lent)
        self._lent, self._rows, self.sequence.unseen = None, (), ()
