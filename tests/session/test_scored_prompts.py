"""Tests of prompts whose prefilled part a model selects: order of events, chunks beside sequences, ends, and other
vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling_params import SamplingParams
from dflash_ggml.errors import ContextOverflowError, DflashError
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.events import Begin, Finish, Progress, Usage
from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.scoring import ScoredText, Scoring
from dflash_ggml.session.session import Session, generation_of, run_chat
from dflash_ggml.text.prompt_selection import Choice
from reference.fake_engine import FakeEngine, FakeScorer, byte_vocabulary

LINES = [f"Line {i}: the lamp of room {i * 7 % 311} is lit.\n" for i in range(200)]
ASKED = "Is it lit?"
KEEP, GREEDY = 0.4, SamplingParams(temperature=0)


def session(n_ctx: int = 16_384, parallel: int = 1, **scorer: Any) -> Session:
    engine: Any = FakeEngine(
        tokenizer=byte_vocabulary(),
        config=EngineConfig(Path("toy.gguf"), n_ctx=n_ctx),
        parallel=parallel,
    )
    engine.scorer = FakeScorer(engine, **({"wanted": LINES[120]} | scorer))
    return Session(engine, prompt_keep=0.1)


def chat(keep: float | None = KEEP, **more: Any) -> ChatRequest:
    messages = [
        {"role": "user", "content": "".join(LINES)},
        {"role": "assistant", "content": "Read."},
        {"role": "user", "content": ASKED},
    ]
    return ChatRequest(messages=messages, **({"max_tokens": 4, "prompt_keep": keep} | more))


def calls(on: Session, name: str) -> int:
    return sum(entry[0] == name for entry in on.engine.log)


def test_a_prompt_is_scored_and_what_is_chosen_of_it_prefilled() -> None:
    on = session()
    prepared = on.prepare(chat())
    assert prepared.choice is not None and not calls(on, "begin")  # preparing does not wait for the device
    n = len(on.prepare(chat(None)).ids)
    assert len(prepared.ids) == prepared.sent_n == n and prepared.read_n <= KEEP * n + 1
    events = list(run_chat(on, prepared))
    progress = [e for e in events if isinstance(e, Progress) and e.stage == "score"]
    assert events[: len(progress)] == progress and isinstance(events[len(progress)], Begin)
    assert [e.done for e in progress] == sorted({e.done for e in progress})
    assert progress[-1].done == progress[-1].total == len(on.engine.scorer.ids)
    (usage,) = (e for e in events if isinstance(e, Usage))
    assert usage.prompt_n == n and 0 < usage.score_ms < usage.prompt_ms
    assert usage.prompt_kept_n is not None and usage.prompt_kept_n <= prepared.read_n
    read = on.tokenizer.decode(on.slots.all[0].tokens, special=True)
    assert LINES[120] in read and LINES[60] not in read and ASKED in read


def test_the_queries_are_the_questions_tokens() -> None:
    on = session()
    list(run_chat(on, chat()))
    scorer = on.engine.scorer
    assert scorer is not None
    assert on.tokenizer.decode(scorer.ids[-scorer.window :]) == ASKED


def test_messages_start_where_they_did_in_what_is_kept() -> None:
    on = session()
    list(on.chosen(on.prepare(chat())))
    again = on.prepare(chat())  # chosen before: known at once
    assert again.choice is None and again.selection is not None and calls(on, "begin") == 1
    mark = on.tokenizer.id_of("<|im_start|>")
    assert again.boundaries == tuple(i for i, token in enumerate(again.ids) if token == mark)
    assert len(again.boundaries) == 4 and again.first_answer == again.boundaries[1]


def test_several_answers_of_a_prompt_are_scored_once() -> None:
    on = session(parallel=2)
    prompts = [on.prepare(chat()) for _ in range(3)]
    scorings = [Scoring(on.engine, on.prompts, prepared, None) for prepared in prompts]
    on.scheduler.submit(*scorings)
    for one in scorings:
        one.runs_ahead = True
    while not all(one.ended for one in scorings):
        assert on.scheduler.iterate()
    assert calls(on, "begin") == 1 and len({one.prepared.ids for one in scorings}) == 1


def test_lexical_scoring_where_requested() -> None:
    on = session()
    prepared = on.prepare(chat(prompt_scorer="lexical"))
    assert prepared.choice is None and len(prepared.ids) < prepared.sent_n


def test_without_a_share_nothing_is_scored() -> None:
    on = session()
    Answer.of(run_chat(on, chat(None)))
    assert not calls(on, "begin")


@pytest.mark.parametrize("how", ["stopped", "closed", "broken", "not finite"])
def test_a_scoring_that_ends_early_leaves_the_scorer_to_the_next(how: str) -> None:
    on = session()
    scorer: Any = on.engine.scorer
    if how == "stopped":
        events = list(run_chat(on, chat(), should_stop=lambda: calls(on, "score") > 2))
        assert isinstance(events[-1], Finish) and events[-1].reason == "cancelled" and not calls(on, "read")
    elif how == "closed":
        stream = run_chat(on, chat())
        next(stream)
        stream.close()
    else:
        if how == "broken":
            scorer.broken = DflashError("it broke")
        else:
            scorer.masses = lambda: np.full(len(scorer.ids) - scorer.window, np.nan, np.float32)
        with pytest.raises(DflashError, match=how.replace("broken", "it broke")):
            list(run_chat(on, chat()))
        on.engine.scorer = FakeScorer(on.engine, LINES[120])
    assert not on.scheduler.is_busy
    before = calls(on, "begin")
    assert Answer.of(run_chat(on, chat())).usage is not None and calls(on, "begin") == before + 1


def test_sequences_have_their_steps_between_chunks() -> None:
    on = session(parallel=2)
    request = chat(None, max_tokens=300, ignore_eos=True)
    running = generation_of(on, on.prepare(request))
    scoring = Scoring(on.engine, on.prompts, on.prepare(chat()), None)
    for one in (running, scoring):
        one.runs_ahead = True
    on.scheduler.submit(running)
    while not running.is_decoding:
        on.scheduler.iterate()
    on.engine.log.clear()
    on.scheduler.budget.decoded(10.0, 1)  # steps are slow: large chunks fit
    on.scheduler.submit(scoring)
    while not scoring.ended:
        assert on.scheduler.iterate()
    kinds = [entry[0] for entry in on.engine.log]
    assert kinds.count("score") > 1 and not running.ended
    assert len(running.events) > 1


def test_a_prompt_that_does_not_fit_the_scorer_is_refused() -> None:
    on = session(limit=3000)
    prepared = on.prepare(chat())
    with pytest.raises(ContextOverflowError, match="prompt scorer's limit of 3000"):
        list(run_chat(on, prepared))


def test_what_may_be_kept_has_to_fit() -> None:
    on = session(n_ctx=6_000)
    assert on.prepare(chat()).read_n < 6_000
    with pytest.raises(ContextOverflowError):
        on.prepare(chat(0.9))
    assert Answer.of(run_chat(on, chat())).usage is not None


def text_of(ids: Sequence[int]) -> str:
    return byte_vocabulary().decode(ids)


def choice(units: tuple[tuple[int, int], ...], question: tuple[int, int]) -> Choice:
    return Choice("fake", 0.5, units, question, 10, ())


def test_units_behind_the_question_have_it_once_more_behind_them() -> None:
    tokenizer = byte_vocabulary()
    ids = tokenizer.encode("Question? Here is what the tool found.")
    found = ScoredText.of(ids, choice(((20, 26), (26, 34)), (0, 9)), tokenizer, None)
    assert found.ids == [*ids[:34], *ids[:9]] and found.window == 9 and found.units == [(20, 26), (26, 34)]
    before = ScoredText.of(ids, choice(((2, 4), (4, 8)), (20, 30)), tokenizer, None)
    assert before.ids == ids[:30] and before.window == 10


def test_scores_are_mean_masses() -> None:
    found = ScoredText([0] * 9, 2, [(0, 2), (2, 6), (6, 6)]).scores(np.arange(7, dtype=np.float32))
    assert found.tolist() == [0.5, 3.5, 0.0]


def test_another_vocabulary_has_the_same_bytes_by_units() -> None:
    target, other = byte_vocabulary(), byte_vocabulary(harmony=True)
    text = "hello thé answer in a STORE <|im_end|> and €more words on it. What?"
    ids = target.encode(text)
    units = ((3, 14), (14, 30))
    question = (len(ids) - 5, len(ids))
    found = ScoredText.of(ids, choice(units, question), target, other)
    assert len(other.encode("<|im_end|>")) > 1  # no control token there
    assert b"".join(other.pieces(found.ids)) == b"".join(target.pieces(ids))
    assert found.window == len(other.encode(target.decode(ids[slice(*question)])))
    for (a, b), (c, d) in zip(units, found.units):
        assert other.decode(found.ids[c:d], special=True) == target.decode(ids[a:b], special=True)


def test_a_share_of_one_is_scored_and_keeps_all() -> None:
    on = session()
    whole = on.prepare(chat(None)).ids
    assert on.prepare(chat(1.0)).choice is not None
    list(on.chosen(on.prepare(chat(1.0))))
    assert calls(on, "score")
    assert on.prepare(chat(1.0)).ids == whole
    answers = [
        Answer.of(run_chat(on, replace(chat(keep), max_tokens=20, sampling=GREEDY))).text
        for keep in (None, 1.0)
    ]
    assert answers[0] == answers[1]
