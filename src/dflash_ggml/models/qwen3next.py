"""Target `qwen3next`: Qwen3-Next and Qwen3-Coder-Next. The graph of `qwen35moe`, whose files hold the delta nets otherwise.

A file has the value heads of a key head adjacent, the operations want them apart (head h reads key head h % ssm_k_heads):
rows of the matrices that make them are brought into that order as they are read, which is exact in every type. Columns cannot be,
in types whose blocks span several heads, so the graph brings the outputs back into the file's order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..files.gguf import GGUFFile
from ..ggml.weights import Source
from .feed_forward import scale_shape
from .qwen35moe import Qwen35Moe

# what a file has in place of two that the graph multiplies with: old ones the first too
_WHOLES = {"attn_qkv": "ssm_in", "attn_gate": "ssm_in", "ssm_beta": "ssm_ba", "ssm_alpha": "ssm_ba"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Next(Qwen35Moe):
    """Sizes of the trunk, as of `qwen35moe`."""

    grouped: ClassVar[bool] = True

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that the graph uses; a scale of two matrices is that of each."""
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
        return shapes | {
            name: scale_shape(shapes[f"{name.removesuffix('scale')}weight"]) for name in self.scales
        }

    def sources(self, file: GGUFFile) -> dict[str, Source]:
        """Name -> bytes of every tensor that the graph uses, value heads in its order."""
        found = {}
        for name, shape in self.tensors().items():
            home = _home(file, name)
            data, rows = file.data(home), self._rows(name, home)
            if rows is not None:
                data = data.reshape(file.tensors[home].shape[-1], -1)[rows].reshape(-1)
            found[name] = Source(file.tensors[home].type, shape, data)
        return found

    def _rows(self, name: str, home: str) -> NDArray[np.int64] | None:
        """Which rows of the tensor `home` make the tensor `name`; None: all, as they are."""
        s, h_k, ratio = self.ssm_state, self.ssm_k_heads, self.ssm_v_heads // self.ssm_k_heads
        key_heads, of_one = np.arange(h_k), np.arange(ratio)
        keys = np.arange(2 * h_k * s)
        within = np.arange(s)
        # [ratio, h_k]: where a value head is among all of a file's
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
    """The tensor of a file that holds what the graph knows as `name`."""
    block, part, end = [*name.rsplit(".", 2), "", ""][:3]
    whole = f"{block}.{_WHOLES[part]}.{end}" if part in _WHOLES else name
    return whole if whole in file.tensors or part in ("ssm_beta", "ssm_alpha") else name
