"""Tests of a target's own text for training: saved while it is generated. A second; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.errors import ConfigError
from dflash_ggml.train.cli import _rows, _run, build_parser
from dflash_ggml.train.corpus import Rows, load_rows
from dflash_ggml.train.own_text import BEGUN, KEPT, write_rows, write_turns
from dflash_ggml.train.recipe import TargetSizes

PROMPTS = [[i] * 4 for i in range(10)]
HEAT = [0.0] * len(PROMPTS)
LENGTH = 8


class Target:
    """Repeats its prompt's number; fails at a given batch."""

    has_template = False
    sizes = TargetSizes(4, 32, 64, 300, 1e7, 1e-6, 0)

    def __init__(self, broken_at: int = 1000) -> None:
        self.broken_at = broken_at
        self.written: list[int] = []

    def encode(self, texts) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def write(self, prompts, length, temperatures, batch, seed, done, report) -> Iterator[Rows]:
        for at in range(done, len(prompts), batch):
            if at >= self.broken_at:
                raise RuntimeError("the machine stopped")
            rows = prompts[at : at + batch]
            self.written += range(at, at + len(rows))
            start = np.array([len(row) for row in rows])
            ids = np.array([[row[-1]] * length for row in rows], np.int32)
            yield Rows(ids, start, np.full(len(rows), length))


def written(target: Target, folder: Path, batch: int = 3, prompts=PROMPTS, reports=None, stop=lambda: False):
    collected = [] if reports is None else reports
    return write_rows(target, folder, prompts, LENGTH, HEAT, batch, 1, collected.append, stop)


def same(a: Rows, b: Rows) -> bool:
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("ids", "start", "stop"))


def test_a_crash_loses_no_batch_that_was_whole(tmp_path: Path) -> None:
    whole = written(Target(), tmp_path / "whole")
    out = tmp_path / "out"
    with pytest.raises(RuntimeError):
        written(Target(broken_at=6), out)
    assert same(load_rows(out / BEGUN), whole.take(slice(6))) and not (out / KEPT).exists()
    again, reports = Target(), []
    assert same(written(again, out, batch=2, reports=reports), whole)
    assert again.written == [6, 7, 8, 9] and "6 of 10 rows" in reports[0]
    assert same(load_rows(out / KEPT), whole) and not (out / BEGUN).exists()


def test_an_interrupt_ends_it_behind_a_batch(tmp_path: Path) -> None:
    first, reports = Target(), []
    with pytest.raises(KeyboardInterrupt):
        written(first, tmp_path, reports=reports, stop=lambda: True)
    assert first.written == [0, 1, 2] and "the same command goes on" in reports[-1]
    second = Target()
    assert len(written(second, tmp_path)) == 10 and second.written[0] == 3


def test_what_was_begun_otherwise_is_not_gone_on_from(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        written(Target(broken_at=3), tmp_path)
    with pytest.raises(ConfigError, match="begun with another target, texts or options"):
        written(Target(), tmp_path, prompts=[[7], *PROMPTS[1:]])
    np.savez(tmp_path / BEGUN, ids=np.zeros((1, 8), np.int32), start=np.array([1]), stop=np.array([8]))
    with pytest.raises(ConfigError, match="begun with another"):
        written(Target(), tmp_path)


def test_the_command_reports_that_it_reuses_existing_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("some words " * 40)
    out = tmp_path / "out"
    options = f"target -o {out} --data {tmp_path / 'text.txt'} --own-text 40 --prompt 4 --length 8 --steps 1"
    args = build_parser().parse_args(options.split())

    class Quiet:
        asked = False

    found = []
    for target in (Target(), Target(broken_at=0)):
        own, _ = _rows(args, _run(args), target, Quiet())  # type: ignore[arg-type]
        found.append(own)
        printed = capsys.readouterr().out
        assert ("nothing written; remove it" in printed) == (target.broken_at == 0)
    assert same(*found) and len(found[0]) == 10 and (out / KEPT).exists()


class Chatting(Target):
    """Writes user turns of one letter, of which every third has no end, and answers after whole prompts."""

    has_template = True
    n_turns = 0

    def render(self, messages, answer) -> str:
        return "".join(f"<{m['role'][0]}>{m['content']}" for m in messages) + "<a>" * answer

    def write(self, prompts, length, temperatures, batch, seed, done, report) -> Iterator[Rows]:
        for rows in super().write(prompts, length, temperatures, batch, seed, done, report):
            for row, start, prompt in zip(rows.ids, rows.start, prompts):
                row[:start] = prompt
                if bytes(prompt) == b"<u>":
                    row[start:] = ord("a") + self.n_turns
                    row[-1] = 0 if self.n_turns % 3 else ord("z")
                    self.n_turns += 1
            yield rows


def test_user_turns_that_the_target_writes_are_answered(tmp_path: Path) -> None:
    options = f"target -o {tmp_path} --own-text 40 --prompt 4 --length 16 --steps 1"
    args = build_parser().parse_args(options.split())

    class Quiet:
        asked = False

    target = Chatting()
    found, _ = _rows(args, _run(args), target, Quiet())  # type: ignore[arg-type]
    assert found is not None and (found.start == 10).all()
    assert {bytes(row[:10].tolist()) for row in found.ids} <= {b"<u>" + c * 4 + b"<a>" for c in (b"b", b"c")}
    again = write_turns(target, tmp_path, 3, 8, 2, 1, lambda line: None, lambda: False)
    assert again == [list(b"<u>bbbb<a>"), list(b"<u>cccc<a>")], (
        "kept, sorted, without the turn that has no end"
    )
    with pytest.raises(ConfigError, match="no user turn of the target's ends within 8"):
        write_turns(Chatting(), tmp_path / "one", 1, 8, 2, 1, lambda line: None, lambda: False)
    target.render = lambda messages, answer: "none"  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="does not give a user turn's text once"):
        write_turns(target, tmp_path, 1, 8, 2, 1, lambda line: None, lambda: False)


def test_a_target_without_chat_format_has_no_turns(tmp_path: Path) -> None:
    options = f"target -o {tmp_path} --own-text 40 --prompt 4 --length 16 --own-turns 0.5 --steps 1"
    args = build_parser().parse_args(options.split())
    with pytest.raises(ConfigError, match="needs a chat template"):
        _rows(args, _run(args), Target(), None)  # type: ignore[arg-type]
