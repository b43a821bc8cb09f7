"""Tests of the parameters of a prompt scorer from a published file."""

from __future__ import annotations

from pathlib import Path

from dflash_ggml.engine.scorer import LONGEST, QUESTION, ScorerSource
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml.device import Device
from dflash_ggml.models.scorer import ScorerModel
from dflash_ggml.state.kv_type import KvType
from reference import real_files


def test_the_first_fifteen_blocks_and_what_asks_of_the_next(tmp_path: Path) -> None:
    path = real_files.write_target(tmp_path, "Qwen3.5-0.8B-Q4_K_M")
    with GGUFFile(path) as file:
        model = ScorerModel.from_gguf(file)
        wanted, there = model.tensors(), file.tensors
        assert set(model.sources(file)) == set(wanted) < set(there)
    assert model.block == 15 and model.taps == (14,) and model.trunk.n_layers == 15
    assert (model.trunk.n_heads, model.trunk.n_kv_heads, model.trunk.head_dim) == (8, 2, 256)
    assert sum(not is_recurrent for is_recurrent in model.trunk.recurrent) == 3
    assert {name for name in wanted if name.startswith("blk.15.")} == {
        f"blk.15.attn_{x}.weight" for x in ("norm", "q", "k", "q_norm", "k_norm")
    }
    assert not any(name.startswith(("blk.16.", "output.")) for name in wanted)
    # bytes of a token: keys and values of three layers, and the keys that are looked at
    assert (
        model.trunk.state_spec().kv_bytes(1, KvType.named("f16", "f16")) == 6144 and 2 * model.key_row == 1024
    )


def test_memory_for_prompts_that_are_prefilled_in_part(tmp_path: Path) -> None:
    path = real_files.write_target(tmp_path, "Qwen3.5-0.8B-Q4_K_M")
    source = ScorerSource(path, 0.1, [])
    assert source.rows(4096) == 40960 + 256 and source.rows(32768) == LONGEST + 256 >= LONGEST + QUESTION
    device = Device.cpu(1, reference=True)
    full, small = (
        {part.name: part.nbytes(32768) for part in source.parts(device, 256, KvType.named(kind, kind))}
        for kind in ("f16", "q8_0")
    )
    source.close()
    device.close()
    assert full["scorer K/V"] == 6144 * (LONGEST + 256) and full["scorer weights"] < 500e6
    assert 0.53 < small["scorer K/V"] / full["scorer K/V"] < 0.54
    assert {name for name in full if full[name] != small[name]} == {"scorer K/V"}


def test_other_sizes_of_the_family_have_such_a_block_too(tmp_path: Path) -> None:
    for name in ("Qwen3.5-2B-Q4_K_M", "Qwen3.5-4B-Q4_K_M"):
        with GGUFFile(real_files.write_target(tmp_path, name)) as file:
            assert ScorerModel.from_gguf(file).block == 15
