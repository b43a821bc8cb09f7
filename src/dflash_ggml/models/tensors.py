"""Names and shapes, in ggml's order, of tensors shared by all targets."""

from __future__ import annotations

from collections.abc import Iterable


def outer_tensors(d: int, n_vocab: int, tied_head: bool) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a target's tensors outside its blocks.

    Args:
        tied_head: Whether the embedding is the output matrix.
    """
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (d, n_vocab), "output_norm.weight": (d,)}
    return shapes if tied_head else shapes | {"output.weight": (d, n_vocab)}


def attention_tensors(
    d: int, heads: int, kv_heads: int, head_dim: int, gated: bool = False, normed: bool = True
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of an attention layer's tensors for a width of d.

    Args:
        gated: Whether a head's query rows are followed by as many for its gate.
        normed: Whether queries and keys are normalised.
    """
    q, kv = heads * head_dim, kv_heads * head_dim
    norms = {f"attn_{x}_norm.weight": (head_dim,) for x in "qk"} if normed else {}
    return {
        "attn_q.weight": (d, 2 * q if gated else q),
        "attn_k.weight": (d, kv),
        "attn_v.weight": (d, kv),
        "attn_output.weight": (q, d),
        **norms,
    }


def with_scales(shapes: dict[str, tuple[int, ...]], scales: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """`shapes` and those of `scales`, names of the `.scale` of a matrix or of stacked matrices (one each)."""
    matrices = {name: shapes.get(f"{name.removesuffix('scale')}weight", ()) for name in scales}
    return shapes | {name: (s[2],) if len(s) == 3 else (1,) for name, s in matrices.items()}
