"""Tests of published sizes of gpt-oss as sparse files: read, checked and planned for; mismatches are named. 5 seconds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.engine.memory_planner import Opened, composed_bytes, memory_needs
from dflash_ggml.errors import ModelFileError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml.device import NARROW_COLUMNS, Device
from dflash_ggml.ggml.operations import Yarn
from dflash_ggml.models.experts import Experts
from dflash_ggml.models.gpt_oss import GptOss
from dflash_ggml.models.registry import read_target
from reference import real_files

SIZES = {"20b": (24, 32), "120b": (36, 128)}  # layers, experts
D, HEADS, KV, HEAD_DIM = 2880, 64, 8, 64


def keys(layers: int, experts: int) -> dict[str, Any]:
    """As ggml-org's files have them."""
    own = {
        "block_count": layers,
        "context_length": 131072,
        "embedding_length": D,
        "feed_forward_length": D,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 128,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
        "expert_count": experts,
        "expert_used_count": 4,
        "expert_feed_forward_length": D,
    }
    return {"general.architecture": "gpt-oss", **{f"gpt-oss.{name}": value for name, value in own.items()}}


def tensors(layers: int, experts: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    q, kv = HEADS * HEAD_DIM, KV * HEAD_DIM
    matrices: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_q": ("Q8_0", (D, q)),
        "attn_k": ("Q8_0", (D, kv)),
        "attn_v": ("Q8_0", (D, kv)),
        "attn_output": ("Q8_0", (q, D)),
        "ffn_gate_inp": ("F32", (D, experts)),
        **{f"ffn_{x}_exps": ("MXFP4", (D, D, experts)) for x in ("gate", "up", "down")},
    }
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("Q8_0", (D, 201088)),
        "output.weight": ("Q8_0", (D, 201088)),
        "output_norm.weight": ("F32", (D,)),
    }
    for i in range(layers):
        block = f"blk.{i}."
        for name, (kind, shape) in matrices.items():
            found[f"{block}{name}.weight"] = (kind, shape)
            found[f"{block}{name}.bias"] = ("F32", shape[1:])
        for name in ("attn_norm", "post_attention_norm"):
            found[f"{block}{name}.weight"] = ("F32", (D,))
        found[f"{block}attn_sinks.weight"] = ("F32", (HEADS,))
    return found


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes(size: str, tmp_path: Path) -> None:
    layers, experts = SIZES[size]
    path = real_files.write(tmp_path / "model.gguf", keys(layers, experts), tensors(layers, experts))
    with GGUFFile(path) as file:
        assert len(file.tensors) == {"20b": 459, "120b": 687}[size]  # as loaders' logs count them
        target = read_target(file)
        assert isinstance(target, GptOss) and target.tensors().keys() == file.tensors.keys()
        assert target.windows == (128, None) * (layers // 2)
        assert target.experts == Experts(D, experts, 4, D, scoring="chosen", limit=7.0)
        assert target.rope_full.yarn == Yarn(32.0, 4096, pytest.approx(1.3465736), 32.0, 1.0)  # type: ignore[arg-type]
        # masks are made for few columns, or where attention over ranges is composed: of all rows, and of a window's
        per_row = target.scratch_bytes(4096, 131072, 0) - target.scratch_bytes(4096, 131071, 0)
        assert per_row == 2 * NARROW_COLUMNS
        masks, _ = composed_bytes(target.state_spec(), 512, 0, 1, 1)
        assert masks(8192) == 2 * 512 * (8192 + 768)
        device = Device.cpu(1, reference=True)
        try:
            declared = memory_needs(Opened(device, EngineConfig(path, n_ctx=4096), file, target))
            used = sum(info.nbytes for info in file.tensors.values())
            assert used <= declared.weights.wanted < 1.01 * used + (1 << 20)
        finally:
            declared.weights.close()
            device.close()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("blk.1.attn_sinks.weight", None, "'blk.1.attn_sinks.weight' is missing"),
        ("blk.0.ffn_up_exps.bias", None, "'blk.0.ffn_up_exps.bias' is missing"),
        ("blk.0.ffn_up_exps.bias", ("F16", (D, 4)), "is f16, expected f32"),
        ("blk.0.attn_q.bias", ("F32", (64,)), "has shape [64], expected [4096]"),
        ("blk.0.ffn_norm.weight", ("F32", (D,)), "'blk.0.ffn_norm.weight' is unknown"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str, change: Any, message: str) -> None:
    found = {**tensors(2, 4), name: change}
    path = real_files.write(tmp_path / "model.gguf", keys(2, 4), {n: t for n, t in found.items() if t})
    with GGUFFile(path) as file, pytest.raises(ModelFileError, match=re.escape(message)):
        read_target(file)


@pytest.mark.parametrize(
    ("pattern", "windows"), [(3, (128, 128, None, 128)), ([False, True, True, False], (None, 128, 128, None))]
)
def test_layers_that_see_everything(tmp_path: Path, pattern: Any, windows: tuple[int | None, ...]) -> None:
    more = {"gpt-oss.attention.sliding_window_pattern": pattern}
    path = real_files.write(tmp_path / "model.gguf", keys(4, 4) | more, tensors(4, 4))
    with GGUFFile(path) as file:
        target = read_target(file)
        assert isinstance(target, GptOss) and target.windows == windows
