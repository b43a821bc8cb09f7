"""The committed text of a place: its tokens, what the device holds of them, and who may change it."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..decode.sequence import Sequence
from ..drafts.suffix import Copies
from ..errors import ConfigError, ContextOverflowError, DeviceError, NoNumbersError, NoRoomError
from ..models.target import Target
from ..state.memory import padded
from ..state.pool import UNIT
from ..state.snapshot import Snapshot, Tensors
from .claim import Claim
from .shared import Shared
from .step import NAN

T = TypeVar("T")


class Committed:
    """A text on an engine: a lane of its recurrent state, a range of its cache rows, and the tokens whose state they are.

    One call at a time: a call that would change the text while another runs, or while a generation is suspended, is refused
    by name, from whatever thread it comes. Calls on other places of the engine wait for the pass that is under way.
    """

    def __init__(self, engine: Shared, sequence: Sequence, rows: range, copies: Copies | None) -> None:
        """`rows`: lent by the engine."""
        self.engine, self.sequence, self.copies = engine, sequence, copies
        self.config, self.n_ctx, self.n_vocab = engine.config, engine.n_ctx, engine.n_vocab
        self.tokenizer, self.metadata, self.batches = engine.tokenizer, engine.metadata, engine.batches
        self._lent: range | None = rows
        # tokens whose K/V rows outlive a reset or restore, until the next write
        self._rows: tuple[int, ...] = ()
        self._written = 0  # rows that a prompt has come to
        # those behind the text in which earlier ones may have left something; see `_overwrite`
        self._stale = range(engine.passes.rows.take_stale(rows))
        self._stale_rings = False
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

    def _forgotten(self, torn: bool, kept: int = 0) -> None:
        """What the device holds is that of an earlier text from now on. Of a torn one nothing but its first rows is left: it may
        have ended for a key that overflowed long before a pass took notice."""
        self._stale, self._stale_rings = range(self._touched), self._stale_rings or self._touched > 0
        self._written = 0
        if torn:
            self.engine.device.synchronize()
            self._clear(self._tensors(), kept, 0)

    @property
    def _touched(self) -> int:
        """Rows that passes of this text or of earlier ones may have written."""
        n = self.sequence.n_tokens
        return max(
            self._written, self._stale.stop, min(n + self.engine.over, len(self._lent or ())) if n else 0
        )

    def _overwrite(self, n_more: int = 0) -> None:
        """The rows of earlier texts behind this one are nobody's from now on, and those that passes over `n_more` tokens may read
        hold zeros.

        Attention multiplies rows that a mask hides by 0, and a NaN among them would come through: a text that overflowed would
        spoil all that follow. Clearing always was chosen over asking every text for its numbers when it ends: on a GPU it takes
        some 10 us a layer and text, and greedy decoding never looks at a logit. A CPU takes 0.3 s for 8K tokens of an 8B model;
        there rows are cleared as the text comes near them.
        """
        self._rows, n, stale = (), self.sequence.n_tokens, self._stale
        end = min(self._seen(n + n_more + self.engine.over), stale.stop)
        if not self._stale_rings and end <= stale.start:
            return
        self.engine.device.synchronize()
        tensors = self._tensors()
        if self._stale_rings:
            tensors.clear_rings(n)
            self._stale_rings = False
        first = max(n, stale.start)
        tensors.clear_rows(first, max(end, first))
        self._stale = range(max(end, stale.start), stale.stop) if end < stale.stop else range(0)

    def clear_spoilt(self) -> None:
        """Zero what the last pass left without numbers, before any other text's pass. A text that has such rows is of no use.

        What a mask hides is multiplied by 0 all the same: on a GPU a NaN in rows that are only held would spoil other texts.
        The other design, passes that read no rows but their text's, is kept by some kernels only: one for few columns of heads
        of 128 and 256 is told where rows begin and end, that of prompts reads tiles of 80 rows, others know a mask and no more.
        So all that is written is looked at when its pass has run, in what the host reads of it anyway: where keys or values are
        NaN, or values overflow, their own column's logits are NaN, and those of all that follow. A key that overflows alone may
        have no weight, or all there is: it stays, unnoticed, as long as its text. For those that were in the same pass see
        `Place.stepped`.
        """
        sequence, drafter, first = self.sequence, self.engine.drafter, self.sequence.spoilt_from
        if first is not None:
            known = sequence.n_tokens - len(sequence.unseen)
            sequence.spoilt_from = None
            if first < sequence.n_tokens:
                sequence.torn, self._rows, sequence.unseen = True, (), ()
            self.engine.device.synchronize()
            kept = 0 if sequence.torn else sequence.n_tokens
            self._clear(self._tensors(draft=False), first, kept)
            self._clear(self._tensors(target=False), min(first, known), min(kept, known))
        if drafter is not None and sequence.undraftable:
            if sequence.spoilt_draft or drafter.seen(sequence).any():
                drafter.reset(sequence)
                self.engine.device.synchronize()
                self._clear(self._tensors(target=False), 0, 0)
            sequence.spoilt_draft = False

    def _clear(self, tensors: Tensors, first: int, kept: int) -> None:
        """Zero rows from position `first` on, and in rings all that is not seen behind `kept` tokens."""
        tensors.clear_rows(first, max(self._touched, first))
        tensors.clear_rings(kept)

    def _seen(self, n: int) -> int:
        """Rows that passes may read of a text that has come to n: a CPU skips tiles in which nobody sees anything."""
        return self.engine.passes.n_rows if self.engine.device.is_gpu else padded(n, UNIT)

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
        with self._claim.by("grow"), self.engine.passing:
            self._there()
            return self._grow(n)

    def _grow(self, n: int) -> bool:
        rows, pool, n = self._lent, self.engine.passes.rows, n + self.engine.over
        assert rows is not None
        if len(rows) >= n:
            return True
        longer = pool.extend(rows, n)
        if longer is None and self._go_elsewhere(n):
            return True
        if longer is None and self.engine.gather(n, rows):
            rows = self._lent or rows  # it may have moved, too
            longer = pool.extend(rows, n)
        if longer is None:
            return False
        self._lent, self.sequence.end_slot = longer, longer.stop
        if found := pool.take_stale(longer):
            self._stale = range(self._stale.start if self._stale else len(rows), max(found, self._stale.stop))
        return True

    def _go_elsewhere(self, n: int) -> bool:
        """Take the text to a range of n rows elsewhere; False where there is none."""
        pool, rows = self.engine.passes.rows, self._lent
        assert rows is not None
        try:
            longer = pool.lend(n)
        except NoRoomError:
            return False
        try:
            self._carry(longer)
        finally:
            pool.give_back(rows if self._lent == longer else longer)
        return True

    def move(self, to: range) -> None:
        """Take the text to rows that are nobody's or its own, as many as it has."""
        assert self._lent is not None
        rows = self._lent
        try:
            self._carry(to)
        finally:
            self.engine.passes.rows.move(rows, self._lent)

    def _carry(self, to: range) -> None:
        """Have the text's rows in those of `to`, which the pool keeps for it, and leave the others as `_let_go` does."""
        rows, pool, drafter, sequence = (
            self._lent,
            self.engine.passes.rows,
            self.engine.drafter,
            self.sequence,
        )
        assert rows is not None
        tensors, touched = self._tensors(), rows.start + self._touched
        held = max(len(self._rows), sequence.n_tokens)
        torn, sequence.torn = sequence.torn, True
        self.engine.passes.carry(tensors.caches, rows.start, to.start, held)
        seen = drafter.seen(sequence) if drafter else None
        if drafter:
            drafter.leave(sequence)
        self._lent, sequence.first_slot, sequence.end_slot = to, to.start, to.stop
        if drafter and seen is not None:
            drafter.restore_seen(sequence, seen)
        self._written = 0
        self._stale = range(max(held, pool.take_stale(to), min(touched, to.stop) - to.start))
        left = range(max(rows.start, to.stop), touched)
        if to.start > rows.start:
            left = range(rows.start, min(touched, to.start))
        self._clear_left(tensors, left)
        sequence.torn = torn

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
            self._have_rows(len(ids))
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

    def _tensors(self, target: bool = True, draft: bool = True) -> Tensors:
        """What is kept of the text, of either or of both."""
        state, drafter, sequence = self.engine.passes.state, self.engine.drafter, self.sequence
        live, caches, rings = list[Any](), list[Any](), list[tuple[Any, int, int]]()
        if target:
            live, caches = state.live(sequence.lane), [*state.kv.slices]
            rings += [kept for ring in state.rings for kept in ring.kept]
        if draft and drafter:
            caches += drafter.rows
            rings += drafter.rings
        return Tensors(self.engine.device, live, caches, sequence.first_slot, rings, sequence.lane)

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

    def _let_go(self, rows: range, tensors: Tensors, touched: int) -> None:
        """Give rows back, of which so many hold something."""
        self.engine.passes.rows.give_back(rows)
        self._clear_left(tensors, range(rows.start, rows.start + touched))

    def _clear_left(self, tensors: Tensors, left: range) -> None:
        """Leave zeros in rows that were the text's; on a CPU in the first, which a pass's padding may see. Who has them next is
        told of the others."""
        pool = self.engine.passes.rows
        pool.left_in(left)
        if left:
            cleared = left if self.engine.device.is_gpu else left[:UNIT]
            self.engine.device.synchronize()
            tensors.clear_rows(cleared.start - tensors.first_slot, cleared.stop - tensors.first_slot)
            pool.take_stale(cleared)
