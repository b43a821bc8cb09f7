"""What the readers of targets' files do alike: keys of an architecture, the vocabulary's size, types of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ..files.gguf import F32, GGUFFile, StringArray
from .checks import MAX_WIDTH, check_tensors, in_range, positive


class Keys:
    """Keys of an open file below the name of its architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.arch = file, file.arch

    def has(self, key: str) -> bool:
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
        """A number for each of `n` layers, from 1 to `high`: an array under `key`, or one number for all of them."""
        if not isinstance(self.file.metadata.get(f"{self.arch}.{key}"), (Sequence, np.ndarray)) or isinstance(
            self.file.metadata.get(f"{self.arch}.{key}"), str
        ):
            return (self.count(key, high),) * n
        name = f"{self.arch}.{key}"
        found = self.file.require_array(name, int)
        if len(found) != n:
            raise self.file.error(f"key {name!r} has {len(found)} entries (expected {n})")
        return tuple(in_range(self.file.error, f"key {name!r}", i, 1, high) for i in found)

    def hold(self, *rules: tuple[str, bool, str]) -> None:
        """Raise for the first rule (key, whether it holds, what was expected) that does not hold."""
        for key, holds, expected in rules:
            if not holds:
                key = f"{self.arch}.{key}"
                raise self.file.error(f"key {key!r}: {self.file.metadata.get(key)}, not {expected}")


def vocabulary_size(file: GGUFFile) -> int:
    """Rows of the embedding, which are the vocabulary."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.error("tensor 'token_embd.weight' is missing or not a matrix")
    n_vocab = embedding.shape[1]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringArray) and len(tokens) != n_vocab:
        raise file.error(f"key 'tokenizer.ggml.tokens': {len(tokens)} tokens (expected {n_vocab})")
    return n_vocab


def scales_beside(file: GGUFFile, matrices: Iterable[str]) -> tuple[str, ...]:
    """The `.scale` tensors [1] that a file has beside these matrices, as NVFP4 files do."""
    names = (name.removesuffix("weight") + "scale" for name in matrices if not name.startswith("token_embd."))
    return tuple(name for name in names if name in file.tensors)


def check_file(
    file: GGUFFile,
    shapes: Mapping[str, tuple[int, ...]],
    ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """The tensors are those of `shapes`; vectors are float32. How activations were scaled when the weights were made is ignored:
    ggml scales them by what they are."""

    def unused(name: str) -> bool:
        matrix = name.removesuffix("input_scale") + "weight"
        return ignored(name) or (name.endswith(".input_scale") and matrix in shapes)

    check_tensors(file.error, file.tensors, shapes, unused)
    for name, shape in shapes.items():
        if len(shape) == 1 and file.tensors[name].type != F32:
            raise file.error(f"tensor {name!r} is {file.tensors[name].type_name}, expected f32")
