"""Requests side by side on real engines, small ones: arrivals, parking, shared prefixes and cancellations change no text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dflash_ggml.ggml.bindings")

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from reference.engine_kit import Solo
from dflash_ggml.errors import DflashError
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.hooks import Hooks
from dflash_ggml.session.requests import CompletionRequest
from dflash_ggml.session.session import Session, completion_generation, run_completion
from reference import toys

KINDS: dict[str, dict[str, Any]] = {
    "a draft": {},
    "a draft with a ring": {"window": 40, "full_layers": 1, "draft_layers": 2},
}
N_CTX = 768


def config(pair: Any, parallel: int, n_ctx: int) -> EngineConfig:
    return EngineConfig(
        *pair,
        n_ctx=n_ctx,
        parallel=parallel,
        n_batch=64,
        type_k="f32",
        type_v="f32",
        reference=True,
        n_threads=1,
        budget=12,
        mode="tree",
        calibrate="never",
    )


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Solo]:
    pair = toys.write_pair(tmp_path_factory.mktemp("pair"), 7, n_ctx=N_CTX, **KINDS[request.param])
    with Solo.load(config(pair, 3, N_CTX)) as found:
        yield found


def asked(seed: int) -> list[CompletionRequest]:
    """Six prompts, three of which begin alike, and long answers: more than the caches hold at once."""
    rng, found = random.Random(seed), []
    common = [rng.randrange(3, 50) for _ in range(90)]
    for i in range(6):
        prompt = [rng.randrange(3, 50) for _ in range(rng.randrange(5, 60))]
        sampling = SamplingParams(temperature=(0, 0.8, 1.0)[i % 3], seed=i, top_k=(0, 9)[i % 2])
        found.append(
            CompletionRequest(
                prompt=[*common, *prompt] if i < 3 else prompt,
                sampling=sampling,
                max_tokens=680 if i < 3 else rng.choice((20, 60)),
                ignore_eos=True,
                return_tokens=True,
                mode=("tree", "plain", "chain")[i % 3] if seed else None,  # type: ignore[arg-type]
            )
        )
    return found


def words(answer: Answer) -> list[int]:
    return [entry.token for entry in answer.logprobs]


@pytest.mark.parametrize("seed", [0, 1])
def test_each_answer_is_what_it_is_alone(engine: Solo, seed: int) -> None:
    requests = asked(seed)
    plain = Session(engine, cache_bytes=0)
    expected = [words(Answer.of(run_completion(plain, one))) for one in requests]
    session, rng = Session(engine, side_by_side=True), random.Random(seed)
    scheduler, tasks, given_up = session.scheduler, [], []

    def make(request: CompletionRequest, seat: Any) -> Any:
        return completion_generation(session, session.prepare(request), seat).events()

    waiting = [*requests]
    while waiting or not all(task.ended for task in tasks):
        # the first three come together
        while waiting and (len(tasks) < 3 or rng.random() < 0.3 or all(task.ended for task in tasks)):
            request = waiting.pop(0)
            tasks.append(scheduler.submit(session.prepare(request), partial(make, request)))
        if rng.random() < 0.1:  # one more, which is given up
            extra = scheduler.submit(session.prepare(requests[0]), partial(make, requests[0]))
            given_up.append((extra, rng.randrange(1, 20)))
        for task, rounds in given_up:
            if rounds <= len(given_up):
                task.abandoned = True
        scheduler.round()
    assert [words(Answer.of(task.events)) for task in tasks] == expected
    assert 0 < scheduler.rounds.tally.parkings < 8  # who is short takes the rows before they are gone again
    assert any(task.events[0].cached_n > 60 for task in tasks)  # type: ignore[union-attr]
    for task, _ in given_up:
        task.abandoned = True
    scheduler.round()
    assert scheduler.rounds.counts == {"running": 0, "waiting": 0}
    scheduler.seats.close()
    assert engine.slots == [] and engine.passes.rows.longest == engine.passes.n_rows


def test_a_text_that_is_left_alone_has_the_whole_context(tmp_path: Path) -> None:
    """It began behind another's rows, and ends where it would end alone."""
    requests = [
        CompletionRequest(
            prompt=[20 + (7 * i + n) % 37 for i in range(n)],
            sampling=SamplingParams(temperature=0),
            max_tokens=most,
            ignore_eos=True,
            return_tokens=True,
        )
        for n, most in ((700, 2), (10, -1))
    ]
    engine = Solo.load(config(toys.write_pair(tmp_path, 7, n_ctx=1024), 2, 1024))
    expected = [words(Answer.of(run_completion(Session(engine, cache_bytes=0), one))) for one in requests]
    session = Session(engine, side_by_side=True)
    runs = [run_completion(session, one) for one in requests]
    answers = [Answer(), Answer()]
    for answer, run in zip(answers, runs):
        answer.feed(next(run))
    for answer, run in zip(answers, runs):
        for event in run:
            answer.feed(event)
    assert [words(answer) for answer in answers] == expected
    assert session.scheduler.rounds.tally.parkings == 0  # it moves to the first rows
    session.close()


class Panic(BaseException):
    """What a library in another language raises."""


@pytest.mark.parametrize("call", [1, 4])
def test_a_processor_that_panics_ends_its_own_text(engine: Solo, call: int) -> None:
    requests = [
        CompletionRequest(
            prompt=[20 + i] * 9,
            sampling=SamplingParams(temperature=0),
            max_tokens=12,
            ignore_eos=True,
            return_tokens=True,
        )
        for i in range(2)
    ]
    expected = words(Answer.of(run_completion(Session(engine, cache_bytes=0), requests[1])))
    session, calls = Session(engine, side_by_side=True), []

    def bad(history: Any, scores: Any) -> Any:
        calls.append(1)
        if len(calls) >= call:
            raise Panic("of a grammar")
        return scores

    runs = [
        run_completion(session, requests[0], hooks=Hooks(logits_processor=(bad,))),
        run_completion(session, requests[1]),
    ]
    answer = Answer()
    answer.feed(next(runs[1]))
    with pytest.raises(DflashError, match="of a grammar"):
        list(runs[0])
    for event in runs[1]:
        answer.feed(event)
    assert words(answer) == expected
    session.scheduler.seats.close()
