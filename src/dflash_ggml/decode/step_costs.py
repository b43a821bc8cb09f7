"""What a step of several texts costs, by who drafts and how wide it is: joint costs, each looked up only now and then."""

from __future__ import annotations

from collections.abc import Callable

from .joint_costs import JointCosts, JointPass
from .tree import verify_width

REFRESH = 8  # steps between looks at what a pass costs
VERIFY: tuple[JointPass, JointPass] = ("verify", "host")


def widths(most: int) -> list[int]:
    """Columns of a pass over several sequences: as those of a tree."""
    return [*range(1, min(most, 8) + 1), *range(16, most + 1, 8)]


class StepCosts:
    """Milliseconds of the step under way and of its passes; a cost that has become old is looked up anew when there is time."""

    def __init__(self, most: int) -> None:
        """`most`: columns of the widest pass."""
        self.most = most
        self.step, self._context = 0, 0
        self._joint: JointCosts | None = None
        self._known: dict[
            tuple[JointPass, int, int], tuple[int, float]
        ] = {}  # when it was looked up, and what it was
        self._stale: dict[tuple[JointPass, int, int], None] = {}
        self._plain_known: set[int] = set()  # numbers of sequences
        self._widths = widths(most)
        self._ends: dict[int, list[int]] = {}

    def begin(self, joint: JointCosts, context: int) -> None:
        """A step begins, of sequences of so many tokens in the mean."""
        self._are(joint)
        self._context = context
        self.step += 1

    def of(self, kind: JointPass, columns: int, sequences: int) -> float:
        """What a pass takes."""
        key = kind, columns, sequences
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.step, self._look_up(key)
        elif self.step - found[0] >= REFRESH:
            self._stale[key] = None
        return found[1]

    def plain(self, n: int) -> float:
        """A step of n sequences without drafts."""
        return self.of("plain", n, n)

    def known_plain(self, n: int) -> float:
        """The same as of the last step that it was asked for; 0 where it never was."""
        return self._known.get(("plain", n, n), (0, 0.0))[1]

    def knows_plain(self, n: int, joint: JointCosts | None = None) -> bool:
        """Whether that was measured, or what about as many take. What is known once stays so and is not asked for again: asking
        takes in what was measured last, for which there is time behind the draft. joint: costs of a step that has not begun."""
        if joint is not None:
            self._are(joint)
        if n not in self._plain_known and self._joint is not None and self._joint.knows("plain", n):
            self._plain_known.add(n)
        return n in self._plain_known

    def draft(self, drafting: int, block: int) -> float:
        """A draft of so many blocks."""
        return self.of("draft", drafting * block, drafting)

    def drafted(self, n: int, drafting: int, block: int) -> Callable[[int], float]:
        """A step of n sequences, so many of which draft, by its drafted nodes."""
        rest = self.draft(drafting, block) if drafting else 0.0
        rest += self.of("commit", 1, n)

        def of(nodes: int) -> float:
            if not nodes and not drafting:
                return self.plain(n)
            width = verify_width(n + nodes - 1)
            verify, host = (self.of(kind, width, n) for kind in VERIFY)
            return rest + verify + host

        return of

    def ends(self, n: int) -> list[int]:
        """Node counts at which a pass of n sequences is full, rising; none is one."""
        found = self._ends.get(n)
        if found is None:
            room = max(self.most - n, 0)
            found = self._ends[n] = [
                0,
                *(w - n for w in self._widths if 0 < w - n < room),
                *([room] if room else []),
            ]
        return found

    def refresh(self) -> None:
        """Take in what was measured, and look up anew what has become old."""
        if self._joint is not None:
            self._joint.catch_up()
        for key in self._stale:
            self._known[key] = self.step, self._look_up(key)
        self._stale.clear()

    def _are(self, joint: JointCosts) -> None:
        """The costs of the passes."""
        if joint is not self._joint:
            self._joint = joint
            self._plain_known.clear()

    def _look_up(self, key: tuple[JointPass, int, int]) -> float:
        assert self._joint is not None
        return self._joint.of(*key, self._context)
