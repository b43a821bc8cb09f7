"""Tests of batched requests on small real engines: arrivals, preemption, shared prefixes and cancellations change no answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dflash_ggml.ggml.bindings")

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.errors import DflashError
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.hooks import Hooks
from dflash_ggml.session.requests import CompletionRequest
from dflash_ggml.session.session import Session, generation_of, run_completion
from reference import toys
from reference.engine_kit import Solo

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


def alone(engine: Solo, requests: list[CompletionRequest]) -> list[list[int]]:
    """The tokens of each answer by itself."""
    session = Session(engine, cache_bytes=0)
    found = [words(Answer.of(run_completion(session, one))) for one in requests]
    session.slots.close()
    return found


def submitted(session: Session, *requests: CompletionRequest, **options: Any) -> list[Any]:
    found = [generation_of(session, session.prepare(one), **options) for one in requests]
    for generation in found:
        generation.runs_ahead = True
    session.scheduler.submit(*found)
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_each_answer_is_what_it_is_alone(engine: Solo, seed: int) -> None:
    requests = asked(seed)
    expected = alone(engine, requests)
    session, rng = Session(engine), random.Random(seed)
    scheduler, found, given_up = session.scheduler, list[Any](), list[Any]()
    waiting = [*requests]
    while waiting or not all(one.ended for one in found):
        # the first three come together
        while waiting and (len(found) < 3 or rng.random() < 0.3 or all(one.ended for one in found)):
            found += submitted(session, waiting.pop(0))
        if rng.random() < 0.1:  # one more, which is given up
            (extra,) = submitted(session, requests[0])
            given_up.append((extra, rng.randrange(1, 20)))
        for one, iterations in given_up:
            if iterations <= len(given_up):
                one.abandoned = True
        scheduler.iterate()
    assert [words(Answer.of(one.events)) for one in found] == expected
    assert 0 < scheduler.tally.preemptions < 8  # rows are taken before their owners come back
    assert any(one.events[0].cached_n > 60 for one in found)
    for one, _ in given_up:
        one.abandoned = True
    scheduler.iterate()
    assert not scheduler.is_busy
    session.slots.close()
    assert engine.passes.rows.longest == engine.passes.n_rows


def test_a_sequence_that_is_left_alone_has_the_whole_context(tmp_path: Path) -> None:
    """It began behind another's rows, and ends where it would end alone."""
    requests = [
        CompletionRequest(
            prompt=[20 + (7 * i + n) % 37 for i in range(n)],
            sampling=SamplingParams(temperature=0),
            max_tokens=most,
            ignore_eos=True,
            return_tokens=True,
        )
        for n, most in ((700, 16), (10, -1))  # 16 steps of 16 tokens end before the 324 rows left
    ]
    engine = Solo.load(config(toys.write_pair(tmp_path, 7, n_ctx=1024), 2, 1024))
    expected = alone(engine, requests)
    session = Session(engine)
    found = submitted(session, requests[0])
    while not found[0].events:  # how long a prompt may take beside decoding is measured, not fixed
        session.scheduler.iterate()
    found += submitted(session, requests[1])
    assert [words(Answer.of(session.scheduler.events(one))) for one in found] == expected
    assert session.scheduler.tally.preemptions == 0  # it moves to the first rows
    session.close()


class Panic(BaseException):
    """What a library in another language raises."""


@pytest.mark.parametrize("call", [1, 4])
def test_a_processor_that_panics_ends_its_own_sequence(engine: Solo, call: int) -> None:
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
    expected = alone(engine, requests)[1]
    session, calls = Session(engine), []

    def bad(history: Any, scores: Any) -> Any:
        calls.append(1)
        if len(calls) >= call:
            raise Panic("of a grammar")
        return scores

    (broken,) = submitted(session, requests[0], hooks=Hooks(logits_processor=(bad,)))
    (other,) = submitted(session, requests[1])
    assert words(Answer.of(session.scheduler.events(other))) == expected
    with pytest.raises(DflashError, match="of a grammar"):
        list(session.scheduler.events(broken))
    session.slots.close()
