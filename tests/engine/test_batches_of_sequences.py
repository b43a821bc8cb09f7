"""Tests of several sequences in one pass, with drafts and targets of every kind: each equals its solo run. 15 seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.engine import memory_planner
from dflash_ggml.engine.slot import Slot
from dflash_ggml.engine.step import Verify
from dflash_ggml.errors import NoRoomError
from dflash_ggml.state.memory import SCRATCH
from reference import kv_toys, toys
from reference.engine_kit import EXACT, AnyPlan, Solo

# sizes of a toy pair, and options of its engine
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": ({}, {}),
    "a ring": ({"window": 40, "full_layers": 1, "draft_layers": 2, "n_ctx": 2048}, {"n_ctx": 1600}),
    "dflash2": ({"draft": "dflash2", "window": 24, "causal": False}, {}),
    "dspark": ({"draft": "dspark", "from_anchor": False}, {}),
    "head": ({"nextn": True}, {"draft": None}),
    "both": ({"nextn": True}, {"spec": ("dflash", "mtp")}),
    "prompt lookup": ({}, {"draft": None, "spec": ("suffix",)}),
    "plain": ({}, {"draft": None, "spec": (), "mode": "plain"}),
    "a window": ({}, {"fa_window": 96}),
    "experts": ({"arch": "qwen3next", "n_experts": 6, "n_used": 2, "n_ff": 32, "ssm_v_heads": 6}, {}),
    "experts with the host": (
        {"arch": "qwen35moe", "n_experts": 6, "n_used": 2, "n_ff": 32},
        {"n_cpu_moe": 3},
    ),
    "rows only": ({"kv_toy": True}, {}),
    "rings": ({"kv_toy": True, **kv_toys.VARIANTS[32]}, {}),
    "sinks": ({"kv_toy": True, **kv_toys.VARIANTS[51]}, {}),
    "sinks, experts with the host": ({"kv_toy": True, **kv_toys.VARIANTS[51]}, {"n_cpu_moe": 2}),
    "gemma3": ({"kv_toy": True, **kv_toys.VARIANTS[63]}, {}),
    "shared rows": ({"kv_toy": True, **kv_toys.VARIANTS[86]}, {}),
    "gemma4's experts": ({"kv_toy": True, **kv_toys.VARIANTS[73]}, {"n_cpu_moe": 2}),
}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5},
    {"temperature": 0.7, "top_k": 9, "repeat_penalty": 1.1, "seed": 6},
)


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Solo]:
    sizes, options = KINDS[request.param]
    write_pair = kv_toys.write_pair if "kv_toy" in sizes else toys.write_pair
    sizes = {name: size for name, size in sizes.items() if name != "kv_toy"}
    pair = write_pair(tmp_path_factory.mktemp("pair"), 90 + list(KINDS).index(request.param), **sizes)
    config = EngineConfig(
        *pair,
        n_ctx=700,
        parallel=4,
        n_batch=64,
        budget=20,
        **EXACT,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_planner, "has_own_memory", lambda device: "n_cpu_moe" in options)
        with Solo.load(replace(config, **options)) as found:
            yield found


@dataclass
class Job:
    """A sequence to generate, and its result."""

    prompt: list[int]
    sampling: dict[str, Any]
    n: int
    written: list[int] = field(default_factory=list)
    slot: Slot | None = None
    run: Sequence | None = None

    @property
    def sampler(self) -> Sampler:
        return Sampler(SamplingParams(**self.sampling), 64)

    def alone(self, engine: Solo) -> list[int]:
        engine.reset()
        engine.prefill(self.prompt)
        options: dict[str, Any] = {"max_tokens": self.n, "mode": "plain", "stop": lambda token: False}
        return [t for step in engine.generate(self.sampler, **options) for t in step.tokens]

    def join(self, engine: Solo, room: int, others: Items[Job] = (), size: int = 1) -> None:
        """Begin; others: in whose passes the prompt is prefilled, so many tokens in each, as long as they go on."""
        self.slot, at = engine.open(room), 0
        while at < len(self.prompt) and (going := [job for job in others if job.run and not job.run.finish]):
            steps: list[Any] = []

            def joined(run: Verify, going: list[Job] = going, steps: list[Any] = steps) -> None:
                steps += engine.step([job.run for job in going], run)

            self.slot.prefill(self.prompt[at : at + size], join=joined)
            for job, step in zip(going, steps, strict=True):
                assert not isinstance(step, Exception), repr(step)
                job.written += step.tokens
            at += size
        if at < len(self.prompt):
            self.slot.prefill(self.prompt[at:])
        self.run = self.slot.begin(self.sampler, max_tokens=self.n, stop=lambda token: False)
        self.written += self.slot.first().tokens


def some_jobs(engine: Solo, n: int, seed: int) -> list[Job]:
    rng = np.random.default_rng(seed)
    longest = 500 if engine.n_ctx > 1000 else 120
    return [
        Job(
            rng.integers(0, 60, int(rng.integers(1, longest))).tolist(),
            SAMPLINGS[i % len(SAMPLINGS)],
            int(rng.integers(2, 60)),
        )
        for i in range(n)
    ]


def write(engine: Solo, jobs: list[Job], seed: int) -> int:
    """Decode the jobs in batches; they arrive, are preempted and continue at random. Returns the number of batched passes."""
    rng = np.random.default_rng(seed)
    waiting, running, preempted, together = list(jobs), list[Job](), list[tuple[Job, Any]](), 0
    while waiting or running or preempted:
        free = len(running) < engine.parallel
        if free and preempted and rng.random() < 0.5:
            job, snapshot = preempted.pop(0)
            job.slot = engine.open(len(snapshot.tokens))
            job.slot.restore(snapshot)
            job.slot.resume(job.run)
            running.append(job)
        elif free and waiting and (not running or rng.random() < 0.4):
            waiting[0].join(engine, int(rng.integers(1, 100)))
            running.append(waiting.pop(0))
        stepped = [job for job in running if rng.random() < 0.9]
        together += len(stepped) > 1
        for job, step in zip(stepped, engine.step([job.run for job in stepped]), strict=True):
            leaves = isinstance(step, NoRoomError) or rng.random() < 0.02
            if not isinstance(step, NoRoomError):
                assert not isinstance(step, Exception), repr(step)
                job.written += step.tokens
            if leaves and not job.run.finish:
                preempted.append((job, job.slot.snapshot()))
            if leaves or job.run.finish:
                running.remove(job)
                job.slot.close()
    return together


def write_beside(engine: Solo, jobs: list[Job]) -> None:
    """Write the jobs, each prompt in chunks of 1 to 60 tokens in the passes of those that came before."""
    graphs = engine.graph_counts()["graphs"]
    for i, (job, size) in enumerate(zip(jobs, cycle((1, 60, 9, 24)))):
        job.join(engine, 20, jobs[:i], size)
    assert engine.graph_counts()["graphs"] > graphs
    while going := [job for job in jobs if job.run and not job.run.finish]:
        for job, step in zip(going, engine.step([job.run for job in going]), strict=True):
            assert not isinstance(step, Exception), repr(step)
            job.written += step.tokens
    for job in jobs:
        job.slot.close()


def foretell(engine: Solo, jobs: list[Job], outputs: list[list[int]], patch: pytest.MonkeyPatch) -> None:
    """Let the draft know the outputs: for every depth the right token and another, either of them first."""
    drafter, rng = engine.drafter, np.random.default_rng(7)
    assert drafter is not None

    def rows(sequence: Any) -> CandidateBlock:
        at = next(i for i, job in enumerate(jobs) if job.run and job.run is sequence)
        start = sequence.n_tokens - len(jobs[at].prompt) + 1
        right = np.array(outputs[at][start : start + drafter.depth] or [0])
        ids = np.stack([right, (right + 1) % 50], axis=1).astype(np.int32)
        swapped = rng.random(len(ids)) < 0.5
        ids[swapped] = ids[swapped, ::-1]
        return CandidateBlock(ids, np.tile(np.log([0.55, 0.45]).astype(np.float32), (len(ids), 1)))

    def propose(sequences: list[Any], budget: int, depth: int | None = None) -> list[CandidateBlock]:
        drafter.take_in([s for s in sequences if s.unseen])
        return [rows(s) for s in sequences]

    patch.setattr(drafter, "propose", propose)


@pytest.mark.parametrize("how", ["as asked", "any plan", "foretold"])
def test_each_sequence_equals_its_solo_run(engine: Solo, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = some_jobs(engine, 6, seed=3 + len(how))
    expected = [job.alone(engine) for job in jobs]
    if how != "as asked" and engine.sources:
        monkeypatch.setattr(engine.stepper, "policy", AnyPlan(engine, seed=5))
    if how == "foretold" and engine.drafter:
        foretell(engine, jobs, expected, monkeypatch)
    assert write(engine, jobs, seed=4) > 4
    assert [job.written for job in jobs] == expected
    if how == "foretold" and engine.drafter:
        assert sum(job.run.statistics.accepted for job in jobs if job.run) > 60
    assert not engine.slots and engine.passes.rows.longest == engine.passes.n_rows


def test_the_time_of_the_policy_does_not_count_as_verification(
    engine: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the policy catches up after the pass; its time would be learned as a part of the pass's."""
    calls: list[None] = []

    def catch_up() -> None:
        calls.append(time.sleep(0.1))

    jobs = some_jobs(engine, 2, seed=9)
    monkeypatch.setattr(engine.policy, "catch_up", catch_up)
    for job in jobs:
        job.join(engine, 20)
    steps = engine.step([job.run for job in jobs])
    assert len(calls) == (1 if engine.passes.takes_several else 2)  # behind a window one by one
    for step in steps:
        assert not isinstance(step, Exception) and (not calls or step.timings.tree >= 100)
    for job in jobs:
        job.slot.close()


def test_the_plan_is_what_is_allocated(engine: Solo) -> None:
    allocated = {name: size for name, size in engine.nbytes.items() if name != SCRATCH and size}
    assert allocated == {name: engine.memory.parts[name] for name in allocated}


def test_a_prompt_in_the_passes_of_others_changes_no_text(engine: Solo) -> None:
    assert engine.can_join == (engine.passes.takes_several and not engine.passes.state.rings)
    if not engine.can_join:  # rows that are gathered
        return
    jobs = some_jobs(engine, 4, seed=8)
    expected = [job.alone(engine) for job in jobs]
    write_beside(engine, jobs)
    assert [job.written for job in jobs] == expected
