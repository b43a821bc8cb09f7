"""Tests on headers of published targets, as sparse files of full size: all are read, checked and planned for. 8 seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.engine.memory_planner import Opened, memory_needs
from dflash_ggml.errors import ModelFileError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml import weights
from dflash_ggml.ggml.device import Device
from dflash_ggml.models.qwen35 import Qwen35
from dflash_ggml.models.registry import read_target
from reference import real_files


@pytest.mark.parametrize("name", real_files.TARGETS)
def test_target(name: str, tmp_path: Path) -> None:
    recipe = real_files.TARGETS[name]
    size = real_files.SIZES[recipe.size]
    path = real_files.write_target(tmp_path, name)
    with GGUFFile(path) as file:
        target = read_target(file)
        assert (target.n_layers, target.n_embd, target.n_ff, target.n_vocab) == (
            size.layers,
            size.d,
            size.ff,
            size.vocab,
        )
        assert (target.n_heads, target.n_kv_heads, target.tied_head) == (size.heads, size.kv, size.tied)
        assert sum(target.recurrent) == size.layers * 3 // 4
        assert isinstance(target, Qwen35)
        left_out = {name for name in file.tensors if name not in target.stored(file)}
        block = f"blk.{size.layers}."
        assert all(
            name.startswith((block, "v.", "mtp.")) or name.endswith("input_scale") for name in left_out
        )
        of_head, scaled = (20, 40 * 6 + 30 * 3 + 10 * 4) if size.experts else (15, 400)
        scales = scaled * ("input_scale" in recipe.scales)
        assert len(left_out) == of_head * recipe.mtp + 2 * recipe.ollama + scales
        used = sum(info.nbytes for name, info in file.tensors.items() if name not in left_out)
        device = Device.cpu(1, reference=True)
        try:
            declared = memory_needs(Opened(device, EngineConfig(path, n_ctx=4096), file, target))
            assert used <= declared.weights.wanted < 1.01 * used + (1 << 20)
            assert {part.name for part in declared.parts(declared.kv[0])} >= {
                "target weights",
                "target K/V",
                "recurrent state",
            }
            assert all(part.nbytes(4096) >= 0 for part in declared.parts(declared.kv[0]))
        finally:
            declared.weights.close()
            device.close()


def test_tensor_counts() -> None:
    """As the loaders' logs of the published files count them."""
    counts = {name: len(real_files.target_tensors(recipe)) for name, recipe in real_files.TARGETS.items()}
    assert counts["Qwen3.6-27B-BF16"] == 851 and counts["Qwen3.8-27B-MTP-UD-Q4_K_XL"] == 866
    assert counts["Qwen3.5-9B-Q4_K_M"] == 427 and counts["Qwen3.5-2B-Q4_K_M"] == 320
    assert counts["Qwen3.5-35B-A3B-Q4_K_M"] == 733 and counts["Qwen3.6-35B-A3B-MTP-UD-Q4_K_XL"] == 753


def test_an_embedding_that_the_device_cannot_look_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = real_files.write_target(tmp_path, "Qwen3.5-0.8B-Q4_K_M")
    device = Device.cpu(1, reference=True)
    monkeypatch.setattr(weights, "_can_gather", lambda device, source: False)
    with (
        GGUFFile(path) as file,
        pytest.raises(ModelFileError, match="token_embd.weight: CPU cannot look rows up in type q4_K"),
    ):
        memory_needs(Opened(device, EngineConfig(path), file, read_target(file)))
    device.close()


def test_a_vocabulary_of_another_size(tmp_path: Path) -> None:
    path = real_files.write_target(tmp_path, "Qwen3.5-0.8B-Q4_K_M", **real_files.tokens(512))
    with pytest.raises(ModelFileError, match="512 tokens .expected 248320"):
        read_target(GGUFFile(path))
