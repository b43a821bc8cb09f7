"""Tests of draft parameters: all dialects read alike, other kinds are refused, mismatched pairs are named. 4 seconds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.drafts.dflash.file import DraftFile
from dflash_ggml.drafts.dflash.params import DraftParams, check_pair
from dflash_ggml.errors import ModelFileError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.files.tensor_info import BF16, F32
from dflash_ggml.models.qwen35 import Qwen35
from reference import tiny_models as tiny
from reference.gguf_bytes import Tensor, build


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


EXPECTED = DraftParams(
    n_layers=2,
    n_embd=8,
    n_ff=14,
    n_heads=4,
    n_kv_heads=1,
    head_dim=10,
    rope_theta=1e7,
    rms_eps=float(np.float32(1e-6)),
    block_size=5,
    mask_id=7,
    taps=(0, 2),
    n_vocab=tiny.VOCAB,
    sliding_window=None,
    window_layers=(False, False),
    declared_causal=None,
)


def lucebox_name(name: str) -> str:
    return {"fc.weight": "dflash.fc.weight", "enc.output_norm.weight": "dflash.hidden_norm.weight"}.get(
        name, name
    )


def spiritbuun_name(name: str) -> str:
    name = {"fc.weight": "dflash_fc.weight", "enc.output_norm.weight": "dflash_hidden_norm.weight"}.get(
        name, name
    )
    return name.replace("ffn_norm", "post_attention_norm")


def draft(path: Path, keys: dict[str, Any], rename: Callable[[str], str] = str, **options: Any) -> DraftFile:
    keys = {key: value for key, value in keys.items() if value is not None}
    path.write_bytes(tiny.gguf_draft(keys, rename).data)
    return DraftFile.open(path, **options)


def upstream(path: Path, **changes: Any) -> DraftFile:
    """A llama.cpp draft with `changes` to the keys below `dflash.`."""
    return draft(path, tiny.upstream_draft_keys() | {f"dflash.{key}": v for key, v in changes.items()})


def zlab(folder: Path, **changes: Any) -> DraftFile:
    """A z-lab draft with `changes` to its config.json (None is written as null)."""
    return DraftFile.open(tiny.write_zlab_draft(folder, tiny.zlab_config() | changes))


def check_values(opened: DraftFile) -> None:
    values = tiny.draft_values()
    assert set(opened.names) == set(values)
    for name, expected in values.items():
        kind, shape, data = opened.tensor(name)
        x = (
            data.view(np.float32)
            if kind == F32
            else (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        )
        assert kind == F32 or (kind == BF16 and len(shape) == 2), name
        assert shape == expected.shape[::-1] and np.array_equal(x.reshape(expected.shape), expected), name


@pytest.mark.parametrize(
    ("keys", "rename"),
    [
        (tiny.upstream_draft_keys(), str),
        (tiny.lucebox_draft_keys(), lucebox_name),
        (tiny.lucebox_draft_keys("dflash-draft"), spiritbuun_name),
    ],
    ids=["upstream", "lucebox", "spiritbuun"],
)
def test_gguf_dialects(file: Path, keys: dict[str, Any], rename: Callable[[str], str]):
    opened = draft(file, keys, rename)
    assert opened.params == EXPECTED
    check_values(opened)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_zlab_dialect(tmp_path: Path, prefix: str):
    folder = tiny.write_zlab_draft(tmp_path / "draft", prefix=prefix)
    for path in (folder, folder / "model.safetensors"):
        opened = DraftFile.open(path)
        assert opened.params == dataclasses.replace(EXPECTED, rms_eps=1e-6)
        check_values(opened)


def test_zlab_shards(tmp_path: Path):
    folder = tiny.write_zlab_draft(tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    names = {tiny.zlab_name(name): x for name, x in tiny.draft_values().items()}
    where = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(where.values()):
        tensors = {name: ("F32", x) for name, x in names.items() if where[name] == part}
        (folder / part).write_bytes(tiny.safetensors_bytes(tensors))
    with pytest.raises(ModelFileError, match="2 .safetensors files in this folder"):
        DraftFile.open(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    check_values(DraftFile.open(folder))
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelFileError, match="weight_map"):
        DraftFile.open(folder)
    index.unlink()
    (folder / "part-0.safetensors").unlink()
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ModelFileError, match="0 .safetensors files"):
        DraftFile.open(folder)


def test_zlab_key_variants(tmp_path: Path):
    config = tiny.zlab_config()
    config["dflash_config"]["block_size"] = config.pop("block_size")
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    opened = DraftFile.open(tiny.write_zlab_draft(tmp_path / "a", config))
    assert opened.params == dataclasses.replace(EXPECTED, rms_eps=1e-6)
    del config["dflash_config"]["block_size"]
    assert DraftFile.open(tiny.write_zlab_draft(tmp_path / "b", config)).params.block_size == 16


def test_upstream_key_variants(file: Path):
    keys = tiny.upstream_draft_keys()
    keys["dflash.mask_token_id"] = keys.pop("tokenizer.ggml.mask_token_id")
    assert draft(file, keys).params == EXPECTED
    assert upstream(file, block_size=None).params.block_size == 16


def test_embedded_draft(demo_draft: Path):
    p = DraftFile.open(demo_draft).params
    assert (p.taps, p.mask_id, p.block_size, p.n_layers) == ((1, 4, 7, 10, 13), 8189, 16, 3)


def test_sliding_windows(tmp_path: Path):
    kinds = ["sliding_attention", "full_attention"]
    some = zlab(tmp_path / "a", use_sliding_window=True, sliding_window=9, layer_types=kinds).params
    assert (some.sliding_window, some.window_layers) == (9, (True, False))
    off = zlab(tmp_path / "b", use_sliding_window=False, sliding_window=9, layer_types=kinds).params
    assert (off.sliding_window, off.window_layers) == (None, (False, False))
    every = tiny.zlab_config()["dflash_config"] | {"use_swa": True, "swa_window_size": 6}
    p = zlab(tmp_path / "c", dflash_config=every).params
    assert (p.sliding_window, p.window_layers) == (6, (True, True))
    windows = {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False]}
    assert upstream(tmp_path / "d.gguf", **windows).params.window_layers == (True, False)
    lucebox = tiny.lucebox_draft_keys() | {
        f"qwen35-dflash-draft.{key}": value for key, value in windows.items()
    }
    assert draft(tmp_path / "e.gguf", lucebox, lucebox_name).params.sliding_window == 9


@pytest.mark.parametrize(
    ("declared", "full", "window"), [(None, False, True), (True, True, True), (False, False, False)]
)
def test_attention_inside_the_block(tmp_path: Path, declared: bool | None, full: bool, window: bool):
    p = zlab(tmp_path / "a", is_causal=declared).params
    assert (p.causal_full, p.causal_window) == (full, window)
    p = upstream(tmp_path / "b.gguf", **{"attention.causal": declared}).params
    assert (p.causal_full, p.causal_window) == (full, window)


def test_interleaved_rotary_pairs_are_reordered(tmp_path: Path):
    """Rotating neighbours before and halves after the reordering gives the same scores of q against k."""
    plain, other = zlab(tmp_path / "a"), zlab(tmp_path / "b", rope_is_neox_style=False)
    rng, d = np.random.default_rng(1), tiny.DRAFT_HEAD_DIM
    x = rng.standard_normal(tiny.D)
    angles = rng.standard_normal((2, d // 2))

    def vectors(opened: DraftFile, which: str, heads: int) -> np.ndarray:
        _, _, raw = opened.tensor(f"blk.1.attn_{which}.weight")
        w = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(heads, d, tiny.D)
        return (w @ x) * opened.tensor(f"blk.1.attn_{which}_norm.weight")[2].view(np.float32)

    def rotated(v: np.ndarray, angle: np.ndarray, neighbours: bool) -> np.ndarray:
        a, b = (v[:, 0::2], v[:, 1::2]) if neighbours else (v[:, : d // 2], v[:, d // 2 :])
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], 1
        )

    q, k = (vectors(plain, w, h) for w, h in (("q", tiny.DRAFT_HEADS), ("k", tiny.DRAFT_KV)))
    expected = rotated(q, angles[0], True) @ rotated(k, angles[1], True).T
    q, k = (vectors(other, w, h) for w, h in (("q", tiny.DRAFT_HEADS), ("k", tiny.DRAFT_KV)))
    np.testing.assert_allclose(
        rotated(q, angles[0], False) @ rotated(k, angles[1], False).T, expected, rtol=1e-9
    )
    for name in ("blk.0.attn_v.weight", "blk.0.attn_norm.weight", "fc.weight"):
        assert np.array_equal(plain.tensor(name)[2], other.tensor(name)[2])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("selector_hidden.weight", "key 'dflash.conv_kernel_size' is missing"),
        ("blk.0.attn_conv_base", "'blk.0.attn_conv_base' is unknown"),
        (
            "markov_w1.weight",
            "rank of the Markov head|'markov_w1.weight' has shape|'markov_w2.weight' is missing",
        ),
        ("d2t", "'d2t' is f32 .4., expected i64 .4."),
        ("rope_freqs.weight", "'rope_freqs.weight' is unknown"),
        ("blk.0.attn_q.bias", "'blk.0.attn_q.bias' is unknown"),
    ],
)
def test_tensors_that_stand_alone_are_named(file: Path, extra: str, message: str):
    """Parts of the newer kinds without the others, and what no kind has."""
    values = tiny.draft_values() | {extra: np.zeros((4,), np.float32)}
    tensors = [Tensor(name, F32, x.shape[::-1], x.tobytes()) for name, x in values.items()]
    file.write_bytes(build(tiny.upstream_draft_keys(), tensors).data)
    with pytest.raises(ModelFileError, match=message):
        DraftFile.open(file)
    file.write_bytes(build(tiny.lucebox_draft_keys(), tensors).data)
    with pytest.raises(ModelFileError, match=f"{extra!r} is unknown"):
        DraftFile.open(file)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dflash.selector_rank": 256}, "key 'dflash.conv_kernel_size' is missing"),
        ({"dflash.conv_kernel_size": 2}, "key 'dflash.conv_group_size' is missing"),
        (
            {"dflash.has_confidence_head": True},
            "tensor 'markov_w1.weight' is missing, but key 'dflash.has_conf",
        ),
        ({"general.architecture": "eagle3"}, "an EAGLE-3 draft, by its architecture 'eagle3'.*--list-pairs"),
        (
            {"eagle3.norm_before_residual": True},
            "an EAGLE-3 draft, by its key 'eagle3.norm_before_residual'.*--list-pairs",
        ),
    ],
)
def test_keys_of_other_kinds(file: Path, keys: dict[str, Any], message: str):
    with pytest.raises(ModelFileError, match=message):
        draft(file, tiny.upstream_draft_keys() | keys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["OtherModel"]}, "architectures"),
        ({"architectures": 3}, "key 'architectures' should be an array"),
        (
            {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2], "selector_rank": 4}},
            "conv_kernel_size' is mis",
        ),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "an EAGLE-3 draft, by its architecture"),
        ({"hidden_size": None}, "key 'hidden_size' is missing"),
        ({"hidden_size": "8"}, "key 'hidden_size' should be an integer but is a string"),
        ({"num_hidden_layers": 10**6}, "key 'num_hidden_layers': 1000000 is out of range"),
        ({"num_key_value_heads": 3}, "do not divide over 3"),
        ({"rope_theta": 0}, "key 'rope_theta': 0.0 should be a positive number"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling.original_max_position_embeddings",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"partial_rotary_factor": 0.3}, "3 rotated dimensions should be even"),
        ({"draft_vocab_size": 9}, "tensor 'd2t' is missing: the draft has 9 tokens of its own"),
        ({"hidden_act": "gelu"}, "key 'hidden_act' is a string .'gelu'., but only 'silu' is supported"),
        ({"dflash_config": {}}, "key 'dflash_config.mask_token_id' is missing"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": []}}, "number of tapped layers: 0"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [2, 0]}}, "should ascend"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [-1, 0]}}, "should ascend from 0"),
        ({"dflash_config": {"mask_token_id": -7, "target_layer_ids": [0, 2]}}, "mask token id: -7"),
        (
            {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0]}},
            r"'fc.weight' has shape .16, 8., expected .8",
        ),
        ({"block_size": 1}, "block size: 1 is out of range"),
        (
            {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["full_attention"]},
            "1 entries for 2 layers",
        ),
        ({"sliding_window": -4, "use_sliding_window": True}, "sliding window: -4"),
    ],
)
def test_bad_config(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ModelFileError, match=message):
        zlab(tmp_path / "draft", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layers": None}, "key 'dflash.target_layers' is missing"),
        ({"target_layers": [0, 2]}, "should be layer ids"),
        ({"attention.value_length": 9}, "value_length' is an integer .'9'., but only 10 is supported"),
        ({"rope.dimension_count": 5}, "5 rotated dimensions should be even and within a head of 10"),
        (
            {"rope.scaling.type": "linear"},
            "rope.scaling.type': 'linear' is not supported, only 'none' and 'yarn'",
        ),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.original_context_length' is missing"),
        ({"attention.sliding_window": 9}, "key 'dflash.attention.sliding_window_pattern' is missing"),
        ({"embedding_scale": 2.0}, "embedding_scale' is a number .'2.0'., but only 1.0"),
        ({"embedding_length": 9}, "tensor 'fc.weight' has shape"),
    ],
)
def test_bad_gguf_draft(file: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ModelFileError, match=message):
        upstream(file, **changes)


def test_tables_of_its_own(file: Path):
    """A draft's own embedding or head is recognised by its shape, and gives the vocabulary size where no key does."""
    own = {"token_embd.weight": (8, 30), "output.weight": (8, 30)}
    keys = {
        key: value
        for key, value in tiny.upstream_draft_keys().items()
        if not key.startswith("tokenizer.ggml.t")
    }

    def opened(**shapes: tuple[int, ...]) -> DraftParams:
        values = tiny.draft_values() | {
            name: np.zeros(shape[::-1], np.float32) for name, shape in shapes.items()
        }
        tensors = [Tensor(name, F32, x.shape[::-1], x.tobytes()) for name, x in values.items()]
        file.write_bytes(build(keys, tensors).data)
        return DraftFile.open(file).params

    p = opened(**own)
    assert p.own == tuple(own) and p.n_vocab == 30
    assert opened(**{"output.weight": (8, 31)}).own == ("output.weight",)
    with pytest.raises(ModelFileError, match=r"'output.weight' has shape .8, 31., expected .8, 30"):
        opened(**own | {"output.weight": (8, 31)})
    with pytest.raises(ModelFileError, match=r"'token_embd.weight' has shape .9, 30., expected .8, 30"):
        opened(**{"token_embd.weight": (9, 30)})


def test_taps_under_their_early_name(file: Path):
    """As llama.cpp's fork wrote them before the key had its name: the layers themselves, not those plus one."""
    keys = tiny.upstream_draft_keys() | {
        "dflash.target_layers": None,
        "dflash.target_layer_ids": list(EXPECTED.taps),
    }
    assert draft(file, keys).params == EXPECTED
    assert upstream(file, target_layer_ids=[0, 1]).params == EXPECTED  # the settled name wins


def test_drafts_of_no_dialect(file: Path, tmp_path: Path):
    with pytest.raises(ModelFileError, match="'qwen35' is not a draft"):
        draft(file, tiny.target_keys())
    with pytest.raises(ModelFileError, match="'clip' is not a draft .*vision part of a model .mmproj"):
        draft(file, {"general.architecture": "clip"})
    keys = tiny.lucebox_draft_keys() | {"qwen35-dflash-draft.dflash.target_layer_ids": None}
    with pytest.raises(ModelFileError, match="target_layer_ids' is missing"):
        draft(file, keys, lucebox_name)
    with pytest.raises(ModelFileError, match="'fc.weight' is missing"):
        draft(file, tiny.upstream_draft_keys(), lucebox_name)
    with pytest.raises(ModelFileError, match="no such file"):
        DraftFile.open(tmp_path / "absent.safetensors")


# --- the pair ---


def tiny_target(path: Path) -> Qwen35:
    path.write_bytes(tiny.gguf_file(tiny.target_keys(), tiny.target_shapes()).data)
    return Qwen35.from_gguf(GGUFFile(path))


def test_pair_that_fits(file: Path, tmp_path: Path):
    assert check_pair(tiny_target(file), EXPECTED, "T", "D") == []
    assert check_pair(tiny_target(file), dataclasses.replace(EXPECTED, n_vocab=None), "T", "D") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": 16}, "hidden size is 16, the target's 8"),
        ({"n_vocab": 100}, f"vocabulary has 100 tokens, the target's {tiny.VOCAB}"),
        ({"taps": (0, 4)}, "taps layer 4, the target's last one is 3"),
        ({"mask_id": 5000}, "mask token id 5000 is outside"),
    ],
)
def test_pair_that_does_not_fit(file: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ModelFileError, match=f"d.gguf does not fit t.gguf: .*{message}"):
        check_pair(tiny_target(file), dataclasses.replace(EXPECTED, **changes), "t.gguf", "d.gguf")


def test_different_rope_bases_are_a_warning(file: Path):
    warnings = check_pair(
        tiny_target(file), dataclasses.replace(EXPECTED, rope_theta=1e6), "t.gguf", "d.gguf"
    )
    assert len(warnings) == 1 and "d.gguf has rope base 1e+06, t.gguf has 1e+07" in warnings[0]
