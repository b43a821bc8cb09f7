"""Which draft belongs to which target."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ggml.errors import ConfigError
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET, draft_beside


def test_the_embedded_target_has_the_embedded_draft() -> None:
    assert EMBEDDED_TARGET.is_file() and EMBEDDED_DRAFT.is_file()
    assert draft_beside(EMBEDDED_TARGET) == EMBEDDED_DRAFT


def test_one_sibling_that_says_dflash(tmp_path: Path) -> None:
    target = tmp_path / "model-DFlash-distilled.gguf"  # the target itself is no candidate
    for name in (target.name, "other.gguf", "dflash.txt"):
        (tmp_path / name).touch()
    assert draft_beside(target) is None
    draft = tmp_path / "model-DFlash.gguf"
    draft.touch()
    assert draft_beside(target) == draft
    (tmp_path / "dflash-2.gguf").touch()
    with pytest.raises(
        ConfigError, match=r"several drafts beside .*: dflash-2\.gguf, model-DFlash\.gguf; name one"
    ):
        draft_beside(target)
