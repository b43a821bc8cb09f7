"""Which file is which kind of draft: the only place that knows them all."""

from __future__ import annotations

from pathlib import Path

from ..config import DraftType
from ..files.gguf import GGUFFile
from ..models.target import Target
from .dflash.drafter import DFlashSource
from .dflash.file import DraftFile
from .drafter import DraftSource
from .mtp.drafter import DEPTH, open_head


def open_draft(path: Path, window: int | None = None, type_: DraftType | None = None) -> DraftSource:
    """The draft in a file or folder; `window` replaces its attention window (see `DraftFile.open`), `type_` that of its matrices.

    Raises ModelFileError for one that is damaged or of no kind that is known."""
    return DFlashSource(DraftFile.open(path, window=window), window, type_)


def open_own(file: GGUFFile, target: Target, depth: int = DEPTH) -> DraftSource | None:
    """The draft that a target's open file holds itself, to draft `depth` tokens ahead; None if it has none.

    Raises ModelFileError for one that is damaged."""
    return open_head(file, target, depth)
