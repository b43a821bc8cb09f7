"""Tests of finding a draft next to a target, among sparse files with published headers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dflash_ggml.drafts.beside import draft_beside
from dflash_ggml.errors import ModelFileError
from dflash_ggml.files.named import NAMED
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET
from reference import real_files

TARGET = "Qwen3.6-27B-Q8_0"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return real_files.write_target(tmp_path, TARGET)


def test_the_embedded_target_has_the_embedded_draft() -> None:
    assert draft_beside(EMBEDDED_TARGET).path == EMBEDDED_DRAFT


def test_a_model_with_a_name_has_the_draft_of_the_package_unless_one_lies_beside_it(target: Path) -> None:
    model = next(m for m in NAMED if m.draft)
    named = target.rename(target.with_name(model.file))
    assert draft_beside(named).path == model.draft
    own = real_files.write_draft(named.parent, "up-3.6-q8", "a-dflash-draft.gguf")
    assert draft_beside(named).path == own


def test_nothing_there(target: Path) -> None:
    (target.parent / "dflash.txt").touch()
    real_files.write_draft(target.parent, "up-3.6-q8", "mmproj-dflash.gguf")  # by its name no draft
    found = draft_beside(target)
    assert found.path is None and found.why == f"no draft beside {target}" and not found.is_useless
    assert found.advice == "-hfd spiritbuun/Qwen3.6-27B-DFlash-GGUF:Q8_0 fetches the one of Qwen3.6-27B"
    small = real_files.write_target(target.parent, "Qwen3.5-2B-Q4_K_M")
    assert draft_beside(small).advice == "Qwen3.5-2B has none that can be used: no draft is published for it"


def test_of_several_that_fit(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one that names this target, then Q8_0, BF16, F16, and the larger of the rest."""
    names = [
        "other-dflash-IQ2_M.gguf",
        "other-dflash-Q4_K_M.gguf",
        "other-dflash-Q6_K.gguf",
        "other-dflash-F16.gguf",
        "other-dflash-BF16.gguf",
        "other-DFlash-Q8_0.gguf",
        "Qwen3.6-27B-DFlash-IQ4_XS.gguf",
    ]
    caplog.set_level(logging.INFO)
    for name in names:
        title = {"general.name": "An unnamed draft"}  # which would speak for the file, too
        draft = real_files.write_draft(target.parent, "up-3.6-q8", name, **title)
        assert draft_beside(target).path == draft
    assert f"7 drafts fit {target.name}: taking {names[-1]}" in caplog.text


def test_a_draft_of_another_model_is_not_taken(target: Path) -> None:
    nine = real_files.write_target(target.parent, "Qwen3.5-9B-Q4_K_M")
    draft = real_files.write_draft(target.parent, "up-3.6-q8", "a-dflash-draft.gguf")
    found = draft_beside(nine)
    assert found.path is None and found.is_useless
    assert "hidden size is 5120, the target's 4096" in found.why and draft.name in found.why
    assert found.advice == "-hfd z-lab/Qwen3.5-9B-DFlash fetches the one of Qwen3.5-9B"
    assert draft_beside(target).path == draft
    # the same sizes, but by its name of another version
    older = real_files.write_target(target.parent, "Qwen3.5-27B-Q4_K_M")
    assert draft_beside(older).path is None
    assert "a-dflash-draft.gguf is for Qwen3.6-27B by its name" in draft_beside(older).why


def test_kinds_that_cannot_be_used_and_damaged_files(target: Path) -> None:
    real_files.write_draft(target.parent, "up-dflash2", "dflash-Qwen3.6-27B-Q8_0.gguf")
    (target.parent / "dflash-broken.gguf").write_bytes(b"GGUF nonsense")
    found = draft_beside(target)
    assert found.path is None and found.is_useless
    assert (
        "dflash-Qwen3.6-27B-Q8_0.gguf: key 'dflash.conv_group_size' is missing" in found.why
        and "dflash-broken.gguf: " in found.why
    )


def test_a_folder_with_a_checkpoint(target: Path) -> None:
    folder = target.parent / "Qwen3.6-27B-DFlash"
    real_files.write_checkpoint(folder, 5120, 17408, real_files.TAPS, layers=5, window=2048)
    assert draft_beside(target).path == folder


def test_a_bad_target_is_reported_as_such(tmp_path: Path) -> None:
    """Not that it has no draft."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="cut.gguf"):
        draft_beside(path)


def test_a_prediction_head_stands_in_for_a_draft(tmp_path: Path) -> None:
    """Only where there is no draft, and only with its tensors."""
    target = real_files.write_target(tmp_path, "Qwen3.6-27B-MTP-Q4_K_M")
    found = draft_beside(target)
    assert found.path is None and not found.is_useless
    assert found.own == f"drafting with {target.name}'s own prediction head, 3 tokens ahead"
    real_files.write_draft(tmp_path, "up-3.6-q8", "dflash-Qwen3.6-27B-Q8_0.gguf")
    assert draft_beside(target).path is not None
    other = tmp_path / "other"
    other.mkdir()
    assert not draft_beside(real_files.write_target(other, "Qwen3.6-27B-Q8_0")).own
