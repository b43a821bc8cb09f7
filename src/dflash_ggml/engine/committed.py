"""The committed text of a place: its tokens, how they are read, kept and gone back to, and who may change them."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from ..decode.sequence import Sequence
from ..drafts.suffix import Copies
from ..errors import ConfigError, ContextOverflowError, DeviceError, NoNumbersError
from ..models.target import Target
from ..state.memory import padded
from ..state.pool import UNIT
from ..state.snapshot import Snapshot, Tensors
from .claim import Claim
from .shared import Shared
from .step import NAN
from .text_rows import TextRows

T = TypeVar("T")


class Committed(TextRows):
    """A text on an engine: a lane of its recurrent state, a range of its cache rows, and the tokens whose state they are.

    One call at a time: a call that would change the text while another runs, or while a generation is suspended, is refused
    by name, from whatever thread it comes. Calls on other places of the engine wait for the pass that is under way.
    """

    def __init__(self, engine: Shared, sequence: Sequence, rows: range, copies: Copies | None) -> None:
        """`rows`: lent by the engine."""
        super().__init__(engine, sequence, rows)
        self.copies = copies
        self.config, self.n_ctx, self.n_vocab = engine.config, engine.n_ctx, engine.n_vocab
        self.tokenizer, self.metadata, self.batches = engine.tokenizer, engine.metadata, engine.batches
        self._claim = Claim()  # who may change the text now

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
        with self._claim.by("reset"), self.engine.passing:
            self._reset()

    def _reset(self) -> None:
        self._there()
        sequence = self.sequence
        torn, sequence.torn = sequence.torn, True
        rows = () if torn else max(self._rows, tuple(sequence.tokens), key=len)
        self._rows = ()
        self._forgotten(torn)
        sequence.clear()
        self.engine.passes.state.reset(sequence.lane)
        if self.engine.drafter:
            self.engine.drafter.reset(sequence)
        sequence.torn, self._rows = False, rows

    def grow(self, n: int) -> bool:
        """Have rows for a text of n tokens, which may move them; False where the engine has not as many left in one piece."""
        with self._claim.by("grow"), self.engine.passing:
            self._there()
            return self._grow(n)

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
        Raises ContextOverflowError before any work when they do not fit, ConfigError for an id outside the vocabulary,
        NoNumbersError where what comes out is NaN: the text is of no use then.
        """
        with self._claim.by("prefill"):
            self._prefill(ids, progress, should_stop, take_row)

    def _prefill(
        self,
        ids: Items[int],
        progress: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        take_row: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        self._usable()
        wanted = self.n_tokens + len(ids)
        if wanted > self.n_ctx:
            raise ContextOverflowError(f"Requested tokens ({wanted}) exceed context window of {self.n_ctx}")
        self.check_ids(ids)
        self._guarded(partial(self._have_rows, wanted))  # for which others may move
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
        sequence, append = self.sequence, self.engine.drafter.append if self.engine.drafter else None
        self.engine.passes.bucket(sequence.slots(len(ids)).stop)
        self._overwrite(len(ids))
        sequence.torn, self._written = True, sequence.n_tokens + len(ids)
        began = time.perf_counter()
        graph = self.engine.passes.linear(sequence, ids, append, outputs="every" if take_row else "last")
        if self.engine.drafter:
            self.engine.drafter.prefilled(sequence, len(ids), append is not None)
        sequence.tokens.extend(ids)
        sequence.torn = False
        self.engine.device.synchronize()  # a GPU would be batches behind, with progress that is none
        self.batches.took(len(ids), time.perf_counter() - began)
        is_spoilt = self.engine.passes.is_nan(graph, len(ids) - 1 if take_row else 0)
        sequence.spoilt_from = sequence.n_tokens - len(ids) if is_spoilt else None
        self.clear_spoilt()
        if is_spoilt:
            raise NoNumbersError(NAN)
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
        Raises ContextOverflowError, ConfigError, NoNumbersError as prefill does, and ConfigError for no ids.
        """
        with self._claim.by("hidden_states"):
            self._usable()
            if not len(ids):
                raise ConfigError("hidden_states: there are no tokens")
            if len(ids) > self.n_ctx:
                raise ContextOverflowError(
                    f"Requested tokens ({len(ids)}) exceed context window of {self.n_ctx}"
                )
            self.check_ids(ids)
            self._guarded(partial(self._have_rows, len(ids)))
            self._guarded(partial(self._aside, ids, take, should_stop))

    def _aside(
        self,
        ids: Items[int],
        take: Callable[[np.ndarray], None],
        should_stop: Callable[[], bool] | None,
    ) -> None:
        """Run ids in cache rows behind all that are held; of those, rows are copied away only where room is short.

        Attention also reads what else lies in the first and the last tile of rows: they begin where a range of rows can, and
        hold zeros before and after.
        """
        state, sequence, n = self.engine.passes.state, self.sequence, len(ids)
        held = sequence.first_slot + max(len(self._rows), sequence.n_tokens)
        touched = sequence.first_slot + self._touched
        assert self._lent is not None
        first = min(padded(held, UNIT), (self._lent.stop - n) // UNIT * UNIT)
        other = Sequence(first_slot=first, lane=sequence.lane)
        live, rings = state.live(sequence.lane), [kept for ring in state.rings for kept in ring.kept]
        caches, lane = state.kv.slices, sequence.lane
        tensors = Tensors(self.engine.device, live, caches, other.first_slot, rings, lane)
        rows = tensors.read_rows(max(held - first, 0))
        text, windows = tuple(sequence.tokens), tensors.read_rings(sequence.n_tokens)
        saved = Snapshot(text, tensors.read_live(), rows, np.zeros(0, bool), None, rings=windows)
        written, sequence.torn = self._written, True
        self._written = max(written, first - sequence.first_slot + n)
        try:
            state.reset(sequence.lane)
            tensors.clear_rows(0, max(min(touched - first, self._seen(n)), 0))
            if self._touched or self._stale_rings:
                tensors.clear_rings(0)
            while other.n_tokens < n:
                if should_stop and should_stop():
                    return
                at = other.n_tokens
                part = ids[at : at + self.batches.next(n - at)]
                hidden = self.engine.passes.hidden_rows(
                    self.engine.passes.linear(other, part, outputs="hidden")
                )
                if np.isnan(hidden[-1, 0]):
                    raise NoNumbersError(NAN)
                take(hidden)
                other.tokens.extend(part)
        finally:
            self.engine.device.synchronize()
            tensors.clear_rows(0, n)
            tensors.clear_rings(sequence.n_tokens)
            tensors.write(saved)
            sequence.torn, self._written = False, written

    def _guarded(self, work: Callable[[], T]) -> T:
        """Run passes, during which nobody may close the engine."""
        with self.engine.passing:
            self._usable()
            before, self.engine.in_pass = self.engine.in_pass, True
            try:
                return work()
            finally:
                self.engine.in_pass = before

    # ---- snapshots

    def snapshot(self, with_rows: bool = True) -> Snapshot:
        """A copy of the committed state, for `restore`; the pending token is not part of it.

        Without its K/V rows a snapshot is small and good for as long as the cache still holds the same tokens' rows.
        """
        with self._claim.by("snapshot"), self.engine.passing:
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
        with self._claim.by("restore"), self.engine.passing:
            self._there()
            sequence = self.sequence
            if not self.can_restore(snapshot):
                raise ConfigError("the K/V rows of this snapshot are gone; prefill its tokens again")
            n = len(snapshot.tokens)
            self._tensors().check(snapshot)
            if n > self.n_ctx:
                raise ConfigError("snapshot: taken from a model or context of another shape")
            rows, torn = snapshot.tokens, sequence.torn
            if snapshot.rows is None and not torn:
                rows = max(self._rows, tuple(sequence.tokens), key=len)
            sequence.torn, self._rows = True, ()
            self._forgotten(torn, 0 if snapshot.rows is not None else n)
            sequence.clear()
            self._tensors().write(snapshot)
            if self.engine.drafter:
                self.engine.drafter.restore_seen(sequence, snapshot.in_draft)
            sequence.tokens += snapshot.tokens
            sequence.logits, self._rows, sequence.torn = snapshot.logits, rows, False

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
        with self._claim.by("close"), self.engine.passing:
            if self._lent is not None:
                try:
                    self._leave()
                finally:
                    self.engine.left(self.sequence.lane)

    def _leave(self) -> None:
        """Give the rows back, and clear the rings."""
        assert self._lent is not None
        touched, tensors = self._touched, self._tensors()
        try:
            self._let_go(self._lent, tensors, touched)
            if touched:
                tensors.clear_rings(0)
        finally:
            if self.engine.drafter:
                self.engine.drafter.leave(self.sequence)
            if self.copies:
                self.copies.leave()
            self._lent, self._rows, self.sequence.unseen = None, (), ()
            self._written, self._stale, self._stale_rings = 0, range(0), False
