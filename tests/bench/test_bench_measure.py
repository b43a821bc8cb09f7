"""Tests of the measurements of one run, and of their totals over many."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_ggml.bench.measure import (
    Interrupted,
    Job,
    Run,
    Setting,
    by_depth,
    decode,
    mean_length,
    ratios,
    repeats,
    step_times,
    summary,
)
from dflash_ggml.bench.prompts import Prompt
from reference.fake_engine import FakeEngine, FakeSlot


def run(**more: Any) -> Run:
    return Run(
        **{
            "prompt": "p",
            "style": "s",
            "setting": "x",
            "prompt_n": 5,
            "n": 11,
            "ttft_ms": 2.0,
            "decode_ms": 100.0,
        }
        | more
    )


def job(engine: FakeSlot, setting: Setting, n: int = 40) -> Job:
    ids = engine.tokenizer.encode("hello there")
    return Job(Prompt("one", "chat", "hello there"), ids, "hello there", setting, n)


@pytest.mark.parametrize(("mode", "budget"), [("plain", None), ("chain", None), ("tree", 7)])
def test_one_sequence(mode: Any, budget: int | None) -> None:
    slot: Any = FakeEngine().open()
    found = decode(slot, job(slot, Setting("here", mode, budget)), lambda: False)
    assert (found.prompt, found.style, found.setting, found.n) == ("one", "chat", "here", 40)
    assert found.prompt_n == len(slot.tokenizer.encode("hello there")) and found.finish == "length"
    # the prompt's pass gave the first token, and every pass one of the target's own beside those it kept
    assert found.n - 1 - found.steps - found.draft_n_accepted in (-1, 0)
    assert found.steps == sum(found.widths.values()) and found.length == 39 / found.steps
    if mode == "plain":
        assert found.widths == {0: 39} and found.accepted == {} and found.length == 1
    else:
        assert sum(found.accepted.values()) == found.steps and found.length > 1
        assert sum(w * n for w, n in found.widths.items()) == found.draft_n > 0
    assert found.ttft_ms >= found.prefill_ms > 0 and found.decode_ms > 0 and found.per_second
    assert set(found.step_ms) == {"draft", "tree", "verify", "commit", "host"}


def test_settings_are_decoded_from_the_same_start() -> None:
    """What an engine held before has no influence: the same text again."""
    slot: Any = FakeEngine().open()
    setting = Setting("here", "tree", 7, temperature=1.0)
    first = decode(slot, job(slot, setting), lambda: False)
    tokens = slot.tokens
    decode(slot, job(slot, Setting("there", "plain")), lambda: False)
    again = decode(slot, job(slot, setting), lambda: False)
    assert slot.tokens == tokens and again.accepted == first.accepted


@pytest.mark.parametrize("after", [0, 1, 4])
def test_stopped(after: int) -> None:
    """Asked before a batch or between two steps; the engine is free afterwards."""
    slot: Any = FakeEngine().open()
    calls = iter(range(100))
    with pytest.raises(Interrupted):
        decode(slot, job(slot, Setting("here", "tree", 7)), lambda: next(calls) >= after)
    slot.reset()


def test_repeats() -> None:
    assert repeats([1, 2, 3] * 20) and repeats([7] * 5)
    assert not repeats(list(range(100))) and not repeats([]) and not repeats([1])
    assert repeats([*range(50), *[1, 2] * 27]) and not repeats([*range(60), *[1, 2] * 26])
    assert not repeats([*range(40)] * 3)  # too long a period to be a loop


def test_rates() -> None:
    assert run().per_second == 100.0  # ten after the first, in a tenth of a second
    assert run(n=1, decode_ms=0.0).per_second is None and run().length is None
    assert run(steps=4).length == 2.5 and mean_length([run(steps=4), run(steps=10), run()]) == 1.75
    assert summary([1.0, None, 3.0, 8.0]) == {"median": 3.0, "mean": 4.0, "min": 1.0, "max": 8.0, "n": 3}
    assert summary([None]) is None and mean_length([]) is None and step_times([run()]) is None


def test_a_cached_prompt_gives_no_first_token() -> None:
    assert run(prompt_n=100, cached_n=10).fresh_ttft_ms == 2.0
    assert run(prompt_n=100, cached_n=11).fresh_ttft_ms is None and run(n=0).fresh_ttft_ms is None


def test_ratios_go_by_prompt() -> None:
    """Iterations are averaged first; a prompt that only one side has does not count."""
    base = [run(prompt="a", decode_ms=100), run(prompt="a", decode_ms=50), run(prompt="b", decode_ms=100)]
    ours = [run(prompt="a", decode_ms=50), run(prompt="b", decode_ms=200), run(prompt="c", decode_ms=1)]
    found = ratios(ours, base)
    assert found is not None and (found["n"], found["min"]) == (2, 0.5)
    assert found["max"] == pytest.approx(200 / 150)
    assert ratios(ours, []) is None


def test_depths_count_drafted_steps() -> None:
    assert by_depth([run(accepted={0: 5, 2: 3}), run(accepted={1: 2})]) == [0.5, 0.3]
    assert by_depth([run()]) == [] and by_depth([run(accepted={0: 4})]) == []
    times = step_times(
        [run(steps=2, step_ms=dict.fromkeys(("draft", "tree", "verify", "commit", "host"), 4.0))]
    )
    assert times is not None and times["verify"] == 2.0
