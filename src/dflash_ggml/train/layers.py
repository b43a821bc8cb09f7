"""Layers of a block draft in torch, named as in the published checkpoints. B rows, Q columns, T context, D width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipe import CONV_KERNEL, Shape, TargetSizes


class Norm(nn.Module):
    """RMS norm with its weight stored directly."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D], normed."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).type_as(x)


def linear(n_in: int, n_out: int, scale: float = 1.0) -> nn.Linear:
    """A matrix without bias, initialised with standard deviation scale / sqrt(n_in)."""
    made = nn.Linear(n_in, n_out, bias=False)
    nn.init.normal_(made.weight, std=scale * n_in**-0.5)
    return made


class Rotary:
    """Cosines and sines of positions [B, Q], for heads of `dim` with pairs half a head apart."""

    def __init__(self, positions: Tensor, dim: int, theta: float) -> None:
        frequency = theta ** (-torch.arange(0, dim, 2, device=positions.device).float() / dim)
        angle = positions.float()[:, None, :, None] * frequency  # [B, 1, Q, dim / 2]
        self.cos, self.sin = angle.cos(), angle.sin()

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, heads, Q, dim]."""
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1).type_as(x)


class Attention(nn.Module):
    """Columns attend to the context's vectors and to each other; the context has keys and values, but no queries."""

    def __init__(self, s: Shape, t: TargetSizes) -> None:
        super().__init__()
        self.shape = s
        self.q_proj = linear(t.n_embd, s.n_heads * s.head_dim)
        self.k_proj = linear(t.n_embd, s.n_kv_heads * s.head_dim)
        self.v_proj = linear(t.n_embd, s.n_kv_heads * s.head_dim)
        self.o_proj = linear(s.n_heads * s.head_dim, t.n_embd, (2 * s.n_layers) ** -0.5)
        self.q_norm, self.k_norm = Norm(s.head_dim, t.rms_eps), Norm(s.head_dim, t.rms_eps)

    def forward(self, x: Tensor, context: Tensor, at: Rotary, before: Rotary, mask: Tensor) -> Tensor:
        """x [B, Q, D], context [B, T, D], mask [B, 1, Q, T + Q], added to the scores."""
        s = self.shape

        def heads(y: Tensor, n: int) -> Tensor:
            return y.unflatten(-1, (n, s.head_dim)).transpose(1, 2)

        def keys(y: Tensor, rotary: Rotary) -> Tensor:
            return rotary(self.k_norm(heads(self.k_proj(y), s.n_kv_heads)))

        q = at(self.q_norm(heads(self.q_proj(x), s.n_heads)))
        k = torch.cat([keys(context, before), keys(x, at)], 2)
        v = heads(self.v_proj(torch.cat([context, x], 1)), s.n_kv_heads)
        repeat = s.n_heads // s.n_kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
        return self.o_proj(o.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, s: Shape, t: TargetSizes) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(t.n_embd, s.n_ff), linear(t.n_embd, s.n_ff)
        self.down_proj = linear(s.n_ff, t.n_embd, (2 * s.n_layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, Q, D] -> [B, Q, D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Convolution(nn.Module):
    """The causal convolution around a layer, with dynamic weights from the layer's input; initialised to the identity."""

    def __init__(self, s: Shape, t: TargetSizes) -> None:
        super().__init__()
        self.block, self.group = s.block_size, s.group
        base = torch.zeros(2, CONV_KERNEL, t.n_embd)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = linear(t.n_embd, 2 * CONV_KERNEL * (t.n_embd // s.group), 0.0)

    def weights(self, x: Tensor) -> Tensor:
        """Weights for each column of x [B, Q, D]: [B, Q, side, kernel, D]."""
        dynamic = self.kernel_projection(x).unflatten(-1, (2, CONV_KERNEL, -1))
        return self.base_kernel + dynamic.repeat_interleave(self.group, -1)

    def forward(self, x: Tensor, weights: Tensor, side: int) -> Tensor:
        """x [B, Q, D]; columns before a block are zero."""
        blocks = x.unflatten(1, (-1, self.block))
        total = torch.zeros_like(x, dtype=weights.dtype)
        for tap in range(CONV_KERNEL):
            shifted = F.pad(blocks, (0, 0, tap, 0))[:, :, : self.block] if tap else blocks
            total = total + weights[:, :, side, tap] * shifted.flatten(1, 2)
        return total.type_as(x)


class Layer(nn.Module):
    """Attention and feed-forward layer, each with convolutions around it for kinds with them."""

    def __init__(self, s: Shape, t: TargetSizes) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(t.n_embd, t.rms_eps) for _ in range(2))
        self.self_attn, self.mlp = Attention(s, t), FeedForward(s, t)
        if s.kind == "dflash2":
            self.attention_conv, self.mlp_conv = Convolution(s, t), Convolution(s, t)
        self.has_conv = s.kind == "dflash2"

    def forward(self, x: Tensor, context: Tensor, at: Rotary, before: Rotary, mask: Tensor) -> Tensor:
        """x [B, Q, D] -> [B, Q, D]; arguments as of `Attention.forward`."""
        y = self.input_layernorm(x)
        if not self.has_conv:
            x = x + self.self_attn(y, context, at, before, mask)
            return x + self.mlp(self.post_attention_layernorm(x))
        around = self.attention_conv.weights(y)
        y = self.self_attn(self.attention_conv(y, around, 0), context, at, before, mask)
        x = x + self.attention_conv(y, around, 1)
        y = self.post_attention_layernorm(x)
        around = self.mlp_conv.weights(y)
        return x + self.mlp_conv(self.mlp(self.mlp_conv(y, around, 0)), around, 1)
