"""The cache rows of a text: lent to it, longer when it grows, elsewhere when they must, and zeros where another may read them."""

from __future__ import annotations

from typing import Any

from ..decode.sequence import Sequence
from ..errors import NoRoomError
from ..state.memory import padded
from ..state.pool import UNIT
from ..state.snapshot import Tensors
from .shared import Shared


class TextRows:
    """What the device holds of a text: a range of cache rows, and the recurrent state and rings of a lane."""

    def __init__(self, engine: Shared, sequence: Sequence, rows: range) -> None:
        """`rows`: lent by the engine."""
        self.engine, self.sequence = engine, sequence
        self._lent: range | None = rows
        # tokens whose K/V rows outlive a reset or restore, until the next write
        self._rows: tuple[int, ...] = ()
        self._written = 0  # rows that a prompt has come to
        # those behind the text in which earlier ones may have left something; see `_overwrite`
        self._stale = range(engine.passes.rows.take_stale(rows))
        self._stale_rings = False

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
        return 0 if self._lent is None else len(self._lent) - self.engine.over - self.sequence.n_tokens

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

    def _have_rows(self, n: int) -> None:
        """Have rows for a text of n tokens. Raises NoRoomError."""
        if not self._grow(n):
            raise NoRoomError(f"no cache rows for {n} tokens are left in one piece beside other texts")

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

    @property
    def _touched(self) -> int:
        """Rows that passes of this text or of earlier ones may have written."""
        n = self.sequence.n_tokens
        return max(
            self._written, self._stale.stop, min(n + self.engine.over, len(self._lent or ())) if n else 0
        )

    def _forgotten(self, torn: bool, kept: int = 0) -> None:
        """What the device holds is that of an earlier text from now on. Of a torn one nothing but its first rows is left: it may
        have ended for a key that overflowed long before a pass took notice."""
        self._stale, self._stale_rings = range(self._touched), self._stale_rings or self._touched > 0
        self._written = 0
        if torn:
            self.engine.device.synchronize()
            self._clear(self._tensors(), kept, 0)

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
