"""The gated delta rule over chunks, for targets whose transformers class would loop over the tokens of a chunk in Python.

With S the state before a chunk, G_i the decay up to token i and D_ij = G_i / G_j: the values that are written, u, solve
(I + tril(beta K K^T * D, -1)) u = beta (v - G K S), a triangular system per chunk (arXiv 2412.06464).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
_NAME = "torch_chunk_gated_delta_rule"


def chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = CHUNK,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Same arguments and results as transformers' function: query, key [B, T, H, k], value [B, T, H', v], g, beta [B, T, H']."""
    dtype, (rows, n, heads, width) = query.dtype, value.shape
    repeat = heads // key.shape[2]
    if use_qk_l2norm_in_kernel:
        query, key = (
            x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (query, key)
        )
    query, key = query.repeat_interleave(repeat, 2), key.repeat_interleave(repeat, 2)
    pad = -n % CHUNK

    def split(x: Tensor) -> Tensor:
        """[B, T, H, ...] -> [B, H, chunks, CHUNK, ...], zeros behind the end."""
        x = x.float().transpose(1, 2)
        x = F.pad(x, (0, 0, 0, pad)) if x.ndim == 4 else F.pad(x, (0, pad))
        return x.unflatten(2, (-1, CHUNK))

    q, k, v, decay, b = (split(x) for x in (query * key.shape[-1] ** -0.5, key, value, g, beta))
    total = decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    k_beta = k * b[..., None]
    system = (k_beta @ k.mT * between).tril(-1) + torch.eye(CHUNK, device=q.device)
    right = torch.cat([v * b[..., None], k_beta * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, from_state = solved.split([width, k.shape[-1]], -1)
    scores = q @ k.mT * between
    q = q * total.exp()[..., None]
    last = total[..., -1]
    k = k * (last[..., None] - total).exp()[..., None]
    state = torch.zeros(rows, heads, k.shape[-1], width, device=q.device)
    if initial_state is not None:
        state = initial_state.float()
    out = []
    for i in range(q.shape[2]):
        u = written[:, :, i] - from_state[:, :, i] @ state
        out.append(q[:, :, i] @ state + scores[:, :, i] @ u)
        state = state * last[:, :, i].exp()[..., None, None] + k[:, :, i].mT @ u
    result = torch.cat(out, 2)[:, :, :n].transpose(1, 2).to(dtype)
    return result.contiguous(), state if output_final_state else None


def hasten(model: torch.nn.Module) -> int:
    """Let a model's delta-net layers use `chunked` where they would use transformers' loop. Returns how many there are."""
    found = 0
    for layer in model.modules():
        module = sys.modules.get(type(layer).__module__)
        slow = getattr(module, _NAME, None)
        if "GatedDeltaNet" not in type(layer).__name__ or slow is None:
            continue
        found += 1
        own = getattr(layer, "chunk_gated_delta_rule", None)
        if own is not None and own is slow:
            layer.chunk_gated_delta_rule = chunked
    for name in {
        type(layer).__module__ for layer in model.modules() if "GatedDeltaNet" in type(layer).__name__
    }:
        if "chunk_gated_delta_rule" not in vars(
            sys.modules[name]
        ):  # where it is not fla's function by that name
            setattr(sys.modules[name], _NAME, chunked)
    return found
