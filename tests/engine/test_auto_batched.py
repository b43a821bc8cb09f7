"""Tests of mode auto on the demo pair in float32, whose drafts are often right: sequences start, end and are cancelled.

Plans depend on pass times here, so no two runs plan alike; all have the output of plain decoding. 5 seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("dflash_ggml.ggml.bindings")

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.policy.policy import Policy, Result, StepTimes
from reference.engine_kit import EXACT, Solo

PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import numpy as np\n\n\ndef softmax(x, axis=-1):\n",
    "x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3,",
    "def read_csv(path, sep=','):\n",
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 20, "seed": 5},
    {"temperature": 0.4, "repeat_penalty": 1.1, "seed": 6},
)
N = 32


@dataclass
class Job:
    """A sequence to generate. leaves: tokens after which it is cancelled."""

    prompt: list[int]
    sampling: dict[str, Any]
    leaves: float = inf
    written: list[int] = field(default_factory=list)
    slot: Any = None
    run: Any = None

    def how(self, engine: Solo, mode: str) -> dict[str, Any]:
        sampler = Sampler(SamplingParams(**self.sampling), engine.n_vocab)
        return {"sampler": sampler, "max_tokens": N, "mode": mode, "stop": lambda token: False}


@pytest.fixture(scope="module", params=["draft", "draft and lookup", "lookup"])
def engine(request: pytest.FixtureRequest, f32_target: Path, f32_draft: Path) -> Iterator[Solo]:
    sources = {"draft": ("dflash",), "draft and lookup": ("dflash", "suffix"), "lookup": ("suffix",)}
    config = EngineConfig(
        f32_target,
        f32_draft if request.param != "lookup" else None,
        spec=sources[request.param],
        n_ctx=320,
        parallel=3,
        n_batch=64,
        **EXACT,
    )
    with Solo.load(config) as found:
        yield found


@pytest.fixture
def fast_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let wide passes take what plain ones do, on whatever machine, so that drafting pays."""
    record = Policy.record

    def recorded(self: Policy, result: Result) -> None:
        draft = 0.2 if result.times.draft else 0.0
        record(self, replace(result, times=StepTimes(draft, tree=0.05, verify=10.0, commit=0.1, host=0.1)))

    monkeypatch.setattr(Policy, "record", recorded)


def expected(engine: Solo, job: Job) -> list[int]:
    engine.reset()
    engine.prefill(job.prompt)
    return [token for step in engine.generate(**job.how(engine, "plain")) for token in step.tokens]


def test_output_equals_plain_decoding(engine: Solo, fast_passes: None) -> None:
    """Between one sequence and three, in any state index."""
    rng = np.random.default_rng(1)
    jobs = [
        Job(engine.tokenizer.encode(prompt), SAMPLINGS[i % 3])
        for i, prompt in enumerate((*PROMPTS, *PROMPTS[:3]))
    ]
    outputs = [expected(engine, job) for job in jobs]
    for job in jobs[1::3]:
        job.leaves = int(rng.integers(2, N))
    waiting, running, sizes = [*jobs], list[Job](), list[int]()
    while waiting or running:
        if waiting and len(running) < engine.parallel and (not running or rng.random() < 0.25):
            job = waiting.pop(0)
            job.slot = engine.open(len(job.prompt) + N)
            job.slot.prefill(job.prompt)
            job.run = job.slot.begin(**job.how(engine, "auto"))
            job.written += job.slot.first().tokens
            running.append(job)
        sizes.append(len(running))
        for job, step in zip([*running], engine.step([job.run for job in running]), strict=True):
            assert not isinstance(step, Exception), repr(step)
            job.written += step.tokens
            if step.finish or len(job.written) >= job.leaves:
                running.remove(job)
                job.slot.close()
    for job, tokens in zip(jobs, outputs):
        assert job.written == (tokens if job.leaves == inf else tokens[: len(job.written)])
    assert {1, 2} <= set(sizes) and sum(a != b for a, b in pairwise(sizes)) >= 8
    assert sum(job.run.statistics.accepted for job in jobs) > 0
