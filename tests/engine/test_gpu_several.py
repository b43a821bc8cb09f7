"""Tests of batched sequences on a GPU: each equals its solo run, up to near-ties. Skipped where this build or machine has no
GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_gpu import GPUS, GREEDY, NEAR_TIE, PROMPTS, fork

from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine.step import Verify
from reference.engine_kit import Solo

pytestmark = pytest.mark.skipif(not GPUS, reason="no GPU in this build or machine")
N, SEQUENCES = 96, 6


@pytest.fixture(scope="module")
def engine(demo_target: Path, demo_draft: Path) -> Iterator[Solo]:
    with Solo.load(EngineConfig(demo_target, demo_draft, parallel=4, n_ctx=4096)) as found:
        assert found.device.is_gpu
        yield found


def batched(engine: Solo, params: list[SamplingParams], mode: Any, joined: bool = False) -> list[list[int]]:
    """Generate after the first prompts, four at a time; a slot is reused when its sequence has ended. joined: prompts are
    prefilled in the passes of running sequences."""
    outputs: list[list[int]] = [[] for _ in params]
    waiting, running = list(range(len(params))), dict[int, Any]()

    def take(steps: list[Any]) -> None:
        for i, step in zip(list(running), steps, strict=True):
            assert not isinstance(step, Exception), repr(step)
            outputs[i] += step.tokens
            if step.finish:
                running.pop(i)[0].close()

    def step(run: Verify | None = None) -> None:
        take(engine.step([run for _, run in running.values()], run))

    while waiting or running:
        while waiting and len(running) < engine.parallel:
            i = waiting.pop(0)
            slot = engine.open(64)
            ids = engine.tokenizer.encode(PROMPTS[i])
            slot.prefill(ids, join=step if joined and running else None)
            run = slot.begin(
                Sampler(params[i], engine.n_vocab), max_tokens=N - 10 * i, mode=mode, stop=lambda t: False
            )
            outputs[i] += slot.first().tokens
            running[i] = slot, run
        step()
    return outputs


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("mode", ["plain", "tree", "auto"])
def test_each_sequence_equals_its_solo_run(engine: Solo, mode: Any, joined: bool) -> None:
    outputs = batched(engine, [GREEDY] * SEQUENCES, mode, joined)
    assert [len(tokens) for tokens in outputs] == [N - 10 * i for i in range(SEQUENCES)]
    for prompt, tokens in zip(PROMPTS, outputs):
        ids = engine.tokenizer.encode(prompt)
        engine.reset()
        engine.prefill(ids)
        sampler = Sampler(GREEDY, engine.n_vocab)
        steps = engine.generate(sampler, max_tokens=len(tokens), mode="plain", stop=lambda t: False)
        alone = [t for step in steps for t in step.tokens]
        if (at := fork(tokens, alone)) < len(tokens):
            engine.reset()
            engine.prefill([*ids, *alone[:at]])
            assert abs(engine.logits[tokens[at]] - engine.logits[alone[at]]) < NEAR_TIE


def test_sampled_sequences_and_few_graphs(demo_target: Path, demo_draft: Path) -> None:
    """Rows are reduced on the device, each with its own sequence's temperature; the same steps again build no graph.

    Without prompt lookup: the second run would match the first one's output, and take other steps."""
    params = [SamplingParams(temperature=0.5 + 0.2 * i, seed=i) for i in range(SEQUENCES)]
    with Solo.load(EngineConfig(demo_target, demo_draft, parallel=4, n_ctx=4096, spec=DRAFTS)) as engine:
        first = batched(engine, params, "tree")
        built = engine.run_counts()["graphs"]
        assert batched(engine, params, "tree") == first
        assert engine.run_counts()["graphs"] == built
