"""Tests of a target's prediction head as its draft: against numpy in float64, with unchanged output. 4 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.tree import expand, spine
from dflash_ggml.drafts import registry
from dflash_ggml.drafts.mtp.drafter import MtpDrafter
from dflash_ggml.errors import ConfigError, DeviceError
from reference import toys
from reference.engine_kit import EXACT, Solo, fresh, generate
from reference.numpy_draft import PredictionHead

FORMS = {"norm": {}, "tied": {"tied": True}, "shapes": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 32}}
FORMS["experts"] = {"arch": "qwen35moe", "n_experts": 12, "n_used": 4, "n_ff": 32}
FORMS["joined ones"] = {"arch": "qwen3next", "n_experts": 5, "n_used": 2, "joined": True, "ssm_v_heads": 6}


@pytest.fixture(scope="module", params=FORMS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return toys.write_pair(folder, 70 + len(request.param), nextn=True, **FORMS[request.param])[0]


def config(target: Path, **options) -> EngineConfig:
    base = EngineConfig(
        target,
        n_ctx=256,
        n_batch=16,
        **EXACT,
    )
    return replace(base, **options)


@pytest.fixture
def engine(target: Path) -> Iterator[Solo]:
    with Solo.load(config(target)) as engine:
        yield engine


def features(engine: Solo, ids: list[int]) -> np.ndarray:
    """Outputs float64 [tokens, D] of the target's last layer, token by token, through plain steps."""
    other, found = engine.passes, []
    fresh(engine, ids[:1])
    engine.reset()
    for token in ids:
        engine.passes.linear(engine.sequence, [token], column=0)
        engine.sequence.tokens.append(token)
        row = other.device.read(other.state.features.tensor, engine.params.n_embd)
        found.append(row.astype(np.float64))
    return np.array(found)


@pytest.mark.parametrize("n", [1, 5, 40])
def test_rows_are_numpys(engine: Solo, target: Path, n: int) -> None:
    """Log-probabilities along the chain, after prompts of one batch and of several."""
    ids = np.random.default_rng(n).integers(0, engine.n_vocab - 4, n).tolist()
    seen = features(engine, ids)
    fresh(engine, ids)
    engine.sequence.pending = 7
    assert isinstance(engine.drafter, MtpDrafter)
    rows = engine.drafter.propose([engine.sequence], 31)[0]
    expected = PredictionHead(target).rows([*ids, 7], seen, 3)
    assert rows.ids.shape == (3, 16)
    found = np.take_along_axis(expected, rows.ids, 1)
    np.testing.assert_allclose(rows.log_probs, found, atol=2e-4)
    assert rows.ids[:, 0].tolist() == expected.argmax(1).tolist()


def test_what_follows_the_best_is_drafted_and_nothing_else(engine: Solo) -> None:
    fresh(engine)
    engine.sequence.pending = 7
    assert engine.drafter is not None
    rows = engine.drafter.propose([engine.sequence], 31)[0]
    tree, chain = expand(7, rows, 31), spine(7, rows, 3)
    assert chain.n_nodes == 3 and tree.n_nodes == 31
    for parent in set(tree.parents[1:].tolist()):
        path = []
        while parent > 0:
            path.append(int(tree.tokens[parent]))
            parent = int(tree.parents[parent])
        assert path[::-1] == chain.tokens[1 : 1 + len(path)].tolist()
    assert np.exp(tree.log_probs[1:]).sum() >= np.exp(chain.log_probs[1:]).sum()
    assert np.allclose(chain.log_probs[1:], np.cumsum(rows.log_probs[:, 0]), atol=1e-5)


@pytest.mark.parametrize("mode", ["chain", "tree", "auto"])
def test_output_is_unchanged(engine: Solo, mode: str) -> None:
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        plain = generate(fresh(engine), max_tokens=80, mode="plain", sampling=sampling)
        assert generate(fresh(engine), max_tokens=80, mode=mode, sampling=sampling) == plain
    assert engine.sequence.statistics.passes


@pytest.mark.parametrize("modes", [("tree",), ("plain",), ("tree", "plain", "chain", "plain")])
def test_it_sees_the_same_whatever_the_steps_were(engine: Solo, modes: tuple[str, ...]) -> None:
    """After steps of all kinds it proposes what it does after one prompt of the same tokens."""
    fresh(engine)
    for mode in modes:
        generate(engine, max_tokens=12, mode=mode)
        pending = engine.pending
        engine.prefill([pending])
    tokens = engine.tokens
    engine.sequence.pending = 9
    assert engine.drafter is not None
    stepped = engine.drafter.propose([engine.sequence], 31)[0]
    assert engine.drafter.seen(engine.sequence).all()
    fresh(engine, tokens)
    engine.sequence.pending = 9
    read = engine.drafter.propose([engine.sequence], 31)[0]
    np.testing.assert_allclose(stepped.log_probs, read.log_probs, atol=1e-4)
    assert np.array_equal(stepped.ids, read.ids)


def test_after_a_snapshot(engine: Solo) -> None:
    """One row is made without the state before it, as a first one, and is seen; the output is the same."""
    fresh(engine, [3, 1, 4, 1, 5, 9, 2, 6])
    snapshot = engine.snapshot()
    expected = generate(engine, max_tokens=40, mode="tree")
    for later in ([], [5, 3, 5]):
        engine.restore(snapshot)
        engine.prefill(later)
        found = generate(engine, max_tokens=40, mode="tree")
        assert later or found == expected
        assert engine.drafter is not None
        assert engine.drafter.seen(engine.sequence)[: engine.n_tokens - len(engine.sequence.unseen)].all()


def test_plain_decoding_does_without(target: Path) -> None:
    with Solo.load(config(target, mode="plain")) as engine:
        assert not engine.has_draft


def test_a_head_that_does_not_fit_stops_nothing(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found, not requested: a warning, and plain decoding; where drafts were requested, an error."""

    def fail(*args, **options):
        raise DeviceError("no room for it")

    monkeypatch.setattr(registry, "open_own", fail)
    with Solo.load(config(target)) as engine:
        assert not engine.has_draft and "decoding without a draft model: no room for it" in caplog.text
    with pytest.raises(Exception, match="mode tree needs a draft, .*no room for it"):
        Solo.load(config(target, mode="tree"))


def test_a_draft_that_is_named_comes_first(tmp_path: Path) -> None:
    target, draft = toys.write_pair(tmp_path, 3, nextn=True)
    with Solo.load(config(target, draft=draft)) as engine:
        assert not isinstance(engine.drafter, MtpDrafter)


@pytest.mark.parametrize("n", [1, 2, 6])
def test_how_far_ahead(target: Path, n: int) -> None:
    with Solo.load(config(target)) as engine:
        plain = generate(fresh(engine), max_tokens=50, mode="plain")
        fresh(engine).sequence.pending = 7
        assert engine.drafter is not None
        usual = engine.drafter.propose([engine.sequence], 31)[0]
    with Solo.load(config(target, draft_max=n)) as engine:
        assert engine.drafter is not None and engine.drafter.depth == n
        for mode in ("chain", "tree"):
            assert generate(fresh(engine), max_tokens=50, mode=mode) == plain
        fresh(engine).sequence.pending = 7
        rows = engine.drafter.propose([engine.sequence], 31)[0]
        assert rows.ids.shape[0] == n and np.array_equal(rows.ids[:3], usual.ids[:n])
        if n > 1:
            fresh(engine).sequence.pending = 7
            assert np.array_equal(engine.drafter.propose([engine.sequence], 31, n - 1)[0].ids, rows.ids[:-1])


@pytest.mark.parametrize("bad", [0, 17, 2.5])
def test_how_far_ahead_it_cannot(target: Path, bad: object) -> None:
    with pytest.raises(ConfigError, match="draft_max: .* is outside 1..16"):
        config(target, draft_max=bad)


def test_a_head_that_is_named_drafts_though_a_draft_lies_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That file was not requested: it is neither opened nor in the way, in any mode, in the class and in the commands."""
    import argparse

    from dflash_ggml.cli.arguments import add_model_options, engine_config
    from dflash_ggml.llama import Llama

    target, draft = toys.write_pair(tmp_path, 75, nextn=True)
    beside = tmp_path / "mtp"
    beside.mkdir()
    target = target.rename(beside / "toy.gguf")
    draft.rename(beside / "toy-dflash.gguf")
    for mode in ("auto", "tree"):
        llm = Llama(str(target), n_ctx=256, spec=("mtp",), mode=mode, verbose=False)
        assert llm.engine.drafter is not None and llm.engine.drafter.name == "mtp"
        llm.close()
        parser = argparse.ArgumentParser()
        add_model_options(parser)
        args = ["-m", str(target), "-c", "256", "--spec", "mtp", "--mode", mode, "-ngl", "0"]
        with Solo.load(engine_config(parser.parse_args(args))) as engine:
            assert engine.drafter is not None and engine.drafter.name == "mtp" and engine.config.draft is None
