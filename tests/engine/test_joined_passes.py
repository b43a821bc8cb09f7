"""A prompt's chunk and a step of other sequences in one pass: what breaks in it is the concern of the one that broke. 5 s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from test_batches_of_sequences import some_jobs, write_beside

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.engine.slot import Slot
from dflash_ggml.engine.step import Verify
from dflash_ggml.errors import DeviceError, NonFiniteError
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.requests import CompletionRequest
from dflash_ggml.session.session import Session, generation_of, run_completion
from reference import toys
from reference.engine_kit import EXACT, Solo, generate

BAD = 61  # a token that the toys never write, whose embedding is NaN
IDS = np.random.default_rng(3).integers(0, 50, 90).tolist()
LONG = np.random.default_rng(4).integers(0, 50, 150).tolist()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Solo]:
    pair = toys.write_pair(tmp_path_factory.mktemp("pair"), 5, own_tables=True)
    reader = GGUFReader(pair[0], "r+")
    next(t for t in reader.tensors if t.name == "token_embd.weight").data[BAD] = np.nan
    reader.data.flush()
    with Solo.load(EngineConfig(*pair, n_ctx=700, parallel=3, n_batch=64, **EXACT)) as found:
        yield found


@pytest.fixture(autouse=True)
def left_in_order(engine: Solo) -> Iterator[None]:
    yield
    for slot in engine.slots:
        slot.close()


def begun(engine: Solo, ids: list[int], processors: Any = ()) -> Sequence:
    slot = engine.open(300)
    slot.prefill(ids)
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab, processors)
    sequence = slot.begin(sampler, max_tokens=100, stop=lambda token: False)
    slot.first()
    return sequence


def joined(engine: Solo, slot: Slot, ids: list[int], others: list[Sequence]) -> list[Any]:
    """Prefill ids in the pass of a step of others: what came of the step."""
    steps: list[Any] = []

    def joined(run: Verify) -> None:
        steps.extend(engine.step(others, run))

    slot.prefill(ids, join=joined)
    return steps


def alone(engine: Solo, ids: list[int], n: int) -> list[int]:
    slot = engine.open(300)
    slot.prefill(ids)
    found = generate(slot, max_tokens=n)
    slot.close()
    return found


def on(engine: Solo, sequence: Sequence, n: int) -> list[int]:
    """The first n tokens that a sequence emits."""
    while len(sequence.history) - len(IDS) < n:
        (step,) = engine.step([sequence])
        assert not isinstance(step, Exception), repr(step)
    return sequence.history[len(IDS) :][:n]


def test_a_step_and_a_chunk_are_one_pass(engine: Solo) -> None:
    other, slot = begun(engine, IDS), engine.open(200)
    joined(engine, slot, LONG[:24], [other])
    before = engine.run_counts()
    joined(engine, slot, LONG[24:48], [other])
    assert engine.run_counts() == {**before, "runs": before["runs"] + 1}


def test_a_prompt_that_overflows_harms_none_of_the_others(engine: Solo) -> None:
    expected = alone(engine, IDS, 40)
    other, slot = begun(engine, IDS), engine.open(200)
    with pytest.raises(NonFiniteError):
        joined(engine, slot, [*LONG[:20], BAD, *LONG[:9]], [other])
    assert slot.sequence.inconsistent and len(other.history) == len(IDS) + 2
    assert on(engine, other, 40) == expected
    slot.reset()
    slot.prefill(LONG)
    assert generate(slot, max_tokens=30) == alone(engine, LONG, 30)


def test_a_sequence_that_overflows_does_not_harm_the_prompt(engine: Solo) -> None:
    expected = alone(engine, LONG, 30)
    other, slot = begun(engine, IDS), engine.open(200)
    other.pending = BAD
    (step,) = joined(engine, slot, LONG, [other])
    assert isinstance(step, NonFiniteError)
    assert generate(slot, max_tokens=30) == expected


def test_an_error_of_a_sampler_is_its_sequences(engine: Solo) -> None:
    def fails(history: Any, logits: Any) -> Any:
        if len(history) > len(IDS):
            raise ZeroDivisionError
        return logits

    expected = alone(engine, IDS, 40), alone(engine, LONG, 30)
    broken, other, slot = begun(engine, IDS, [fails]), begun(engine, IDS), engine.open(200)
    steps = joined(engine, slot, LONG, [broken, other])
    assert isinstance(steps[0], ZeroDivisionError) and not isinstance(steps[1], Exception)
    assert on(engine, other, 40) == expected[0]
    assert generate(slot, max_tokens=30) == expected[1]


def test_a_pass_that_breaks_off_leaves_both_inconsistent(
    engine: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, slot = begun(engine, IDS), engine.open(200)

    def breaks(*forest: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.passes, "joined", breaks)
    with pytest.raises(KeyboardInterrupt):
        joined(engine, slot, LONG, [other])
    assert other.inconsistent and slot.sequence.inconsistent
    with pytest.raises(DeviceError, match="inconsistent"):
        slot.prefill(LONG)


def test_a_chunk_that_no_sequence_joins_runs_alone(engine: Solo) -> None:
    other, slot = begun(engine, IDS), engine.open(200)
    other.isolated = True
    (step,) = joined(engine, slot, LONG, [other])
    assert len(step.tokens) >= 1
    assert generate(slot, max_tokens=30) == alone(engine, LONG, 30)
    assert on(engine, other, 40) == alone(engine, IDS, 40)


@pytest.mark.parametrize("leaves", [False, True])
def test_the_scheduler_joins_chunks_with_steps(
    engine: Solo, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """Two answers go on, one of which may be given up midway, while a third prompt is prefilled."""

    def asked(ids: list[int], n: int) -> CompletionRequest:
        return CompletionRequest(
            prompt=ids,
            sampling=SamplingParams(temperature=0),
            max_tokens=n,
            ignore_eos=True,
            return_tokens=True,
        )

    def words(answer: Answer) -> list[int]:
        return [entry.token for entry in answer.logprobs]

    requests = [asked(IDS, 150), asked(IDS[40:], 150), asked(LONG, 30)]
    session = Session(engine, cache_bytes=0)
    expected = [words(Answer.of(run_completion(session, one))) for one in requests]
    session.slots.close()
    session, chunks, joined = Session(engine, cache_bytes=0), list[int](), engine.passes.joined
    session.scheduler.joins = True  # as on a GPU

    def counted(sequence: Sequence, ids: list[int], *more: Any) -> Any:
        chunks.append(len(ids))
        return joined(sequence, ids, *more)

    monkeypatch.setattr(engine.passes, "joined", counted)
    found: list[Any] = []
    for request in requests:
        found.append(generation_of(session, session.prepare(request)))
        found[-1].runs_ahead = True
        session.scheduler.submit(found[-1])
        for _ in range(4):
            session.scheduler.iterate()
    found[1].abandoned = leaves
    while not all(one.ended for one in found):
        session.scheduler.iterate()
    written = [words(Answer.of(one.events)) for one in found]
    assert written[0] == expected[0] and written[2] == expected[2]
    assert written[1] == expected[1][: len(written[1])] and (leaves or len(written[1]) == 150)
    assert chunks
    session.slots.close()


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_on_two_devices(tmp_path: Path, mode: Any) -> None:
    """Layers on two CPUs, or halves of each."""
    pair = toys.write_pair(tmp_path, 60, n_heads=4, n_kv_heads=2, ssm_k_heads=2, ssm_v_heads=6)
    config = EngineConfig(*pair, n_ctx=700, parallel=3, n_batch=64, **EXACT)
    with Solo.load(replace(config, device=("CPU", "CPU"), split_mode=mode)) as engine:
        jobs = some_jobs(engine, 3, seed=8)
        expected = [job.alone(engine) for job in jobs]
        write_beside(engine, jobs)
        assert [job.written for job in jobs] == expected
