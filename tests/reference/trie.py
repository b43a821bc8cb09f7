"""Candidates of any depth, for drafts that do not propose blocks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from dflash_ggml.decode.candidates import Children


class Trie:
    """Continuations of any depth as an explicit tree.

    children: node -> {token: (log-probability given the node, child node)}; `root` is the pending token's node.
    """

    def __init__(
        self, children: Mapping[Hashable, Mapping[int, tuple[float, Hashable]]], root: Hashable
    ) -> None:
        self.children, self.root = children, root

    def expand(self, cursor: Hashable) -> Children:
        found = sorted(self.children.get(cursor, {}).items(), key=lambda item: -item[1][0])
        return [t for t, _ in found], [p for _, (p, _) in found], [node for _, (_, node) in found]
