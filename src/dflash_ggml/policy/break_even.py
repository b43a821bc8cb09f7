"""Break-even acceptance lengths: the length from which a drafted step of each width pays, by the measured costs."""

from __future__ import annotations

from dataclasses import dataclass

from ..decode.tree import verify_width
from .costs import Costs, step_ends
from .forecast import blocks


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A drafted step of one width.

    Attributes:
        nodes: Drafted nodes that it verifies.
        columns: Of its verify pass.
        block: Columns of its draft.
        ms: Expected milliseconds.
        length: Tokens that it must emit to be as fast as plain decoding.
        reach: The most tokens that it can emit.
    """

    nodes: int
    columns: int
    block: int
    ms: float
    length: float
    reach: int

    @property
    def can_pay(self) -> bool:
        """Whether it beats plain decoding if a whole path is accepted."""
        return self.length < self.reach


def break_even(costs: Costs, budget: int, depth: int, context: int) -> list[BreakEven]:
    """Break-even lengths by step end up to `budget`, at `context` tokens; none before plain, draft and verify were measured.

    Args:
        depth: The longest path of the draft. Of its block sizes the one with the largest margin counts.
    """
    plain = costs.of("plain", 1, context)
    if plain is None or len(costs.curve("verify", context)) < 2 or not costs.curve("draft", context):
        return []
    choices = []
    for block in blocks(depth):
        took = costs.drafted(step_ends(budget + 1), block, context)
        choices.append(
            [
                BreakEven(n, verify_width(n), block, ms, ms / plain, 1 + min(n, block - 1))
                for n, ms in took.items()
            ]
        )
    return [min(choice, key=_room_taken) for choice in zip(*choices)]


def where_it_pays(found: list[BreakEven]) -> str:
    """A clause for messages that says from where on drafting pays; empty if there is nothing to say."""
    if not found:
        return ""
    roomy = min(found, key=_room_taken)
    if not roomy.can_pay:
        return (
            f"drafting cannot pay: {_nodes(roomy)} would have to give {roomy.length:.1f} tokens a step, "
            f"and {roomy.reach} are the most; auto decodes plainly"
        )
    first = min((one for one in found if one.can_pay), key=lambda one: one.length)
    message = f"drafting pays from {first.length:.2f} tokens a step on with {_nodes(first)}"
    return message if first == roomy else f"{message}, from {roomy.length:.2f} with {roomy.nodes}"


def _room_taken(one: BreakEven) -> float:
    return one.length / one.reach


def _nodes(one: BreakEven) -> str:
    return f"{one.nodes} node" if one.nodes == 1 else f"{one.nodes} nodes"
