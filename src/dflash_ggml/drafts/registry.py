"""Which file is which kind of draft: the only place that knows them all."""

from __future__ import annotations

from pathlib import Path

from .dflash.drafter import DFlashSource
from .dflash.file import DraftFile
from .drafter import DraftSource


def open_draft(path: Path, window: int | None = None) -> DraftSource:
    """The draft in a file or folder; `window` replaces its attention window (see `DraftFile.open`).

    Raises ModelFileError for one that is damaged or of no kind that is known."""
    return DFlashSource(DraftFile.open(path, window=window), window)
