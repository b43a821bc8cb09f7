"""Prediction head as a torch network: a copy of the target's last attention layer, fed with joined token and hidden state.

B rows of T tokens, D width, S drafted tokens. Trained on its own drafts: pass s takes the h that pass s - 1 gave out.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from .block_net import Tables
from .blocks import unrolled
from .losses import token_loss
from .recipe import Shape, TargetSizes


class HeadNet(nn.Module):
    """The head, its parameters below `mtp` as in the targets' own checkpoints.

    Args:
        s: The head's sizes.
        t: The target's.
        model: The target's decoder.

    Raises:
        ConfigError: The target has no layer to copy.
    """

    def __init__(self, s: Shape, t: TargetSizes, model: Any) -> None:
        super().__init__()
        self.shape, self.sizes = s, t
        full = [layer for layer in model.layers if hasattr(layer, "self_attn")]
        if not full or not hasattr(model, "rotary_emb"):
            raise ConfigError("this target has no attention layer of a form that a prediction head can copy")
        self.rotary = [model.rotary_emb]  # in a list, so that it is not a submodule
        self.mtp = nn.Module()
        self.mtp.fc = nn.Linear(2 * t.n_embd, t.n_embd, bias=False)
        nn.init.normal_(self.mtp.fc.weight, std=(2 * t.n_embd) ** -0.5)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.mtp.add_module(name, copy.deepcopy(model.norm).float())
        nn.init.zeros_(self.mtp.pre_fc_norm_embedding.weight)
        nn.init.zeros_(self.mtp.pre_fc_norm_hidden.weight)
        self.mtp.layers = nn.ModuleList([copy.deepcopy(full[-1]).float()])
        self.requires_grad_(True)

    def passes(self, tables: Tables, ids: Tensor, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Normed outputs [S, B, T, D]; row t of pass s drafts the token at t + 2 + s.

        ids [B, T]; hidden [B, T, D], the target's behind its output norm. Row t of pass s takes the token at t + 1 + s, the
        text's, or with `tokens` [B, T], of the first pass, and from then on those that it drafts itself.
        """
        s, m, (rows, n) = self.shape, self.mtp, ids.shape
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        h = hidden
        for step in range(s.n_steps):
            if tokens is None or not step:
                at = torch.roll(ids, -1 - step, 1)
            else:
                at = F.linear(outputs[-1], tables.head).argmax(-1)
            e = m.pre_fc_norm_embedding(F.embedding(at, tables.embedding))
            inputs.append(m.fc(torch.cat([e, m.pre_fc_norm_hidden(h).type_as(e)], -1)))
            columns = torch.arange(len(inputs) * n, device=ids.device)
            seen = unrolled(columns, n)
            x = torch.cat(inputs, 1)
            mask = torch.zeros_like(seen, dtype=x.dtype).masked_fill_(~seen, float("-inf"))
            positions = (columns % n + columns // n + 1).expand(rows, -1)
            sections = hasattr(self.rotary[0], "mrope_section")
            around = self.rotary[0](x, positions.expand(3, -1, -1) if sections else positions)
            y = m.layers[0](x, position_embeddings=around, attention_mask=mask.expand(rows, 1, -1, -1))
            y = y[0] if isinstance(y, tuple) else y
            h = m.norm(y[:, -n:])
            outputs.append(h)
        return torch.stack(outputs)

    def loss(
        self, tables: Tables, ids: Tensor, hidden: Tensor, anchors: Tensor, stop: Tensor, by_depth: Tensor
    ) -> Tensor:
        """As of a block draft; here every token after a row's first anchor counts."""
        outputs = self.passes(tables, ids, hidden)
        at = torch.arange(ids.shape[1], device=ids.device)
        labels = torch.stack([torch.roll(ids, -2 - s, 1) for s in range(len(outputs))])
        first = anchors[:, :1] - 1
        counts = torch.stack([(at >= first) & (at + 2 + s < stop[:, None]) for s in range(len(outputs))])
        weights = by_depth[:, None, None] * counts
        weights = weights / weights.sum().clamp_min(1e-6)
        return token_loss(tables.head, outputs.flatten(0, 2), labels.flatten(), weights.flatten())

    @torch.no_grad()
    def chain(self, tables: Tables, ids: Tensor, hidden: Tensor, anchors: Tensor) -> Tensor:
        """The tokens that it drafts after each anchor, [B, n, S]."""
        outputs = self.passes(tables, ids, hidden, tokens=ids)
        rows = (anchors - 1).clamp_min(0)
        drafted = F.linear(outputs, tables.head).argmax(-1)  # [S, B, T]
        return torch.stack([d.gather(1, rows) for d in drafted], -1)

    def behind(self, ids: Tensor, anchors: Tensor, stop: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As of a block draft."""
        where = anchors[..., None] + 1 + torch.arange(self.shape.n_steps, device=ids.device)
        labels = ids.gather(1, where.clamp_max(ids.shape[1] - 1).flatten(1)).view_as(where)
        return labels, labels, where < stop[:, None, None]
