"""Tests of one model in several file forms: in parts, and as Ollama writes it. All compute the same. 3 seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler
from dflash_ggml.decode.sampling_params import SamplingParams
from dflash_ggml.errors import ModelFileError
from dflash_ggml.files.gguf import GGUFFile, StringArray, part_names
from dflash_ggml.ggml.bindings import lib
from dflash_ggml.ggml.device import F32
from dflash_ggml.models.registry import read_target
from reference import kv_toys, toys
from reference.engine_kit import Solo
from reference.gguf_bytes import Tensor, build, f32_tensor


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return toys.write_pair(tmp_path_factory.mktemp("forms"), seed=9)


@pytest.fixture(scope="module")
def target(pair: tuple[Path, Path]) -> Path:
    return pair[0]


def contents(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Keys and tensors of a file, to be written again."""
    with GGUFFile(path) as file:
        keys = {
            key: value.tolist()
            if isinstance(value, np.ndarray)
            else list(value)
            if isinstance(value, StringArray)
            else value
            for key, value in file.metadata.items()
        }
        tensors = [Tensor(t.name, t.type, t.shape, bytes(file.data(t.name))) for t in file.tensors.values()]
    return keys, tensors


def logits(path: Path) -> np.ndarray:
    with Solo.load(
        EngineConfig(path, n_ctx=256, n_threads=1, type_k="f32", type_v="f32", reference=True)
    ) as engine:
        engine.prefill([*range(1, 30)])
        return engine.logits.copy()


def test_in_parts(target: Path, tmp_path: Path) -> None:
    keys, tensors = contents(target)
    names = part_names("toy-00001-of-00003.gguf")
    for i, name in enumerate(names):
        own = {"split.no": i, "split.count": 3, "split.tensors.count": len(tensors)}
        (tmp_path / name).write_bytes(build(keys | own if i == 0 else own, tensors[i::3]).data)
    for name in names:
        np.testing.assert_array_equal(logits(tmp_path / name), logits(target))


def test_as_ollama_writes_it(target: Path, tmp_path: Path) -> None:
    """KV heads per block, three rotary sections, `ssm_dt` without .bias, the vision tower beside; the file has no ending."""
    keys, tensors = contents(target)
    flags = keys.pop("qwen35.attention.recurrent_layers")
    heads = keys["qwen35.attention.head_count_kv"]
    keys["qwen35.attention.head_count_kv"] = [0 if is_recurrent else heads for is_recurrent in flags]
    keys["qwen35.rope.dimension_sections"] = keys["qwen35.rope.dimension_sections"][:3]
    keys["qwen35.ssm.v_head_reordered"] = True
    renamed = [t._replace(name=t.name.replace("ssm_dt.bias", "ssm_dt")) for t in tensors]
    others = [f32_tensor("v.blk.0.attn_q.weight", (4, 4)), f32_tensor("mtp.fc.weight", (8, 4))]
    path = tmp_path / "sha256-0123abcd"
    path.write_bytes(build(keys, [*others, *renamed]).data)
    np.testing.assert_array_equal(logits(path), logits(target))


def ternary(target: Path) -> tuple[dict[str, Any], list[Tensor], list[Tensor]]:
    """Keys, and the tensors twice: matrices as ternary weights in Q2_0, a scale for 64 of them, and as the same in F32."""
    keys, tensors = contents(target)
    packed, plain = [], []
    rng = np.random.default_rng(1)
    for t in tensors:
        if len(t.shape) < 2 or t.shape[0] % 64 or "conv1d" in t.name:
            packed.append(t)
            plain.append(t)
            continue
        w = rng.integers(-1, 2, (t.shape[1], t.shape[0] // 64, 64))
        scales = (rng.integers(1, 9, (*w.shape[:2], 1)) / 64).astype(np.float16)
        codes = (w + 1).astype(np.uint8).reshape(*w.shape[:2], 16, 4)
        codes = (codes << np.array([0, 2, 4, 6], np.uint8)).sum(-1, dtype=np.uint8)
        blocks = np.concatenate([scales.view(np.uint8), codes], axis=-1)
        packed.append(Tensor(t.name, lib.GGML_TYPE_Q2_0, t.shape, blocks.tobytes()))
        plain.append(
            Tensor(t.name, F32, t.shape, (w * scales.astype(np.float32)).astype(np.float32).tobytes())
        )
    return keys, packed, plain


def test_ternary_weights(target: Path, tmp_path: Path) -> None:
    """As Bonsai's files for stock llama.cpp have them (Q2_0, architecture qwen35)."""
    keys, packed, plain = ternary(target)
    assert sum(t.type == lib.GGML_TYPE_Q2_0 for t in packed) > 10
    found = []
    for name, tensors in (("packed", packed), ("plain", plain)):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(build(keys, tensors).data)
        found.append(logits(path))
    # activations are rounded to 8 bits before a product with Q2_0
    assert np.linalg.norm(found[0] - found[1]) < 0.05 * np.linalg.norm(found[1])


@pytest.mark.parametrize(("number", "nbytes"), [(lib.GGML_TYPE_Q2_0, 34), (142, 34), (143, 28)])
def test_ternary_types_with_a_scale_for_128_weights_are_refused(
    target: Path, tmp_path: Path, number: int, nbytes: int
) -> None:
    """Those of a fork; the first has the number that Q2_0 has here, and its tensors lie too close together."""
    keys, packed, _ = ternary(target)
    wide = [t for t in packed if t.type == lib.GGML_TYPE_Q2_0 and t.shape[0] % 128 == 0]
    assert wide
    changed = [
        Tensor(t.name, number, t.shape, bytes(t.shape[0] // 128 * t.shape[1] * nbytes)) if t in wide else t
        for t in packed
    ]
    path = tmp_path / "wide.gguf"
    path.write_bytes(build(keys, changed).data)
    with pytest.raises(ModelFileError, match=f"unknown type {number}|overlap|ends at byte"):
        GGUFFile(path)


def test_weights_in_a_rotated_basis_are_refused(target: Path, tmp_path: Path) -> None:
    keys, packed, _ = ternary(target)
    path = tmp_path / "rotated.gguf"
    path.write_bytes(build({**keys, "prism.hadamard.block_size": 128}, packed).data)
    with GGUFFile(path) as file, pytest.raises(ModelFileError, match=r"prism\.hadamard.*rotated basis"):
        read_target(file)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("seed", [21, 24, 31, 62, 73])
def test_matrices_as_one(tmp_path: Path, seed: int, kind: GGMLQuantizationType) -> None:
    """Queries, keys and values of every layer but the first, and gate and up of the experts, as llama.cpp's converter can write
    them."""
    apart = kv_toys.write_target(tmp_path, seed, kind, **kv_toys.VARIANTS[seed])
    keys, tensors = contents(apart)
    found = {t.name: t for t in tensors}
    joins = {"attn_qkv": ["attn_q", "attn_k", "attn_v"]}
    arch = keys["general.architecture"]
    if arch == "gemma4":
        joins.clear()
    if arch in ("qwen3moe", "gemma4"):
        joins["ffn_gate_up_exps"] = ["ffn_gate_exps", "ffn_up_exps"]
    for i in range(1, keys[f"{arch}.block_count"]):
        for whole, names in joins.items():
            parts = [found.pop(f"blk.{i}.{name}.weight") for name in names]
            width, _, *n = parts[0].shape
            shape = (width, sum(part.shape[1] for part in parts), *n)
            rows = [np.frombuffer(part.data, np.uint8).reshape(*n, -1) for part in parts]
            data = np.concatenate(rows, axis=-1).tobytes()  # of each expert, where there are several
            name = f"blk.{i}.{whole}.weight"
            found[name] = Tensor(name, parts[0].type, shape, data)
    path = tmp_path / "one.gguf"
    path.write_bytes(build(keys, list(found.values())).data)
    np.testing.assert_array_equal(logits(path), logits(apart))


@pytest.mark.parametrize(
    ("seed", "key", "value"),
    [
        (61, "gemma3.attn_logit_softcapping", 50.0),
        (86, "gemma4.attention.shared_kv_layers", 5),
        (71, "gemma4.rope.dimension_count", 16),
        (71, "gemma4.attention.value_length_swa", 16),
        (73, "gemma4.expert_used_count", 9),
    ],
)
def test_forms_of_gemma_that_are_refused(tmp_path: Path, seed: int, key: str, value: float) -> None:
    keys, tensors = contents(kv_toys.write_target(tmp_path, seed, **kv_toys.VARIANTS[seed]))
    path = tmp_path / "other.gguf"
    path.write_bytes(build(keys | {key: value}, tensors).data)
    with GGUFFile(path) as file, pytest.raises(ModelFileError, match=f"key '{key}'"):
        read_target(file)


def test_keys_that_a_layer_does_not_use(tmp_path: Path) -> None:
    """Of a layer that sees the rows of another one."""
    target = kv_toys.write_target(tmp_path, 86, **kv_toys.VARIANTS[86])
    keys, tensors = contents(target)
    path = tmp_path / "more.gguf"
    path.write_bytes(build(keys, [*tensors, f32_tensor("blk.5.attn_k.weight", (64, 64))]).data)
    np.testing.assert_array_equal(logits(path), logits(target))


def test_a_draft_with_tables_of_its_own(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Copies of the target's give the same trees; others do not, and never other output."""
    keys, tensors = contents(pair[1])
    tables = [t for t in contents(pair[0])[1] if t.name in ("token_embd.weight", "output.weight")]

    def drafted(*own: Tensor) -> tuple[list[int], list[list[int]]]:
        path = tmp_path / "draft.gguf"
        path.write_bytes(build(keys, [*tensors, *own]).data)
        config = EngineConfig(
            pair[0],
            path,
            n_ctx=256,
            n_threads=1,
            type_k="f32",
            type_v="f32",
            reference=True,
            mode="tree",
            budget=7,
        )
        with Solo.load(config) as engine:
            engine.prefill([*range(1, 30)])
            sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
            steps = list(engine.generate(sampler, max_tokens=24, stop=lambda token: False))
        trees = [step.tree.tokens.tolist() for step in steps if step.tree is not None]
        return [token for step in steps for token in step.tokens], trees

    expected = drafted()
    assert drafted(*tables) == expected
    for table in tables:
        changed = np.frombuffer(table.data, np.float32).reshape(table.shape[::-1])[::-1].tobytes()
        text, trees = drafted(table._replace(data=changed))
        assert text == expected[0] and trees != expected[1], table.name
