"""What the policy knows of one sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from ..decode.accept import Accepted
from ..decode.calibration import Calibration
from ..decode.sequence import Sequence
from ..decode.tree import Tree
from .forecast import LOOK_BACK, Forecast
from .plan import Plan

REPEATED = 8  # foretold tokens in a row at which a text is said to repeat itself
PROMPT = 512  # tokens of a prompt that are searched for repetition


class Hindsight:
    """A drafted tree that was not verified, walked by the tokens that the target then chose without it."""

    __slots__ = ("_path", "_start", "tree")

    def __init__(self, tree: Tree, start: int) -> None:
        """start: tokens committed before its root."""
        self.tree, self._start, self._path = tree, start, [0]

    def follow(self, sequence: Sequence) -> Accepted | None:
        """Return what a walk would have given once the text has left the tree, None before that."""
        parents, carries, path = self.tree.parents, self.tree.tokens, self._path
        while True:
            at = self._start + len(path)
            if at < sequence.n_tokens:
                token = sequence.tokens[at]
            elif at == sequence.n_tokens and sequence.pending is not None:
                token = sequence.pending
            else:
                return None
            below = ((parents == path[-1]) & (carries == token)).nonzero()[0]
            if not len(below):
                return Accepted(tuple(path), (*carries[path[1:]].tolist(), token))
            path.append(int(below[0]))


class Repetition:
    """Tokens in a row that the text itself foretold: a sign, free of passes, that a draft is worth a try."""

    def __init__(self) -> None:
        self.run = 0
        self._wanted = REPEATED
        self._followed: dict[tuple[int, ...], int] = {}
        self._at: int | None = None

    def follow(self, tokens: Items[int]) -> int:
        """Take in new tokens; return how many in a row, up to the end, stood after the same three before."""
        followed, n = self._followed, len(tokens)
        if self._at is None or self._at > n:
            self._at = max(n - PROMPT, 3)
        for i in range(self._at, n):
            before, token = (tokens[i - 3], tokens[i - 2], tokens[i - 1]), tokens[i]
            self.run = self.run + 1 if followed.get(before) == token else 0
            followed[before] = token
        self._at = max(n, 3)
        return self.run

    def is_worth_a_try(self, tokens: Items[int]) -> bool:
        """Whether the text has begun to repeat itself, or has gone on for as long again since this was said last."""
        run = self.follow(tokens)
        if run < self._wanted:
            self._wanted = REPEATED if run < REPEATED else self._wanted
            return False
        self._wanted = 2 * run
        return True


@dataclass(slots=True, eq=False)
class Notes:
    """Notes on a sequence.

    Attributes:
        fixed: The plan of its mode, None where each step is decided.
        tried_at: The step of the last draft.
        again: Whether the last try paid, so that the next need not be saved for.
        rest: Steps that are plain without a look.
        glanced: Whether prompt lookup was asked in this step; foretold: in the last one, which was plain.
        promise: Tokens that its next draft is expected to add.
        kept, least: Verified nodes of the last trees, and the log-probability of the least of them.
        waiting: Drafts that were not verified, of which the text has not told all yet.
    """

    fixed: Plan | None
    calibration: Calibration
    forecast: Forecast
    tried_at: int = -(1 << 30)
    again: bool = False
    rest: int = 0
    glanced: bool = False
    foretold: bool = False
    promise: float = 0.0
    kept: deque[int] = field(default_factory=lambda: deque(maxlen=LOOK_BACK))
    least: deque[float] = field(default_factory=lambda: deque(maxlen=LOOK_BACK))
    waiting: list[Hindsight] = field(default_factory=list)
    repetition: Repetition = field(default_factory=Repetition)
