"""Tests of target and draft graphs against PyTorch (see `fixtures`), on the same dequantised weights in float32."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from fixtures import draft_blocks, greedy_cases
from reference.engine_kit import Solo, verify
from reference.trees import chain

GREEDY = SamplingParams(temperature=0)
NEAR_TIE = 2e-3  # logits this close may swap between two float32 implementations


@pytest.fixture(scope="module")
def engine(f32_target, f32_draft):
    with Solo.load(
        EngineConfig(
            f32_target, f32_draft, type_k="f32", type_v="f32", n_threads=1, candidates=8, spec=DRAFTS
        )
    ) as e:
        yield e


@pytest.mark.parametrize("case", greedy_cases(), ids=lambda c: repr(c.text[:24]))
def test_target_logits(engine, case):
    """Logits at six positions agree to 2e-3 (their spread is about 30)."""
    for point in case.points:
        engine.reset()
        engine.prefill(point.tokens)
        np.testing.assert_allclose(engine.logits[point.top_ids], point.top_logits, atol=2e-3)
        if point.row is not None:
            np.testing.assert_allclose(engine.logits, point.row, atol=2e-3)


@pytest.mark.parametrize("case", greedy_cases(), ids=lambda c: repr(c.text[:24]))
def test_greedy_tokens(engine, case):
    """200 greedy tokens are transformers' own, up to the first near-tie."""
    engine.reset()
    engine.prefill(case.prompt)
    sampler = Sampler(GREEDY, engine.n_vocab)
    tokens = [t for step in engine.generate(sampler, max_tokens=200, mode="plain") for t in step.tokens]
    fork = next((i for i, (a, b) in enumerate(zip(tokens, case.greedy)) if a != b), None)
    if fork is not None:
        assert tokens[fork] == case.runner_up[fork] and case.gap[fork] < NEAR_TIE, (
            f"fork at {fork}, gap {case.gap[fork]}"
        )


def test_tapped_features(engine):
    """A verify pass leaves the outputs of the tapped layers in the feature buffer."""
    for case in greedy_cases()[:3]:
        for point in case.points:
            engine.reset()
            engine.prefill(point.tokens[:-1])
            verify(engine, chain(point.tokens[-1], np.zeros((0, 1), np.int32)))
            features = engine.passes.device.read(engine.passes.state.features.tensor, len(point.taps))
            np.testing.assert_allclose(features, point.taps, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("block", draft_blocks(), ids=lambda b: f"context{len(b.tokens) - 1}")
def test_draft_block(engine, block):
    """Hidden states and candidates of one noise block after a context that the engine itself read."""
    context, pending = block.tokens[:-1], block.tokens[-1]
    engine.reset()
    engine.prefill(context)
    engine.sequence.pending = pending
    rows = engine.drafter.propose([engine.sequence], 15)[0]
    ids, log_probs = rows.ids, rows.log_probs
    graph = next(g for key, g in engine.drafter.graphs if key[0] == "draft" and g.valid)
    hidden = engine.passes.device.read(graph.outputs["hidden"]).reshape(15, -1)
    np.testing.assert_allclose(hidden, block.hidden_exact[1:], atol=5e-3, rtol=1e-3)
    np.testing.assert_allclose(log_probs, block.top_log_probs, atol=5e-3)
    assert (ids[:, 0] == block.top_ids[:, 0]).mean() > 0.9


@pytest.mark.parametrize("case", greedy_cases(), ids=lambda c: repr(c.text[:24]))
def test_chain_acceptance(engine, case):
    """Tokens per step of greedy chain speculation match an independent loop, up to near-ties of the draft."""
    engine.reset()
    engine.prefill(case.prompt)
    sampler = Sampler(GREEDY, engine.n_vocab)
    steps = [
        len(s.tokens) for s in engine.generate(sampler, max_tokens=200, mode="chain") if s.mode == "chain"
    ]
    assert sum(steps) == 199
    assert abs(len(steps) - len(case.chain_steps)) <= 2, (steps, case.chain_steps)
