"""The head for multi-token prediction (`nextn`) of a target's file: sizes, tensors, and reader.

It is an attention block after the trunk, whose input joins a token's embedding with the hidden state before it. Its graphs are
in the draft (`drafts/mtp`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..files.gguf import GGUFFile
from .experts import FeedForward
from .reading import check_file
from .tensors import attention_tensors, with_scales


@dataclass(frozen=True, slots=True)
class Head:
    """Sizes of the head's block, equal to those of the trunk's attention layers, and its optional tensors.

    Attributes:
        block: Its number in the file, that of the first block after the trunk.
        ffn: Its feed-forward layer.
        n_rot: Rotated leading dimensions of a head.
        joined: Whether gate and up of its feed-forward layer are one matrix.
        optional: Those of NORM, EMBEDDING and HEAD that it has; the target's replace the others.
        scales: Its `.scale` tensors of matrices (NVFP4).
    """

    block: int  # its number in the file
    n_embd: int
    ffn: FeedForward
    n_vocab: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_rot: int
    rope_theta: float
    rms_eps: float
    joined: bool = False
    optional: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """Prefix of its tensors' names."""
        return f"blk.{self.block}."

    def own(self, name: str, shared: str) -> str:
        """The name of an optional tensor of the head, or `shared`, the target's tensor that replaces it."""
        return self.prefix + name if name in self.optional else shared

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of every tensor of the head's own."""
        d = self.n_embd
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (d,),
            "post_attention_norm.weight": (d,),
            **attention_tensors(d, self.n_heads, self.n_kv_heads, self.head_dim, gated=True),
            **self.ffn.tensors(self.joined),
            "nextn.eh_proj.weight": (2 * d, d),
            "nextn.enorm.weight": (d,),
            "nextn.hnorm.weight": (d,),
        }
        more = {NORM: (d,), EMBEDDING: (d, self.n_vocab), HEAD: (d, self.n_vocab)}
        shapes |= {name: more[name] for name in self.optional}
        return {self.prefix + name: shape for name, shape in with_scales(shapes, self.scales).items()}


NORM = "nextn.shared_head_norm.weight"
EMBEDDING, HEAD = "nextn.embed_tokens.weight", "nextn.shared_head_head.weight"


def read_head(file: GGUFFile, head: Head) -> Head | None:
    """Read and check the head of an open file.

    Args:
        file: The target's open file.
        head: The sizes of the trunk's attention layers, without optional tensors.

    Returns:
        `head` with the optional tensors that the file has; None if it has no head, or several (one for each further token).

    Raises:
        ModelFileError: A tensor is missing, or of another shape or type; it names it.
    """
    if file.get(f"{file.arch}.nextn_predict_layers", int) != 1:
        return None
    prefix = head.prefix
    found = [name.removeprefix(prefix) for name in file.tensors if name.startswith(prefix)]
    if not found:  # a file made without the head may still have the key
        return None
    head = replace(
        head,
        joined="ffn_gate_up_exps.weight" in found,
        optional=tuple(name for name in (NORM, EMBEDDING, HEAD) if name in found),
        scales=tuple(name for name in found if name.endswith(".scale")),
    )
    check_file(file, head.tensors(), lambda name: not name.startswith(prefix))
    return head
