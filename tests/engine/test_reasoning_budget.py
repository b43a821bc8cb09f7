"""Tests of thoughts ended by a budget: the tokens of plain decoding with the same forced tokens, in every mode and in a
batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("dflash_ggml.ggml.bindings")

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.hooks import Hooks
from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import Session, generation_of, run_chat
from reference.engine_kit import EXACT, Solo

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
)
PROMPTS = (
    'def mean(values: list[float]) -> float:\n    """Average."""\n',
    "import json\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "for i in range(10):\n    print(i",
)
LIMIT = 40
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.8, top_k=20, seed=3),
    "whole rows": SamplingParams(temperature=1.2, repeat_penalty=1.1, mirostat_mode=2, seed=4),
}


@pytest.fixture(scope="module")
def engine(f32_target: Any, f32_draft: Any) -> Iterator[Solo]:
    config = EngineConfig(f32_target, f32_draft, n_ctx=512, parallel=3, **EXACT)
    with Solo.load(config) as found:
        yield found


def chat(prompt: str, budget: int | None, sampling: SamplingParams, **options: Any) -> ChatRequest:
    return ChatRequest(
        messages=[{"role": "user", "content": prompt}],
        sampling=sampling,
        max_tokens=LIMIT,
        reasoning_budget=budget,
        template=TEMPLATE,
        **options,
    )


def sampling_of(engine: Any, name: str) -> SamplingParams:
    """One of SAMPLINGS; what is sampled does not end by itself, and greedy decoding keeps to argmax alone."""
    params = SAMPLINGS[name]
    if params.temperature == 0:
        return params
    return replace(params, logit_bias=dict.fromkeys(engine.tokenizer.eog_ids, float("-inf")))


def end_of(engine: Any) -> list[int]:
    return engine.tokenizer.encode("\n</think>")


def decoded(session: Session, request: ChatRequest) -> tuple[list[int], Answer]:
    """The tokens of an answer, and what became of them."""
    tokens: list[int] = []
    answer = Answer.of(run_chat(session, request, hooks=Hooks(on_step=lambda s: tokens.extend(s.tokens))))
    return tokens, answer


def expected(engine: Solo, prompt: str, budget: int, sampling: SamplingParams) -> list[int]:
    """Plain decoding to the budget, and behind the end of the thought; one sampler draws all but that."""
    ids, end = engine.tokenizer.encode(f"{prompt}<think>\n"), end_of(engine)
    sampler, tokens = Sampler(sampling, engine.n_vocab), list[int]()
    for n, forced in ((budget, end), (LIMIT - budget - len(end), [])):
        engine.reset()
        engine.prefill(ids + tokens)
        tokens += (
            [t for s in engine.generate(sampler, max_tokens=n, mode="plain") for t in s.tokens] if n else []
        )
        tokens += forced
    return tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("budget", [0, 1, 9])
def test_tokens_are_those_of_plain_decoding(engine: Solo, sampling: str, budget: int) -> None:
    params, prompts = sampling_of(engine, sampling), PROMPTS[: 2 if sampling == "greedy" else 1]
    wanted = [expected(engine, prompt, budget, params) for prompt in prompts]
    engine.slot.close()
    session, end = Session(engine, cache_bytes=0), end_of(engine)
    for prompt, tokens in zip(prompts, wanted):
        assert tokens[budget : budget + len(end)] == end
        for mode in ("plain", "chain", "tree", "auto"):
            found, answer = decoded(session, chat(prompt, budget, params, mode=mode))
            assert found == tokens, (prompt, mode)
            usage, _ = answer.done()
            assert usage.reasoning_n == budget + len(end)
            assert answer.reasoning.strip() == engine.tokenizer.decode(tokens[:budget]).strip()
    session.scheduler.close()
    session.slots.close()


def test_drafted_paths_reach_past_the_budget(engine: Solo) -> None:
    """A budget that falls inside an accepted path ends the path there."""
    prompt, n_cut = PROMPTS[0], 0
    engine.slot.close()
    session = Session(engine, cache_bytes=0)
    steps: list[int] = []
    hooks = Hooks(on_step=lambda s: steps.append(len(s.tokens)))
    free = chat(prompt, None, SAMPLINGS["greedy"], mode="tree")
    list(run_chat(session, free, hooks=hooks))
    at = 0
    for n in steps:
        at += n
        if n > 2 and at < LIMIT - 5:
            n_cut, cut, lengths = n_cut + 1, at - 1, list[int]()
            hooks = Hooks(on_step=lambda s, lengths=lengths: lengths.append(len(s.tokens)))  # type: ignore[misc]
            list(run_chat(session, chat(prompt, cut, SAMPLINGS["greedy"], mode="tree"), hooks=hooks))
            ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
            assert cut in ends and at not in ends[: ends.index(cut) + 1]
    assert n_cut
    session.scheduler.close()
    session.slots.close()


@pytest.mark.parametrize("reduces", [False, True])
def test_batched_sequences_are_the_same_as_alone(
    engine: Solo, reduces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other budgets, modes and sampling each, from whole and from reduced logits."""
    monkeypatch.setattr(engine.passes, "reduces", reduces)
    rows = [
        (PROMPTS[0], 7, sampling_of(engine, "greedy"), "tree"),
        (PROMPTS[1], 12, sampling_of(engine, "sampled"), "chain"),
        (PROMPTS[2], 3, sampling_of(engine, "greedy"), "plain"),
        (PROMPTS[2], 16, sampling_of(engine, "whole rows"), "tree"),
        (PROMPTS[1], 0, sampling_of(engine, "greedy"), "auto"),
    ]
    wanted = [expected(engine, prompt, budget, params) for prompt, budget, params, _ in rows]
    engine.slot.close()
    session = Session(engine, cache_bytes=0)
    tokens: list[list[int]] = [[] for _ in rows]
    found = []
    for output, (prompt, budget, params, mode) in zip(tokens, rows):
        prepared = session.prepare(chat(prompt, budget, params, mode=mode))
        hooks = Hooks(on_step=lambda s, output=output: output.extend(s.tokens))
        found.append(generation_of(session, prepared, hooks))
        found[-1].runs_ahead = True
    session.scheduler.submit(*found)
    while session.scheduler.is_busy:
        session.scheduler.iterate()
    assert all(generation.error is None for generation in found)
    assert tokens == wanted
    session.scheduler.close()
    session.slots.close()
