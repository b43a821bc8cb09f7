"""Which architecture is which target: the only place that knows them all. Adding one is a file and a line here."""

from __future__ import annotations

from ..files.gguf import GGUFFile
from .qwen35 import Qwen35
from .target import Target

TARGETS: dict[str, type[Target]] = {"qwen35": Qwen35}


def read_target(file: GGUFFile) -> Target:
    """The target in an open file. Raises ModelFileError for an architecture that is none, or a file that does not fit its own."""
    target = TARGETS.get(file.arch)
    if target is None:
        known = ", ".join(repr(name) for name in TARGETS)
        raise file.error(f"key 'general.architecture': {file.arch!r} is no target (expected {known})")
    return target.from_gguf(file)
