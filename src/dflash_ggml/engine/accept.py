"""Acceptance: what the target chose at the nodes of a pass's trees, and the path that each sequence takes through its tree."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..decode.accept import Accepted, followed, greedy, walk
from ..decode.forest import Forest
from ..decode.reduced import ReducedRows, Watch, draw
from ..decode.sequence import Sequence
from ..decode.tree import Tree
from ..errors import NonFiniteError, as_exception
from ..ggml.graph import Graph
from .passes import TargetPasses

NAN = "target produced NaN logits (corrupt weights or overflow)"


class Acceptance:
    """Reads the outputs of a pass over `forest` once, then walks its trees one by one, in sequence order.

    Args:
        watches: How the pass reduced each sequence's logits (None: not reduced).
    """

    def __init__(
        self, passes: TargetPasses, graph: Graph, forest: Forest, watches: Items[Watch | None]
    ) -> None:
        self.passes, self.graph, self.forest, self.watches = passes, graph, forest, watches
        is_greedy = any(s.is_greedy for s in forest.sequences)
        self._choices = passes.choices(graph) if is_greedy else None
        self._reduced = passes.reduced_rows(graph) if any(watches) else None
        if self._choices is None and self._reduced is None:
            passes.device.synchronize()
        # lists for all trees at once: numpy calls per tree take longer than the walks
        choices = [] if self._choices is None else self._choices[: forest.used].tolist()
        self._lists: tuple[list[int], list[int], list[int]] | None = None
        if choices and min(choices) > 0:  # all are finite
            tokens, parents = forest.arrays
            self._lists = parents.tolist(), tokens.tolist(), choices

    def walk(self, i: int) -> tuple[Accepted | Exception, list[NDArray[np.float32]]]:
        """Walk the tree of sequence number i; an error of its sampler or its logits is returned, not raised.

        Returns:
            The accepted path, and the logits behind its tokens where the sequence keeps them.
        """
        sequence, tree, block = self.forest.blocks[i]
        logits: list[NDArray[np.float32]] = []
        try:
            if self._lists is not None and sequence.is_greedy:
                parents, tokens, choices = self._lists
                return followed(parents[block], tokens[block], choices[block], sequence.emit), logits
            return self._walk(i, logits), logits
        except BaseException as error:
            if tree.width == 1 and not isinstance(error, NonFiniteError):
                # the pass has committed the token, so the generation can go on from these logits
                sequence.logits, sequence.inconsistent = (
                    self.passes.logits_row(self.graph, block.start),
                    False,
                )
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            return as_exception(error), logits

    def _walk(self, i: int, logits: list[NDArray[np.float32]]) -> Accepted:
        sequence, tree, block = self.forest.blocks[i]
        watch, passes, graph, first = self.watches[i], self.passes, self.graph, block.start
        reduced: ReducedRows | None = None
        if watch is not None and self._reduced is not None:
            reduced = ReducedRows(self._reduced[block], watch, passes.target.n_vocab)
            nonfinite = reduced.nan_columns(tree.width)
        else:
            choices = passes.choices(graph) if self._choices is None else self._choices
            nonfinite = passes.nan_columns(graph, choices[block], first)
        start = sequence.n_tokens - (tree.width == 1)  # position of the root, committed by now if it is alone
        if nonfinite:
            tree = self._without(sequence, tree, nonfinite, start)
        if sequence.is_greedy:
            assert self._choices is not None
            accepted = greedy(tree, self._choices[block], sequence.emit)
        else:
            accepted = walk(tree, partial(self._choose, sequence, reduced, first, logits), sequence.emit)
        if nonfinite:
            sequence.nonfinite_from = start + len(accepted.path)
        return accepted

    @staticmethod
    def _without(sequence: Sequence, tree: Tree, nonfinite: list[int], start: int) -> Tree:
        """The tree without following nodes whose logits are NaN. Raises NonFiniteError where the root's are."""
        sequence.nonfinite_from = start
        if not nonfinite[0]:
            raise NonFiniteError(NAN)
        tokens = tree.tokens.copy()
        tokens[nonfinite] = -1  # its token is emitted where it is chosen, and is the next root
        return replace(tree, tokens=tokens)

    def _choose(
        self,
        sequence: Sequence,
        reduced: ReducedRows | None,
        first: int,
        logits: list[NDArray[np.float32]],
        node: int,
    ) -> int:
        """The token after a node: the forced one, or the sampler's, from reduced logits where those decide it."""
        if reduced is not None and not sequence.forced:
            assert sequence.sampler is not None
            block = partial(self.passes.logits_block, self.graph, first + node)
            token = draw(sequence.sampler, reduced[node], sequence.history, block)
            if token is not None:
                return token
        row = self.passes.logits_row(self.graph, first + node)
        if sequence.keep_logits:
            logits.append(row)
        return sequence.sample(row)
