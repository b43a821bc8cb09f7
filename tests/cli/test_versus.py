"""Tests of `--versus-plain`: how much is decoded again, and the reported comparison."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.cli import versus
from dflash_ggml.cli.report import Meter, Report, Steps
from dflash_ggml.cli.versus import ROUNDS, Plain, compared, decode_again, versus_line
from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling_params import SamplingParams
from dflash_ggml.engine.step import Step
from dflash_ggml.files.pairs import EMBEDDED_TARGET
from dflash_ggml.session.events import Usage, WidthUse
from dflash_ggml.session.hooks import Hooks
from dflash_ggml.session.prompts import Prepared
from dflash_ggml.session.requests import CompletionRequest
from dflash_ggml.session.session import Session, run_completion
from reference.fake_engine import FakeEngine, FakeSlot

GREEDY = SamplingParams(temperature=0)


def session(model: Path = Path("toy.gguf"), **options: Any) -> Session:
    engine = FakeEngine(config=EngineConfig(model=model, n_ctx=1024, n_batch=32), **options)
    return Session(engine, cache_bytes=0)


def speculate(on: Session, n: int, sampling: SamplingParams = GREEDY) -> tuple[Report, Prepared]:
    steps = Steps()
    prepared = on.prepare(CompletionRequest(prompt="hello", sampling=sampling, max_tokens=n))
    *_, usage, finish = run_completion(on, prepared, hooks=Hooks(on_step=steps.add))
    assert isinstance(usage, Usage)
    return Report("", finish.reason, usage, steps), prepared


def again(on: Session, report: Report, prepared: Prepared) -> Plain:
    """The second run; all its steps must be plain ones."""
    n, modes = len(report.steps.token_ids), set()
    take = Steps.add

    def add(self: Steps, step: Step) -> None:
        modes.add(step.mode)
        take(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "add", add)
        plain = decode_again(on, prepared, n, Meter(io.StringIO()), lambda: False)
    assert "prefill" in modes and modes <= {"prefill", "plain"}
    assert plain is not None
    return plain


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.5, seed=3)])
def test_the_same_prompt_is_decoded_again(sampling: SamplingParams) -> None:
    on = session()
    report, prepared = speculate(on, 40, sampling)
    plain = again(on, report, prepared)
    assert report.usage.mode == "auto" and report.usage.tokens_per_step > 1
    assert plain.token_ids == report.steps.token_ids and plain.ms > 0
    assert "plain decoding of the same text" in versus_line(report, plain, on)


def test_a_run_that_ends_early_continues_to_the_same_length() -> None:
    on = session(replies=["one two three four five six seven", "ab", "c"])
    report, prepared = speculate(on, 20)
    plain = again(on, report, prepared)
    eos = on.tokenizer.eos_id
    assert len(plain.token_ids) == len(report.steps.token_ids) == 20
    assert plain.token_ids[:5] == [97, 98, eos, 99, eos]
    assert "plain decoding of as many tokens" in versus_line(report, plain, on)


def test_an_answer_that_ended_by_itself_counts_its_end() -> None:
    on = session(replies=["one two", "one two"])
    report, prepared = speculate(on, 90)
    assert report.finish_reason == "stop" and again(on, report, prepared).token_ids == report.steps.token_ids


def test_who_was_faster() -> None:
    on = session()
    report, _ = speculate(on, 40)
    n, ms = len(report.steps.token_ids), report.usage.predicted_ms
    ids = report.steps.token_ids
    assert versus_line(report, Plain(ids, 2 * ms), on).endswith(
        "on this machine drafting is 2.00 times as fast"
    )
    assert versus_line(report, Plain(ids, ms / 2), on).endswith(
        "on this machine plain is faster for this model"
    )
    embedded = session(EMBEDDED_TARGET)
    assert versus_line(report, Plain(ids, ms / 2), embedded).endswith("faster for this small model")
    line = versus_line(report, Plain(ids, 1000.0), on)
    speeds = rf"{report.usage.tokens_per_step:.2f} tokens, {1e3 * n / ms:.1f} tokens/s; .*: {n:.1f} tokens/s"
    assert re.search(speeds, line)
    one, _ = speculate(session(), 1)
    assert "too few" in versus_line(one, Plain(one.steps.token_ids, 1.0), on)


def test_short_runs_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mode alternates, prompt lookup cannot match an earlier run of the same prompt, and the median counts."""
    on = session()
    report, prepared = speculate(on, 12)
    seen: list[Any] = []

    def again(*args: Any) -> Plain:
        seen.append(args[-1])
        return Plain(report.steps.token_ids, {None: 10.0, "plain": 10.0 * len(seen)}[args[-1]])

    monkeypatch.setattr(versus, "decode_again", again)
    monkeypatch.setattr(FakeSlot, "forget", lambda self: seen.append("forget"))
    how = Meter(io.StringIO()), lambda: False
    rounds = compared(on, prepared, 10.0, Plain(report.steps.token_ids, 20.0), *how)
    assert len(rounds) == ROUNDS and rounds[0] == 2.0
    assert seen[:8] == ["forget", "plain", "forget", None, "forget", None, "forget", "plain"]
    line = versus_line(report, Plain(report.steps.token_ids, 20.0), on, [2.0, 1.5, 0.5])
    assert line.endswith(
        "drafting is 1.50 times as fast (3 times by turns: 0.50 to 2.00, 1.50 in the middle)"
    )
    long = compared(on, prepared, 1000.0, Plain(report.steps.token_ids, 2500.0), *how)
    assert long == [2.5], "a text that takes its time is decoded once in each way"
    monkeypatch.setattr(versus, "decode_again", lambda *args: None)
    assert compared(on, prepared, 10.0, Plain(report.steps.token_ids, 20.0), *how) == [2.0], "stopped"


def test_as_an_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The output once, then two lines; with --json one more key. Without a seed both still take the same draws."""
    pytest.importorskip("dflash_ggml.ggml.bindings")
    from dflash_ggml.cli.run import main

    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr("secrets.randbits", lambda bits: 7)
    monkeypatch.setattr(versus, "ENOUGH", 1e9)
    flags = ["-t", "1", "-ngl", "0", "--mode", "tree", "-p", "class Point:", "-n", "8", "--versus-plain"]
    assert main([*flags, "--temp", "1.5"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and "class Point:" not in out
    first, last = err.splitlines()
    assert "8 tokens at" in first and re.match(r"every pass of the target gave [\d.]+ tokens", last)
    assert "plain decoding of the same text" in last and f"({ROUNDS} times by turns: " in last
    assert main([*flags, "--json"]) == 0
    out, err = capsys.readouterr()
    assert '"plain_per_second": ' in out and '"times_plain": [' in out and err == ""


@pytest.mark.parametrize(
    "mode, widths, plain_ms, verdict",
    [
        ("auto", [(0, 30), (7, 2)], 100.0, "drafting does not pay for this model, and auto decoded plainly"),
        ("auto", [(0, 30), (7, 10)], 100.0, "not pay for this model, and auto decoded mostly plainly"),
        ("auto", [(0, 30), (7, 10)], 130.0, "drafting is 1.30 times as fast"),  # few passes, many tokens
        ("auto", [(0, 5), (7, 30)], 300.0, "drafting is 3.00 times as fast"),
        ("tree", [(31, 35)], 50.0, "plain is faster for this model"),
    ],
)
def test_the_verdict(mode: str, widths: list[tuple[int, int]], plain_ms: float, verdict: str) -> None:
    on = session()
    report, _ = speculate(on, 40, GREEDY)
    uses = tuple(WidthUse(nodes, steps, steps, 1.0, None) for nodes, steps in widths)
    steps = sum(use.steps for use in uses)
    usage = replace(report.usage, mode=mode, widths=uses, steps=steps, predicted_ms=100.0)
    line = versus_line(replace(report, usage=usage), Plain(report.steps.token_ids, plain_ms), on)
    assert line.endswith(verdict) and line.count("on this machine") == 1
