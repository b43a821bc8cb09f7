"""Tests of the benchmark suites on a fake engine: what is decoded, in which order, and what is reported."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.bench import runner, suites
from dflash_ggml.bench.measure import Run, Setting, decode
from dflash_ggml.bench.prompts import Prompt, own
from dflash_ggml.bench.runner import QUICK, Bench
from dflash_ggml.bench.sections import Section, markdown, plain
from dflash_ggml.bench.suites import SUITES, budget_report, largest_budget, named
from dflash_ggml.bench.terminal import Lines, progress, show
from dflash_ggml.config import EngineConfig
from reference.fake_engine import FakeEngine

SIZE = replace(QUICK, prompts=3, n=24, rounds=2, lengths=(16, 64, 5000), budgets=(3, 15))
ON_ANY_ENGINE = [
    name for name in SUITES if name != "needles"
]  # that one has a template and lengths of its own: test_needles
PROMPTS = [*own("python")[:3], *own("chat")[:2], Prompt("long", "python", "x" * 3000)]


def bench(**options: Any) -> Bench:
    draft = options.pop("draft", True)
    config = EngineConfig(model=Path("toy.gguf"), n_ctx=1024, n_batch=32, budget=31)
    engine: Any = FakeEngine(config=config, has_draft=draft)
    return Bench(engine, PROMPTS, SIZE, Lines(io.StringIO()), **options)


@pytest.mark.parametrize("name", ON_ANY_ENGINE)
def test_every_suite_reports(name: str) -> None:
    found = bench()
    jobs = SUITES[name].jobs(found)
    runs = found.run(name, jobs)
    assert len(runs) == len(jobs) > 0 and not found.stopped
    assert [run.setting for run in runs] == [job.setting.label for job in jobs]
    section = SUITES[name].report(found, runs)
    assert section.name == name and section.rows and section.forced is None
    json.dumps(section.as_dict())
    shown = plain(section)
    assert section.title in shown and shown.replace("\n", "").isprintable()
    assert all(line == line.rstrip() for line in shown.split("\n"))
    details = [section.details] if section.details else []
    for part in (replace(section, details=None), *details):
        lines = [line for line in markdown([], [part], "").split("\n") if line.startswith("|")][2:]
        head, _, *rows = lines
        assert len(rows) == len(part.rows) and {line.count("|") for line in lines} == {head.count("|")}


@pytest.mark.parametrize("name", ON_ANY_ENGINE)
def test_every_suite_reports_what_an_interrupt_left(name: str) -> None:
    for limit in (1, 2, 3):
        found = bench()
        jobs = SUITES[name].jobs(found)
        runs = found.run(name, jobs[:limit])
        assert SUITES[name].report(found, runs).rows


@pytest.mark.parametrize("name", ON_ANY_ENGINE)
def test_every_suite_without_a_draft(name: str) -> None:
    found = bench(draft=False)
    runs = found.run(name, SUITES[name].jobs(found))
    assert {run.setting for run in runs} == (set() if name in ("acceptance", "never-slower") else {"plain"})
    if runs:
        assert SUITES[name].report(found, runs).rows


def test_the_first_setting_rotates() -> None:
    found = bench()
    jobs = SUITES["speed"].jobs(found)
    labels = ["plain", "chain", "tree 7", "tree 15", "tree 31", "auto"]
    blocks = [jobs[i : i + 6] for i in range(0, len(jobs), 6)]
    assert len(blocks) == 2 * 3 and all(len({job.prompt.id for job in block}) == 1 for block in blocks)
    assert all({job.setting.label for job in block} == set(labels) for block in blocks)
    assert [block[0].setting.label for block in blocks] == [*labels[:3], *labels[1:4]]
    assert {job.seed for job in blocks[0]} == {1} and {job.seed for job in blocks[-1]} == {2}


def test_a_warm_up_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench()
    decoded: Counter[Setting] = Counter()

    def counting(engine: Any, job: Any, should_stop: Any) -> Run:
        decoded[job.setting] += 1
        return decode(engine, job, should_stop)

    monkeypatch.setattr(runner, "decode", counting)
    jobs = SUITES["speed"].jobs(found)
    runs = found.run("speed", jobs)
    assert len(runs) == len(jobs) and set(decoded.values()) == {len(jobs) // len(decoded) + 1}


def test_prompts_that_do_not_fit_are_left_out() -> None:
    found = bench()
    assert {job.prompt.id for job in found.jobs(found.modes(), PROMPTS)} == {p.id for p in PROMPTS} - {"long"}
    assert {len(job.ids) for job in SUITES["prefill"].jobs(found)} == {16, 64}


def test_filled_prompts_differ_between_iterations() -> None:
    found = bench()
    jobs = [found.filled(64, turn, found.setting("plain", "plain"), 8) for turn in range(3)]
    assert {len(job.ids) for job in jobs} == {64} and len({tuple(job.ids) for job in jobs}) == 3
    # prompts for other servers begin with a unique line, so that none is cached
    text = found.engine.tokenizer.decode(jobs[0].ids)
    assert jobs[0].text.endswith(f"\n{text}") and jobs[0].text != found.filled(64, 0, jobs[0].setting, 8).text


def test_requests_go_through_the_template() -> None:
    found = bench()
    (python, raw), (chat, wrapped) = found.ids(PROMPTS[0]), found.ids(PROMPTS[3])
    tokenizer = found.engine.tokenizer
    assert not python.chat and tokenizer.decode(raw) == python.text
    assert chat.chat and len(wrapped) > len(tokenizer.encode(chat.text))
    assert bench(chat=True).ids(PROMPTS[0])[0].chat and not bench(chat=False).ids(PROMPTS[3])[0].chat


def test_interrupt_keeps_what_was_measured() -> None:
    found = bench()
    done: list[int] = []
    found.progress.at = lambda n, what: done.append(n)  # type: ignore[method-assign]
    found.should_stop = lambda: done[-1] >= 4
    runs = found.run("speed", SUITES["speed"].jobs(found))
    assert len(runs) == 4 and found.stopped


def run(setting: str, speed: float, width: int = 0, repeating: bool = False) -> Run:
    return Run(
        "p", "python", setting, 9, 101, 5.0, 1e5 / speed, steps=50, widths={width: 50}, accepted={1: 50} if width else {},
        step_ms=dict.fromkeys(("draft", "tree", "verify", "commit", "host"), 10.0), repeats=repeating,
    )  # fmt: skip


def test_the_chosen_budget_is_marked() -> None:
    runs = [run("plain", 100), run("tree 3", 150, 3), run("tree 15", 200, 15), run("auto", 190, 15)]
    section = budget_report(bench(), runs)
    assert [row["setting"] for row in section.rows if row["chosen"]] == ["tree 15"]
    (plot,) = section.plots
    assert plot.mark == ("chosen by auto: 15", 15, 200) and [name for name, _ in plot.levels] == [
        "plain",
        "auto",
    ]
    assert section.notes[:2] == [
        "auto chose 15 nodes in 100% of its passes.",
        "Fastest of the sweep in the median: tree 15.",
    ]
    assert [row["versus_plain"] for row in section.rows[1:]] == pytest.approx([1.5, 2.0, 1.9])


def test_plain_may_be_what_was_chosen_and_so_may_a_width_between() -> None:
    runs = [run("plain", 100), run("tree 3", 50, 3), run("auto", 98, 0)]
    section = budget_report(bench(), runs)
    assert [row["setting"] for row in section.rows if row["chosen"]] == ["plain"]
    assert section.plots[0].mark is None and "auto chose plain" in section.plots[0].title
    between = budget_report(bench(), [*runs[:2], run("auto", 120, 5)])
    assert between.plots[0].mark == ("chosen by auto: 5", 5, 120)
    assert not any(row["chosen"] for row in between.rows)


def test_repetition_and_forced_acceptance_are_reported() -> None:
    section = budget_report(bench(), [run("plain", 100), run("tree 3", 150, 3, repeating=True)])
    assert "1 of 2 runs repeat themselves, which flatters acceptance." in section.notes
    assert section.as_dict()["texts"][1]["repeats"] is True
    assert "FORCED" not in plain(section) and section.as_dict()["forced_acceptance"] is None
    section.forced = "8.31 tokens per pass in the mean"
    for output in (plain(section), markdown([], [section], "")):
        assert "FORCED ACCEPTANCE, not model text (8.31 tokens per pass in the mean)" in output
    assert section.as_dict()["forced_acceptance"] == section.forced


def test_acceptance_by_style() -> None:
    """The line without loops leaves a prompt out in every setting when it loops in one."""

    def one(prompt: str, style: str, setting: str, steps: int, loop: bool = False) -> Run:
        return replace(run(setting, 100, 3, loop), prompt=prompt, style=style, steps=steps)

    runs = [
        one("a", "python", "chain", 50), one("a", "python", "tree 31", 25),
        one("b", "json", "chain", 20), one("b", "json", "tree 31", 10, loop=True),
    ]  # fmt: skip
    section = suites.acceptance_report(bench(), runs)
    assert [row["style"] for row in section.rows] == ["python", "json", "all", "all that do not loop"]
    assert [row["chain"] for row in section.rows] == [2.0, 5.0, 3.5, 2.0]
    assert [row["tree 31"] for row in section.rows] == [4.0, 10.0, 7.0, 4.0]
    assert [row["texts"] for row in section.rows] == [1, 1, 2, 1]
    assert [row["repeating"] for row in section.rows] == [0, 1, 1, 0]


def test_names() -> None:
    everyday = [name for name in SUITES if name not in ("never-slower", "drafts", "needles")]
    assert named("quick") == (everyday, True) and named("full") == (everyday, False)
    assert named("never-slower") == (["never-slower"], False)
    assert named("budget,speed") == (["budget", "speed"], False)
    with pytest.raises(KeyError, match="nope"):
        named("speed,nope")
    assert largest_budget(["speed"], QUICK, 15) == 31 and largest_budget(["budget"], QUICK, 31) == 63
    assert largest_budget(["context"], QUICK, 7) == 7


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminals_and_pipes() -> None:
    """Bars and styles on a terminal only."""
    section = Section("x", "A title", [suites.Column("a", "first", 1)], [{"a": 1.25}], ["a note"])
    pipe = io.StringIO()
    show(section, pipe)
    assert pipe.getvalue() == "A title\n  first\n    1.2\n  a note\n\n"
    pytest.importorskip("rich")
    terminal = Terminal()
    show(section, terminal)
    assert "\x1b[" in terminal.getvalue() and "1.2" in terminal.getvalue() and "a note" in terminal.getvalue()
    for stream, bar in ((io.StringIO(), False), (Terminal(), True)):
        shown = progress(stream)
        shown.begin("speed", 7)
        shown.at(3, "tree 7")
        shown.end()
        assert ("\x1b[" in stream.getvalue()) is bar and "speed" in stream.getvalue()


def test_names_are_no_markup() -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    bar = progress(stream)
    bar.begin("speed", 7)
    bar.at(3, "tree 7, [/x]")
    bar.end()
    assert "[/x]" in stream.getvalue() and "MarkupError" not in stream.getvalue()


def test_a_terminal_of_80_columns_shows_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide table is split into blocks, each with the names of its rows."""
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "80")
    found = bench()
    for name in ("speed", "temperature", "context", "prefill", "acceptance"):
        section = SUITES[name].report(found, found.run(name, SUITES[name].jobs(found)))
        stream = Terminal()
        show(section, stream)
        shown = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())
        words = Counter(word for line in shown.split("\n")[1:] for word in line.split())
        for row in section.cells():
            assert not Counter(word for cell in row for word in cell.split()) - words
        assert "…" not in shown and max(map(len, shown.split("\n"))) <= 80
