"""Tests of the parameters of targets without recurrent layers: every size is read, every key or tensor that does not fit is
named."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.errors import ModelFileError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml.device import F16
from dflash_ggml.ggml.operations import Yarn
from dflash_ggml.models.experts import Experts
from dflash_ggml.models.laguna import Laguna
from dflash_ggml.models.llama import Llama
from dflash_ggml.models.qwen3 import Qwen3
from dflash_ggml.models.qwen3moe import Qwen3Moe
from dflash_ggml.models.registry import read_target
from dflash_ggml.models.rope import Rope
from dflash_ggml.models.target import Target
from dflash_ggml.state.kv_type import KvType
from dflash_ggml.state.state import state_parts
from reference.gguf_bytes import Tensor, build, f32_tensor
from reference.tiny_kv_models import (
    FF,
    HEAD_DIM,
    HEADS,
    KV,
    D,
    laguna_keys,
    laguna_shapes,
    qwen3_keys,
    qwen3_shapes,
)
from reference.tiny_models import VOCAB


def target(
    path: Path, keys: dict[str, Any] | None = None, changes: dict[str, tuple[int, ...] | None] | None = None
) -> Target:
    """The tiny target with `keys` changed (None drops one), and shapes of tensors changed, dropped (None) or added."""
    merged = {key: value for key, value in (qwen3_keys() | (keys or {})).items() if value is not None}
    shapes = qwen3_shapes() | (changes or {})
    tensors: list[Tensor] = [f32_tensor(name, shape) for name, shape in shapes.items() if shape]
    path.write_bytes(build(merged, tensors).data)
    return read_target(GGUFFile(path))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_qwen3(file: Path) -> None:
    found = target(file)
    assert found == Qwen3(
        n_layers=2,
        n_embd=D,
        n_ff=FF,
        n_vocab=VOCAB,
        n_heads=HEADS,
        n_kv_heads=KV,
        head_dim=HEAD_DIM,
        rope_theta=1e6,
        rope_full=Rope(HEAD_DIM, 1e6),
        rope_near=Rope(HEAD_DIM, 1e6),
        rms_eps=float(np.float32(1e-6)),
        n_ctx_train=64,
        tied_head=False,
    )
    assert found.tensors() == qwen3_shapes() and not found.state_spec().recurrent
    assert target(file, changes={"output.weight": None}).tied_head
    scale = {"blk.1.ffn_up.scale": (1,), "blk.1.ffn_up.input_scale": (1,)}
    assert target(file, changes=scale).scales == ("blk.1.ffn_up.scale",)


def test_what_a_file_may_leave_out(file: Path) -> None:
    """Heads are as wide as the embedding divides, and as many of keys as of queries."""
    changes = {f"blk.{i}.attn_{x}.weight": (D, D) for i in range(2) for x in ("q", "k", "v", "output")}
    changes |= {f"blk.{i}.attn_{x}_norm.weight": (2,) for i in range(2) for x in "qk"}
    names = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    found = target(file, {f"qwen3.{name}": None for name in names}, changes)
    assert (found.n_kv_heads, found.head_dim, found.rope_theta) == (HEADS, 2, 10000.0)


def moe(
    path: Path, keys: dict[str, Any] | None = None, changes: dict[str, tuple[int, ...] | None] | None = None
) -> Qwen3Moe:
    """As `target`, with five experts of which three are used."""
    own: dict[str, Any] = {key.replace("qwen3.", "qwen3moe."): value for key, value in qwen3_keys().items()}
    own |= {key: None for key in qwen3_keys() if key.startswith("qwen3.")}
    own |= {"general.architecture": "qwen3moe", "qwen3moe.expert_count": 5, "qwen3moe.expert_used_count": 3}
    shapes: dict[str, tuple[int, ...] | None] = {}
    for i in range(2):
        block = f"blk.{i}.ffn_"
        shapes |= {f"{block}{x}.weight": None for x in ("gate", "up", "down")}
        shapes |= {f"{block}gate_inp.weight": (D, 5), f"{block}down_exps.weight": (FF // 3, D, 5)}
        shapes |= {f"{block}{x}_exps.weight": (D, FF // 3, 5) for x in ("gate", "up")}
    found = target(path, own | (keys or {}), shapes | (changes or {}))
    assert isinstance(found, Qwen3Moe)
    return found


def test_experts(file: Path) -> None:
    found = moe(file, changes={"blk.1.ffn_down_exps.scale": (5,)})
    assert found.experts == Experts(D, 5, 3, FF // 3)
    assert found.scales == ("blk.1.ffn_down_exps.scale",)
    with pytest.raises(ModelFileError, match="'qwen3moe.expert_used_count': 6 is out of range"):
        moe(file, {"qwen3moe.expert_used_count": 6})


def test_width_of_experts(file: Path) -> None:
    """0 means the same as a missing key: those used are together as wide as a dense layer."""
    key, expected = "qwen3moe.expert_feed_forward_length", moe(file)
    assert moe(file, {key: 0}) == moe(file, {key: FF // 3}) == expected
    with pytest.raises(ModelFileError, match=f"'{key}': 0 is out of range"):
        moe(file, {key: 0, "qwen3moe.feed_forward_length": None})


def test_gate_and_up_as_one(file: Path) -> None:
    apart = {f"blk.1.ffn_{x}_exps.weight": None for x in ("gate", "up")}
    name = "blk.1.ffn_gate_up_exps.weight"
    assert moe(file, changes=apart | {name: (D, 2 * (FF // 3), 5)}).joined == {1}
    with pytest.raises(ModelFileError, match=f"tensor '{name}' has shape"):
        moe(file, changes=apart | {name: (D, FF // 3, 5)})


def qkv(block: int, heads: int = HEADS) -> dict[str, tuple[int, ...] | None]:
    """Changes of shapes: a block with queries, keys and values as one matrix."""
    apart = {f"blk.{block}.attn_{x}.weight": None for x in "qkv"}
    return apart | {f"blk.{block}.attn_qkv.weight": (D, (heads + 2 * KV) * HEAD_DIM)}


def test_queries_keys_and_values_as_one(file: Path) -> None:
    """The parts lie within it, rows in order, and a scale is that of each."""
    scales: dict[str, tuple[int, ...] | None] = {f"blk.1.attn_qkv.{x}scale": (1,) for x in ("", "input_")}
    found = target(file, changes=qkv(1) | scales)
    assert found.scales == ("blk.1.attn_q.scale", "blk.1.attn_k.scale", "blk.1.attn_v.scale")
    assert isinstance(moe(file, changes=qkv(0)), Qwen3Moe) and laguna(file, changes=qkv(2, 6)).n_layers == 4
    target(file, changes=qkv(1) | scales)
    with GGUFFile(file) as opened:
        whole = opened.data("blk.1.attn_qkv.weight")
        sources = read_target(opened).sources(opened)
    rows = [sources[f"blk.1.attn_{x}.weight"] for x in "qkv"]
    assert [s.shape for s in rows] == [(D, HEADS * HEAD_DIM), (D, KV * HEAD_DIM), (D, KV * HEAD_DIM)]
    assert np.concatenate([s.data for s in rows]).tolist() == whole.tolist()


@pytest.mark.parametrize(
    "shape", [(D, (HEADS + 2 * KV) * HEAD_DIM + 1), (D,), (D + 1, (HEADS + 2 * KV) * HEAD_DIM)]
)
def test_one_matrix_of_another_shape(file: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelFileError, match=r"tensor 'blk.1.attn_(qkv|q).weight' has shape"):
        target(file, changes=qkv(1) | {"blk.1.attn_qkv.weight": shape})


def test_one_matrix_beside_its_parts_or_with_a_bias(file: Path) -> None:
    beside: dict[str, tuple[int, ...] | None] = {"blk.1.attn_k.weight": (D, KV * HEAD_DIM)}
    with pytest.raises(ModelFileError, match="tensor 'blk.1.attn_q.weight' is missing"):
        target(file, changes=qkv(1) | beside)
    bias: dict[str, tuple[int, ...] | None] = {"blk.1.attn_qkv.bias": ((HEADS + 2 * KV) * HEAD_DIM,)}
    with pytest.raises(ModelFileError, match="'blk.1.attn_qkv.bias' is unknown"):
        target(file, changes=qkv(1) | bias)


def test_scales_by_the_name_of_their_matrix(file: Path) -> None:
    """`X.weight.scale` is `X.scale`."""
    changes = {f"blk.1.attn_q.weight.{x}scale": (1,) for x in ("", "input_")}
    assert target(file, changes=changes).scales == ("blk.1.attn_q.scale",)
    assert moe(file, changes={"blk.0.ffn_up_exps.weight.scale": (5,)}).scales == ("blk.0.ffn_up_exps.scale",)
    assert laguna(file, changes=changes).scales == ("blk.1.attn_q.scale",)


@pytest.mark.parametrize(
    ("read", "n", "key", "value"),
    [
        *(
            ("qwen3", 2, key, value)
            for key, value in (("feed_forward_length", FF), ("attention.head_count_kv", KV))
        ),
        ("qwen3", 2, "attention.head_count", HEADS),
        ("moe", 2, "expert_used_count", 3),
        ("moe", 2, "feed_forward_length", FF),
        ("moe", 2, "expert_feed_forward_length", FF // 3),
        ("laguna", 4, "attention.head_count_kv", KV),
        ("laguna", 4, "feed_forward_length", FF),
        ("laguna", 4, "expert_used_count", 3),
        ("laguna", 4, "expert_feed_forward_length", 10),
    ],
)
def test_one_number_for_all_layers(file: Path, read: str, n: int, key: str, value: int) -> None:
    """As an array it has an entry for each, and they agree."""
    load = {"qwen3": target, "moe": moe, "laguna": laguna}[read]
    key = f"{'qwen3moe' if read == 'moe' else read}.{key}"
    assert load(file, {key: [value] * n}) == load(file)
    with pytest.raises(ModelFileError, match=rf"'{key}': \[{value}, {value + 1}\] .expected one number"):
        load(file, {key: [value] * (n - 1) + [value + 1]})
    for wrong, message in (
        ([value] * (n + 1), "entries"),
        ([0] * n, "out of range"),
        ([True] * n, "an integer"),
    ):
        if not (read == "moe" and "expert_feed" in key and wrong[0] == 0):  # there 0 means unset
            with pytest.raises(ModelFileError, match=f"key '{key}'.*{message}"):
                load(file, {key: wrong})


def test_yarn(file: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32768}
    found = target(file, {f"qwen3.rope.scaling.{key}": value for key, value in keys.items()})
    assert isinstance(found, Qwen3) and found.rope_full.yarn == Yarn(
        4.0, 32768, pytest.approx(1 + 0.1 * np.log(4))
    )
    with pytest.raises(ModelFileError, match=r"qwen3.rope.scaling.type': 'linear' is not supported"):
        target(file, {"qwen3.rope.scaling.type": "linear"})
    for missing in (None, 0):  # then it is what the model was trained for
        first = {
            f"qwen3.rope.scaling.{k}": v for k, v in (keys | {"original_context_length": missing}).items()
        }
        assert target(file, first).rope_full.yarn == found.rope_full.yarn._replace(n_ctx=64)


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(file: Path, name: str) -> None:
    for nothing in (0.0, 1.0):
        assert target(file, {f"qwen3.{name}": nothing}).rope_full.yarn is None
    assert target(file, {f"qwen3.{name}": 4.0, "qwen3.rope.scaling.type": "none"}).rope_full.yarn is None
    for factor in (4.0, 0.5, float("nan")):
        with pytest.raises(ModelFileError, match=f"key 'qwen3.{name}': without a type it is 'linear', which"):
            target(file, {f"qwen3.{name}": factor})


def test_published_sizes() -> None:
    """Qwen3-8B: 399 tensors, 8.2 billion weights; Qwen3-4B is tied: 398."""
    common = {"n_vocab": 151936, "n_kv_heads": 8, "head_dim": 128, "rope_theta": 1e6}
    common |= {"rope_full": Rope(128, 1e6), "rope_near": Rope(128, 1e6)}
    common |= {"rms_eps": 1e-6, "n_ctx_train": 40960, "n_layers": 36, "n_heads": 32}
    large = Qwen3(n_embd=4096, n_ff=12288, tied_head=False, **common).tensors()
    assert len(large) == 399 and round(sum(np.prod(s) for s in large.values()) / 1e9, 2) == 8.19
    small = Qwen3(n_embd=2560, n_ff=9728, tied_head=True, **common).tensors()
    assert len(small) == 398 and round(sum(np.prod(s) for s in small.values()) / 1e9, 2) == 4.02


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qwen3.block_count", 0),
        ("qwen3.embedding_length", 2**31),
        ("qwen3.attention.head_count_kv", 3),
        ("qwen3.attention.value_length", 5),
        ("qwen3.attention.key_length", 5),
        ("qwen3.attention.layer_norm_rms_epsilon", 0.0),
        ("qwen3.rope.freq_base", float("nan")),
        ("qwen3.rope.dimension_count", 4),
        ("tokenizer.ggml.tokens", ["a", "b"]),
    ],
)
def test_values_that_cannot_be(file: Path, key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=re.escape(f"model.gguf: key '{key}'")):
        target(file, {key: value})


@pytest.mark.parametrize("name", [n for n in qwen3_shapes() if n.startswith(("blk.1", "output_norm"))])
def test_tensors_that_are_missing_or_misshapen(file: Path, name: str) -> None:
    shape = qwen3_shapes()[name]
    with pytest.raises(ModelFileError, match=re.escape(f"tensor '{name}' is missing")):
        target(file, changes={name: None})
    with pytest.raises(ModelFileError, match=re.escape(f"tensor '{name}' has shape")):
        target(file, changes={name: (*shape[:-1], shape[-1] + 1)})


def test_unknown_tensors(file: Path) -> None:
    for name in (
        "blk.0.attn_q.bias",
        "blk.2.attn_q.weight",
        "token_embd.scale",
        "blk.0.attn_norm.input_scale2",
    ):
        with pytest.raises(ModelFileError, match=f"{name!r} is unknown"):
            target(file, changes={name: (1,)})


def laguna(
    path: Path, keys: dict[str, Any] | None = None, changes: dict[str, tuple[int, ...] | None] | None = None
) -> Laguna:
    """As `target`."""
    merged = {key: value for key, value in (laguna_keys() | (keys or {})).items() if value is not None}
    shapes = laguna_shapes() | (changes or {})
    path.write_bytes(build(merged, [f32_tensor(name, shape) for name, shape in shapes.items() if shape]).data)
    found = read_target(GGUFFile(path))
    assert isinstance(found, Laguna)
    return found


def test_laguna(file: Path) -> None:
    found = laguna(file)
    assert found.tensors() == laguna_shapes()
    assert (found.heads, found.n_dense, found.gates) == ((4, 6, 6, 6), 1, (4, 6, 6, 6))
    assert found.windows == (None, 16, 16, 16) and found.rope_theta == 5e5
    assert found.rope_full == Rope(2, 5e5, Yarn(32.0, 8, pytest.approx(1 + 0.1 * np.log(32)), 64.0))
    assert found.rope_near == Rope(HEAD_DIM, 1e4)
    experts = found.experts
    assert (experts.n_experts, experts.n_used, experts.n_ff, experts.n_ff_shared) == (5, 3, 10, 14)
    assert (experts.scoring, experts.biased, experts.normalised, experts.scale) == (
        "sigmoid",
        True,
        True,
        2.5,
    )
    spec = found.state_spec()
    assert not spec.recurrent and spec.windows == (16,) and spec.kind_index == (0, 0, 1, 2)


def test_forms_of_laguna(file: Path) -> None:
    """Gates per element, layers by their period, no window at all, and what is left out."""
    per_element = {f"blk.{i}.attn_gate.weight": (D, h * HEAD_DIM) for i, h in enumerate([4, 6, 6, 6])}
    assert laguna(file, changes=per_element).gates == (24, 36, 36, 36)
    pattern = "laguna.attention.sliding_window_pattern"
    assert laguna(file, {pattern: None}).windows == (None, 16, 16, 16)  # every fourth sees everything
    assert laguna(file, {pattern: 2}).windows == (None, 16, None, 16)
    assert laguna(file, {"laguna.attention.sliding_window": 0}).windows == (None,) * 4
    left_out = ("expert_gating_func", "expert_weights_norm", "expert_weights_scale", "rope.freq_base_swa")
    found = laguna(file, {f"laguna.{name}": None for name in left_out})
    assert laguna(file, {"laguna.expert_weights_scale": 0.0}).experts == replace(
        laguna(file).experts, scale=1.0
    )
    assert found.experts.scoring == "sigmoid" and found.experts.scale == 1 and found.rope_near.theta == 5e5


def test_scales_of_experts(file: Path) -> None:
    changes = {"blk.1.ffn_up_exps.scale": (5,), "blk.1.ffn_up_shexp.scale": (1,)}
    assert sorted(laguna(file, changes=changes).scales) == sorted(changes)


def test_published_size_of_xs() -> None:
    """Laguna XS.2: 678 tensors, 33 billion weights."""
    heads = tuple(64 if i % 4 else 48 for i in range(40))
    found = Laguna(
        n_layers=40,
        n_embd=2048,
        n_ff=8192,
        n_vocab=100352,
        n_heads=64,
        heads=heads,
        n_kv_heads=8,
        head_dim=128,
        seen=tuple(512 if i % 4 else None for i in range(40)),
        gates=heads,
        n_dense=1,
        experts=Experts(2048, 256, 8, 512, 512, False, "sigmoid", True, True, 2.5),
        rope_theta=5e5,
        rope_full=Rope(64, 5e5),
        rope_near=Rope(128, 1e4),
        rms_eps=1e-6,
        n_ctx_train=131072,
        tied_head=False,
    )
    shapes = found.tensors()
    assert len(shapes) == 678 and round(sum(np.prod(s) for s in shapes.values()) / 1e9) == 33
    kv = {
        part.name: part for part in state_parts(found.state_spec(), 32, KvType(F16, F16), 24, 0, n_batch=512)
    }
    # 40 KiB a token of the layers that see everything, 120 KiB a row of the rings
    assert kv["target K/V"].nbytes(131072) == 131072 * 40 * 1024 + 1024 * 120 * 1024


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("laguna.attention.head_count", [4, 6, 6]),
        ("laguna.attention.head_count", [4, 6, 6, 5]),
        ("laguna.attention.head_count_kv", [2, 2, 2, 1]),
        ("laguna.attention.sliding_window_pattern", [True]),
        ("laguna.attention.value_length", 5),
        ("laguna.rope.dimension_count", 3),
        ("laguna.rope.dimension_count_swa", 8),
        ("laguna.rope.scaling.type", "linear"),
        ("laguna.leading_dense_block_count", 5),
        ("laguna.expert_used_count", 6),
        ("laguna.expert_gating_func", 1),
        ("laguna.expert_shared_count", 2),
        ("laguna.router_logit_softcapping", 30.0),
        ("laguna.expert_weights_scale", -1.0),
    ],
)
def test_values_that_laguna_cannot_have(file: Path, key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=re.escape(f"model.gguf: key '{key}'")):
        laguna(file, {key: value})


@pytest.mark.parametrize("name", [n for n in laguna_shapes() if n.startswith(("blk.0", "blk.2"))])
def test_tensors_of_laguna_that_are_missing_or_misshapen(file: Path, name: str) -> None:
    shape = laguna_shapes()[name]
    with pytest.raises(ModelFileError, match=re.escape(f"tensor '{name}' is missing")):
        laguna(file, changes={name: None})
    with pytest.raises(ModelFileError, match=re.escape(f"tensor '{name}' has shape")):
        laguna(file, changes={name: (*shape[:-1], shape[-1] + 1)})


def test_what_laguna_would_ignore(file: Path) -> None:
    for name in ("blk.1.attn_sinks.weight", "blk.0.ffn_gate_inp.weight", "blk.1.ffn_gate_inp_shexp.weight"):
        with pytest.raises(ModelFileError, match=f"{name!r} is unknown"):
            laguna(file, changes={name: (D,)})


def llama(
    path: Path, keys: dict[str, Any] | None = None, changes: dict[str, tuple[int, ...] | None] | None = None
) -> Llama:
    """As `target`, in the architecture `llama`."""
    own: dict[str, Any] = {key: None for key in qwen3_keys() if key.startswith("qwen3.")}
    own |= {key.replace("qwen3.", "llama."): value for key, value in qwen3_keys().items()}
    own |= {"general.architecture": "llama", "llama.rope.dimension_count": HEAD_DIM}
    norms: dict[str, tuple[int, ...] | None] = {
        f"blk.{i}.attn_{x}_norm.weight": None for i in range(2) for x in "qk"
    }
    found = target(path, own | (keys or {}), norms | (changes or {}))
    assert isinstance(found, Llama)
    return found


def test_llama(file: Path) -> None:
    found = llama(file)
    assert (found.n_heads, found.n_kv_heads, found.head_dim, found.n_ff) == (HEADS, KV, HEAD_DIM, FF)
    assert (found.factors, found.biases) == (False, ())
    assert found.windows == (None, None) and not found.state_spec().recurrent
    assert found.ropes({}) == (Rope(HEAD_DIM, 1e6, None, 1.0, True),) * 2
    assert llama(file, changes={"output.weight": None}).tied_head
    scale = {"blk.1.ffn_up.scale": (1,)}
    assert llama(file, changes=scale).scales == ("blk.1.ffn_up.scale",)
    llama(file, changes=qkv(1))
    llama(file, changes={"blk.1.attn_rot_embd.weight": (HEAD_DIM // 2,)})


def test_llama_positions(file: Path) -> None:
    """Linear, with or without its name; YaRN; divisors of each pair; and nothing else."""
    for keys in ({"type": "linear", "factor": 8.0}, {"factor": 8.0}):
        found = llama(file, {f"llama.rope.scaling.{k}": v for k, v in keys.items()})
        assert (found.rope_full.stretch, found.rope_full.yarn) == (8.0, None)
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    found = llama(file, {f"llama.rope.scaling.{k}": v for k, v in keys.items()})
    rope = found.rope_full
    assert rope.stretch == 1.0 and rope.yarn is not None and rope.yarn.n_ctx == 32
    factors: dict[str, tuple[int, ...] | None] = {"rope_freqs.weight": (HEAD_DIM // 2,)}
    found = llama(file, changes=factors)
    assert found.factors and found.ropes({"rope_freqs.weight": "divisors"})[0].factors == "divisors"
    with pytest.raises(ModelFileError, match="'rope_freqs.weight' has shape"):
        llama(file, changes={"rope_freqs.weight": (HEAD_DIM,)})
    with pytest.raises(ModelFileError, match="'longrope' is not supported, only 'none', 'linear' and 'yarn'"):
        llama(file, {"llama.rope.scaling.type": "longrope"})


def test_llama_windows(file: Path) -> None:
    """All layers have it where the file does not list those that do."""
    window = {"llama.attention.sliding_window": 16}
    assert llama(file, window).windows == (16, 16)
    listed = window | {"llama.attention.sliding_window_pattern": [True, False]}
    assert llama(file, listed).windows == (16, None)
    spec = llama(file, window).state_spec()
    assert [layer.window for layer in spec.layers] == [16, 16]


def test_llama_biases(file: Path) -> None:
    biases: dict[str, tuple[int, ...] | None] = {
        "blk.0.attn_q.bias": (HEADS * HEAD_DIM,),
        "blk.1.ffn_down.bias": (D,),
    }
    found = llama(file, changes=biases)
    assert found.biases == tuple(biases)
    assert {name: found.tensors()[name] for name in biases} == biases
    with pytest.raises(ModelFileError, match="'blk.0.attn_q.bias' has shape"):
        llama(file, changes={"blk.0.attn_q.bias": (D,)})
    with pytest.raises(ModelFileError, match="'output.bias' is unknown"):
        llama(file, changes={"output.bias": (VOCAB,)})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_count", 8, "models with experts are not supported"),
        ("attention.scale", 0.5, "not 0"),
        ("rope.dimension_count", HEAD_DIM - 2, "the whole head"),
        ("attention.head_count_kv", 3, "a divisor of 4"),
    ],
)
def test_llama_values_that_are_not_supported(file: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(ModelFileError, match=f"key 'llama.{key}'.*{message}"):
        llama(file, {f"llama.{key}": value})
