"""Texts side by side on a GPU: each is what it is alone, up to near-ties. Skipped where this build or machine has no GPU."""

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
N, TEXTS = 96, 6


@pytest.fixture(scope="module")
def engine(demo_target: Path, demo_draft: Path) -> Iterator[Solo]:
    with Solo.load(EngineConfig(demo_target, demo_draft, parallel=4, n_ctx=4096)) as found:
        assert found.device.is_gpu
        yield found


def side_by_side(
    engine: Solo, params: list[SamplingParams], mode: Any, joined: bool = False
) -> list[list[int]]:
    """Texts behind the first prompts, four at a time; a place is taken again when its text has ended. joined: prompts are
    prefilled in the passes of those that are running."""
    texts: list[list[int]] = [[] for _ in params]
    waiting, running = list(range(len(params))), dict[int, Any]()

    def take(steps: list[Any]) -> None:
        for i, step in zip(list(running), steps, strict=True):
            assert not isinstance(step, Exception), repr(step)
            texts[i] += step.tokens
            if step.finish:
                running.pop(i)[0].close()

    def step(run: Verify | None = None) -> None:
        take(engine.step([run for _, run in running.values()], run))

    while waiting or running:
        while waiting and len(running) < engine.parallel:
            i = waiting.pop(0)
            place = engine.open(64)
            ids = engine.tokenizer.encode(PROMPTS[i])
            place.prefill(ids, beside=step if joined and running else None)
            run = place.begin(
                Sampler(params[i], engine.n_vocab), max_tokens=N - 10 * i, mode=mode, stop=lambda t: False
            )
            texts[i] += place.first().tokens
            running[i] = place, run
        step()
    return texts


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("mode", ["plain", "tree", "auto"])
def test_each_text_is_what_it_is_alone(engine: Solo, mode: Any, joined: bool) -> None:
    texts = side_by_side(engine, [GREEDY] * TEXTS, mode, joined)
    assert [len(text) for text in texts] == [N - 10 * i for i in range(TEXTS)]
    for prompt, text in zip(PROMPTS, texts):
        ids = engine.tokenizer.encode(prompt)
        engine.reset()
        engine.prefill(ids)
        sampler = Sampler(GREEDY, engine.n_vocab)
        steps = engine.generate(sampler, max_tokens=len(text), mode="plain", stop=lambda t: False)
        alone = [t for step in steps for t in step.tokens]
        if (at := fork(text, alone)) < len(text):
            engine.reset()
            engine.prefill([*ids, *alone[:at]])
            assert abs(engine.logits[text[at]] - engine.logits[alone[at]]) < NEAR_TIE


def test_drawn_texts_and_few_graphs(demo_target: Path, demo_draft: Path) -> None:
    """Rows are reduced on the device, each with its own text's temperature; the same steps again build no graph.

    Without copies: the second time they would find the first time's texts, and take other steps."""
    params = [SamplingParams(temperature=0.5 + 0.2 * i, seed=i) for i in range(TEXTS)]
    with Solo.load(EngineConfig(demo_target, demo_draft, parallel=4, n_ctx=4096, spec=DRAFTS)) as engine:
        first = side_by_side(engine, params, "tree")
        built = engine.run_counts()["graphs"]
        assert side_by_side(engine, params, "tree") == first
        assert engine.run_counts()["graphs"] == built
