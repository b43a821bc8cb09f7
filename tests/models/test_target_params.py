"""Tests of the parameters of targets: every size is read, every key or tensor that does not fit is named. 3 seconds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.errors import ModelFileError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.files.tensor_info import BF16
from dflash_ggml.models.qwen35 import Qwen35
from dflash_ggml.models.registry import read_target
from reference import tiny_models as tiny
from reference.gguf_bytes import Tensor, build, f32_tensor

SHAPES = tiny.target_shapes()


def target(path: Path, keys: dict[str, Any] | None = None, tensors: list[Tensor] | None = None) -> Qwen35:
    """Parameters of the tiny target with `keys` changed (None drops a key) or other tensors."""
    merged = tiny.target_keys() | (keys or {})
    merged = {key: value for key, value in merged.items() if value is not None}
    default = [f32_tensor(name, shape) for name, shape in SHAPES.items()]
    path.write_bytes(build(merged, default if tensors is None else tensors).data)
    return read_target(GGUFFile(path))


def tensors_with(**changes: tuple[int, ...] | None) -> list[Tensor]:
    """The tiny target's tensors with some shapes changed, dropped (None) or added."""
    return [f32_tensor(name, shape) for name, shape in (SHAPES | changes).items() if shape]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_target(file: Path):
    assert target(file) == Qwen35(
        n_layers=4,
        n_embd=8,
        n_ff=12,
        n_vocab=tiny.VOCAB,
        n_heads=4,
        n_kv_heads=2,
        head_dim=6,
        n_rot=4,
        rope_theta=1e7,
        rms_eps=float(np.float32(1e-6)),
        conv_kernel=4,
        ssm_state=4,
        ssm_k_heads=2,
        ssm_v_heads=6,
        ssm_inner=24,
        recurrent=(True, False, True, False),
        n_ctx_train=64,
        tied_head=False,
    )


def test_embedded_target(demo_target: Path):
    p = Qwen35.from_gguf(GGUFFile(demo_target))
    assert (p.n_layers, p.n_embd, p.n_vocab, p.n_ctx_train) == (16, 256, 8192, 4096)
    assert [i for i, recurrent in enumerate(p.recurrent) if not recurrent] == [3, 7, 11, 15]


def test_tied_head(file: Path):
    assert target(file, tensors=tensors_with(**{"output.weight": None})).tied_head


def test_layer_kinds(file: Path):
    interval, array = "qwen35.full_attention_interval", "qwen35.attention.recurrent_layers"
    flags = [True, False, True, False]
    assert target(file, {interval: 3, array: flags}).recurrent == tuple(flags)  # the array wins
    with pytest.raises(ModelFileError, match=re.escape("blk.1.attn_qkv.weight")):
        target(file, {interval: None})  # 4 by default, so block 1 would be recurrent
    with pytest.raises(ModelFileError, match=f"{array}' has 3 entries .expected 4"):
        target(file, {array: flags[:3]})


def test_prediction_blocks_are_skipped(file: Path):
    mtp = {
        "blk.4.attn_q.weight": (8, 48),
        "blk.4.nextn.eh_proj.weight": (16, 8),
        "blk.4.attn_norm.weight": (8,),
    }
    keys = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    p = target(file, keys, tensors_with(**mtp))
    assert p.n_layers == 4 and p.recurrent == (True, False, True, False)
    array = {"qwen35.attention.recurrent_layers": [True, False, True, False, False]}
    assert target(file, keys | array, tensors_with(**mtp)) == p
    with pytest.raises(ModelFileError, match="blk.4"):
        target(file, {}, tensors_with(**mtp))


def test_published_27b_layout():
    """Counts and sizes of Qwen3.5-27B: 851 tensors, 26.9 billion weights."""
    p = Qwen35(
        n_layers=64,
        n_embd=5120,
        n_ff=17408,
        n_vocab=248320,
        n_heads=24,
        n_kv_heads=4,
        head_dim=256,
        n_rot=64,
        rope_theta=1e7,
        rms_eps=1e-6,
        conv_kernel=4,
        ssm_state=128,
        ssm_k_heads=16,
        ssm_v_heads=48,
        ssm_inner=6144,
        recurrent=tuple((i + 1) % 4 != 0 for i in range(64)),
        n_ctx_train=262144,
        tied_head=False,
    )
    shapes = p.tensors()
    assert len(shapes) == 48 * 14 + 16 * 11 + 3
    assert p.conv_channels == 10240
    assert shapes["blk.3.attn_q.weight"] == (5120, 12288)
    assert shapes["blk.3.attn_output.weight"] == (6144, 5120)
    assert shapes["blk.0.attn_qkv.weight"] == (5120, 10240)
    assert shapes["blk.0.ssm_conv1d.weight"] == (4, 10240)
    assert shapes["blk.0.ssm_dt.bias"] == shapes["blk.0.ssm_a"] == (48,)
    assert round(sum(np.prod(shape) for shape in shapes.values()) / 1e9, 1) == 26.9


OPTIONAL = {"attention.value_length", "rope.dimension_sections", "full_attention_interval"}


@pytest.mark.parametrize("key", [k for k in tiny.target_keys() if k.startswith(("qwen35.", "general"))])
def test_target_key_missing_or_of_the_wrong_type(file: Path, key: str):
    if key.removeprefix("qwen35.") not in OPTIONAL:
        with pytest.raises(ModelFileError, match=re.escape(f"model.gguf: key '{key}' is missing")):
            target(file, {key: None})
    with pytest.raises(ModelFileError, match=re.escape(f"model.gguf: key '{key}'")):
        target(file, {key: [True]})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "falcon"),
        ("qwen35.block_count", 0),
        ("qwen35.block_count", 2**31),
        ("qwen35.nextn_predict_layers", 4),
        ("qwen35.embedding_length", 2**31),
        ("qwen35.attention.head_count_kv", 3),
        ("qwen35.attention.value_length", 5),
        ("qwen35.attention.layer_norm_rms_epsilon", 0.0),
        ("qwen35.rope.freq_base", float("nan")),
        ("qwen35.rope.freq_base", float("inf")),
        ("qwen35.rope.freq_base", -1.0),
        ("qwen35.rope.dimension_count", 8),
        ("qwen35.rope.dimension_count", 3),
        ("qwen35.rope.dimension_sections", [1, 0, 0, 1]),
        ("qwen35.rope.dimension_sections", []),
        ("qwen35.rope.scaling.type", "yarn"),
        ("qwen35.rope.scaling.factor", 4.0),
        ("qwen35.rope.scale_linear", 2.0),
        ("qwen35.ssm.conv_kernel", 1),
        ("qwen35.ssm.group_count", 4),
        ("qwen35.ssm.inner_size", 25),
        ("qwen35.full_attention_interval", 0),
        ("tokenizer.ggml.tokens", ["a", "b"]),
    ],
)
def test_target_value_that_cannot_be(file: Path, key: str, value: object):
    with pytest.raises(ModelFileError, match=re.escape(f"model.gguf: key '{key}'")):
        target(file, {key: value})


@pytest.mark.parametrize("name", SHAPES)
def test_target_tensor_missing_or_misshapen(file: Path, name: str):
    # The embedding defines the vocabulary, and without the head the model is tied.
    missing = {"token_embd.weight": f"tensor '{name}' is missing", "output.weight": None}
    expected = missing.get(name, f"tensor '{name}' is missing (expected shape {list(SHAPES[name])})")
    if expected:
        with pytest.raises(ModelFileError, match=re.escape(f"model.gguf: {expected}")):
            target(file, tensors=tensors_with(**{name: None}))
    wrong = (*SHAPES[name][:-1], SHAPES[name][-1] + 1)
    message = f"tensor '{name}' has shape {list(wrong)}, expected {list(SHAPES[name])}"
    if name == "token_embd.weight":
        message = f"key 'tokenizer.ggml.tokens': {tiny.VOCAB} tokens (expected {tiny.VOCAB + 1})"
    with pytest.raises(ModelFileError, match=re.escape(message)):
        target(file, tensors=tensors_with(**{name: wrong}))


def test_target_tensor_types(file: Path):
    def retyped(name: str, code: int, width: int) -> list[Tensor]:
        other = [t for t in tensors_with() if t.name != name]
        return [*other, Tensor(name, code, SHAPES[name], bytes(width * int(np.prod(SHAPES[name]))))]

    assert target(file, tensors=retyped("blk.0.ffn_up.weight", BF16, 2)) == target(file)
    with pytest.raises(ModelFileError, match="'blk.0.attn_norm.weight' is f16, expected f32"):
        target(file, tensors=retyped("blk.0.attn_norm.weight", 1, 2))
    with pytest.raises(ModelFileError, match="'blk.0.ssm_conv1d.weight' is bf16, expected f32"):
        target(file, tensors=retyped("blk.0.ssm_conv1d.weight", BF16, 2))
    with pytest.raises(
        ModelFileError, match="'blk.0.ffn_up.weight' is stored as i32, which no weight may be"
    ):
        target(file, tensors=retyped("blk.0.ffn_up.weight", 26, 4))


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("clip", "vision part of a model .mmproj., name the model's own file"),
        ("dflash", "this is a draft, name it with -md"),
        ("qwen35-dflash-draft", "this is a draft, name it with -md"),
        ("gptoss", "take a GGUF file of architecture 'gpt-oss'"),
        ("qwen2moe", "Qwen3, Qwen3-Next and those from 3.5 on are supported"),
        (
            "falcon",
            "'falcon' is not a target .expected 'qwen35', 'qwen35moe', 'qwen3next', 'qwen3', 'qwen3moe', 'laguna', 'llama', "
            "'gpt-oss', 'gemma3', 'gemma4'.$",
        ),
    ],
)
def test_files_that_are_no_target(file: Path, arch: str, message: str):
    with pytest.raises(ModelFileError, match=message):
        target(file, {"general.architecture": arch})


def test_unknown_target_tensor(file: Path):
    for name in (
        "blk.0.ffn_up.bias",
        "blk.0.ssm_conv1d.scale",
        "token_embd.scale",
        "blk.9.ffn_up.input_scale",
    ):
        with pytest.raises(ModelFileError, match=f"{name!r} is unknown"):
            target(file, tensors=tensors_with(**{name: (1,)}))


def test_scales_beside_matrices(file: Path):
    names = ["blk.0.ffn_up.scale", "blk.1.attn_q.scale", "output.scale"]
    ignored = {"blk.0.ffn_up.input_scale": (1,)}
    p = target(file, tensors=tensors_with(**dict.fromkeys(names, (1,)), **ignored))
    assert sorted(p.scales) == names and all(p.tensors()[name] == (1,) for name in names)
    assert "blk.0.ffn_up.input_scale" not in p.tensors()
    other = {name.replace(".scale", ".weight.scale"): (1,) for name in names}  # as some writers name them
    assert sorted(target(file, tensors=tensors_with(**other)).scales) == names
    with pytest.raises(ModelFileError, match=r"'output.scale' has shape \[2\], expected \[1\]"):
        target(file, tensors=tensors_with(**{"output.scale": (2,)}))


def test_heads_per_block(file: Path):
    """Ollama writes a number per block, 0 where a block has no attention."""
    key = "qwen35.attention.head_count_kv"
    assert target(file, {key: [0, 2, 0, 2]}) == target(file)
    assert target(file, {"qwen35.attention.head_count": [4, 4, 4, 4]}) == target(file)
    for counts, message in (
        ([0, 2, 0], "3 entries"),
        ([0, 2, 0, 4], r"\[2, 4\] heads"),
        ([0] * 4, "0 is out of range"),
    ):
        with pytest.raises(ModelFileError, match=f"{key}'.*{message}"):
            target(file, {key: counts})


def test_what_ollama_keeps_in_the_same_file(file: Path):
    others = {"v.blk.0.attn_q.weight": (4, 4), "mm.0.weight": (4, 4), "mtp.fc.weight": (16, 8)}
    renamed = {"blk.0.ssm_dt.bias": None, "blk.0.ssm_dt": SHAPES["blk.0.ssm_dt.bias"]}
    assert target(file, tensors=tensors_with(**others, **renamed)) == target(file)
    key = "qwen35.ssm.v_head_reordered"
    assert target(file, {key: True}) == target(file)
    with pytest.raises(ModelFileError, match=f"{key}' is false"):
        target(file, {key: False})
