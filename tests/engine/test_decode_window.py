"""Tests of an attention window at decode: what it masks, and that all modes still give the same output."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.tree import Tree
from dflash_ggml.errors import ConfigError
from dflash_ggml.state.mask import HIDDEN, ResidentMask
from dflash_ggml.state.memory import GRAPHS
from dflash_ggml.state.window import SINKS, DecodeWindow
from reference.engine_kit import Solo, verify

IDS = np.random.default_rng(4).integers(0, 60, 1800).tolist()
WINDOW = 80


def load(pair, **options) -> Solo:
    base = {
        "n_ctx": 2000,
        "type_k": "f32",
        "type_v": "f32",
        "reference": True,
        "n_threads": 1,
        "n_gpu_layers": 0,
    }
    return Solo.load(EngineConfig(*pair, calibrate="never", **{**base, **options}))


def write(engine: Solo, n_prompt: int, n: int, mode: str) -> list[int]:
    engine.reset()
    engine.prefill(IDS[:n_prompt])
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
    steps = engine.generate(sampler, max_tokens=n, mode=mode, stop=lambda t: False)
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("types", [("f32", "f32"), ("q8_0", "q4_0"), ("f16", "bf16")], ids="/".join)
def test_all_modes_give_the_same_output(toy_pair, types):
    """Which is the usual one as long as nothing is hidden, and another one later."""
    kinds = {"type_k": types[0], "type_v": types[1]}
    with load(toy_pair, **kinds) as engine:
        usual = write(engine, 20, 100, "plain"), write(engine, 700, 120, "plain")
    with load(toy_pair, fa_window=WINDOW, **kinds) as engine:
        assert write(engine, 20, 100, "plain") == usual[0] == write(engine, 20, 100, "tree")
        outputs = [write(engine, 700, 120, mode) for mode in ("plain", "tree", "chain")]
    assert outputs[0] == outputs[1] == outputs[2] != usual[1]
    assert outputs[0][0] == usual[1][0], "a prompt is read whole"


@pytest.mark.parametrize("n_prompt", [SINKS + WINDOW - 2, SINKS + WINDOW + 1, 200, 853])
@pytest.mark.parametrize("first_row", [0, 300])
@pytest.mark.parametrize("types", [("f32", "f32"), ("bf16", "q5_1"), ("q8_0", "q4_0")], ids="/".join)
def test_it_hides_what_a_mask_would(toy_pair, n_prompt, first_row, types):
    """A pass over a tree against the whole cache under an explicit mask."""
    rng = np.random.default_rng(n_prompt)
    parents = np.array([-1, 0, 0, 1, 1, 3, 5, 2], np.int32)
    depths = np.array([0, 1, 1, 2, 2, 3, 4, 2], np.int32)
    tree = Tree(rng.integers(0, 60, 8).astype(np.int32), parents, depths, np.zeros(8, np.float32))
    with load(toy_pair, fa_window=WINDOW, type_k=types[0], type_v=types[1]) as engine:
        engine.sequence.first_row = first_row
        engine.prefill(IDS[:n_prompt])
        passes = engine.passes
        graph = verify(engine, tree)
        windowed = [passes.logits_row(graph, node) for node in range(8)]
        assert any("window" in name for name in graph.inputs) == (n_prompt + 5 > SINKS + WINDOW)
        passes.window, mask = None, passes.tree_mask
        passes.graphs.clear()
        for node in range(8):
            hidden = range(first_row + SINKS, first_row + n_prompt + int(depths[node]) - WINDOW + 1)

            def write(out, first, start, own, hidden=hidden):
                ResidentMask._write(mask, out, first, start, own)
                out[max(hidden.start - first, 0) : max(hidden.stop - first, 0)] = HIDDEN

            mask._write, mask._unwritten = write, True
            graph = verify(engine, tree)
            np.testing.assert_allclose(windowed[node], passes.logits_row(graph, node), atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 5, 16, 90])
@pytest.mark.parametrize("start", [3, 60, 64, 70, 300])
def test_every_column_sees_each_of_its_rows_once(tokens, start):
    """Also where a tree is deeper than the window, or begins among the first tokens."""
    columns, first = 24, 7
    rng = np.random.default_rng(start)
    parents = [-1, *(int(rng.integers(max(0, i - 3), i)) for i in range(1, columns))]
    lines = [[i] for i in range(columns)]
    for i in range(1, columns):
        lines[i] += lines[parents[i]]
    depths = np.array([len(line) - 1 for line in lines], np.int32)
    own = np.array([[j in line for j in range(columns)] for line in lines])
    window = DecodeWindow(tokens)
    n = window._rows(columns)
    arrays = {"window rows": np.zeros(n, np.int32), "window mask": np.zeros((columns, n), np.float16)}
    window.fill(
        SimpleNamespace(inputs={k: SimpleNamespace(array=a) for k, a in arrays.items()}),
        first,
        start,
        depths,
        own,
    )
    for i, line in enumerate(lines):
        at = start + int(depths[i])
        seen = [first + p for p in range(start) if p < SINKS or p > at - tokens]
        seen += [first + start + j for j in line if (p := start + int(depths[j])) < SINKS or p > at - tokens]
        assert sorted(arrays["window rows"][arrays["window mask"][i] == 0]) == sorted(seen)


def test_loading_warns_that_output_changes(toy_pair, caplog):
    with load(toy_pair, fa_window=WINDOW):
        pass
    assert any("out of sight" in r.getMessage() and "80 tokens" in r.getMessage() for r in caplog.records)
    with load(toy_pair) as engine:
        assert engine.passes.window is None
    with pytest.raises(ConfigError, match="fa_window"):
        EngineConfig(toy_pair[0], fa_window=-1)


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_what_it_gathers_is_planned_and_reserved(toy_pair, mode):
    """Where it is more than a batch of a prompt takes: nothing grows during a generation."""
    options = {"n_batch": 16, "type_k": "q8_0", "type_v": "q4_0", "mode": mode}
    with load(toy_pair, **options) as engine:
        usual = engine.memory.parts[GRAPHS], engine.passes.workspace.nbytes
    with load(toy_pair, fa_window=1600, **options) as engine:
        planned, taken = engine.memory.parts[GRAPHS], engine.passes.workspace.nbytes
        assert usual[0] < planned and usual[1] < taken <= planned
        write(engine, 1700, 20, mode)
        assert any("window" in name for _, graph in engine.passes.graphs for name in graph.inputs)
        assert engine.passes.workspace.nbytes == taken


def test_when_a_window_hides_something():
    window = DecodeWindow(100, sinks=4)
    assert not window.hides(104) and window.hides(105)
