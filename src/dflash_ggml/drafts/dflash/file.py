"""An open draft file of any dialect: parameters, and tensors under llama.cpp's names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import ConfigError, ModelFileError
from ...files.gguf import GGUFFile
from ...files.safetensors import SafetensorsFile
from ...files.tensor_info import BF16, F16, F32, TensorInfo, ggml_types, tensor_nbytes
from ...files.torch_vector import read_torch_vector
from ...ggml.device import I32
from ...ggml.retype import floats
from ...models.checks import check_tensors
from ..dflash2 import BEFORE as SELECTOR_BEFORE
from ..dspark import BEFORE, CONFIDENCE, CONFIDENCE_BIAS, GATE, GATE_HIDDEN, GATE_TOKEN, TO_TARGET
from .dialects import instead, read_dialect, title
from .params import (
    MASK,
    MAX_WINDOW,
    OUTPUT_GATE,
    OWN_TABLES,
    TAP_NORMS,
    DraftParams,
    check_params,
    with_window,
)

I64 = 27  # ggml's type number


class DraftFile:
    """An open draft of any dialect: `params`, and its tensors under the names that llama.cpp gives them."""

    def __init__(
        self,
        source: GGUFFile | SafetensorsFile,
        params: DraftParams,
        names: dict[str, str],
        interleaved: bool,
        is_offset: bool = False,
        mask: np.ndarray | None = None,
    ):
        """Use `open` instead.

        Args:
            source: The open file.
            params: Its parameters.
            names: Normalised name -> name in `source`.
            interleaved, is_offset: See `Dialect`.
            mask: The mask token's separate vector, float32 [D].

        Raises:
            ModelFileError: The table of a reduced vocabulary is bad.
        """
        self.path, self.params, self.title = source.path, params, title(source)
        self._source, self._names, self._interleaved, self._mask = source, names, interleaved, mask
        self.to_target = None if params.n_draft_vocab is None else self._target_ids(is_offset)

    @classmethod
    def open(cls, path: str | Path, *, window: int | None = None) -> DraftFile:
        """Open a GGUF file, a .safetensors file or a folder with one, and check it.

        Args:
            window: Tokens, replaces the file's window, or, if the file has none, applies to all layers but the last; 0: no
                windows.

        Raises:
            ModelFileError: A key or tensor is missing or wrong; it names it.
            ConfigError: An option is bad.
        """
        if window is not None and not 0 <= window <= MAX_WINDOW:
            raise ConfigError(f"draft window: {window} is outside 0..{MAX_WINDOW}")
        path = Path(path)
        is_checkpoint = path.is_dir() or path.suffix == ".safetensors"
        source = SafetensorsFile(path) if is_checkpoint else GGUFFile(path)
        dialect = read_dialect(source)
        folder = path if path.is_dir() else path.parent
        mask = _mask_vector(folder, dialect.fields) if is_checkpoint else None
        params = DraftParams(**dialect.fields, has_mask_vector=mask is not None)
        if window is not None:
            params = with_window(params, window)
        check_params(source, params)
        found = {name: source.tensors[old] for name, old in dialect.names.items()}
        own = tuple(name for name in OWN_TABLES if name in found)
        params = replace(params, own=own, normed_taps=TAP_NORMS in found)
        params = replace(params, gated=f"blk.0.{OUTPUT_GATE}.weight" in found)
        if params.normed_taps and params.declared_causal is None:
            params = replace(params, declared_causal=True)  # as all of them are trained
        whole = (OWN_TABLES[0], SELECTOR_BEFORE, BEFORE, OWN_TABLES[1])  # with a row per token of the target
        if params.n_vocab is None and (tables := [t for t in whole if t in found]):
            params = replace(params, n_vocab=found[tables[0]].shape[-1])
        if mask is not None:
            found[MASK] = TensorInfo(MASK, F32, (len(mask),), 0, mask.nbytes)
        _check_heads(source, params, found)
        shapes = params.tensor_shapes()
        check_tensors(source.error, found, shapes, ignored=lambda name: True)
        known = {*shapes, *(_UNUSED if params.markov else ()), *([TO_TARGET] if params.n_draft_vocab else ())}
        if unknown := next((name for name in found if name not in known), None):
            raise source.error(
                f"tensor {unknown!r} is unknown: this variant of a draft is not supported; {instead(source)}"
            )
        for name, info in found.items():
            if name in shapes and _is_small(name, info.shape) and info.type not in (F32, F16, BF16):
                raise source.error(f"tensor {name!r} is {info.type_name}, expected f32, f16 or bf16")
        names = {name: old for name, old in dialect.names.items() if name in (*shapes, *_UNUSED)}
        if params.n_draft_vocab is not None:
            names[TO_TARGET] = dialect.names[TO_TARGET]
        return cls(source, params, names, dialect.interleaved, dialect.is_offset, mask)

    @property
    def names(self) -> tuple[str, ...]:
        """Normalised names of all tensors that the graph uses."""
        names = [name for name in self._names if name not in (GATE, *_UNUSED)]
        halves = (GATE_HIDDEN, GATE_TOKEN) if GATE in self._names else ()
        return (*names, *halves, *((MASK,) if self._mask is not None else ()))

    @property
    def published(self) -> tuple[str, ...]:
        """Normalised names of the file's own tensors, including those that the graph does not use."""
        return tuple(self._names)

    def kind(self, name: str) -> tuple[int, tuple[int, ...]]:
        """ggml type in the file and shape of a tensor, by normalised name."""
        if name in (GATE_HIDDEN, GATE_TOKEN):
            kind, (_, rank) = self.kind(GATE)
            return kind, (self.params.n_embd if name == GATE_HIDDEN else rank, rank)
        if name == MASK and self._mask is not None:
            return F32, (len(self._mask), 1)
        info = self._source.tensors[self._names[name]]
        if name == TO_TARGET:
            return I32, (1, info.shape[0])
        return info.type, (*info.shape, 1) if name == MASK else info.shape

    def tensor(self, name: str) -> tuple[int, tuple[int, ...], np.ndarray]:
        """ggml type, shape (ggml order) and bytes (uint8 [nbytes]) of a tensor, by normalised name.

        Norms are always F32. Bytes are a view into the file unless they had to be converted or reordered.
        """
        kind, shape = self.kind(name)
        if name in (GATE_HIDDEN, GATE_TOKEN):
            return kind, shape, self._gate_half(name, kind)
        if name == TO_TARGET and self.to_target is not None:
            return kind, shape, self.to_target.view(np.uint8)
        if name == MASK and self._mask is not None:
            return kind, shape, self._mask.view(np.uint8)
        data = self._source.data(self._names[name])
        if _is_small(name, self._source.tensors[self._names[name]].shape) and kind != F32:
            kind, data = F32, floats(data, kind).view(np.uint8)
        if self._interleaved and re.search(r"attn_[qk](_norm)?\.weight$", name):
            data = _half_split(data, shape[-1], self.params.head_dim)
        return kind, shape, data

    def _gate_half(self, name: str, kind: int) -> np.ndarray:
        """The columns of the Markov head's gate for the hidden state, or those for the previous token."""
        width, rank = self.params.n_embd, self.kind(GATE)[1][1]
        rows = self._source.data(self._names[GATE]).reshape(rank, -1)
        at = tensor_nbytes(kind, (width,))
        return np.ascontiguousarray(rows[:, :at] if name == GATE_HIDDEN else rows[:, at:]).reshape(-1)

    def _target_ids(self, is_offset: bool) -> np.ndarray:
        """The target's id of each of the draft's ids, int32."""
        ids = self._source.data(self._names[TO_TARGET]).view("<i8").copy()
        if is_offset:
            ids += np.arange(len(ids))
        n_vocab = self.params.n_vocab or 1 << 31
        if len(np.unique(ids)) < len(ids) or ids.min() < 0 or ids.max() >= n_vocab:
            raise self._source.error(
                f"tensor {TO_TARGET!r}: its ids are not distinct ones of the target's {n_vocab} tokens"
            )
        return ids.astype(np.int32)

    def close(self) -> None:
        """Close the file; arrays returned by `tensor` stay valid."""
        self._source.close()


# the confidence head is not used: measured acceptance rates predict better (see decode/calibration)
_UNUSED = (CONFIDENCE, CONFIDENCE_BIAS)


def _is_small(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor stays float32: vectors, the taps' norms, and the fixed kernels of convolutions."""
    return (len(shape) == 1 and name != TO_TARGET) or name == TAP_NORMS or name.endswith("_conv_base")


def _mask_vector(folder: Path, fields: dict) -> np.ndarray | None:
    """The mask token's separate vector from a file beside a checkpoint. Raises `ModelFileError`."""
    path = folder / "mask_embedding.pt"
    if not path.is_file():
        return None
    vector, rest = read_torch_vector(path, "embedding")
    if rest.get("mask_token_id") != fields["mask_id"] or len(vector) != fields["n_embd"]:
        raise ModelFileError(
            f"{path}: a vector of {len(vector)} for token {rest.get('mask_token_id')}, but config.json has "
            f"hidden size {fields['n_embd']} and mask token {fields['mask_id']}"
        )
    return vector


def _check_heads(source: GGUFFile | SafetensorsFile, p: DraftParams, found: dict[str, TensorInfo]) -> None:
    """Check DSpark's tensors beyond their mutual shapes. Raises `ModelFileError`."""
    if p.n_draft_vocab is not None:
        table = found.get(TO_TARGET)
        if table is None:
            raise source.error(
                f"tensor {TO_TARGET!r} is missing: the draft has {p.n_draft_vocab} tokens of its own"
            )
        if table.type != I64 or table.shape != (p.n_draft_vocab,):
            raise source.error(
                f"tensor {TO_TARGET!r} is {table.type_name} {list(table.shape)}, expected i64 [{p.n_draft_vocab}]"
            )
        if OWN_TABLES[1] not in found:
            raise source.error(
                f"tensor {OWN_TABLES[1]!r} is missing: a draft with a vocabulary of its own needs it"
            )
    gate = found.get(GATE)
    if gate is not None and p.n_embd % ggml_types()[gate.type].block:
        raise source.error(
            f"tensor {GATE!r} is {gate.type_name}, whose blocks do not end where the hidden size does, at {p.n_embd}"
        )
    confidence = found.get(CONFIDENCE)
    if confidence is not None:
        rank = p.markov.rank if p.markov is not None else 0
        if confidence.shape not in ((p.n_embd + rank, 1), (p.n_embd, 1)):
            raise source.error(
                f"tensor {CONFIDENCE!r} has shape {list(confidence.shape)}, expected [{p.n_embd + rank}, 1]"
            )


def _half_split(data: np.ndarray, n_rows: int, head_dim: int) -> np.ndarray:
    """Reorder rows of interleaved rotary pairs (0 1)(2 3)... per head: first members, then second ones."""
    rows = data.reshape(n_rows // head_dim, head_dim // 2, 2, data.size // n_rows)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
