"""An open draft file of any dialect: parameters, and tensors under llama.cpp's names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np

from ...errors import ConfigError
from ...files.gguf import BF16, F16, F32, GGUFFile
from ...files.safetensors import SafetensorsFile
from ...models.checks import check_tensors
from .dialects import instead, read_dialect, title
from .params import MAX_WINDOW, OWN_TABLES, Causality, DraftParams, check_params, with_window


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
        self.path, self.params, self.title = source.path, params, title(source)
        self._source, self._names, self._interleaved = source, names, interleaved

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        rope_theta: float | None = None,
        window: int | None = None,
        full_policy: Causality = "auto",
        window_policy: Causality = "auto",
    ) -> DraftFile:
        """Open a GGUF file, a .safetensors file or a folder with one, and check it.

        `rope_theta` replaces the file's value (some converters wrote a wrong one). `window`, in tokens, replaces that of the
        window layers, or, in a file that tells of none, makes all layers but the last such; 0: no windows. The policies
        choose attention inside the block per kind of layer. Raises `ModelFileError` that names key or tensor,
        `ConfigError` for a bad option.
        """
        for policy in (full_policy, window_policy):
            if policy not in get_args(Causality):
                raise ConfigError(f"draft attention: {policy!r} is none of {', '.join(get_args(Causality))}")
        if rope_theta is not None and not 0 < rope_theta < float("inf"):
            raise ConfigError(f"draft rope base: {rope_theta} is not a positive number")
        if window is not None and not 0 <= window <= MAX_WINDOW:
            raise ConfigError(f"draft window: {window} is outside 0..{MAX_WINDOW}")
        path = Path(path)
        is_checkpoint = path.is_dir() or path.suffix == ".safetensors"
        source = SafetensorsFile(path) if is_checkpoint else GGUFFile(path)
        dialect = read_dialect(source)
        params = DraftParams(**dialect.fields, full_policy=full_policy, window_policy=window_policy)
        if rope_theta is not None:
            params = replace(params, rope_theta=rope_theta)
        if window is not None:
            params = with_window(params, window)
        check_params(source, params)
        found = {name: source.tensors[old] for name, old in dialect.names.items()}
        if own := tuple(name for name in OWN_TABLES if name in found):
            params = replace(params, own=own, n_vocab=params.n_vocab or found[own[0]].shape[-1])
        shapes = params.tensor_shapes()
        check_tensors(source.error, found, shapes, ignored=lambda name: True)
        if unknown := next((name for name in found if name not in shapes), None):
            raise source.error(
                f"tensor {unknown!r} is unknown: this variant of a draft is not supported; {instead(source)}"
            )
        for name, info in found.items():
            if len(info.shape) == 1 and info.type not in (F32, F16, BF16):
                raise source.error(f"tensor {name!r} is {info.type_name}, expected f32, f16 or bf16")
        return cls(source, params, dialect.names, dialect.interleaved)

    @property
    def names(self) -> tuple[str, ...]:
        """The normalised names of all tensors."""
        return tuple(self._names)

    def kind(self, name: str) -> tuple[int, tuple[int, ...]]:
        """ggml type in the file and shape of a tensor, by normalised name."""
        info = self._source.tensors[self._names[name]]
        return info.type, info.shape

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


def _as_f32(data: np.ndarray, kind: int) -> np.ndarray:
    """Bytes of F16 or BF16 numbers as bytes of F32."""
    if kind == BF16:
        return (data.view("<u2").astype("<u4") << 16).view(np.uint8)
    return data.view("<f2").astype("<f4").view(np.uint8)


def _half_split(data: np.ndarray, n_rows: int, head_dim: int) -> np.ndarray:
    """Rows of interleaved rotary pairs (0 1)(2 3)... reordered per head: first members, then second ones."""
    rows = data.reshape(n_rows // head_dim, head_dim // 2, 2, data.size // n_rows)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
