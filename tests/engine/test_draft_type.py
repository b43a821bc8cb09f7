"""Tests of loading a draft's weights in another type: each tensor's conversion, and the automatic choice. 3 seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf.quants import dequantize

from dflash_ggml.config import EngineConfig
from dflash_ggml.drafts.registry import open_draft
from dflash_ggml.engine import loading, memory_planner
from dflash_ggml.errors import ConfigError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.files.tensor_info import BF16, F16, F32
from dflash_ggml.ggml.device import Device
from dflash_ggml.ggml.retype import TYPES, retyped
from dflash_ggml.ggml.weights import Source
from dflash_ggml.models.registry import read_target
from reference import toys
from reference.checkpoints import write_checkpoint
from reference.engine_kit import Solo, fresh, generate
from reference.tiny_models import bf16


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a DFlash2 draft published in BF16."""
    folder = tmp_path_factory.mktemp("pair")
    target, gguf = toys.write_pair(folder, 8, draft="dflash2", n_embd=256, rank=256, n_ff=320)
    return target, write_checkpoint(folder / "dflash", gguf, half=True)


@pytest.mark.parametrize("name", TYPES)
def test_numbers_are_ggmls(name: str) -> None:
    """From all three float types, of more rows than are turned at once; within the error of the type."""
    import gguf

    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 512)).astype(np.float32)
    x = (bf16(x).astype(np.uint32) << 16).view(np.float32)
    half = Source(F16, (512, 40), x.astype(np.float16).view(np.uint8).reshape(-1))
    found = []
    for s in (
        Source(F32, (512, 40), x.view(np.uint8).reshape(-1)),
        Source(BF16, (512, 40), bf16(x).view(np.uint8)),
        half,
    ):
        turned = retyped(s, name)
        if turned is s:
            assert s.type == F16 and name == "f16"
            continue
        found.append(bytes(turned.data))
        kind = gguf.GGMLQuantizationType(turned.type)
        y = dequantize(np.frombuffer(turned.data, np.uint8).reshape(40, -1), kind)
        error = np.sqrt(np.mean((y.reshape(x.shape) - x) ** 2))
        assert error < {
            "f16": 3e-4,
            "q8_0": 8e-3,
            "q6_k": 0.03,
            "q5_k": 0.05,
            "q5_1": 0.05,
            "q5_0": 0.06,
        }.get(name, 0.12)
    assert name == "f16" or found[0] == found[1]


def test_what_stays_as_it_is() -> None:
    rows = Source(F32, (48, 8), np.zeros(48 * 8 * 4, np.uint8))
    assert retyped(rows, "q8_0") is rows, "a row and a half of blocks"
    vector = Source(F32, (64,), np.zeros(64 * 4, np.uint8))
    assert retyped(vector, "q8_0") is vector
    table = Source(F32, (256, 8), np.zeros(256 * 8 * 4, np.uint8))
    assert retyped(table, "q4_k").type == TYPES["q4_k"] and retyped(table, "q4_k", True).type == TYPES["q8_0"]
    assert retyped(table, "q4_0", True).type == TYPES["q4_0"]
    quantised = retyped(table, "q8_0")
    assert retyped(quantised, "q4_0") is quantised
    odd = Source(F32, (96, 8), np.zeros(96 * 8 * 4, np.uint8))
    assert retyped(odd, "q4_k").type == TYPES["q8_0"]


@pytest.mark.parametrize("name", ["q8_0", "q4_k"])
def test_a_draft_gets_smaller_and_drafts(pair: tuple[Path, Path], name: str) -> None:
    config = EngineConfig(*pair, n_ctx=128, n_threads=1, mode="chain", reference=True, calibrate="never")
    sizes, outputs = [], []
    for type_ in (None, name):
        with Solo.load(replace(config, draft_type=type_)) as engine:
            outputs.append(generate(fresh(engine), max_tokens=30))
            sizes.append(engine.nbytes["draft weights"])
    assert outputs[0] == outputs[1]
    assert sizes[1] < {"q8_0": 0.62, "q4_k": 0.45}[name] * sizes[0]


def test_costs_are_of_the_type(pair: tuple[Path, Path]) -> None:
    kinds = [open_draft(pair[1], None, type_).identity for type_ in (None, "q8_0", "q4_0")]
    assert len({str(kind) for kind in kinds}) == 3


def test_where_it_does_not_fit(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU, and only where no type was asked for."""
    config = EngineConfig(*pair, n_ctx=128)
    file = GGUFFile(config.model)
    target = read_target(file)
    device = Device.cpu(1, reference=True)
    weights = []
    monkeypatch.setattr(Device, "is_gpu", property(lambda self: True))
    monkeypatch.setattr(memory_planner.MemoryNeeds, "usual", lambda _: SimpleNamespace(fits=False))
    planned = lambda self, *_: weights.append(self.parts(self.kv[0])) or 1 / 0  # noqa: E731
    monkeypatch.setattr(memory_planner.MemoryNeeds, "plan", planned)
    for type_ in (None, "q8_0", "f16"):
        source = open_draft(config.draft, None, type_)
        with pytest.raises(ZeroDivisionError):
            loading._on_device(
                memory_planner.Opened(device, replace(config, draft_type=type_), file, target, source),
                None,
                None,  # type: ignore[arg-type]
            )
    device.close()
    sizes = [next(part.nbytes(256) for part in parts if part.name == "draft weights") for parts in weights]
    assert sizes[0] == sizes[1] < sizes[2]
    assert caplog.text.count("its weights become q8_0, as they are they do not fit") == 1


@pytest.mark.parametrize("bad", ["q8", "iq2_xxs", "bf16", 8])
def test_what_is_no_type(bad: object) -> None:
    with pytest.raises(ConfigError, match="draft_type: .* is none of f16, q8_0"):
        EngineConfig(Path("x"), draft_type=bad)  # type: ignore[arg-type]
