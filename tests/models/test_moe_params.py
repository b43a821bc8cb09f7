"""Tests of the parameters of targets with experts: every size is read, every key or tensor that does not fit is named. 3
seconds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.errors import ModelFileError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.models.experts import Experts
from dflash_ggml.models.qwen3next import Qwen3Next
from dflash_ggml.models.qwen35moe import Qwen35Moe
from dflash_ggml.models.registry import read_target
from reference import tiny_models as tiny
from reference.gguf_bytes import Tensor, build, f32_tensor

ARCHS = ("qwen35moe", "qwen3next")
EXPERTS = Experts(tiny.D, tiny.EXPERTS, tiny.USED, tiny.EXPERT_FF, tiny.SHARED_FF)
EXPERT_KEYS = [
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
]


@pytest.fixture(params=ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def target(
    path: Path,
    arch: str,
    keys: dict[str, Any] | None = None,
    shapes: dict[str, tuple[int, ...] | None] | None = None,
) -> Qwen35Moe:
    """The tiny target with `keys` (under the architecture; None drops one) and shapes changed (None drops a tensor)."""
    merged = tiny.moe_keys(arch) | {f"{arch}.{key}": value for key, value in (keys or {}).items()}
    wanted = tiny.moe_shapes(arch) | (shapes or {})
    tensors = [f32_tensor(name, shape) for name, shape in wanted.items() if shape]
    path.write_bytes(build({key: value for key, value in merged.items() if value is not None}, tensors).data)
    found = read_target(GGUFFile(path))
    assert isinstance(found, Qwen35Moe)
    return found


def test_sizes(file: Path, arch: str) -> None:
    p = target(file, arch)
    assert type(p) is (Qwen3Next if arch == "qwen3next" else Qwen35Moe)
    assert p.experts == EXPERTS and p.joined == {3} and p.n_ff == tiny.EXPERT_FF
    assert (p.n_layers, p.ssm_k_heads, p.ssm_v_heads) == (4, tiny.H_K, tiny.H_V)
    assert p.recurrent == (True, False, True, False)


@pytest.mark.parametrize("key", EXPERT_KEYS)
def test_one_number_for_all_blocks(file: Path, arch: str, key: str) -> None:
    value = tiny.moe_keys()[f"qwen35moe.{key}"]
    if key not in (EXPERT_KEYS[0], EXPERT_KEYS[3]):
        assert target(file, arch, {key: [value] * 4}) == target(file, arch)
        with pytest.raises(
            ModelFileError, match=rf"'{arch}.{key}': \[{value - 1}, {value}\] .expected one number"
        ):
            target(file, arch, {key: [value, value - 1, value, value]})
    for wrong in (0, 2**31, "many", [True]):
        with pytest.raises(ModelFileError, match=re.escape(f"model.gguf: key '{arch}.{key}'")):
            target(file, arch, {key: wrong})


def test_widths_that_are_not_declared(file: Path, arch: str) -> None:
    """They follow from the length of a layer without experts, as in llama.cpp."""
    dense = {"feed_forward_length": tiny.USED * tiny.EXPERT_FF, EXPERT_KEYS[2]: None}
    assert target(file, arch, dense).experts == EXPERTS
    shared = {"feed_forward_length": tiny.SHARED_FF, EXPERT_KEYS[3]: None}
    assert target(file, arch, shared).experts == EXPERTS
    with pytest.raises(ModelFileError, match=f"key '{arch}.feed_forward_length' is missing"):
        target(file, arch, {EXPERT_KEYS[2]: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", None),
        ("expert_used_count", None),
        ("expert_used_count", tiny.EXPERTS + 1),
        ("expert_group_count", 4),
        ("rope.scaling.type", "yarn"),
        ("ssm.inner_size", 25),
    ],
)
def test_values_that_cannot_be(file: Path, arch: str, key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=re.escape(f"model.gguf: key '{arch}.{key}'")):
        target(file, arch, {key: value})


def test_every_tensor_missing_or_misshapen(file: Path, arch: str) -> None:
    for name, shape in tiny.moe_shapes(arch).items():
        if name in ("token_embd.weight", "output.weight"):
            continue
        absent = name
        if name == "blk.0.ssm_in.weight":  # then it is taken for a newer file
            absent = "blk.0.attn_qkv.weight"
        if name == "blk.3.ffn_gate_up_exps.weight":  # and here for one with two matrices
            absent = "blk.3.ffn_gate_exps.weight"
        with pytest.raises(ModelFileError, match=re.escape(f"model.gguf: tensor '{absent}' is missing")):
            target(file, arch, shapes={name: None})
        wrong = (*shape[:-1], shape[-1] + 1)
        message = f"tensor '{name}' has shape {list(wrong)}, expected {list(shape)}"
        with pytest.raises(ModelFileError, match=re.escape(message)):
            target(file, arch, shapes={name: wrong})


def test_both_forms_of_a_block_are_too_much(file: Path) -> None:
    for name, shape in (
        ("blk.3.ffn_up_exps.weight", (tiny.D, tiny.EXPERT_FF, tiny.EXPERTS)),
        ("blk.0.attn_gate.weight", (tiny.D, 24)),
    ):
        with pytest.raises(ModelFileError, match=f"tensor '{name}' is unknown"):
            target(file, "qwen3next", shapes={name: shape})


def test_order_of_value_heads(file: Path) -> None:
    """Ollama's key."""
    assert target(file, "qwen3next", {"ssm.v_head_reordered": False}) == target(file, "qwen3next")
    assert target(file, "qwen35moe", {"ssm.v_head_reordered": True}) == target(file, "qwen35moe")
    for arch, value in (("qwen3next", True), ("qwen35moe", False)):
        with pytest.raises(ModelFileError, match=f"v_head_reordered' is {str(value).lower()}: value heads"):
            target(file, arch, {"ssm.v_head_reordered": value})


def test_scales(file: Path) -> None:
    """One per expert, one per matrix; of a matrix that is taken apart, the same for each part."""
    e = (tiny.EXPERTS,)
    scales = {"blk.1.ffn_up_exps.scale": e, "blk.3.ffn_gate_up_exps.scale": e, "blk.2.ssm_ba.scale": (1,)}
    scales |= {"blk.0.ssm_in.scale": (1,), "output.scale": (1,), "blk.2.attn_qkv.scale": (1,)}
    ignored = {"blk.1.ffn_up_exps.input_scale": e, "blk.0.ssm_in.input_scale": (1,)}
    p = target(file, "qwen3next", shapes=scales | ignored)
    assert set(p.scales) == set(scales)
    parts = {f"blk.2.ssm_{x}.scale" for x in ("beta", "alpha")} | {
        f"blk.0.attn_{x}.scale" for x in ("qkv", "gate")
    }
    found = {name: shape for name, shape in p.tensors().items() if name.endswith("scale")}
    assert found == {
        **{name: shape for name, shape in scales.items() if not re.search("ssm_", name)},
        **dict.fromkeys(parts, (1,)),
    }
    sources = p.sources(GGUFFile(file))
    assert set(sources) == set(p.tensors()) and all(
        s.shape == p.tensors()[name] for name, s in sources.items()
    )
    with pytest.raises(ModelFileError, match=r"'blk.1.ffn_up_exps.scale' has shape \[1\], expected \[5\]"):
        target(file, "qwen3next", shapes={"blk.1.ffn_up_exps.scale": (1,)})


def test_a_vector_may_be_one_row(file: Path, arch: str) -> None:
    name = "blk.0.ffn_gate_inp_shexp.weight"
    p = target(file, arch, shapes={name: (tiny.D, 1)})
    assert p == target(file, arch) and p.sources(GGUFFile(file))[name].shape == (tiny.D,)


def test_vectors_are_float32(file: Path) -> None:
    shapes = tiny.moe_shapes()
    name = "blk.0.ffn_gate_inp_shexp.weight"
    tensors = [f32_tensor(n, shape) for n, shape in shapes.items() if n != name]
    tensors.append(Tensor(name, 1, shapes[name], bytes(2 * tiny.D)))
    file.write_bytes(build(tiny.moe_keys(), tensors).data)
    with pytest.raises(ModelFileError, match=f"'{name}' is f16, expected f32"):
        read_target(GGUFFile(file))


def test_rows_of_a_delta_net(file: Path) -> None:
    """Value head j of key head i becomes head j * k_heads + i, of every tensor that has value heads for rows."""
    p = target(file, "qwen3next")
    s, k, v = tiny.S, tiny.H_K, tiny.H_V
    ratio = v // k
    order = [i * ratio + j for j in range(ratio) for i in range(k)]
    names = {name: x for name, x in _numbered(file).items() if name.startswith(("blk.0.", "blk.2."))}
    old, new, ba = names["blk.0.ssm_in.weight"], names["blk.2.attn_qkv.weight"], names["blk.2.ssm_ba.weight"]
    each = old.reshape(k, 2 * s + 2 * ratio * s)
    q, keys, values, z = np.split(each, [s, 2 * s, 2 * s + ratio * s], axis=1)
    expected = {
        "blk.0.attn_qkv.weight": [*q.ravel(), *keys.ravel(), *values.reshape(v, s)[order].ravel()],
        "blk.0.attn_gate.weight": z.ravel(),
        "blk.2.attn_qkv.weight": [*new[: 2 * k * s], *new[2 * k * s :].reshape(v, s)[order].ravel()],
        "blk.2.attn_gate.weight": names["blk.2.attn_gate.weight"],
        "blk.2.ssm_beta.weight": ba.reshape(k, 2, ratio)[:, 0].ravel()[order],
        "blk.2.ssm_alpha.weight": ba.reshape(k, 2, ratio)[:, 1].ravel()[order],
        "blk.2.ssm_a": names["blk.2.ssm_a"][order],
        "blk.2.ssm_dt.bias": names["blk.2.ssm_dt.bias"][order],
        "blk.2.ssm_out.weight": names["blk.2.ssm_out.weight"],
    }
    sources = p.sources(GGUFFile(file))
    for name, rows in expected.items():
        found = np.frombuffer(sources[name].data, np.float32).reshape(sources[name].shape[::-1])
        np.testing.assert_array_equal(found.reshape(len(found), -1)[:, 0], rows, name)


def _numbered(path: Path) -> dict[str, np.ndarray]:
    """Fill every tensor's rows with their numbers, in the file; name -> numbers."""
    rows, data = {}, np.memmap(path, np.uint8, "r+")
    with GGUFFile(path) as file:
        for name, info in file.tensors.items():
            rows[name] = np.arange(info.shape[-1], dtype=np.float32)
            x = np.repeat(rows[name], int(np.prod(info.shape[:-1])))
            data[info.offset : info.offset + info.nbytes] = x.view(np.uint8)
    data.flush()
    return rows


SIZES = {
    "35B-A3B": (Qwen35Moe, 40, 2048, 16, 2, 32, 256, 8, 512, 512, 248320, 733, 34.7),
    "397B-A17B": (Qwen35Moe, 60, 4096, 32, 2, 64, 512, 10, 1024, 1024, 248320, 1098, 396.3),
    "80B-A3B": (Qwen3Next, 48, 2048, 16, 2, 32, 512, 10, 512, 512, 151936, 879, 79.7),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_layouts(name: str) -> None:
    """Counts and sizes of models that are published."""
    kind, layers, d, heads, kv, v_heads, n, used, ff, shared, vocab, tensors, billions = SIZES[name]
    p = kind(
        n_layers=layers,
        n_embd=d,
        n_ff=ff,
        n_vocab=vocab,
        n_heads=heads,
        n_kv_heads=kv,
        head_dim=256,
        n_rot=64,
        rope_theta=1e7,
        rms_eps=1e-6,
        conv_kernel=4,
        ssm_state=128,
        ssm_k_heads=16,
        ssm_v_heads=v_heads,
        ssm_inner=128 * v_heads,
        recurrent=tuple((i + 1) % 4 != 0 for i in range(layers)),
        n_ctx_train=262144,
        tied_head=False,
        experts=Experts(d, n, used, ff, shared),
    )
    shapes = p.tensors()
    assert len(shapes) == tensors
    assert round(sum(np.prod(shape) for shape in shapes.values()) / 1e9, 1) == billions
