"""Output of block drafts of every kind: K candidates for each of L depths, and scores of neighbouring pairs.

score(i, a -> b) = U_i(b) + M_i(a, b) for candidate a of depth i - 1 and b of depth i; the pending token precedes depth 0.
DFlash has M = 0; the others have M_i(a, b) = c_i(P[a]) . S[b] with two tables [R, n_vocab] and a condition c_i on a row of the
first. All of it is computed on the device; 2 L K + L K^2 numbers come to the host. Shapes in ggml's order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..decode.candidates import CandidateBlock
from ..ggml.bindings import Tensor
from ..ggml.graph import Graph

# (rows of P [R, k, n], first depth of them) -> the same, conditioned on the depths' hidden states
Condition = Callable[..., object]


def pack(
    g: Graph,
    best: Tensor,
    ids: Tensor,
    own_ids: Tensor,
    pending: Tensor,
    before: Tensor,
    after: Tensor,
    condition: Condition,
) -> Tensor:
    """Pack a lattice for the host into a float32 vector: best | M_0 [K] | M_1 .. M_L-1 [K, K] each.

    Args:
        best: [K, 2, L], candidates and their log-probabilities.
        ids, own_ids: int32 [K*L], the candidates in the target's vocabulary, in which `before` [R, n_vocab] is
            indexed, and in the draft's, in which `after` is.
        pending: int32 [1].
    """
    k, depths, rank = best.ne[0], best.ne[2], after.ne[0]
    successors = g.reshape(g.get_rows(after, own_ids), rank, k, depths)
    first = condition(g.reshape(g.get_rows(before, pending), rank, 1, 1), 0)
    one = g.mul_mat(g.view(successors, (rank, k)), g.reshape(first, rank, 1))
    whole = g.concat(g.reshape(best, 2 * k * depths), g.reshape(one, k), 0)
    if depths > 1:
        rows = g.get_rows(before, g.view(ids, (k * (depths - 1),)))
        rest = condition(g.reshape(rows, rank, k, depths - 1), 1)
        strides = (successors.nb[1], successors.nb[2])
        later = g.view(successors, (rank, k, depths - 1), strides, offset=successors.nb[2])
        scores = g.mul_mat(later, rest)
        whole = g.concat(whole, g.reshape(scores, k * k * (depths - 1)), 0)
    return whole


def unpack(
    whole: NDArray[np.float32],
    depths: int,
    to_target: NDArray[np.int32] | None = None,
    is_chain: bool = False,
) -> CandidateBlock:
    """The candidates from a vector of `pack`.

    Args:
        to_target: The target's id of each of the draft's ids, if they differ.
        is_chain: Whether U_i already includes M_i after the best candidate of depth i - 1.
    """
    # 2 L K + K + (L - 1) K^2 numbers
    k = next(k for k in range(1, len(whole) + 1) if 2 * depths * k + k + (depths - 1) * k * k == len(whole))
    best = whole[: 2 * k * depths].reshape(depths, 2, k)
    ids = best[:, 0].astype(np.int32)
    pairs = np.zeros((depths, k, k), np.float32)
    pairs[0, 0] = whole[2 * k * depths :][:k]
    pairs[1:] = whole[2 * k * depths + k :].reshape(depths - 1, k, k)
    if is_chain:
        pairs[0] = 0
        pairs[1:] -= pairs[1:, :1].copy()
    return CandidateBlock(ids if to_target is None else to_target[ids], best[:, 1], pairs)
