"""Tests on headers of published drafts, as sparse files of full size: accepted, or refused with an alternative."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.drafts.registry import open_draft
from dflash_ggml.engine.memory_planner import Opened, memory_needs
from dflash_ggml.errors import ConfigError, ModelFileError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml.device import Device
from dflash_ggml.models.registry import read_target
from reference import real_files

REFUSED = {
    "lucebox-convert_dflash_to_gguf.py": "target_layer_ids' is missing, as in files of Lucebox's early converters",
    "lucebox-quantize_draft_q8.py": "target_layer_ids' is missing, as in files of Lucebox's early converters",
}
INSTEAD = "for Qwen3.6-27B use spiritbuun/Qwen3.6-27B-DFlash-GGUF:Q8_0"
CUT_SHORT = "up-dflash2"  # a DFlash2 file that a converter wrote half of
WINDOWED = {"buun-dflash-draft-3.6", "up-3.6-q4km", "up-3.6-q8"}


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_files.write_target(tmp_path_factory.mktemp("target"), "Qwen3.6-27B-UD-Q4_K_XL")


@pytest.mark.parametrize("name", [name for name in real_files.DRAFTS if name not in (*REFUSED, CUT_SHORT)])
def test_draft(name: str, target_file: Path, tmp_path: Path) -> None:
    draft = open_draft(real_files.write_draft(tmp_path, name))
    p = draft.params
    assert (p.n_layers, p.n_embd, p.block_size, p.mask_id) == (5, 5120, 16, 248070)
    assert p.taps == real_files.TAPS and p.rope_theta == 1e7
    windows = (True,) * 4 + (False,) if name in WINDOWED else (False,) * 5
    assert p.window_layers == windows and p.sliding_window == (2048 if name in WINDOWED else None)
    with GGUFFile(target_file) as file:
        target = read_target(file)
        misfits = " ".join(draft.check(target, str(target_file)))
        assert p.own == (("token_embd.weight",) if name == "up-ropefactors" else ())
        # by its title a draft of the 3.6, and its file has no key for it
        assert ("--draft-window 2048" in misfits) == (name not in WINDOWED)
        device = Device.cpu(1, reference=True)
        try:
            declared = memory_needs(
                Opened(device, EngineConfig(target_file, n_ctx=4096), file, target, draft)
            )
            sizes = {part.name: part.nbytes(4096) for part in declared.parts(declared.kv[0])}
            assert sizes["draft weights"] > 800 << 20 and sizes["draft K/V"] > 0
        finally:
            declared.weights.close()
            device.close()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_its_replacement(name: str, tmp_path: Path) -> None:
    path = real_files.write_draft(tmp_path, name)
    with pytest.raises(ModelFileError, match=f"{path.name}: .*{REFUSED[name]}.*{INSTEAD}"):
        open_draft(path)


def test_an_incomplete_dflash2_draft_names_what_it_lacks(tmp_path: Path) -> None:
    path = real_files.write_draft(tmp_path, CUT_SHORT)
    with pytest.raises(ModelFileError, match=f"{path.name}: key 'dflash.conv_group_size' is missing"):
        open_draft(path)


@pytest.mark.parametrize("size", ["27B", "9B", "4B"])
def test_new_drafts_with_six_layers_and_eight_taps(size: str, tmp_path: Path) -> None:
    s = real_files.SIZES[size]
    taps = tuple(range(1, s.layers - 2, (s.layers - 3) // 7))[:8]
    folder = tmp_path / f"Qwen3.5-{size}-DFlash"
    draft = open_draft(real_files.write_checkpoint(folder, s.d, s.ff, taps, layers=6, window=4096))
    p = draft.params
    assert (p.n_layers, p.taps, p.sliding_window) == (6, taps, 4096)
    assert p.window_layers == (True,) * 5 + (False,)
    file = GGUFFile(real_files.write_target(tmp_path, f"Qwen3.5-{size}-Q4_K_M"))
    assert draft.check(read_target(file), str(file.path)) == []


@pytest.mark.parametrize(
    ("version", "layers", "window", "kv_heads"),
    [("3.5", 8, None, 4), ("3.6", 8, None, 4), ("3.6", 6, 4096, 8)],
)
def test_drafts_of_the_35b(
    version: str, layers: int, window: int | None, kv_heads: int, tmp_path: Path
) -> None:
    """Eight layers that see everything, or five with a window and one without."""
    taps = (1, 6, 11, 16, 22, 27, 32, 37)
    folder = tmp_path / f"Qwen{version}-35B-A3B-DFlash"
    made = real_files.write_checkpoint(folder, 2048, 6144, taps, layers, window, kv_heads, mask=248077)
    draft, p = open_draft(made), open_draft(made).params
    assert (p.n_layers, p.n_kv_heads, p.taps, p.mask_id) == (layers, kv_heads, taps, 248077)
    assert p.window_layers == (window is not None,) * (layers - 1) + (False,)
    name = {"3.5": "Qwen3.5-35B-A3B-Q4_K_M", "3.6": "Qwen3.6-35B-A3B-MTP-UD-Q4_K_XL"}[version]
    file = GGUFFile(real_files.write_target(tmp_path, name))
    assert draft.check(read_target(file), str(file.path)) == []


def test_a_window_that_the_file_does_not_declare(target_file: Path, tmp_path: Path) -> None:
    path = real_files.write_draft(tmp_path, "buun-3.6-noSWAkeys")
    target = read_target(GGUFFile(target_file))
    draft = open_draft(path, window=2048)
    assert draft.params.window_layers == (True,) * 4 + (False,) and draft.params.sliding_window == 2048
    assert draft.check(target, str(target_file)) == []
    assert open_draft(path, window=0).check(target, str(target_file)) == []  # asked for
    other = open_draft(real_files.write_draft(tmp_path, "up-3.6-q8"), window=512)
    assert other.params.window_layers == (True,) * 4 + (False,) and other.params.sliding_window == 512
    assert not any(open_draft(other.file.path, window=0).params.window_layers)
    with pytest.raises(ConfigError, match="draft window: -1 is outside"):
        open_draft(path, window=-1)
