"""Losses over a vocabulary, in pieces if it is large. n rows, D width, V tokens, R rank, K candidates."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PIECE = 1 << 28  # logits in memory at once


def in_pieces(part: Callable[..., Tensor], n_vocab: int, *rows: Tensor) -> Tensor:
    """The sum of `part` over pieces of `rows`, each [n, ...]; a piece's logits are recomputed for the gradient."""
    n = len(rows[0])
    size = max(1, PIECE // n_vocab)
    if n <= size:
        return part(*rows)
    total = torch.zeros((), device=rows[0].device)
    for at in range(0, n, size):
        pieces = (r[at : at + size] for r in rows)
        total = total + checkpoint(part, *pieces, use_reentrant=False, preserve_rng_state=False)
    return total


def token_loss(head: Tensor, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy of hidden [n, D] under head [V, D], weighted and summed."""

    def part(h: Tensor, label: Tensor, w: Tensor) -> Tensor:
        return (F.cross_entropy(F.linear(h, head).float(), label, reduction="none") * w).sum()

    return in_pieces(part, len(head), hidden, labels, weights)


def biased_loss(
    head: Tensor, after: Tensor, hidden: Tensor, before: Tensor, labels: Tensor, weights: Tensor
) -> Tensor:
    """`token_loss` with a low-rank bias: before [n, R] under after [V, R]."""

    def part(h: Tensor, b: Tensor, label: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(h, head).float() + F.linear(b, after).float()
        return (F.cross_entropy(logits, label, reduction="none") * w).sum()

    return in_pieces(part, len(head), hidden, before, labels, weights)


def candidate_loss(
    head: Tensor, after: Tensor, k: int, hidden: Tensor, before: Tensor, labels: Tensor, weights: Tensor
) -> Tensor:
    """Cross entropy over all tokens, and over the K best with pair scores before [n, R] . after [V, R] added.

    The right token is always one of the candidates, so that its pairs are learnt too.
    """

    def part(h: Tensor, b: Tensor, label: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(h, head).float()
        plain = F.cross_entropy(logits, label, reduction="none")
        best = logits.detach().topk(k, -1).indices
        ids = torch.cat([label[:, None], best], 1)
        scores = logits.gather(1, ids) + torch.einsum("nr,nkr->nk", b, F.embedding(ids, after)).float()
        again = torch.cat([torch.zeros_like(best[:, :1], dtype=torch.bool), best == label[:, None]], 1)
        scores = scores.masked_fill(again, float("-inf"))
        return ((plain + F.cross_entropy(scores, torch.zeros_like(label), reduction="none")) * w).sum()

    return in_pieces(part, len(head), hidden, before, labels, weights)
