"""Tests of the suite `needles`: documents, what is prefilled of them, and what counts as an answer."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_ggml.bench import needles
from dflash_ggml.bench.measure import _has
from dflash_ggml.bench.needles import KINDS, document, needle_jobs, needle_report
from dflash_ggml.bench.runner import QUICK, Bench
from dflash_ggml.bench.terminal import Lines
from dflash_ggml.config import EngineConfig
from dflash_ggml.engine.engine import Engine
from dflash_ggml.files.pairs import EMBEDDED_TARGET


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_holds_its_answer_and_is_the_same_for_a_seed(kind: str):
    text, answer = document(kind, 100, 3)
    assert (text, answer) == document(kind, 100, 3) != document(kind, 100, 4)
    body, question = text.rsplit("\n\n", 1)
    assert len(body.splitlines()) >= 101 and "?" in question
    if kind == "counting":
        assert body.count("A red lorry") == int(answer)
    else:
        assert answer in body and answer not in question


def test_an_answer_is_a_word_of_its_own():
    assert _has("It is Kelso.", "kelso") and _has("7 lorries", "7")
    assert not _has("17 lorries", "7") and not _has("jars", "jar")


def test_parts_are_prefilled_and_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(needles, "LENGTHS", (9000,))
    config = EngineConfig(model=EMBEDDED_TARGET, n_ctx=10240, n_threads=1, spec=())
    with Engine.load(config) as engine:
        bench = Bench(engine, [], replace(QUICK, prompts=1), Lines(io.StringIO()), mode="plain", chat=True)
        jobs = needle_jobs(bench)
        read = {job.setting.label: len(job.ids) for job in jobs if job.prompt.style == "own words"}
        assert read["exact"] > read["lexical 0.3"] and len(jobs) == 3 * len(KINDS)
        part = [job for job in jobs if job.setting.label == "lexical 0.3"][:2]
        found = needle_report(bench, bench.run("needles", part))
    assert [(row["kind"], row["setting"]) for row in found.rows] == [
        (job.prompt.style, "lexical 0.3") for job in part
    ]
    assert all(row["right"] in (0.0, 100.0) and row["read"] < 5000 for row in found.rows)


def test_the_report_notes_that_nothing_fits(toy_pair: tuple[Path, Path]):
    config = EngineConfig(model=toy_pair[0], draft=toy_pair[1], n_ctx=512, n_threads=1, calibrate="never")
    with Engine.load(config) as engine:
        bench = Bench(engine, [], replace(QUICK, prompts=1), Lines(io.StringIO()))
        assert needle_jobs(bench) == [] and "8024 and more" in needle_report(bench, []).notes[-1]
