"""Tests of matrices with a separate scale, as in NVFP4 files: the scale multiplies the matmul. 4 seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler
from dflash_ggml.decode.sampling_params import SamplingParams
from dflash_ggml.ggml.bindings import ffi, lib
from dflash_ggml.ggml.device import F32, Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.models.feed_forward import matmuls
from reference import toys
from reference.engine_kit import Solo
from reference.model_files import finish, quantize

PROMPT = [*range(1, 40)]
Change = Callable[
    [str, np.ndarray], tuple[np.ndarray, Type, float | None]
]  # -> weights as stored, type, scale


def rewrite(source: Path, dest: Path, change: Change) -> Path:
    """`source` with every matrix that takes part in a matmul as `change` gives it, its scale beside it."""
    reader = GGUFReader(source)
    writer = GGUFWriter(dest, "qwen35")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            is_array = field.types[0] == GGUFValueType.ARRAY
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if is_array else None
            )
    for tensor in reader.tensors:
        x = np.array(tensor.data, np.float32).reshape(tensor.shape[::-1].tolist())
        if x.ndim < 2 or "conv1d" in tensor.name or tensor.name == "token_embd.weight":
            writer.add_tensor(tensor.name, x)
            continue
        stored, kind, scale = change(tensor.name, x)
        writer.add_tensor(tensor.name, stored, raw_dtype=kind)
        if scale is not None:
            writer.add_tensor(tensor.name.removesuffix("weight") + "scale", np.array([scale], np.float32))
            writer.add_tensor(tensor.name.removesuffix("weight") + "input_scale", np.array([7.0], np.float32))
    finish(writer)
    return dest


def scale_of(name: str) -> float:
    """A power of two for each matrix, neighbours with different ones."""
    return 16.0 if name == "output.weight" else 2.0 ** (sum(name.encode()) % 5 - 2)


def result(target: Path, draft: Path, mode: str) -> tuple[np.ndarray, list[int], list[list[int]]]:
    """Logits after the prompt, 24 greedy tokens, and the tokens of each step's tree."""
    config = EngineConfig(
        target, draft, n_ctx=256, n_threads=1, type_k="f32", type_v="f32", reference=True, mode=mode, budget=7
    )
    with Solo.load(config) as engine:
        engine.prefill(PROMPT)
        logits = engine.logits.copy()
        sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
        steps = list(engine.generate(sampler, max_tokens=24, stop=lambda token: False))
    tokens = [token for step in steps for token in step.tokens]
    return logits, tokens, [step.tree.tokens.tolist() for step in steps if step.tree is not None]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return toys.write_pair(tmp_path_factory.mktemp("scaled"), seed=5)


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_a_scale_is_the_same_as_scaled_weights(pair: tuple[Path, Path], tmp_path: Path, mode: str) -> None:
    """To the bit, as powers of two are exact: the draft's logits, which the head's scale changes, too."""
    target, draft = pair
    scaled = rewrite(
        target,
        tmp_path / "s.gguf",
        lambda name, x: (x / np.float32(scale_of(name)), Type.F32, scale_of(name)),
    )
    logits, *rest = result(scaled, draft, mode)
    expected_logits, *expected = result(target, draft, mode)
    np.testing.assert_array_equal(logits, expected_logits)
    assert rest == expected


@pytest.mark.parametrize(("kind", "scale"), [(Type.NVFP4, None), (Type.NVFP4, 0.37), (Type.MXFP4, None)])
def test_four_bit_floats(pair: tuple[Path, Path], tmp_path: Path, kind: Type, scale: float | None) -> None:
    """NVFP4 with scales and without, MXFP4: near what the unpacked weights give in float32."""
    target, draft = pair
    factor = np.float32(scale or 1)

    def pack(name: str, x: np.ndarray) -> tuple[np.ndarray, Type, float | None]:
        return quantize(x / factor, kind), kind, scale

    def unpack(name: str, x: np.ndarray) -> tuple[np.ndarray, Type, None]:
        values = dequantize(pack(name, x)[0], kind).reshape(x.shape) * factor
        return values.astype(np.float32), Type.F32, None

    found = result(rewrite(target, tmp_path / "packed.gguf", pack), draft, "tree")[0]
    expected = result(rewrite(target, tmp_path / "f32.gguf", unpack), draft, "plain")[0]
    assert np.abs(found - expected).max() < 0.08 * expected.std()


def test_scales_follow_the_matmuls_of_their_input() -> None:
    """The GPU applies them as it writes the result; a matrix without a scale is computed separately."""
    device = Device.cpu(1)
    g = Graph(device, 32)
    w = {f"{name}.weight": g.input(name, F32, 32, 8) for name in "abc"}
    w |= {f"{name}.scale": g.input(f"{name}.scale", F32, 1) for name in "ac"}
    a, b, c = matmuls(g, w, "abc", g.input("x", F32, 32, 4))
    g.output(g.add(g.add(b, c), a), "sum")
    nodes = [lib.ggml_graph_node(g.cgraph, i) for i in range(g.n_nodes)]
    assert [ffi.string(lib.ggml_op_desc(node)).decode() for node in nodes] == [
        *("MUL_MAT", "MUL_MAT", "MUL", "MUL", "MUL_MAT", "ADD", "ADD")
    ]
    assert nodes[2:5] == [a, c, b]
    g.close()
    device.close()
