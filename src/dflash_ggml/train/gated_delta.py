"""Chunked gated delta rule, for targets whose transformers class loops over tokens in Python.

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
        query, key = _unit(query), _unit(key)
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


def one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same token by token, for generation; the state [B, H', k, v] is changed in place."""
    dtype, repeat = query.dtype, value.shape[2] // key.shape[2]
    if use_qk_l2norm_in_kernel:
        query, key = _unit(query), _unit(key)
    query, key = (x.float().repeat_interleave(repeat, 2) for x in (query, key))
    query, decay, value = query * key.shape[-1] ** -0.5, g.float().exp(), value.float()
    rows, n, heads, width = value.shape
    state = initial_state
    if state is None or state.dtype != torch.float32:
        state = torch.zeros(rows, heads, key.shape[-1], width, device=query.device)
        if initial_state is not None:
            state.copy_(initial_state)
    flat, out = state.flatten(0, 1), []
    for t in range(n):
        k, q = (x[:, t].flatten(0, 1)[:, None] for x in (key, query))  # [B * H', 1, k]
        flat.mul_(decay[:, t].reshape(-1, 1, 1))
        u = (value[:, t].flatten(0, 1)[:, None] - k @ flat) * beta[:, t].float().reshape(-1, 1, 1)
        flat.baddbmm_(k.mT, u)
        out.append((q @ flat).view(rows, heads, width))
    return torch.stack(out, 1).to(dtype), state if output_final_state else None


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


_OURS = {"chunk_gated_delta_rule": chunked, "recurrent_gated_delta_rule": one_by_one}


def use_chunked_delta_nets(model: torch.nn.Module) -> int:
    """Let delta-net layers use the functions above instead of transformers' loops. Returns the number of layers changed."""
    layers = [layer for layer in model.modules() if "GatedDeltaNet" in type(layer).__name__]
    found = 0
    for layer in layers:
        module = sys.modules[type(layer).__module__]
        for name, ours in _OURS.items():
            slow = getattr(module, f"torch_{name}", None)
            if slow is None:
                continue
            if not hasattr(layer, name):  # calls the module's function, which may be a kernel from the hub
                setattr(module, f"torch_{name}", ours)
                found += name.startswith("chunk")
            elif getattr(layer, name) in (slow, ours):
                setattr(layer, name, ours)
                found += name.startswith("chunk")
    return found
