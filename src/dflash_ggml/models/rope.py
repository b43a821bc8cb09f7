"""Rotary position embedding of a layer: rotated dimensions, frequencies, and scaling of positions."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..files.keys import KeyedFile
from ..ggml.bindings import Tensor
from ..ggml.graph import Graph
from ..ggml.operations import Yarn
from .checks import in_range

FACTORS = "rope_freqs.weight"  # divisors of the pairs' angles, in files of Llama 3.1 and later and of Gemma 4


class Rope(NamedTuple):
    """Parameters of rotary embedding.

    Attributes:
        n_rot: Rotated leading dimensions of a head, in pairs (j, j + n_rot/2).
        theta: The base.
        yarn: See `Yarn`.
        stretch, adjacent, factors: See `Graph.rope`.
    """

    n_rot: int
    theta: float
    yarn: Yarn | None = None
    stretch: float = 1.0
    adjacent: bool = False
    factors: Tensor | None = None

    def rotate(self, g: Graph, x: Tensor, positions: Tensor) -> Tensor:
        """x [head_dim, heads, n] at `positions`, int32 [n]."""
        return g.rope(
            x,
            positions,
            self.n_rot,
            self.theta,
            self.yarn,
            stretch=self.stretch,
            adjacent=self.adjacent,
            factors=self.factors,
        )


class Scaling(NamedTuple):
    """A file's scaling of positions: kind ("none", "linear", "yarn", ...), factor, and the keys of both."""

    kind: str
    factor: float
    kind_key: str
    factor_key: str

    def refusal(self, supported: str) -> str:
        """Error message for a kind that is not one of `supported`."""
        found = (
            "without a type it is 'linear', which" if self.kind_key == self.factor_key else f"{self.kind!r}"
        )
        return f"key {self.kind_key!r}: {found} is not supported, only {supported}"


def read_scaling(file: KeyedFile, prefix: str) -> Scaling:
    """Read the keys below `prefix` (`ARCH.rope.scaling.`). As in llama.cpp, a factor without a type is linear, and 0 is none."""
    key = file.first_of(f"{prefix}factor", f"{prefix.removesuffix('scaling.')}scale_linear")
    kind, factor = file.get(f"{prefix}type", str), file.get(key, float) or 1.0
    if kind is None:
        return Scaling("none" if factor == 1 else "linear", factor, key, key)
    return Scaling(kind, factor, f"{prefix}type", key)


def read_stretch(file: KeyedFile, prefix: str) -> tuple[float, Yarn | None]:
    """Scaling of positions by a GGUF's keys below `prefix`: the linear factor (1 for none), or YaRN.

    Raises:
        ModelFileError: The kind is another one.
    """
    scaling = read_scaling(file, prefix)
    if scaling.kind == "linear":
        return in_range(file.error, f"key {scaling.factor_key!r}", scaling.factor, 1e-3, 1e6), None
    if scaling.kind not in ("none", "yarn"):
        raise file.error(scaling.refusal("'none', 'linear' and 'yarn'"))
    return 1.0, read_yarn(file, prefix)


def read_yarn(file: KeyedFile, prefix: str) -> Yarn | None:
    """YaRN scaling by a GGUF's keys below `prefix` (`ARCH.rope.scaling.`), None without scaling.

    Raises:
        ModelFileError: The kind is not YaRN.
    """
    scaling = read_scaling(file, prefix)
    if scaling.kind == "none":
        return None
    if scaling.kind != "yarn":
        raise file.error(scaling.refusal("'none' and 'yarn'"))
    stretch = in_range(file.error, f"key {scaling.factor_key!r}", scaling.factor, 1.0, 1e6)
    attention = file.get(f"{prefix}yarn_attn_factor", float) or 1 + 0.1 * math.log(stretch)
    attention *= file.get(f"{prefix}attn_factor", float) or 1.0
    fast, slow = (file.get(f"{prefix}yarn_beta_{x}", float) for x in ("fast", "slow"))
    key, trained = f"{prefix}original_context_length", f"{prefix.removesuffix('rope.scaling.')}context_length"
    if not file.get(key, int) and trained in file.metadata:
        key = trained
    n_ctx = in_range(file.error, f"key {key!r}", file.require(key, int), 1, 1 << 30)
    return Yarn(stretch, n_ctx, attention, fast or 32.0, slow or 1.0)
