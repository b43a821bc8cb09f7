"""Fingerprint of a model from samples of its bytes, independent of path and timestamps; models are tens of gigabytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .gguf import part_names

SAMPLES, SAMPLE = 64, 4096  # samples per file, evenly spaced; a training step changes every tensor


def fingerprint(path: Path) -> str:
    """A hash over the size and samples of a model: a file, all parts of a split one, or a folder.

    Raises:
        OSError: It cannot be read.
    """
    digest = hashlib.sha256()
    for part in _parts(path):
        size = part.stat().st_size
        digest.update(f"{size}\n".encode())
        with part.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(max(size - SAMPLE, 0) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:32]


def _parts(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".json", ".pt"))
    names = part_names(path.name)
    return [found for name in names if (found := path.with_name(name)).exists()]
