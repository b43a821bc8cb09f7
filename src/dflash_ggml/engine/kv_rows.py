"""The cache rows of a slot: allocated, extended and moved as its sequence grows, zeroed where other sequences may read them."""

from __future__ import annotations

from collections.abc import Callable

from ..decode.sequence import Sequence
from ..drafts.drafter import Drafter
from ..errors import NoRoomError
from ..ggml.bindings import Tensor
from ..state.memory import padded
from ..state.pool import UNIT
from ..state.snapshot import Tensors
from .passes import TargetPasses


class KvRows:
    """A range of cache rows, and the recurrent state and rings of a state index, as one sequence has them.

    Args:
        over: Rows beyond the committed tokens that a pass may write.
        compact: Moves other slots so that a range is free, see `Engine.compact`.

    Attributes:
        allocated: The range, None once it has been freed.
        kept: Tokens whose K/V rows stay valid after a reset or restore, until the next write.
    """

    def __init__(
        self,
        passes: TargetPasses,
        drafter: Drafter | None,
        sequence: Sequence,
        rows: range,
        over: int,
        compact: Callable[[int, range | None], bool],
    ) -> None:
        self.passes, self.drafter, self.sequence, self.over = passes, drafter, sequence, over
        self.allocated: range | None = rows
        self.kept: tuple[int, ...] = ()
        self._compact = compact
        self._written = 0  # rows that a prompt has come to
        # rows behind the sequence in which earlier ones may have left something; see `overwrite`
        self._stale = range(passes.rows.take_stale(rows))
        self._stale_rings = False

    # ---- range

    @property
    def room(self) -> int:
        """Tokens that can still be committed without more rows."""
        return 0 if self.allocated is None else len(self.allocated) - self.over - self.sequence.n_tokens

    def grow(self, n: int) -> bool:
        """Extend the range to n tokens, moving it if needed; False if no contiguous range is large enough."""
        rows, pool, n = self.allocated, self.passes.rows, n + self.over
        assert rows is not None
        if len(rows) >= n:
            return True
        longer = pool.extend(rows, n)
        if longer is None and self._relocate(n):
            return True
        if longer is None and self._compact(n, rows):
            rows = self.allocated or rows  # it may have moved, too
            longer = pool.extend(rows, n)
        if longer is None:
            return False
        self.allocated, self.sequence.end_row = longer, longer.stop
        if found := pool.take_stale(longer):
            self._stale = range(self._stale.start if self._stale else len(rows), max(found, self._stale.stop))
        return True

    def need(self, n: int) -> None:
        """As `grow`, or raise.

        Raises:
            NoRoomError: There are not as many, even after other slots have moved.
        """
        if not self.grow(n):
            raise NoRoomError(f"no cache rows for {n} tokens are left in one piece beside other sequences")

    def _relocate(self, n: int) -> bool:
        """Move to another range of n rows; False if there is none."""
        pool, rows = self.passes.rows, self.allocated
        assert rows is not None
        try:
            longer = pool.allocate(n)
        except NoRoomError:
            return False
        try:
            self._move_to(longer)
        finally:
            pool.free(rows if self.allocated == longer else longer)
        return True

    def move(self, to: range) -> None:
        """Move to as many rows elsewhere, free ones or some of its own."""
        assert self.allocated is not None
        rows = self.allocated
        try:
            self._move_to(to)
        finally:
            self.passes.rows.move(rows, self.allocated)

    def _move_to(self, to: range) -> None:
        """Move the sequence to `to`, a range that the pool has reserved for it; the old rows are cleared as in `release`."""
        rows, pool, drafter, sequence = self.allocated, self.passes.rows, self.drafter, self.sequence
        assert rows is not None
        tensors, touched = self.tensors(), rows.start + self.touched
        held = max(len(self.kept), sequence.n_tokens)
        inconsistent, sequence.inconsistent = sequence.inconsistent, True
        self.passes.move_rows(tensors.caches, rows.start, to.start, held)
        seen = drafter.seen(sequence) if drafter else None
        if drafter:
            drafter.leave(sequence)
        self.allocated, sequence.first_row, sequence.end_row = to, to.start, to.stop
        if drafter and seen is not None:
            drafter.restore_seen(sequence, seen)
        self._written = 0
        self._stale = range(max(held, pool.take_stale(to), min(touched, to.stop) - to.start))
        left = range(max(rows.start, to.stop), touched)
        if to.start > rows.start:
            left = range(rows.start, min(touched, to.start))
        self._clear_vacated(tensors, left)
        sequence.inconsistent = inconsistent

    def release(self) -> None:
        """Free the rows, and clear the rings."""
        assert self.allocated is not None
        rows, touched, tensors = self.allocated, self.touched, self.tensors()
        try:
            self.passes.rows.free(rows)
            self._clear_vacated(tensors, range(rows.start, rows.start + touched))
            if touched:
                tensors.clear_rings(0)
        finally:
            if self.drafter:
                self.drafter.leave(self.sequence)
            self.allocated, self.kept, self.sequence.unseen = None, (), ()

    def _clear_vacated(self, tensors: Tensors, left: range) -> None:
        """Zero rows that the sequence has left; on a CPU only the first of them, which a pass's padding may read. The pool marks
        the others as stale for their next owner."""
        pool = self.passes.rows
        pool.mark_stale(left)
        if left:
            cleared = left if self.passes.device.is_gpu else left[:UNIT]
            self.passes.device.synchronize()
            tensors.clear_rows(cleared.start - tensors.first_row, cleared.stop - tensors.first_row)
            pool.take_stale(cleared)

    # ---- contents

    @property
    def touched(self) -> int:
        """Rows that passes of this sequence or of earlier ones may have written."""
        n = self.sequence.n_tokens
        beyond = min(n + self.over, len(self.allocated or ())) if n else 0
        return max(self._written, self._stale.stop, beyond)

    def writes(self, n: int) -> int:
        """Note that a pass is about to write the first n rows; returns the previous note."""
        before, self._written = self._written, n
        return before

    @property
    def is_clean(self) -> bool:
        """Whether rows and rings are empty."""
        return not (self.touched or self._stale_rings)

    def forget(self, inconsistent: bool, kept: int = 0) -> None:
        """Treat the device's contents as an earlier sequence's from now on. Of an inconsistent one only the first `kept` rows are
        trusted: a key may have overflowed long before a pass noticed."""
        self._stale, self._stale_rings = range(self.touched), self._stale_rings or self.touched > 0
        self._written = 0
        if inconsistent:
            self.passes.device.synchronize()
            self._clear(self.tensors(), kept, 0)

    def overwrite(self, n_more: int = 0) -> None:
        """Drop the kept rows, and zero those that passes over `n_more` more tokens may read.

        Attention multiplies masked rows by 0, which lets NaN through: a sequence that overflowed would contaminate later
        ones. A GPU clears all at once (10 us a layer); a CPU clears lazily as the sequence grows (0.3 s for 8K tokens of an
        8B model).
        """
        self.kept, stale = (), self._stale
        if not (stale or self._stale_rings):
            return
        n = self.sequence.n_tokens
        end = min(self.visible(n + n_more + self.over), stale.stop)
        if not self._stale_rings and end <= stale.start:
            return
        self.passes.device.synchronize()
        tensors = self.tensors()
        if self._stale_rings:
            tensors.clear_rings(n)
            self._stale_rings = False
        first = max(n, stale.start)
        tensors.clear_rows(first, max(end, first))
        self._stale = range(max(end, stale.start), stale.stop) if end < stale.stop else range(0)

    def clear_nonfinite(self) -> None:
        """Zero what the last pass left NaN-contaminated, before any other sequence's pass.

        Some kernels read masked rows of other sequences, so everything written is checked when its pass has run: where keys or
        values are NaN, or values overflow, the logits of their column and of all that follow are NaN.
        """
        sequence, drafter, first = self.sequence, self.drafter, self.sequence.nonfinite_from
        if first is not None:
            known = sequence.n_tokens - len(sequence.unseen)
            sequence.nonfinite_from = None
            if first < sequence.n_tokens:
                sequence.inconsistent, self.kept, sequence.unseen = True, (), ()
            self.passes.device.synchronize()
            kept = 0 if sequence.inconsistent else sequence.n_tokens
            self._clear(self.tensors(draft=False), first, kept)
            self._clear(self.tensors(target=False), min(first, known), min(kept, known))
        if drafter is not None and sequence.undraftable:
            if sequence.draft_nonfinite or drafter.seen(sequence).any():
                drafter.reset(sequence)
                self.passes.device.synchronize()
                self._clear(self.tensors(target=False), 0, 0)
            sequence.draft_nonfinite = False

    def _clear(self, tensors: Tensors, first: int, kept: int) -> None:
        """Zero rows from position `first` on, and in rings all that is not seen behind `kept` tokens."""
        tensors.clear_rows(first, max(self.touched, first))
        tensors.clear_rings(kept)

    def visible(self, n: int) -> int:
        """Rows that passes over a sequence of n tokens may read: a CPU skips tiles in which no column sees anything."""
        return self.passes.n_rows if self.passes.device.is_gpu else padded(n, UNIT)

    def tensors(self, target: bool = True, draft: bool = True) -> Tensors:
        """The sequence's tensors, of the target, the draft or both."""
        state, drafter, sequence = self.passes.state, self.drafter, self.sequence
        live, caches, rings = list[list[Tensor]](), list[Tensor](), list[tuple[Tensor, int, int]]()
        if target:
            live, caches = state.live_parts(sequence.state_index), [*state.kv.slices]
            rings += [kept for ring in state.rings for kept in ring.kept]
        if draft and drafter:
            caches += drafter.rows
            rings += drafter.rings
        return Tensors(self.passes.device, live, caches, sequence.first_row, rings, sequence.state_index)
