"""The draft's hyper-parameters and weights in one form, whatever its dialect, and its fit to a target."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ...errors import ConfigError, ModelFileError
from ...files.gguf import BF16, F16, F32, GGUFFile
from ...files.safetensors import SafetensorsFile
from ...models.checks import check_tensors, in_range
from ...models.qwen35_params import TargetParams
from .dialects import read_dialect

Causality = Literal["auto", "causal", "bidirectional"]

MAX_BLOCK, MAX_TAPS = 256, 256


@dataclass(frozen=True, slots=True)
class DraftParams:
    """Sizes and attention rules of a plain DFlash draft."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    block_size: int  # rows of the noise block, the pending token's included
    mask_id: int
    taps: tuple[int, ...]  # target layers, from 0, whose output feeds the draft; ascending
    n_vocab: int | None  # where the file tells
    sliding_window: int | None  # tokens that a row of a window layer sees, itself included
    window_layers: tuple[bool, ...]  # [n_layers]
    declared_causal: bool | None  # what the file says about attention inside the block, if anything
    full_policy: Causality = "auto"  # overrides it on full-attention layers
    window_policy: Causality = "auto"  # overrides it on sliding-window layers

    @property
    def causal_full(self) -> bool:
        """Whether a row of the block sees only earlier rows, on full layers: as declared, else no."""
        return self.full_policy == "causal" or (self.full_policy == "auto" and self.declared_causal is True)

    @property
    def causal_window(self) -> bool:
        """The same on sliding-window layers: as declared, else yes, which is how most engines run them."""
        return self.window_policy == "causal" or (
            self.window_policy == "auto" and self.declared_causal is not False
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Normalised name -> shape (ggml order) of every tensor that the graph uses."""
        d, q, kv = self.n_embd, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (len(self.taps) * d, d),
            "enc.output_norm.weight": (d,),
            "output_norm.weight": (d,),
        }
        layer = {
            "attn_norm": (d,),
            "attn_q": (d, q),
            "attn_k": (d, kv),
            "attn_v": (d, kv),
            "attn_output": (q, d),
            "attn_q_norm": (self.head_dim,),
            "attn_k_norm": (self.head_dim,),
            "ffn_norm": (d,),
            "ffn_gate": (d, self.n_ff),
            "ffn_up": (d, self.n_ff),
            "ffn_down": (self.n_ff, d),
        }
        for i in range(self.n_layers):
            shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
        return shapes


class DraftFile:
    """An open draft of any dialect: `params`, and its tensors under the names that llama.cpp gives them."""

    def __init__(
        self,
        source: GGUFFile | SafetensorsFile,
        params: DraftParams,
        names: dict[str, str],
        interleaved: bool,
    ):
        """Made by `open`. `names`: normalised name -> name in `source`; `interleaved`: see `Dialect`."""
        self.path, self.params = source.path, params
        self._source, self._names, self._interleaved = source, names, interleaved

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        rope_theta: float | None = None,
        full_policy: Causality = "auto",
        window_policy: Causality = "auto",
    ) -> DraftFile:
        """Open a GGUF file, a .safetensors file or a folder with one, and check it.

        `rope_theta` replaces the file's value (some converters wrote a wrong one); the policies choose
        attention inside the block per kind of layer. Raises `ModelFileError` that names key or tensor,
        `ConfigError` for a bad option.
        """
        for policy in (full_policy, window_policy):
            if policy not in get_args(Causality):
                raise ConfigError(f"draft attention: {policy!r} is none of {', '.join(get_args(Causality))}")
        if rope_theta is not None and not 0 < rope_theta < float("inf"):
            raise ConfigError(f"draft rope base: {rope_theta} is not a positive number")
        path = Path(path)
        is_checkpoint = path.is_dir() or path.suffix == ".safetensors"
        source = SafetensorsFile(path) if is_checkpoint else GGUFFile(path)
        dialect = read_dialect(source)
        params = DraftParams(**dialect.fields, full_policy=full_policy, window_policy=window_policy)
        if rope_theta is not None:
            params = replace(params, rope_theta=rope_theta)
        _check_params(source, params)
        found = {name: source.tensors[old] for name, old in dialect.names.items()}
        check_tensors(source.error, found, params.tensor_shapes())
        for name, info in found.items():
            if len(info.shape) == 1 and info.type not in (F32, F16, BF16):
                raise source.error(f"tensor {name!r} is {info.type_name}, expected f32, f16 or bf16")
        return cls(source, params, dialect.names, dialect.interleaved)

    @property
    def names(self) -> tuple[str, ...]:
        """The normalised names of all tensors."""
        return tuple(self._names)

    def tensor(self, name: str) -> tuple[int, tuple[int, ...], np.ndarray]:
        """ggml type, shape (ggml order) and bytes (uint8 [nbytes]) of a tensor, by normalised name.

        Norms are always F32. Bytes are a view into the file unless they had to be converted or reordered.
        """
        info, data = self._source.tensors[self._names[name]], self._source.data(self._names[name])
        kind = info.type
        if len(info.shape) == 1 and kind != F32:
            kind, data = F32, _as_f32(data, kind)
        if self._interleaved and re.search(r"attn_[qk](_norm)?\.weight$", name):
            data = _half_split(data, info.shape[-1], self.params.head_dim)
        return kind, info.shape, data

    def close(self) -> None:
        """Let go of the file; arrays that `tensor` gave out stay valid."""
        self._source.close()


def check_pair(target: TargetParams, draft: DraftParams, target_name: str, draft_name: str) -> list[str]:
    """Warnings for a pair that may work badly; `ModelFileError`, naming both files, if it cannot work."""

    def fail(what: str) -> ModelFileError:
        return ModelFileError(f"{draft_name} does not fit {target_name}: {what}; use the draft made for it")

    if draft.n_embd != target.n_embd:
        raise fail(f"the draft's hidden size is {draft.n_embd}, the target's {target.n_embd}")
    if draft.n_vocab not in (None, target.n_vocab):
        raise fail(f"the draft's vocabulary has {draft.n_vocab} tokens, the target's {target.n_vocab}")
    if draft.taps[-1] >= target.n_layers:
        raise fail(f"the draft taps layer {draft.taps[-1]}, the target's last one is {target.n_layers - 1}")
    if draft.mask_id >= target.n_vocab:
        raise fail(f"the mask token id {draft.mask_id} is outside the target's {target.n_vocab} tokens")
    if math.isclose(draft.rope_theta, target.rope_theta, rel_tol=1e-6):  # GGUF rounds it to f32
        return []
    bases = f"{draft_name} has rope base {draft.rope_theta:g}, {target_name} has {target.rope_theta:g}"
    return [
        f"{bases}; some converters wrote a wrong one: if acceptance is low, load the draft with the target's"
    ]


def _check_params(source: GGUFFile | SafetensorsFile, p: DraftParams) -> None:
    """What no single key shows: ranges of the fields, and those that must fit each other."""
    taps, error = p.taps, source.error
    in_range(error, "block size", p.block_size, 2, MAX_BLOCK)
    in_range(error, "mask token id", p.mask_id, 0, (1 << 31) - 1)
    in_range(error, "number of tapped layers", len(taps), 1, MAX_TAPS)
    if taps[0] < 0 or any(a >= b for a, b in pairwise(taps)):
        raise error(f"tapped layers {list(taps)} should ascend from 0 or more")
    if p.n_heads % p.n_kv_heads or p.head_dim % 2:
        raise error(f"{p.n_heads} heads of {p.head_dim} do not divide over {p.n_kv_heads} key/value heads")
    if p.sliding_window is not None:
        in_range(error, "sliding window", p.sliding_window, 1, 1 << 30)
    if len(p.window_layers) != p.n_layers:
        raise error(
            f"the pattern of sliding windows has {len(p.window_layers)} entries for {p.n_layers} layers"
        )


def _as_f32(data: np.ndarray, kind: int) -> np.ndarray:
    """Bytes of F16 or BF16 numbers as bytes of F32."""
    if kind == BF16:
        return (data.view("<u2").astype("<u4") << 16).view(np.uint8)
    return data.view("<f2").astype("<f4").view(np.uint8)


def _half_split(data: np.ndarray, n_rows: int, head_dim: int) -> np.ndarray:
    """Rows of interleaved rotary pairs (0 1)(2 3)... reordered per head: first members, then second ones."""
    rows = data.reshape(n_rows // head_dim, head_dim // 2, 2, data.size // n_rows)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
