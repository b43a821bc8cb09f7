"""Helpers for reading target files: keys of an architecture, the vocabulary's size, types of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..files.gguf import GGUFFile, StringArray
from ..files.tensor_info import F32
from .checks import MAX_LAYERS, MAX_WIDTH, check_tensors, in_range, positive


class Keys:
    """Keys of an open file below the name of its architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.arch = file, file.arch

    def has(self, key: str) -> bool:
        """Whether the file has a key of this architecture."""
        return f"{self.arch}.{key}" in self.file.metadata

    def count(self, key: str, high: int = MAX_WIDTH, low: int = 1, default: int | None = None) -> int:
        """The integer under `key`, from `low` to `high`."""
        if default is not None and not self.has(key):
            return default
        key = f"{self.arch}.{key}"
        return in_range(self.file.error, f"key {key!r}", self.file.require(key, int), low, high)

    def number(self, key: str, default: float | None = None) -> float:
        """The positive number under `key`."""
        if default is not None and not self.has(key):
            return default
        key = f"{self.arch}.{key}"
        return positive(self.file.error, f"key {key!r}", self.file.require(key, float))

    def counts(self, key: str, n: int, high: int) -> tuple[int, ...]:
        """One number per layer, from 1 to `high`: an array under `key`, or a single number for all `n`."""
        found = self._array(key, n)
        if found is None:
            return (self.count(key, high),) * n
        return tuple(in_range(self.file.error, f"key '{self.arch}.{key}'", i, 1, high) for i in found)

    def one(
        self, key: str, high: int = MAX_WIDTH, low: int = 1, default: int | None = None, n: int | None = None
    ) -> int:
        """As `count`, also for a file with an array of `n` equal entries."""
        found = self._array(key, n)
        if found is None:
            return self.count(key, high, low, default)
        key = f"{self.arch}.{key}"
        if len(set(found)) != 1:
            raise self.file.error(f"key {key!r}: {sorted(set(found))} (expected one number for all blocks)")
        return in_range(self.file.error, f"key {key!r}", found[0], low, high)

    def expert_width(self, n_used: int, n: int | None = None) -> int:
        """Width of an expert; if missing or 0, `feed_forward_length` divided by the experts per token."""
        dense = "feed_forward_length"
        width = self.one("expert_feed_forward_length", low=0 if self.has(dense) else 1, default=0, n=n)
        return width or max(1, self.one(dense, n=n) // n_used)

    def _array(self, key: str, n: int | None) -> Sequence[int] | None:
        """The array of `n` entries under `key`; None if the key is missing or not an array."""
        key = f"{self.arch}.{key}"
        if not isinstance(self.file.metadata.get(key, ""), (list, tuple, np.ndarray)):
            return None
        found = self.file.require_array(key, int)
        if n is not None and len(found) != n:
            raise self.file.error(f"key {key!r} has {len(found)} entries (expected {n})")
        return found

    def switched(self, key: str) -> float:
        """The positive number under `key`; 0, as what is not there, for none."""
        return self.number(key) if self.file.get(f"{self.arch}.{key}", float) else 0.0

    def is_(self, key: str, value: int, expected: str) -> tuple[str, bool, str]:
        """The rule that `key`, if it is there, has this value."""
        return key, self.count(key, default=value) == value, expected

    def check(self, *rules: tuple[str, bool, str]) -> None:
        """Raise for the first violated rule (key, whether it holds, expectation)."""
        for key, holds, expected in rules:
            if not holds:
                key = f"{self.arch}.{key}"
                raise self.file.error(f"key {key!r}: {self.file.metadata.get(key)}, not {expected}")


def windows(keys: Keys, n: int, period: int = 0, last: bool = False) -> tuple[int | None, ...]:
    """The window of each of `n` layers, None for full attention: from the file's list of window layers, or from the period of
    full-attention layers (default `period`; 0: no full attention).

    Args:
        last: Whether the last layer of a period has full attention, instead of the first.
    """
    window = keys.count("attention.sliding_window", 1 << 30, 0, default=0)
    if not window:
        return (None,) * n
    key = f"{keys.arch}.attention.sliding_window_pattern"
    if not isinstance(keys.file.metadata.get(key, 0), int):
        pattern = keys.file.require_array(key, bool)
        if len(pattern) != n:
            raise keys.file.error(f"key {key!r} has {len(pattern)} entries (expected {n})")
        return tuple(window if is_window else None for is_window in pattern)
    period = keys.count("attention.sliding_window_pattern", MAX_LAYERS, default=period)
    return tuple(window if not period or (i + last) % period else None for i in range(n))


def common_fields(keys: Keys) -> dict[str, Any]:
    """The fields of a target that every architecture stores alike."""
    return {
        "n_embd": keys.count("embedding_length"),
        "n_vocab": _vocabulary_size(keys.file),
        "rms_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "n_ctx_train": keys.count("context_length", 1 << 31),
        "tied_head": "output.weight" not in keys.file.tensors,
    }


def _vocabulary_size(file: GGUFFile) -> int:
    """The vocabulary's size: rows of the embedding."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.error("tensor 'token_embd.weight' is missing or not a matrix")
    n_vocab = embedding.shape[1]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringArray) and len(tokens) != n_vocab:
        raise file.error(f"key 'tokenizer.ggml.tokens': {len(tokens)} tokens (expected {n_vocab})")
    return n_vocab


def normalise_scales(file: GGUFFile) -> None:
    """Rename `X.weight.scale` and `X.weight.input_scale` of some converters to `X.scale` and `X.input_scale`."""
    names = {
        name: name.replace(".weight.", ".")
        for name in file.tensors
        if re.search(r"\.weight\.(input_)?scale$", name)
    }
    file.rename({old: new for old, new in names.items() if new not in file.tensors})


def split_qkv(file: GGUFFile, heads: Sequence[int], n_kv_heads: int, head_dim: int) -> None:
    """Split a fused `attn_qkv` into the matrices of queries, keys and values, its rows in that order.

    Args:
        heads: Query heads per layer.

    Raises:
        ModelFileError: It has another shape.
    """
    for i, n in enumerate(heads):
        whole, *parts = (f"blk.{i}.attn_{x}." for x in ("qkv", "q", "k", "v"))
        info = file.tensors.get(f"{whole}weight")
        if info is None or any(f"{part}weight" in file.tensors for part in parts):
            continue
        rows = [n * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim]
        if len(info.shape) != 2 or info.shape[1] != sum(rows):
            expected = [info.shape[0], sum(rows)]
            raise file.error(f"tensor '{whole}weight' has shape {list(info.shape)}, expected {expected}")
        row, first, matrices = info.nbytes // sum(rows), 0, []
        for part, m in zip(parts, rows):
            place = {"offset": info.offset + first * row, "nbytes": m * row}
            matrices.append(replace(info, name=f"{part}weight", shape=(info.shape[0], m), **place))
            first += m
        file.replace(f"{whole}weight", matrices)
        for end in ("scale", "input_scale"):  # one for all rows
            if scale := file.tensors.get(whole + end):
                file.replace(whole + end, [replace(scale, name=part + end) for part in parts])


def scales_beside(file: GGUFFile, matrices: Iterable[str]) -> tuple[str, ...]:
    """The `.scale` tensors [1] of these matrices in a file (NVFP4)."""
    names = (name.removesuffix("weight") + "scale" for name in matrices if not name.startswith("token_embd."))
    return tuple(name for name in names if name in file.tensors)


def biases_beside(file: GGUFFile, matrices: Iterable[str]) -> tuple[str, ...]:
    """The `.bias` tensors [rows] of these matrices in a file."""
    names = (name.removesuffix("weight") + "bias" for name in matrices if name.startswith("blk."))
    return tuple(name for name in names if name in file.tensors)


def check_file(
    file: GGUFFile,
    shapes: Mapping[str, tuple[int, ...]],
    ignored: Callable[[str], bool] = lambda name: False,
    floats: str = "",
) -> None:
    """Check that the tensors are those of `shapes`; vectors, biases and names ending in one of `floats` must be float32.
    Recorded scales of activations are ignored: ggml computes its own."""

    def unused(name: str) -> bool:
        matrix = name.removesuffix("input_scale") + "weight"
        return ignored(name) or (name.endswith(".input_scale") and matrix in shapes)

    check_tensors(file.error, file.tensors, shapes, unused)
    for name, shape in shapes.items():
        is_float = len(shape) == 1 or name.endswith(".bias") or (floats and name.endswith(floats))
        if is_float and file.tensors[name].type != F32:
            raise file.error(f"tensor {name!r} is {file.tensors[name].type_name}, expected f32")
