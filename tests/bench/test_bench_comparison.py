"""Tests of the suite `never-slower`: what it decodes, and what it reports about `auto`, from synthetic runs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.bench.comparison import (
    BEFORE,
    BEHIND,
    BETWEEN,
    compared,
    never_slower_jobs,
    never_slower_report,
)
from dflash_ggml.bench.measure import Run, all_uses, decode
from dflash_ggml.bench.page import html
from dflash_ggml.bench.prompts import own
from dflash_ggml.bench.runner import FULL, Bench
from dflash_ggml.bench.sections import markdown, plain
from dflash_ggml.bench.terminal import Lines
from dflash_ggml.config import EngineConfig
from dflash_ggml.session.events import WidthUse
from reference.fake_engine import FakeEngine


def bench(replies: list[str] | None = None) -> Bench:
    config = EngineConfig(model=Path("toy.gguf"), n_ctx=1024, n_batch=32, budget=31)
    engine: Any = FakeEngine(config=config, replies=replies or [])
    return Bench(engine, own("python")[:3], FULL, Lines(io.StringIO()))


def text(prompt: str, setting: str, speed: float, temperature: float = 0.0, **more: Any) -> Run:
    return Run(prompt, "python", setting, 9, 101, 5.0, 1e5 / speed, temperature, steps=50, widths={0: 50},
                step_ms=dict.fromkeys(("draft", "tree", "verify", "commit", "host"), 10.0), **more)  # fmt: skip


def use(nodes: int, steps: int, predicted: float | None) -> WidthUse:
    return WidthUse(nodes, steps, 2 * steps, 3.0 * steps, predicted)


TEXTS = [
    text("a", "plain", 100), text("b", "plain", 50), text("a", "chain", 150), text("b", "chain", 30),
    text("a", "auto", 140, uses=(use(0, 10, 1.0), use(7, 30, 2.0))), text("b", "auto", 45, uses=(use(7, 10, 6.0),)),
]  # fmt: skip


def test_all_modes_alternate_at_all_temperatures() -> None:
    jobs = never_slower_jobs(bench())
    assert all(job.endless for job in jobs)
    jobs = [job for job in jobs if "," not in job.setting.label]
    labels = ["plain", "chain", "tree 3", "tree 7", "tree 15", "tree 31", "auto"]
    assert {job.setting.label for job in jobs} == set(labels)
    assert [job.setting.temperature for job in jobs] == sorted(job.setting.temperature for job in jobs)
    assert {job.setting.temperature for job in jobs} == {0.0, 0.8, 1.2}
    assert [jobs[i].setting.label for i in (0, 7, 14)] == labels[:3]


def test_auto_between_two_plain_runs() -> None:
    jobs = [job for job in never_slower_jobs(bench()) if "," in job.setting.label]
    assert len(jobs) == 3 * 3 * (2 * FULL.rounds + 1) * 3  # temperatures, prompts, iterations
    for at in range(0, len(jobs), 3):
        before, auto, behind = jobs[at : at + 3]
        assert [job.setting.mode for job in (before, auto, behind)] == ["plain", "auto", "plain"]
        assert (
            len({(job.prompt.id, job.seed, job.setting.temperature) for job in (before, auto, behind)}) == 1
        )
    assert {job.seed for job in jobs} == set(range(1, 2 * FULL.rounds + 2))


def test_the_worst_prompt_is_compared_with_the_plain_runs_around_it() -> None:
    """An iteration in which the machine changed its speed counts like its neighbours; a cancelled one not at all."""
    speeds = {
        "a": [(100, 96, 100), (100, 60, 100), (50, 49, 50)],
        "b": [(100, 97, 90), (80, 80, 80), (100, 99, 100)],
    }
    found = [*TEXTS]
    for prompt, rounds in speeds.items():
        for of_round in rounds:
            found += [text(prompt, label, speed) for label, speed in zip((BEFORE, BETWEEN, BEHIND), of_round)]
    found.append(text("a", BEFORE, 1))
    section = never_slower_report(bench(), found)
    expected = (
        "on its worst prompt, a, 0.960 times plain (median of 3 rounds; plain beside itself 1.000 to 1.000)"
    )
    assert expected in section.notes[0] and "1.022 times the best fixed mode" in section.notes[0]
    assert {row["setting"] for row in section.rows} == {"plain", "chain", "auto"}
    cut_off = never_slower_report(bench(), found[6:])
    assert not cut_off.rows and not any("Temperature" in note for note in cut_off.notes)


@pytest.mark.parametrize("endless", [True, False])
def test_an_endless_job_goes_on_behind_the_end(endless: bool) -> None:
    from dataclasses import replace

    found = bench(["hello"])
    job = replace(never_slower_jobs(found)[0], endless=endless, n=40)
    done = decode(found.slot, job, lambda: False)
    assert (done.n == 40 and done.finish == "length") is endless
    assert sum(u.steps for u in done.uses) == done.steps and sum(u.tokens for u in done.uses) == done.n - 1


def test_auto_against_the_best_other_mode_and_its_worst_prompt() -> None:
    *fixed, auto = compared(TEXTS, temperature=0)
    # 200 tokens over the time of both runs: the slow one weighs more
    assert [row["rate"] for row in fixed] == pytest.approx([200 / 3, 50.0]) and auto["best_fixed"] == "plain"
    assert auto["to_best"] == pytest.approx(auto["rate"] / (200 / 3)) and "to_best" not in fixed[0]
    section = never_slower_report(bench(), [*TEXTS, text("a", "plain", 1, 0.8), text("a", "auto", 2, 0.8)])
    note = (
        "Temperature 0: auto is 1.022 times the best fixed mode, plain; on its worst prompt, b, 0.900 times"
    )
    assert section.notes[0].startswith(note)
    assert section.notes[1].startswith("Temperature 0.8: auto is 2.000 times")
    assert {row["temperature"] for row in section.rows} == {0.0, 0.8}


def test_the_worst_prompt_is_judged_by_the_median_of_its_rounds() -> None:
    found = [
        text("a", mode, ms)
        for mode, speeds in (("plain", (100, 100, 99)), ("auto", (97, 98, 40)))
        for ms in speeds
    ]
    assert "a, 0.970 times plain (median of 3 rounds)" in never_slower_report(bench(), found).notes[0]


def test_what_auto_chose_is_in_files_and_not_on_the_terminal() -> None:
    section = never_slower_report(bench(), TEXTS)
    assert section.details is not None
    seven = section.details.rows[1]
    assert (seven["nodes"], seven["steps"], seven["tokens_per_step"], seven["ms"]) == (7, 40, 2.0, 3.0)
    assert seven["predicted_ms"] == pytest.approx(3.0) and seven["share"] == 80.0  # weighed by steps
    assert section.as_dict()["auto_choices"] == section.details.rows
    assert section.as_dict()["texts"][4]["uses"][0]["predicted_ms"] == 1.0
    pytest.importorskip("matplotlib")
    for output, there in (
        (plain(section), False),
        (markdown([], [section], ""), True),
        (html([], [section], ""), True),
    ):
        assert ("What auto chose" in output) is there


def test_uses_without_a_prediction() -> None:
    (merged,) = all_uses(
        [text("a", "auto", 1, uses=(use(3, 5, None),)), text("b", "auto", 1, uses=(use(3, 5, 4.0),))]
    )
    assert (merged.steps, merged.tokens, merged.ms, merged.predicted_ms) == (10, 20, 30.0, 4.0)
    (unknown,) = all_uses([text("a", "auto", 1, uses=(use(3, 5, None),))])
    assert unknown.predicted_ms is None
