"""Files that appear once they are complete."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def complete(path: Path) -> Iterator[Path]:
    """A path beside `path` for a new file, which gets that name once the context has ended without an error.

    Raises:
        OSError: It cannot be renamed.
    """
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
