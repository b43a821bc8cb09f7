"""Steps whose draft is not verified: the text is that of plain decoding, and what is learned that of a verified step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.adaptive import Adaptive
from dflash_ggml.decode.costs import Costs
from dflash_ggml.decode.tree import Tree
from reference.engine_kit import Solo
from reference.engine_kit import EXACT, foretold, fresh, steps, text

PROMPT = [3, 1, 4, 1, 5]


def seldom_verified(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every step drafts, and two trees in three are left to the text."""
    rng, cut = np.random.default_rng(seed), Adaptive.best_cut

    def leave(self: Adaptive, tree: Tree, costs: Costs, context: int) -> Tree:
        made = cut(self, tree, costs, context)
        return self._not_verified(tree, context, 1.0, 1.0) if made.n_nodes and rng.random() < 2 / 3 else made

    monkeypatch.setattr(Adaptive, "best_cut", leave)
    monkeypatch.setattr(
        Adaptive, "_next", lambda self, sequence, costs, *_: self._draft(costs, sequence.n_tokens)
    )


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("spec", [None, ("dflash",)], ids=["with copies", "draft alone"])
def test_the_text_is_that_of_plain_decoding(
    toy_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, spec: tuple[str, ...] | None, sampling: dict
) -> None:
    config = EngineConfig(*toy_pair, n_ctx=256, mode="auto", budget=7, spec=spec, **EXACT)
    with Solo.load(config) as engine:
        said = text(fresh(engine, PROMPT), mode="plain", max_tokens=90, sampling=sampling)
        engine.forget()
        seldom_verified(monkeypatch, 1)
        foretold(engine, said, len(PROMPT))
        made = list(steps(fresh(engine, PROMPT), max_tokens=90, sampling=sampling))
        assert [token for step in made for token in step.tokens] == said
        drafted = [step for step in made if step.timings.draft]
        verified = [step for step in drafted if step.n_draft]
        assert len(drafted) > len(verified) > 2, "some of each"
        assert engine.experience.right > sum(step.n_accepted for step in verified), (
            "and the text told of the others"
        )
