"""Tests of `dflash-bench calibrate`: the report of synthetic costs, and the command on the embedded pair."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_ggml.bench.costs import costs_report
from dflash_ggml.bench.sections import plain
from dflash_ggml.policy.costs import Costs, Point
from reference import toys

POINTS = [
    *(Point("plain", 1, context, ms) for context, ms in ((64, 10.0), (4000, 20.0))),
    *(Point("draft", 16, context, ms) for context, ms in ((64, 2.0), (4000, 3.0))),
    Point("verify", 8, 64, 17.0), Point("verify", 16, 64, 187.0), Point("commit", 1, 64, 1.0),
]  # fmt: skip


def engine(points: list[Point], file: Path | None = Path("costs/a.json")) -> Any:
    found = Costs()
    found.learn(points)
    config, drafter = SimpleNamespace(budget=15), SimpleNamespace(depth=15)
    return SimpleNamespace(costs=found, config=config, drafter=drafter, costs_file=file)


def test_a_row_per_pass_and_where_it_pays() -> None:
    section = costs_report(engine(POINTS))
    rows = {(row["pass"], row["columns"]): row for row in section.rows}
    assert next(iter(rows)) == ("plain", 1) and rows["plain", 1]["ms_4000"] == 20.0
    seven = rows["verify", 8]
    assert seven["nodes"] == 7 and seven["ms_64"] == 17.0 and "ms_4000" not in seven
    assert seven["pays_64"] == seven["length_64"] == 2.0 and seven["most"] == 8
    assert seven["length_4000"] == pytest.approx((17 + 10 + 3 + 1) / 20)  # the slope of plain steps
    assert rows["verify", 16]["pays_64"] is None and rows["verify", 16]["length_64"] == 19.0
    assert rows["verify", 4]["nodes"] == 3  # not measured: on the line
    shown = plain(section)
    assert "ms at 4,000" in shown and "Kept in costs/a.json." in shown
    assert any(note.startswith("Behind 64 tokens drafting pays from ") for note in section.notes)
    (plot,) = section.plots
    assert [len(series.x) for series in plot.series] == [8, 8, 8]
    json.dumps(section.as_dict())


def test_a_machine_where_nothing_pays_and_one_without_time_or_a_folder() -> None:
    dear = [Point("plain", 1, 64, 1.0), Point("draft", 16, 64, 9.0), Point("verify", 16, 64, 30.0)]
    section = costs_report(engine(dear, None))
    assert any("drafting cannot pay" in note and "auto decodes plainly" in note for note in section.notes)
    assert section.notes[-1] == "Not kept: the cache folder cannot be written."
    nothing = costs_report(engine([]))
    assert nothing.rows == [] and nothing.plots == [] and "There was no time" in plain(nothing)
    assert "Kept" not in plain(nothing)


@pytest.fixture()
def calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """calibrate(*flags): exit code, stdout, stderr; costs are kept in a folder of the test."""
    pytest.importorskip("dflash_ggml.ggml.bindings")
    from dflash_ggml.bench import cli
    from dflash_ggml.engine import known_costs

    monkeypatch.setattr(known_costs, "default_folder", lambda: tmp_path / "costs")

    def call(*flags: str) -> SimpleNamespace:
        code = cli.main(["calibrate", "-t", "1", "-ngl", "0", *flags])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


def test_the_command(calibrate: Any, tmp_path: Path, toy_pair: tuple[Path, Path]) -> None:
    """It measures anew whatever was kept, keeps it where `auto` looks, and writes the same figures to files."""
    files = ["-m", str(toy_pair[0]), "-md", str(toy_pair[1]), "-c", "512"]
    assert calibrate(*files).code == 0
    (kept,) = (tmp_path / "costs").iterdir()
    old = json.loads(kept.read_text())
    kept.write_text(json.dumps({**old, "points": [["plain", 1, 64, 9e5]]}))
    done = calibrate(*files, "--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md"))
    assert (
        done.code == 0
        and len(json.loads(kept.read_text())["points"]) > 5
        and [kept] == list((tmp_path / "costs").iterdir())
    )
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["complete"] and result["costs_file"] == kept.name and "styles" not in result
    (rows,) = (suite["rows"] for suite in result["suites"].values())
    assert {row["pass"] for row in rows} >= {"plain", "draft", "verify"}
    written = {(k, w): ms for k, w, context, ms in json.loads(kept.read_text())["points"] if context == 64}
    assert all(row["ms_64"] == written[row["pass"], row["columns"]] for row in rows if "ms_64" in row)
    assert str(kept) in done.out and "Costs of passes" in (tmp_path / "a.md").read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--suite", "speed"], "--suite: calibrate runs alone"),
        (["--mode", "tree"], "--mode: calibrate measures for auto"),
        (["--against", "http://x"], "--against: other servers take part in speed and ttft only"),
    ],
)
def test_what_does_not_go_with_it(calibrate: Any, flags: list[str], words: str) -> None:
    done = calibrate(*flags)
    assert done.code == 2 and done.out == "" and words in done.err and done.err.count("\n") == 1


def test_a_target_alone(calibrate: Any, toy_pair: tuple[Path, Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone.gguf"
    alone.symlink_to(toy_pair[0])
    done = calibrate("-m", str(alone))
    assert done.code == 2 and "name one with -md or -hfd\n" in done.err and not (tmp_path / "costs").exists()


def test_it_follows_spec(calibrate: Any, tmp_path: Path) -> None:
    """A head that --spec leaves out is nothing to measure for; prompt lookup that it names is, without a draft's passes."""
    target, _ = toys.write_pair(tmp_path, 3, nextn=True)
    refused = calibrate("-m", str(target), "-c", "256", "--spec", "dflash")
    assert refused.code == 2 and "leave --spec away" in refused.err and not (tmp_path / "costs").exists()
    for spec, passes in (("mtp", {"plain", "verify", "draft"}), ("suffix", {"plain", "verify"})):
        out = tmp_path / f"{spec}.json"
        done = calibrate("-m", str(target), "-c", "256", "--budget", "3", "--spec", spec, "--json", str(out))
        (section,) = json.loads(out.read_text())["suites"].values()
        assert done.code == 0
        assert {row["pass"] for row in section["rows"]} & {"plain", "verify", "draft"} == passes
