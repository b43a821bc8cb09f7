"""Target `qwen3next`: Qwen3-Next and Qwen3-Coder-Next. The graph of `qwen35moe`, with another layout of the delta nets in files.

In a file the value heads of a key head are adjacent; the operations need them apart (head h uses key head h % ssm_k_heads).
Rows of the matrices are reordered while loading, which is exact in every type. Columns cannot be reordered in types whose blocks
span several heads, so the graph restores the file's order in the outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..files.gguf import GGUFFile
from ..ggml.weights import Source
from .qwen35moe import Qwen35Moe
from .tensors import with_scales

# fused matrices of files, which the graph uses separately; the first only in old files
_WHOLES = {"attn_qkv": "ssm_in", "attn_gate": "ssm_in", "ssm_beta": "ssm_ba", "ssm_alpha": "ssm_ba"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Next(Qwen35Moe):
    """Sizes of the trunk, as of `qwen35moe`."""

    grouped: ClassVar[bool] = True

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that the graph uses; a fused matrix's scale applies to both parts."""
        parts: dict[str, list[str]] = {}
        for part, whole in _WHOLES.items():
            parts.setdefault(whole, []).append(part)
        scales = []
        for name in self.scales:
            matrix = name.removesuffix(".scale").rpartition(".")[2]
            scales += [name.replace(matrix, part) for part in parts.get(matrix, [matrix])]
        return Qwen35Moe.tensors(replace(self, scales=tuple(scales)))

    def stored(self, file: GGUFFile) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor in a file: `ssm_ba` for beta and alpha, in old ones `ssm_in` for q, k, v, z."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in Qwen35Moe.tensors(replace(self, scales=())).items():
            home = _home(file, name)
            rows = shapes[home][-1] if home in shapes else 0
            shapes[home] = (*shape[:-1], rows + shape[-1])
        return with_scales(shapes, self.scales)

    def sources(self, file: GGUFFile) -> dict[str, Source]:
        """Name -> bytes of every tensor that the graph uses, with value heads in the graph's order."""
        found = {}
        for name, shape in self.tensors().items():
            home = _home(file, name)
            data, rows = file.data(home), self._rows(name, home)
            if rows is not None:
                data = data.reshape(file.tensors[home].shape[-1], -1)[rows].reshape(-1)
            found[name] = Source(file.tensors[home].type, shape, data)
        return found

    def _rows(self, name: str, home: str) -> NDArray[np.int64] | None:
        """The rows of the file's tensor `home` that make up the tensor `name`; None: all, in order."""
        s, h_k, ratio = self.ssm_state, self.ssm_k_heads, self.ssm_v_heads // self.ssm_k_heads
        key_heads, of_one = np.arange(h_k), np.arange(ratio)
        keys = np.arange(2 * h_k * s)
        within = np.arange(s)
        # [ratio, h_k]: index of each value head in the file
        heads = key_heads * ratio + of_one[:, None]
        values = (heads[..., None] * s + within).reshape(-1)
        match name.split(".", 2)[-1]:
            case "ssm_dt.bias" | "ssm_a":
                return heads.reshape(-1)
            case "ssm_beta.weight":
                return (key_heads * 2 * ratio + of_one[:, None]).reshape(-1)
            case "ssm_alpha.weight":
                return (key_heads * 2 * ratio + ratio + of_one[:, None]).reshape(-1)
            case "ssm_conv1d.weight":
                return np.concatenate([keys, len(keys) + values])
            case "attn_qkv.weight" if home == name:
                return np.concatenate([keys, len(keys) + values])
            case "attn_qkv.weight":
                each = 2 * s * (1 + ratio)  # rows of a key head: q, k, v, z
                q = (key_heads[:, None] * each + within).reshape(-1)
                v = (key_heads * each + 2 * s + of_one[:, None] * s)[..., None] + within
                return np.concatenate([q, q + s, v.reshape(-1)])
            case "attn_gate.weight" if home != name:
                each = 2 * s * (1 + ratio)
                z = key_heads[:, None] * each + s * (2 + ratio) + np.arange(ratio * s)
                return z.reshape(-1)
        return None


def _home(file: GGUFFile, name: str) -> str:
    """The file's tensor that contains the graph's tensor `name`."""
    block, part, end = [*name.rsplit(".", 2), "", ""][:3]
    whole = f"{block}.{_WHOLES[part]}.{end}" if part in _WHOLES else name
    return whole if whole in file.tensors or part in ("ssm_beta", "ssm_alpha") else name
