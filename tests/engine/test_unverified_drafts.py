"""Tests of steps whose draft is not verified: they emit what plain decoding does. What the policy learns of them:
tests/policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.policy.plan import Plan
from reference.engine_kit import EXACT, AnyPlan, Solo, force_draft, fresh, generate, steps

PROMPT = [3, 1, 4, 1, 5]


class SeldomVerified(AnyPlan):
    """Every step drafts, and two trees in three are not verified."""

    def plan(self, sequences):
        return [Plan("tree", 7) for _ in sequences]

    def cut(self, trees):
        return [tree.first(0) if self.rng.random() < 2 / 3 else tree for tree in trees]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("spec", [None, ("dflash",)], ids=["with copies", "draft alone"])
def test_output_is_that_of_plain_decoding(
    toy_pair: tuple[Path, Path], spec: tuple[str, ...] | None, sampling: dict
) -> None:
    config = EngineConfig(*toy_pair, n_ctx=256, mode="auto", budget=7, spec=spec, **EXACT)
    with Solo.load(config) as engine:
        tokens = generate(fresh(engine, PROMPT), mode="plain", max_tokens=90, sampling=sampling)
        engine.forget()
        engine.stepper.policy = SeldomVerified(engine, 1)
        force_draft(engine, tokens, len(PROMPT))
        made = list(steps(fresh(engine, PROMPT), max_tokens=90, sampling=sampling))
        assert [token for step in made for token in step.tokens] == tokens
        drafted = [step for step in made if step.timings.draft]
        verified = [step for step in drafted if step.n_draft]
        assert len(drafted) > len(verified) > 2, "some of each"
