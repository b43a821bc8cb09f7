"""Tests of an engine's slots: each sequence equals its solo run, whatever the others do, and fails alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.engine.kv_rows import KvRows
from dflash_ggml.engine.slot import Slot
from dflash_ggml.errors import ConfigError, DeviceError, NonFiniteError, NoRoomError
from dflash_ggml.state.pool import ADJACENT, SPACED, UNIT
from reference.engine_kit import EXACT, Solo

N_CTX = 768


@pytest.fixture(scope="module")
def several(toy_pair: tuple[Path, Path]) -> Iterator[Solo]:
    config = EngineConfig(
        *toy_pair,
        n_ctx=N_CTX,
        parallel=4,
        mode="tree",
        budget=12,
        **EXACT,
    )
    with Solo.load(config) as engine:
        yield engine


@dataclass
class Job:
    """A sequence to generate: its prompt and options, and its result."""

    prompt: list[int]
    sampling: dict[str, Any]
    n: int
    mode: Any = None
    written: list[int] = field(default_factory=list)
    slot: Slot | None = None
    run: Sequence | None = None

    def sampler(self, engine: Solo) -> Sampler:
        return Sampler(SamplingParams(**self.sampling), engine.n_vocab)

    def alone(self, engine: Solo) -> list[int]:
        engine.reset()
        engine.prefill(self.prompt)
        options: dict[str, Any] = {"max_tokens": self.n, "mode": self.mode, "stop": lambda token: False}
        return [t for step in engine.generate(self.sampler(engine), **options) for t in step.tokens]

    def join(self, engine: Solo) -> None:
        self.slot = engine.open(len(self.prompt) + 20)
        self.slot.prefill(self.prompt)
        self.run = self.slot.begin(
            self.sampler(engine), max_tokens=self.n, mode=self.mode, stop=lambda token: False
        )
        self.written += self.slot.first().tokens


def some_jobs(n: int, seed: int, vocab: int = 60) -> list[Job]:
    """Prompts of many lengths, greedy and drawn, drafted and plain."""
    rng = np.random.default_rng(seed)
    samplings = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "top_k": 9, "seed": 6},
    ]
    return [
        Job(
            rng.integers(0, vocab, int(rng.integers(1, 120))).tolist(),
            samplings[i % 3] | ({"repeat_penalty": 1.1} if i % 4 == 3 else {}),
            int(rng.integers(1, 70)),
            [None, "chain", "plain"][i % 5 % 3],
        )
        for i in range(n)
    ]


def write_all(engine: Solo, jobs: list[Job], seed: int) -> None:
    """Decode the jobs in batches; they arrive and are preempted at random."""
    rng = np.random.default_rng(seed)
    waiting, running, preempted = list(jobs), [], []
    while waiting or running or preempted:
        if preempted and rng.random() < 0.5 and len(running) < engine.parallel:
            job, snapshot = preempted.pop()
            job.slot = engine.open(len(snapshot.tokens))
            job.slot.restore(snapshot)
            job.slot.resume(job.run)
            running.append(job)
        if waiting and rng.random() < 0.4 and len(running) < engine.parallel:
            waiting[0].join(engine)
            running.append(waiting.pop(0))
        steps = engine.step([job.run for job in running])
        for job, step in zip(list(running), steps, strict=True):
            if isinstance(step, NoRoomError):
                preempted.append((job, job.slot.snapshot()))
            else:
                assert not isinstance(step, Exception), step
                job.written += step.tokens
            if isinstance(step, NoRoomError) or step.finish or rng.random() < 0.02:
                if not isinstance(step, NoRoomError) and not step.finish:
                    preempted.append((job, job.slot.snapshot()))
                running.remove(job)
                job.slot.close()


def test_each_sequence_equals_its_solo_run(several: Solo) -> None:
    jobs = some_jobs(9, seed=1)
    jobs = [job for job in jobs if job.n > 1]
    expected = [job.alone(several) for job in jobs]
    write_all(several, jobs, seed=2)
    assert [job.written for job in jobs] == expected
    assert not several.slots
    # and the engine's own text can be had again
    assert jobs[0].alone(several) == expected[0]


def test_a_run_that_fails_ends_alone(several: Solo) -> None:
    """One whose processor raises gets the error in place of its step, and the others continue as if it were absent."""
    first, second = (Job([3, 1, 4, i], {"temperature": 0}, 30) for i in (1, 2))
    expected = first.alone(several)
    first.join(several)
    second.slot = several.open(40)
    second.slot.prefill(second.prompt)

    def broken(ids: Any, row: Any) -> Any:
        if len(ids) > len(second.prompt) + 4:
            raise ZeroDivisionError("mine")
        return row

    sampler = Sampler(SamplingParams(temperature=0), several.n_vocab, (broken,))
    second.run = second.slot.begin(sampler, max_tokens=30, stop=lambda token: False)
    second.slot.first()
    errors = []
    while first.run.finish is None:
        runs = [first.run] if errors else [first.run, second.run]
        steps = several.step(runs)
        first.written += steps[0].tokens
        errors += [step for step in steps if isinstance(step, Exception)]
    assert [type(error) for error in errors] == [ZeroDivisionError] and first.written == expected
    first.slot.close(), second.slot.close()


def test_state_indices_and_rows_are_lent_and_given_back(several: Solo) -> None:
    slots = [several.open(N_CTX // 2) for _ in range(4)]
    assert len({slot.sequence.state_index for slot in slots}) == 4
    taken = sorted((p.sequence.first_row, p.sequence.end_row) for p in slots)
    assert all(a[1] <= b[0] for a, b in pairwise(taken))
    with pytest.raises(NoRoomError, match="all 4 slots are taken"):
        several.open()
    with pytest.raises(NoRoomError, match="all 4 slots are taken"):
        several.prefill([1])
    slots[1].prefill([1] * 10)
    assert slots[2].grow(N_CTX)  # the others are moved
    assert not slots[1].grow(N_CTX) and slots[1].room > 0
    with pytest.raises(NoRoomError, match="no cache rows for"):
        slots[1].prefill([1] * (N_CTX - 10))
    for slot in (slots[0], *slots[2:]):
        slot.close()
    assert slots[1].grow(N_CTX) and slots[1].tokens == [1] * 10
    row = slots[1].logits.copy()
    slots[1].prefill([2])
    slots[1].close()
    with pytest.raises(DeviceError, match="this slot is closed"):
        slots[1].prefill([1])
    several.prefill([1] * 10)
    assert several.logits.argmax() == row.argmax()
    several.reset()


@pytest.mark.parametrize("spacing", [SPACED, ADJACENT], ids=["spaced", "adjacent"])
def test_sequences_that_outgrow_each_other(
    several: Solo, spacing: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until no row is left: each moves, or all are compacted, and are what they are alone."""
    monkeypatch.setattr(several.passes.rows, "spacing", spacing)
    lengths, whole, moved = (700, 690, 680), KvRows.move, list[range]()
    jobs = [
        Job([3, 1, 4, i], {"temperature": 0}, n, mode)
        for i, (n, mode) in enumerate(zip(lengths, ("tree", "plain", "tree")))
    ]
    expected = [job.alone(several) for job in jobs]
    monkeypatch.setattr(KvRows, "move", lambda slot, to: (whole(slot, to), moved.append(to)))
    for job in jobs:
        job.join(several)
    while going := [job for job in jobs if job.run.finish is None]:
        for job, step in zip(going, several.step([job.run for job in going]), strict=True):
            assert not isinstance(step, Exception), step
            job.written += step.tokens
    assert [job.written for job in jobs] == expected
    assert moved and sum(len(job.slot.kv.allocated) for job in jobs) > several.passes.n_rows - 2 * UNIT
    for job in jobs:
        job.slot.close()
    assert several.passes.rows.longest == several.passes.n_rows
    several.reset()


def test_a_closed_slot_steps_no_more(several: Solo) -> None:
    job = Job([5, 6], {"temperature": 0}, 20)
    job.join(several)
    job.slot.close()
    (error,) = several.step([job.run])
    assert isinstance(error, ConfigError) and "resume it" in str(error)


@pytest.mark.parametrize("part", ["verify", "commit"])
def test_a_pass_that_is_broken_off_leaves_whole_what_it_did_not_touch(
    several: Solo, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence of one column is left inconsistent by the pass, one with a tree by its commit; it starts over, the other
    continues."""
    jobs = [Job([3, 1, 4], {"temperature": 0}, 40, mode) for mode in ("plain", "tree")]
    expected = [job.alone(several) for job in jobs]
    for job in jobs:
        job.join(several)
    for _ in range(3):
        for job, step in zip(jobs, several.step([job.run for job in jobs])):
            job.written += step.tokens
    whole = getattr(several.passes, part)

    def broken(*given: Any) -> None:
        whole(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(several.passes, part, broken)
    with pytest.raises(KeyboardInterrupt):
        several.step([job.run for job in jobs])
    monkeypatch.undo()
    inconsistent = 0 if part == "verify" else 1
    assert [job.slot.sequence.inconsistent for job in jobs] == [inconsistent == 0, inconsistent == 1]
    steps = several.step([job.run for job in jobs])
    assert "inconsistent after an interrupt" in str(steps[inconsistent])
    other = jobs[1 - inconsistent]
    other.written += steps[1 - inconsistent].tokens
    while not other.run.finish:
        other.written += several.step([other.run])[0].tokens
    # a token of the interrupted step may be in the sequence, though it was not emitted
    assert other.run.history[3:] == expected[1 - inconsistent]
    jobs[inconsistent].slot.reset()
    jobs[inconsistent].slot.prefill(jobs[inconsistent].prompt)
    jobs[inconsistent].slot.close()
    jobs[1 - inconsistent].slot.close()
    assert jobs[inconsistent].alone(several) == expected[inconsistent]


def test_nan_stays_in_its_own_sequence(several: Solo) -> None:
    """A sequence whose state has become NaN in a batch is prefilled again, as the NaN may come from another; alone it ends with
    an error. Those beside it, and the next one in its slot, are not affected."""
    jobs = [
        Job([3, 1, 4, i], {"temperature": 0.9, "seed": i}, 30, mode)
        for i, mode in enumerate(("tree", "plain", "tree"))
    ]
    expected = [job.alone(several) for job in jobs]

    def damage() -> None:
        for t in several.passes.state.live(jobs[1].slot.state_index):
            several.device.write(t, np.full(int(np.prod(list(t.ne))), np.nan, np.float32))

    for job in jobs:
        job.join(several)
    damage()
    while going := [job for job in jobs if job.run.finish is None]:
        for job, step in zip(going, several.step([job.run for job in going]), strict=True):
            job.written += step.tokens
    assert [job.written for job in jobs] == expected
    assert [job.run.isolated for job in jobs] == [False, True, False]
    jobs[1].slot.close()
    jobs[1].join(several)
    damage()
    (step,) = several.step([jobs[1].run])
    assert isinstance(step, NonFiniteError) and "NaN" in str(step)
    for job in jobs:
        job.slot.close()
    assert jobs[1].alone(several) == expected[1]


def damaged(engine: Solo) -> list[Job]:
    """Two batched sequences, the second one's state NaN."""
    jobs = [Job([3, 1, 4, i], {"temperature": 0}, 30, "plain") for i in range(2)]
    for job in jobs:
        job.join(engine)
    for t in engine.passes.state.live(jobs[1].slot.state_index):
        engine.device.write(t, np.full(int(np.prod(list(t.ne))), np.nan, np.float32))
    return jobs


def test_an_error_of_reading_again_is_that_runs(several: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = damaged(several)

    def broken(*_: Any) -> None:
        raise NoRoomError("no rows")

    monkeypatch.setattr(jobs[1].slot, "_prefill", broken)
    steps = several.step([job.run for job in jobs])
    assert steps[0].tokens and isinstance(steps[1], NoRoomError)
    assert jobs[1].slot.sequence.inconsistent and not jobs[0].slot.sequence.inconsistent
    for job in jobs:
        job.slot.close()


def test_a_step_that_reads_again_is_a_step_to_its_end(several: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, whole, found = damaged(several), Slot.recompute, list[bool]()

    def read_again(slot: Any) -> Any:
        error = whole(slot)
        found.append(several.in_pass)
        return error

    monkeypatch.setattr(Slot, "recompute", read_again)
    several.step([job.run for job in jobs])
    assert found == [True] and not several.in_pass
    for job in jobs:
        job.slot.close()


def test_sequences_that_ran_alone_are_not_prefilled_again(
    several: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the others can be to blame."""
    jobs = damaged(several)
    monkeypatch.setattr(type(several.passes), "takes_several", False)
    monkeypatch.delattr(Slot, "recompute")
    steps = several.step([job.run for job in jobs])
    assert steps[0].tokens and isinstance(steps[1], NonFiniteError)
    for job in jobs:
        job.slot.close()
