"""Parameters of DFlash2 beyond DFlash: sizes, tensors, and the reader."""

from __future__ import annotations

from dataclasses import dataclass

from ...files.keys import KeyedFile
from ...models.checks import MAX_WIDTH, in_range, positive

SELECTOR = "selector_hidden.weight"
BEFORE, AFTER = "selector_predecessor.weight", "selector_successor.weight"
MAX_KERNEL, MAX_CANDIDATES, MAX_RANK = 64, 64, 1 << 16


@dataclass(frozen=True, slots=True)
class Selector:
    """Sizes of a DFlash2 draft's convolutions and pair scores.

    Attributes:
        kernel: Taps of a convolution.
        group: Channels that share a dynamic weight.
        rank: Rank of the pair scores.
        candidates: Candidates per depth.
        scale, cap: Factor and soft bound of the logits (0: none).
    """

    kernel: int
    group: int
    rank: int
    candidates: int
    scale: float = 1.0
    cap: float = 0.0

    def tensor_shapes(self, n_embd: int, n_layers: int, n_vocab: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of the tensors beyond those of DFlash."""
        shapes: dict[str, tuple[int, ...]] = {
            SELECTOR: (n_embd, self.rank),
            BEFORE: (self.rank, n_vocab),
            AFTER: (self.rank, n_vocab),
        }
        dynamic = 2 * self.kernel * (n_embd // self.group)
        for i in range(n_layers):
            for part in ("attn", "ffn"):
                shapes[f"blk.{i}.{part}_conv_base"] = (n_embd, self.kernel, 2)
                shapes[f"blk.{i}.{part}_conv_proj.weight"] = (n_embd, dynamic)
        return shapes

    def check(self, file: KeyedFile, n_embd: int) -> None:
        """Refuse groups that do not divide the width.

        Raises:
            ModelFileError: They do not.
        """
        if n_embd % self.group:
            raise file.error(
                f"convolution groups of {self.group} channels do not divide the hidden size {n_embd}"
            )


def read_selector(file: KeyedFile, prefix: str, scale_key: str, cap_key: str) -> Selector:
    """Read the sizes of a selector and of its convolutions.

    Args:
        file: The draft's open file.
        prefix: Start of the keys of the four sizes.
        scale_key, cap_key: Keys of the form of the logits.

    Raises:
        ModelFileError: A size is missing or out of range.
    """

    def count(key: str, high: int) -> int:
        return in_range(file.error, f"key {prefix + key!r}", file.require(prefix + key, int), 1, high)

    scale, cap = file.get(scale_key, float), file.get(cap_key, float)
    return Selector(
        kernel=count("conv_kernel_size", MAX_KERNEL),
        group=count("conv_group_size", MAX_WIDTH),
        rank=count("selector_rank", MAX_RANK),
        candidates=count("selector_top_k", MAX_CANDIDATES),
        scale=positive(file.error, f"key {scale_key!r}", scale) if scale else 1.0,
        cap=positive(file.error, f"key {cap_key!r}", cap) if cap else 0.0,
    )
