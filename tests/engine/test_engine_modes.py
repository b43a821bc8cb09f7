"""Tests that plain, chain and tree decoding give the same greedy output: exactly in float32, up to near-ties on quantised
weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from reference.engine_kit import Solo

GREEDY = SamplingParams(temperature=0)
PROMPT_FILE = (
    Path(__file__).resolve().parents[2] / "src" / "dflash_ggml" / "data" / "prompts" / "python.jsonl"
)
PROMPTS = [json.loads(line)["prompt"] for line in PROMPT_FILE.read_text().splitlines() if line.strip()]
N_TOKENS = 128
NEAR_TIE = 0.2  # logits; quantised kernels round differently by batch width


def write(engine: Solo, prompt: str, mode: str, budget: int | None = None) -> list[int]:
    """N_TOKENS greedy tokens, past an end of text if there is one."""
    engine.reset()
    engine.prefill(engine.tokenizer.encode(prompt))
    sampler = Sampler(GREEDY, engine.n_vocab)
    steps = engine.generate(sampler, max_tokens=N_TOKENS, mode=mode, budget=budget, stop=lambda token: False)
    tokens = [token for step in steps for token in step.tokens]
    assert len(tokens) == N_TOKENS
    assert engine.tokens == engine.tokenizer.encode(prompt) + tokens[:-1] and engine.pending == tokens[-1]
    return tokens


def for_each(config: EngineConfig, prompts: list[str], check: Callable[[Solo, str], None]) -> None:
    """check(engine, prompt) for every prompt.

    On two engines with a thread each: two threads of one engine wait for each other in a busy loop, which
    takes ten times as long as soon as the machine has other work.
    """

    def run(part: list[str]) -> None:
        with Solo.load(replace(config, n_threads=1)) as engine:
            for prompt in part:
                check(engine, prompt)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, (prompts[::2], prompts[1::2])))


def test_float32_is_exact(f32_target, f32_draft):
    """On float32 weights with width-independent kernels chain and tree equal plain decoding, token for token."""

    def check(engine: Solo, prompt: str) -> None:
        plain = write(engine, prompt, "plain")
        assert write(engine, prompt, "chain") == plain, prompt
        assert write(engine, prompt, "tree") == plain, prompt

    prompts = PROMPTS[:50]
    assert len(prompts) == 50
    for_each(EngineConfig(f32_target, f32_draft, type_k="f32", type_v="f32", reference=True), prompts, check)


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_quantised_forks_at_near_ties(kind, demo_target, demo_draft, request, record_property, capsys):
    """Where tree and plain text part on quantised weights, the two tokens were nearly tied."""
    target = demo_target if kind == "q8_0" else request.getfixturevalue("q4km_target")
    forks = []

    def check(engine: Solo, prompt: str) -> None:
        plain = write(engine, prompt, "plain")
        for mode in ("chain", "tree"):
            other = write(engine, prompt, mode)
            at = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), None)
            if at is None:
                continue
            engine.reset()
            engine.prefill(engine.tokenizer.encode(prompt) + plain[:at])
            gap = float(engine.logits[plain[at]] - engine.logits[other[at]])
            forks.append((mode, prompt, at, round(gap, 4)))

    for_each(EngineConfig(target, demo_draft), PROMPTS[:24], check)
    with capsys.disabled():
        print(f"\n{kind}: {len(forks)} forks in {2 * 24} texts, gaps {sorted(f[3] for f in forks)}")
    assert all(abs(gap) < NEAR_TIE for *_, gap in forks), forks


@pytest.mark.parametrize("budget", [1, 2, 7, 8, 31, 64])
def test_budgets(f32_target, f32_draft, budget):
    """Any budget writes the same text."""

    def check(engine: Solo, prompt: str) -> None:
        assert write(engine, prompt, "tree", budget) == write(engine, prompt, "plain")

    for_each(
        EngineConfig(f32_target, f32_draft, type_k="f32", type_v="f32", reference=True, budget=64),
        PROMPTS[:4],
        check,
    )


def test_chain_seed_gives_the_same_output(f32_target, f32_draft):
    def check(engine: Solo, prompt: str) -> None:
        assert write(engine, prompt, "tree") == write(engine, prompt, "plain")

    config = EngineConfig(f32_target, f32_draft, type_k="f32", type_v="f32", reference=True, chain_seed=True)
    for_each(config, PROMPTS[:6], check)


def test_thread_count_does_not_matter(f32_target, f32_draft):
    outputs = []
    for n in (1, 2):
        with Solo.load(
            EngineConfig(f32_target, f32_draft, type_k="f32", type_v="f32", reference=True, n_threads=n)
        ) as engine:
            outputs.append(write(engine, PROMPTS[0], "tree"))
    assert outputs[0] == outputs[1]


def test_seeded_sampling_does_not_depend_on_the_mode(f32_target, f32_draft):
    """One draw per emitted token, in order: a seed gives one output, however it is drafted."""

    def check(engine: Solo, prompt: str) -> None:
        params = SamplingParams(temperature=0.9, repeat_penalty=1.1, seed=PROMPTS.index(prompt))
        outputs = []
        for mode in ("plain", "chain", "tree"):
            engine.reset()
            engine.prefill(engine.tokenizer.encode(prompt))
            sampler = Sampler(params, engine.n_vocab)
            outputs.append([t for s in engine.generate(sampler, max_tokens=64, mode=mode) for t in s.tokens])
        assert outputs[0] == outputs[1] == outputs[2]

    for_each(
        EngineConfig(f32_target, f32_draft, type_k="f32", type_v="f32", reference=True), PROMPTS[:6], check
    )


def test_context_end(f32_target, f32_draft):
    """Decoding stops exactly at the context's end in every mode, with the same text."""
    with Solo.load(
        EngineConfig(
            f32_target, f32_draft, type_k="f32", type_v="f32", reference=True, n_threads=1, n_ctx=100
        )
    ) as engine:
        ids = engine.tokenizer.encode(PROMPTS[0])
        outputs = []
        for mode in ("plain", "chain", "tree"):
            engine.reset()
            engine.prefill(ids)
            steps = list(engine.generate(Sampler(GREEDY, engine.n_vocab), mode=mode, stop=lambda t: False))
            outputs.append([t for s in steps for t in s.tokens])
            assert steps[-1].finish == "length" and len(ids) + len(outputs[-1]) == 100
        assert outputs[0] == outputs[1] == outputs[2]
