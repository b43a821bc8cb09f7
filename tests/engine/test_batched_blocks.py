"""Tests that blocks drafted in one pass for several sequences equal solo blocks, pending tokens included. 3 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.decode.candidates import CandidateBlock, CombinedCandidates
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.drafts.dflash import drafter as dflash
from reference import toys
from reference.checkpoints import write_checkpoint
from reference.engine_kit import EXACT, Solo

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "a ring": {"window": 40, "full_layers": 1, "draft_layers": 2, "n_ctx": 2048},
    "causal": {"window": 24, "causal": True},
    "dflash2": {"draft": "dflash2", "window": 24},
    "dspark": {"draft": "dspark", "from_anchor": False},
    "mask vector": {},
    "head": {"nextn": True},
    "both": {"nextn": True},
    "head with experts": {"nextn": True, "arch": "qwen35moe", "n_experts": 6, "n_used": 2, "n_ff": 32},
}
PROMPTS = [np.random.default_rng(i).integers(0, 60, n).tolist() for i, n in enumerate((5, 290, 33, 700, 64))]


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Solo]:
    folder = tmp_path_factory.mktemp("pair")
    target, draft = toys.write_pair(folder, 120, **KINDS[request.param])
    if request.param == "mask vector":
        from drafts.test_checkpoints import torch_archive

        draft = write_checkpoint(folder / "checkpoint", draft)
        vector = np.random.default_rng(1).standard_normal(64).astype(np.float32)
        torch_archive(draft / "mask_embedding.pt", {"mask_token_id": 63}, vector, "FloatStorage")
    config = EngineConfig(
        target,
        None if request.param.startswith("head") else draft,
        n_ctx=1900,
        parallel=5,
        n_batch=64,
        spec=DRAFTS if request.param != "both" else ("dflash", "mtp"),
        **EXACT,
    )
    with Solo.load(config) as found:
        assert found.drafter is not None
        params = getattr(found.drafter, "params", None)
        assert (request.param == "mask vector") == getattr(params, "has_mask_vector", False)
        yield found


def run_on(slot: Any, prompt: list[int], steps: int) -> None:
    """Read a prompt and decode plainly, so that so many tokens wait for the draft."""
    slot.prefill(prompt)
    sampler = Sampler(SamplingParams(temperature=0), slot.n_vocab)
    generation = slot.generate(sampler, mode="plain", stop=lambda token: False)
    for _ in range(steps + 1):
        next(generation)
    generation.close()


def parts(candidates: Any) -> tuple[CandidateBlock, ...]:
    """The rows of each draft that took part."""
    return candidates.drafts if isinstance(candidates, CombinedCandidates) else (candidates,)


@pytest.mark.parametrize("depth", [None, 3])
def test_batched_blocks_equal_solo_blocks(
    engine: Solo, depth: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in parts, as where matmuls of many columns are slow."""
    drafter = engine.drafter
    alone = []
    for i, prompt in enumerate(PROMPTS):
        engine.reset()
        run_on(engine, prompt, 3 * i)
        alone.append(drafter.propose([engine.sequence], 20, depth)[0])
        engine.sequence.unseen = ()
    slots = [engine.open(len(prompt) + 20) for prompt in PROMPTS]
    for i, (slot, prompt) in enumerate(zip(slots, PROMPTS)):
        run_on(slot, prompt, 3 * i)
    # the first state index takes part, and the order is any
    order = [3, 0, 4, 1, 2]
    if hasattr(drafter, "_is_narrow"):
        monkeypatch.setattr(drafter, "_is_narrow", depth is None)
        monkeypatch.setattr(dflash, "NARROW_COLUMNS", 2 * drafter.block)
    found = drafter.propose([slots[i].sequence for i in order], 20, depth)
    for i, candidates in zip(order, found, strict=True):
        assert not slots[i].sequence.unseen and slots[i].snapshot().in_draft.all()
        for rows, own in zip(parts(candidates), parts(alone[i]), strict=True):
            np.testing.assert_allclose(rows.log_probs, own.log_probs, atol=1e-4)
            assert (rows.ids[:, 0] == own.ids[:, 0]).mean() > 0.9
            if rows.pairs is not None:
                np.testing.assert_allclose(rows.pairs[0, 0], own.pairs[0, 0], atol=1e-3)
    for slot in slots:
        slot.close()
