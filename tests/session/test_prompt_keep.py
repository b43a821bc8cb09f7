"""Tests of requests that have part of their prompt prefilled: permission, counts, limits, the prefix cache, and a share of 1."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.errors import ConfigError, ContextOverflowError
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.events import Begin, Progress, Usage
from dflash_ggml.session.requests import ChatRequest, CompletionRequest
from dflash_ggml.session.session import Session, run_chat, run_completion
from dflash_ggml.text import prompt_selection
from reference import kv_toys, toys
from reference.engine_kit import Solo
from reference.fake_engine import FakeEngine, byte_vocabulary

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
DOCUMENT = "".join(f"Line {i}: the lamp of room {i * 7 % 311} is lit.\n" for i in range(200))
HISTORY = [{"role": "user", "content": DOCUMENT}, {"role": "assistant", "content": "Read."}]
ASKED = {"role": "user", "content": "Is the lamp of room 301 lit?"}


def engine(n_ctx: int = 16_384) -> Any:
    return FakeEngine(
        tokenizer=byte_vocabulary(template=TEMPLATE), config=EngineConfig(Path("toy.gguf"), n_ctx=n_ctx)
    )


def chat(keep: float | None, *more: dict[str, str]) -> ChatRequest:
    return ChatRequest(messages=[*HISTORY, ASKED, *more], max_tokens=4, prompt_keep=keep)


def test_counts_are_of_what_was_sent_and_name_what_was_kept() -> None:
    session = Session(engine(), prompt_keep=0.1)
    events = list(run_chat(session, chat(0.4)))
    (begin,) = (e for e in events if isinstance(e, Begin))
    (usage,) = (e for e in events if isinstance(e, Usage))
    n = len(session.prepare(chat(None)).ids)
    assert begin.prompt_n == usage.prompt_n == session.count_tokens(chat(0.4)) == n
    assert usage.prompt_kept_n is not None and usage.prompt_kept_n <= 0.4 * n + 1
    assert 0 < usage.score_ms < usage.prompt_ms
    (plain,) = (e for e in run_chat(session, chat(None)) if isinstance(e, Usage))
    assert plain.prompt_n == n and plain.prompt_kept_n is None and plain.score_ms == 0


def test_without_permission_all_is_read() -> None:
    session = Session(engine())
    prepared = session.prepare(chat(0.4))
    assert prepared.ids == session.prepare(chat(None)).ids
    assert prepared.selection is not None and "--prompt-keep" in prepared.selection.whole


def test_the_least_share_that_is_permitted() -> None:
    session = Session(engine(), prompt_keep=0.5)
    assert session.prepare(chat(0.1)).ids == session.prepare(chat(0.5)).ids


def test_what_is_kept_has_to_fit_and_what_is_sent_need_not() -> None:
    session = Session(engine(n_ctx=6_000), prompt_keep=0.1)
    assert len(session.prepare(chat(0.4)).ids) < 6_000
    with pytest.raises(ContextOverflowError):
        session.prepare(chat(None))
    with pytest.raises(ContextOverflowError):
        session.prepare(chat(0.9))


def test_later_turns_find_the_earlier_ones_in_the_cache() -> None:
    session = Session(engine(), prompt_keep=0.1)
    list(run_chat(session, chat(0.4)))
    more = ({"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And that of room 12?"})
    first, second = session.prepare(chat(0.4)), session.prepare(chat(0.4, *more))
    shared = len(first.ids) - len("<|im_start|>assistant\n")
    assert second.ids[: shared - 40] == first.ids[: shared - 40]
    (begin,) = (e for e in run_chat(session, chat(0.4, *more)) if isinstance(e, Begin))
    assert begin.cached_n > len(first.ids) - 1024


def test_log_probabilities_of_the_prompt_are_of_all_of_it() -> None:
    request = CompletionRequest(prompt="x" * 5000, prompt_logprobs=True, prompt_keep=0.5)
    with pytest.raises(ConfigError, match="prompt_keep"):
        Session(engine(), prompt_keep=0.1).prepare(request)


@pytest.mark.parametrize("keep", [0, -1, 1.5, float("nan")])
def test_shares_that_are_none(keep: float) -> None:
    with pytest.raises(ConfigError, match="prompt_keep"):
        CompletionRequest(prompt="x", prompt_keep=keep)
    with pytest.raises(ConfigError, match="prompt_keep"):
        Session(engine(), prompt_keep=keep)


# the family of the target, and what scores: lexical, a model with the same vocabulary, one with another
FAMILIES = {"qwen35": 7, "qwen35moe": 21} | {
    sizes.get("arch", "qwen3"): i for i, sizes in kv_toys.VARIANTS.items()
}
SCORED = [(name, "same" if name == "qwen35" else "other") for name in FAMILIES] + [
    ("qwen35", "words"),
    ("qwen35", "other"),
]


@pytest.fixture(scope="module", params=SCORED, ids=lambda param: "-".join(param))
def toy(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Solo]:
    folder, (family, by) = tmp_path_factory.mktemp("pair"), request.param
    seed = FAMILIES[family]
    if family in ("qwen35", "qwen35moe"):
        target, draft = toys.write_pair(folder, seed, **toys.MOE_VARIANTS.get(seed, {}))
    else:
        target, draft = kv_toys.write_pair(folder, seed, **kv_toys.VARIANTS[seed])
    scorer = None if by == "words" else toys.write_pair(folder, 8, n_vocab=64 if by == "same" else 96)[0]
    options = {"type_k": "f32", "type_v": "f32", "reference": True, "n_threads": 1, "calibrate": "never"}
    options |= {"scorer": scorer, "prompt_keep": 0.1, "n_ctx": 4096, "n_batch": 256, "budget": 12}
    with Solo.load(EngineConfig(target, draft, mode="tree", **options)) as found:
        yield found


def test_a_share_of_one_is_plain_prefilling(toy: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole pipeline: the same tokens, answer and snapshot, byte for byte."""
    for name, size in (
        ("LEAST", 300),
        ("HEAD", 20),
        ("TAIL", 40),
        ("END", 80),
    ):  # so that a short prompt will do
        monkeypatch.setattr(prompt_selection, name, size)
    rng = random.Random(0)
    prompt = [rng.randrange(20, 50) for _ in range(420)]
    greedy = SamplingParams(temperature=0)
    request = CompletionRequest(prompt=prompt, sampling=greedy, max_tokens=24, ignore_eos=True, mode="plain")
    answers, states = [], []
    for keep in (None, 1.0):
        session = Session(toy, prompt_keep=0.1)
        prepared = session.prepare(replace(request, prompt_keep=keep))
        assert prepared.ids == tuple(prompt)
        if keep is not None:
            assert prepared.selection is not None and not prepared.selection.whole
            assert (prepared.choice is None) == (toy.scorer is None)
        events = list(run_completion(session, replace(prepared.request, max_tokens=0)))  # type: ignore[arg-type]
        scored = [e for e in events if isinstance(e, Progress) and e.stage == "score"]
        assert bool(scored) == (keep is not None and toy.scorer is not None)
        state = toy.slots[0].snapshot()
        parts = [*state.live, *(part for block in state.rows or () for part in block.parts), *state.rings]
        states.append((state.tokens, [part.tobytes() for part in parts], toy.slots[0].logits.tobytes()))
        answers.append(Answer.of(run_completion(session, prepared)).text)
        session.slots.close()
    assert answers[0] == answers[1]
    assert states[0] == states[1]
