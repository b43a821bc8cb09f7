"""Fuzz cases by seed: damaged files, and files that are well-formed and odd.

A case returns "loads" or "refused"; any exception but our own is a finding, and so is a process that dies.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.errors import DflashError
from reference import kv_toys, tiny_kv_models, tiny_models, toys
from reference.engine_kit import Solo
from reference.gguf_bytes import Builder

KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)
EDGES = [2**n + d for n in (0, 7, 8, 15, 16, 31, 32, 62, 63, 64) for d in (-1, 0, 1)]
logging.disable(logging.WARNING)


def used(target: Path, draft: Path | None, rng: np.random.Generator) -> str:
    """Load a pair and use it as a user would, briefly: "loads", or "refused" where it raises an error of ours."""
    choices = {
        "n_ctx": int(rng.choice([0, 0, 1, 16, 64, 700])),
        "n_batch": int(rng.choice([1, 3, 32, 512])),
        "budget": int(rng.choice([1, 2, 7, 15, 31, 63])),
        "type_k": str(rng.choice(["f16", "f32", "bf16"])),
        "type_v": str(rng.choice(["f16", "f32", "bf16"])),
        "reference": bool(rng.random() < 0.3),
        "mode": "auto",
    }
    try:
        config = EngineConfig(target, draft, n_threads=1, n_gpu_layers=0, calibrate="never", **choices)
        with Solo.load(config) as engine:
            room = min(engine.n_ctx, 600)
            for mode in ("auto", "tree") if engine.has_draft else ("plain",):
                engine.reset()
                ids = rng.integers(0, engine.n_vocab, max(1, int(rng.integers(0, room + 1)))).tolist()
                engine.prefill(ids)
                before = engine.snapshot()
                options = SamplingParams(temperature=float(rng.choice([0, 1])), seed=1)
                steps = engine.generate(
                    Sampler(options, engine.n_vocab), max_tokens=9, mode=mode, stop=lambda token: False
                )
                for step in steps:
                    engine.check_ids(step.tokens)
                engine.restore(before)
        return "loads"
    except DflashError as error:
        if "\n" in str(error):
            raise AssertionError(f"more than one line: {error}") from error
        return "refused"


def coherent(seed: int, folder: Path) -> str:
    """A pair whose sizes fit each other and are unusual: one layer, one head, no attention, a window of 1, ..."""
    return _coherent(np.random.default_rng(seed), folder, {})


def experts(seed: int, folder: Path) -> str:
    """The same with experts: one, all of them used, hundreds, ..."""
    rng = np.random.default_rng(seed)
    n_experts = int(rng.choice([1, 2, 3, 7, 8, 16, 33, 64, 200]))
    shapes = {
        "arch": str(rng.choice(["qwen35moe", "qwen3next"])),
        "n_experts": n_experts,
        "n_used": int(rng.choice([1, min(2, n_experts), int(rng.integers(1, n_experts + 1)), n_experts])),
        "n_ff_shared": int(rng.choice([1, 8, 32, 33])),
        "joined": bool(rng.random() < 0.3),
        "old": bool(rng.random() < 0.4),
    }
    if n_experts > 16:  # small ones: the file is to stay so
        shapes |= {"n_embd": int(rng.choice([8, 24, 32])), "n_ff": int(rng.choice([1, 8, 33]))}
    return _coherent(rng, folder, shapes)


def _coherent(rng: np.random.Generator, folder: Path, more: dict[str, Any]) -> str:
    def one(*values: object) -> object:
        return values[int(rng.integers(len(values)))]

    layers = int(rng.integers(1, 6))
    kv_heads, k_heads, draft_layers = (int(n) for n in rng.integers(1, 4, 3))
    head_dim = int(one(2, 4, 6, 8, 16, 32, 40, 64, 128, 256))  # type: ignore[call-overload]
    n_taps = int(rng.integers(1, layers + 1))
    taps = tuple(sorted(rng.choice(layers, n_taps, replace=False).tolist()))
    kind = str(one("dflash", "dflash", "dflash2", "dspark"))
    weights = KINDS[int(rng.integers(len(KINDS)))]
    sizes: dict[str, Any] = {
        "n_vocab": one(16, 17, 33, 64, 300),
        "n_layers": layers,
        "n_embd": one(8, 24, 32, 64, 96, 256),
        "n_ff": one(1, 8, 33, 64, 256),
        "n_heads": kv_heads * int(rng.integers(1, 5)),
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "n_rot": 2 * int(rng.integers(1, head_dim // 2 + 1)),
        "state": one(1, 2, 4, 8, 16, 32, 64, 128),
        "ssm_k_heads": k_heads,
        "ssm_v_heads": k_heads * int(rng.integers(1, 4)),
        "conv": int(rng.integers(2, 7)),
        "draft_layers": draft_layers,
        "block_size": one(2, 3, 5, 8, 16, 16, 64, 256),
        "taps": taps,
        "n_ctx": one(1, 8, 40, 300, 4096),
        "tied": bool(one(False, True)),
        "attention_every": one(0, 1, 2, 3, 4),
        "window": one(None, None, 1, 2, 7, 64, 5000),
        "full_layers": int(rng.integers(0, draft_layers + 1)),
        "draft": kind,
        "causal": one(None, True, False),
        "yarn": one(None, None, 1.0, 4.0),
        "draft_rot": one(None, None, 2),
        "own_tables": bool(one(False, False, True)),
        "selector_top_k": one(1, 2, 6, 16),
        "rank": one(1, 3, 8, 32),
        "conv_group": one(1, 2, 4, 8),
        "conv_kernel": one(1, 2, 3, 7),
        "gated": bool(one(False, True)),
        "confidence": bool(one(False, True)),
        "from_anchor": bool(one(False, True)),
        "n_draft_vocab": one(None, 1, 12) if kind == "dspark" else None,
        "nextn": bool(one(False, False, True)),
    }
    target, draft = toys.write_pair(folder, 0, weights, **(sizes | more))
    return used(target, draft if rng.random() < 0.7 else None, rng)


def windows(seed: int, folder: Path) -> str:
    """A target with K/V rows only, some of its layers with a window and a ring, of unusual sizes, and a draft for it."""
    rng = np.random.default_rng(seed)

    def one(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    layers, kv_heads, n_experts = (int(n) for n in rng.integers(1, 6, 3))
    head_dim = one(2, 4, 8, 16, 32, 64, 128)
    arch = one("qwen3", "qwen3moe", "gpt-oss", "laguna", "laguna", "gemma3", "gemma4")
    width = one(8, 24, 32, 64, 96)
    draft = {
        "normed_taps": bool(one(False, True)),
        "taps": tuple(sorted(rng.choice(layers, int(rng.integers(1, layers + 1)), replace=False).tolist())),
        "window": one(None, 1, 7, 64),
        "block_size": one(2, 3, 8, 16, 64),
        "draft_layers": int(rng.integers(1, 4)),
        "causal": one(None, None, False),
    }
    pair = kv_toys.write_pair(
        folder,
        0,
        draft,
        KINDS[int(rng.integers(len(KINDS)))],
        arch=arch,
        n_vocab=one(16, 33, 64, 300),
        n_layers=layers,
        n_embd=width,
        n_ff=one(1, 8, 33, 64),
        n_heads=kv_heads * int(rng.integers(1, 4)),
        window_heads=kv_heads * int(rng.integers(1, 4)),
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        n_rot=2 * int(rng.integers(1, head_dim // 2 + 1)),
        n_ctx=one(1, 40, 300, 4096),
        yarn=one(None, 1.0, 4.0, 32.0),
        beta=one(None, 64.0),
        tied=bool(one(False, True)),
        period=one(0, 1, 2, 3, 4, 9),
        window=one(1, 2, 3, 12, 64, 200, 5000),
        gate=one("head", "element"),
        n_dense=int(rng.integers(0, layers + 1)),
        n_experts=n_experts,
        n_used=int(rng.integers(1, n_experts + 1)),
        n_ff_expert=one(1, 8, 32, 40),
        n_ff_shared=one(1, 8, 32),
        scale=one(1.0, 2.5),
        softcap=one(None, 5.0),
        full_dim=one(2, 8, 64, 128),
        k_is_v=bool(one(False, True)),
        per_layer=one(0, 0, 1, 8),
        sharing=one(0, 0, min(1, layers - 1)),
        mixture=bool(one(False, True)),
    )
    return used(pair[0], pair[1] if rng.random() < 0.7 else None, rng)


def window_headers(seed: int, folder: Path) -> str:
    """A small target with K/V rows only, with one to four things wrong in its header, alone."""
    rng = np.random.default_rng(seed)
    keys, shapes = (
        (tiny_kv_models.qwen3_keys(), tiny_kv_models.qwen3_shapes()),
        (tiny_kv_models.laguna_keys(), tiny_kv_models.laguna_shapes()),
    )[int(rng.integers(2))]
    target = folder / "target.gguf"
    target.write_bytes(damaged(tiny_models.gguf_file(keys, shapes), rng))
    return used(target, None, rng)


def headers(seed: int, folder: Path) -> str:
    """A small target and draft, one of them with one to four things wrong in its header."""
    rng = np.random.default_rng(seed)
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    builders = [
        tiny_models.gguf_file(tiny_models.target_keys(), tiny_models.target_shapes()),
        tiny_models.gguf_file(tiny_models.upstream_draft_keys(), tiny_models.draft_shapes()),
    ]
    wrong = int(rng.integers(2))
    for i, (path, builder) in enumerate(zip((target, draft), builders, strict=True)):
        path.write_bytes(damaged(builder, rng) if i == wrong else bytes(builder.data))
    return used(target, draft, rng)


def expert_headers(seed: int, folder: Path) -> str:
    """A small target with experts, with one to four things wrong in its header, alone."""
    rng = np.random.default_rng(seed)
    arch = str(rng.choice(["qwen35moe", "qwen3next"]))
    builder = tiny_models.gguf_file(tiny_models.moe_keys(arch), tiny_models.moe_shapes(arch))
    target = folder / "target.gguf"
    target.write_bytes(damaged(builder, rng))
    return used(target, None, rng)


def damaged(builder: Builder, rng: np.random.Generator) -> bytes:
    """A copy with one to four things wrong, most of them numbers of the header."""
    data, header = bytearray(builder.data), builder.fields[-1].offset + 8
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(header))
        match int(rng.integers(9)):
            case 0:
                data[at : at + 1] = bytes([int(rng.integers(256))])
            case 1:
                data[at:at] = rng.bytes(int(rng.integers(1, 10)))
            case 2:
                del data[at : at + int(rng.integers(1, 10))]
            case 3:
                del data[at:]
            case _:
                field = builder.fields[int(rng.integers(len(builder.fields)))]
                value = int(rng.choice(EDGES[:-2])) if rng.random() < 0.5 else int(rng.integers(0, 41))
                value %= 2 ** (8 * field.size)
                data[field.offset : field.offset + field.size] = value.to_bytes(field.size, "little")
    return bytes(data)


def safetensors(seed: int, folder: Path) -> str:
    """A published draft folder with wrong values in config.json or wrong bytes in the header, beside a good target."""
    rng = np.random.default_rng(seed)
    target = folder / "target.gguf"
    target.write_bytes(tiny_models.gguf_file(tiny_models.target_keys(), tiny_models.target_shapes()).data)
    config = tiny_models.zlab_config() | {"use_sliding_window": True, "sliding_window": 4}
    for _ in range(int(rng.integers(0, 3))):
        inner = config["dflash_config"] if rng.random() < 0.3 else config
        if isinstance(inner, dict) and inner:
            inner[list(inner)[int(rng.integers(len(inner)))]] = _any_json(rng)
    draft = tiny_models.write_zlab_draft(folder / "draft", config)
    weights = draft / "model.safetensors"
    data = bytearray(weights.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    for _ in range(int(rng.integers(0, 4))):
        data[int(rng.integers(end))] = int(rng.integers(256))
    weights.write_bytes(data)
    return used(target, draft, rng)


def _any_json(rng: np.random.Generator) -> object:
    values: list[object] = [
        None,
        True,
        False,
        -1,
        0,
        1,
        7,
        2**31,
        2**64,
        10**400,
        1e308,
        float("nan"),
        "",
        "relu",
    ]
    values += [[], {}, [1], [0, 2], ["full_attention"], [1.5], [[1]], {"a": 1}, ["sliding_attention"] * 2]
    return values[int(rng.integers(len(values)))]


CASES: dict[str, Callable[[int, Path], str]] = {
    "headers": headers,
    "coherent": coherent,
    "experts": experts,
    "expert_headers": expert_headers,
    "windows": windows,
    "window_headers": window_headers,
    "safetensors": safetensors,
}


def describe(kind: str, seed: int, folder: Path) -> str:
    """What a case wrote, to reproduce it by."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return json.dumps({"kind": kind, "seed": seed, "files": names})
