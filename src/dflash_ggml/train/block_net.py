"""Block drafts as torch networks: DFlash, DFlash2 with its selector, DSpark with its Markov head; the maths of `drafts/`.

B rows, n blocks a row of C columns, L drafted tokens a block, T context, D width, V tokens, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import labels_at, visible
from .layers import Layer, Norm, Rotary, linear
from .losses import biased_loss, candidate_loss, token_loss
from .recipe import Shape, TargetSizes


@dataclass(frozen=True, slots=True)
class Tables:
    """The target's embedding and output matrix [V, D], which a draft uses."""

    embedding: Tensor
    head: Tensor


class Selector(nn.Module):
    """Pair scores of adjacent candidates: (P[a] * (W h)) . S[b]. S is initialised to 0."""

    def __init__(self, s: Shape, t: TargetSizes) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(t.n_vocab, s.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(t.n_vocab, s.rank))
        self.hidden_projection = linear(t.n_embd, s.rank)

    def before(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """hidden [..., D], tokens [...] before them -> [..., R]."""
        return F.embedding(tokens, self.predecessor_codebook) * self.hidden_projection(hidden)


class MarkovHead(nn.Module):
    """A low-rank bias from the previous token, W2 W1[a], times a gate from hidden state and token. W2 is initialised to 0."""

    def __init__(self, s: Shape, t: TargetSizes) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(t.n_vocab, s.rank)
        self.markov_w2 = linear(s.rank, t.n_vocab, 0.0)
        self.is_gated = s.gated
        if s.gated:
            self.gate_proj = nn.Linear(t.n_embd + s.rank, s.rank)

    def before(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """As `Selector.before`."""
        row = self.markov_w1(tokens)
        if not self.is_gated:
            return row
        return row * self.gate_proj(torch.cat([hidden, row.type_as(hidden)], -1)).sigmoid()


class Confidence(nn.Module):
    """Probability that a drafted token is right, from hidden state and previous token; its gradient stops there."""

    def __init__(self, s: Shape, t: TargetSizes) -> None:
        super().__init__()
        self.proj = nn.Linear(t.n_embd + s.rank, 1)


class BlockNet(nn.Module):
    """The draft. `tables` are the target's and not among its parameters."""

    def __init__(self, s: Shape, t: TargetSizes) -> None:
        super().__init__()
        self.shape, self.sizes = s, t
        self.fc = linear(len(s.taps) * t.n_embd, t.n_embd)
        self.hidden_norm, self.norm = Norm(t.n_embd, t.rms_eps), Norm(t.n_embd, t.rms_eps)
        self.layers = nn.ModuleList(Layer(s, t) for _ in range(s.n_layers))
        if s.kind == "dflash2":
            self.candidate_selector = Selector(s, t)
        if s.kind == "dspark":
            self.markov_head, self.confidence_head = MarkovHead(s, t), Confidence(s, t)

    def forward(self, tables: Tables, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """The drafting rows [B, n, L, D]. ids [B, T], features [B, T, taps * D], anchors [B, n]."""
        s, device = self.shape, ids.device
        columns, keys = (
            torch.arange(n, device=device) for n in (anchors.shape[1] * s.block_size, ids.shape[1])
        )
        pending = ids.gather(1, anchors)
        noise = torch.full((*anchors.shape, s.block_size), s.mask_id, device=device)
        noise[..., 0] = pending
        positions = (anchors[..., None] + torch.arange(s.block_size, device=device)).flatten(1)
        at = Rotary(positions, s.head_dim, self.sizes.rope_theta)
        before = Rotary(keys.expand(len(ids), -1), s.head_dim, self.sizes.rope_theta)
        x = F.embedding(noise.flatten(1), tables.embedding)
        context = self.hidden_norm(self.fc(features))
        masks: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            window = s.window if i < s.n_layers - 1 else 0
            if window not in masks:
                causal = s.causal_windows and window > 0
                masks[window] = _added(
                    *visible(anchors, columns, keys, s.block_size, window, causal), x.dtype
                )
            x = layer(x, context, at, before, masks[window])
        return self.norm(x).unflatten(1, (-1, s.block_size))[:, :, s.first_row :]

    def loss(
        self, tables: Tables, ids: Tensor, features: Tensor, anchors: Tensor, stop: Tensor, by_depth: Tensor
    ) -> Tensor:
        """The mean loss of a batch; by_depth [L]: weights of the depths, of sum 1."""
        hidden = self(tables, ids, features, anchors)
        labels, before, counts = self.behind(ids, anchors, stop)
        weights = by_depth * counts
        weights = (weights / weights.sum().clamp_min(1e-6)).flatten()
        hidden, labels, before = hidden.flatten(0, 2), labels.flatten(), before.flatten()
        s = self.shape
        if s.kind == "dflash2":
            pairs = self.candidate_selector.before(hidden, before)
            after = self.candidate_selector.successor_codebook
            return candidate_loss(tables.head, after, s.candidates, hidden, pairs, labels, weights)
        if s.kind == "dspark":
            row = self.markov_head.before(hidden, before)
            after = self.markov_head.markov_w2.weight
            loss = biased_loss(tables.head, after, hidden, row, labels, weights)
            return loss + self._confidence_loss(tables, hidden, row, before, labels, weights)
        return token_loss(tables.head, hidden, labels, weights)

    def _confidence_loss(self, tables: Tables, hidden: Tensor, row: Tensor, before: Tensor, labels, weights):
        """Loss of the confidence head: whether the most likely token was right, on a part of the rows."""
        rows = slice(0, None, max(1, len(hidden) // 4096))
        with torch.no_grad():
            logits = F.linear(hidden[rows], tables.head) + F.linear(
                row[rows], self.markov_head.markov_w2.weight
            )
            right = (logits.argmax(-1) == labels[rows]).float()
            asked = torch.cat([hidden[rows], self.markov_head.markov_w1(before[rows]).type_as(hidden)], -1)
        logit = self.confidence_head.proj(asked)[:, 0].float()
        w = weights[rows]
        loss = F.binary_cross_entropy_with_logits(logit, right, reduction="none")
        return (loss * w).sum() / w.sum().clamp_min(1e-6)

    def behind(self, ids: Tensor, anchors: Tensor, stop: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens to draft [B, n, L], their predecessors, and a mask of those that count."""
        where = torch.arange(self.shape.depth, device=ids.device)
        positions, counts = labels_at(anchors, stop, self.shape.depth, ids.shape[1], where)
        flat = positions.flatten(1)
        labels = ids.gather(1, flat).view_as(positions)
        return labels, ids.gather(1, (flat - 1).clamp_min(0)).view_as(positions), counts

    @torch.no_grad()
    def chain(self, tables: Tables, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """The chain drafted by each block, [B, n, L]."""
        s = self.shape
        hidden = self(tables, ids, features, anchors)
        logits = F.linear(hidden, tables.head).float()
        if s.kind not in ("dflash2", "dspark"):
            return logits.argmax(-1)
        token, found = ids.gather(1, anchors), []
        for i in range(s.depth):
            h, row = hidden[:, :, i], logits[:, :, i]
            if s.kind == "dspark":
                bias = F.linear(self.markov_head.before(h, token), self.markov_head.markov_w2.weight)
                token = (row + bias.float()).argmax(-1)
            else:
                best = row.topk(s.candidates, -1)
                after = self.candidate_selector.successor_codebook[best.indices]
                pairs = torch.einsum(
                    "bnr,bnkr->bnk", self.candidate_selector.before(h, token), after.type_as(h)
                )
                pick = (best.values + pairs.float()).argmax(-1, keepdim=True)
                token = best.indices.gather(-1, pick)[..., 0]
            found.append(token)
        return torch.stack(found, -1)


def _added(context: Tensor, own: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask [B, 1, Q, T + Q]."""
    seen = torch.cat([context, own.expand(len(context), -1, -1)], -1)[:, None]
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))
