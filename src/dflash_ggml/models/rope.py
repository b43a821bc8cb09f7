"""Rotary positions of a layer's heads: which of their dimensions turn, how fast, and how far positions are stretched."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..files.keys import KeyedFile
from ..ggml.graph import Graph, Yarn
from .checks import in_range


class Rope(NamedTuple):
    """n_rot: leading dimensions of a head that turn, in pairs (j, j + n_rot/2). theta: the base. yarn: see `Yarn`."""

    n_rot: int
    theta: float
    yarn: Yarn | None = None

    def turn(self, g: Graph, x, positions):
        """x [head_dim, heads, n] at `positions`, int32 [n]."""
        return g.rope(x, positions, self.n_rot, self.theta, self.yarn)


def read_yarn(file: KeyedFile, prefix: str) -> Yarn | None:
    """How a GGUF's keys below `prefix` (`ARCH.rope.scaling.`) stretch positions. Raises ModelFileError for a way other
    than YaRN."""
    kind, factor = file.get(f"{prefix}type", str), file.get(f"{prefix}factor", float)
    if kind in (None, "none"):
        return None
    if kind != "yarn":
        raise file.error(f"key {prefix + 'type'!r}: {kind!r} is not supported, only 'none' and 'yarn'")
    stretch = in_range(file.error, f"key {prefix + 'factor'!r}", factor or 1.0, 1.0, 1e6)
    attention = file.get(f"{prefix}yarn_attn_factor", float) or 1 + 0.1 * math.log(stretch)
    attention *= file.get(f"{prefix}attn_factor", float) or 1.0
    fast, slow = (file.get(f"{prefix}yarn_beta_{x}", float) for x in ("fast", "slow"))
    key = f"{prefix}original_context_length"
    n_ctx = in_range(file.error, f"key {key!r}", file.require(key, int), 1, 1 << 30)
    return Yarn(stretch, n_ctx, attention, fast or 32.0, slow or 1.0)
