"""Tests of `dflash-bench` from the command line, on the embedded pair and on toys, small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("dflash_ggml.ggml.bindings")

from dflash_ggml.bench import cli, facts
from dflash_ggml.bench.prompts import STYLES
from dflash_ggml.bench.suites import SUITES
from reference.server_kit import ScriptedRunner, application, serving

COMMAND = [sys.executable, "-m", "dflash_ggml.bench.cli", "-t", "1", "-ngl", "0"]
SMALL = ["-c", "512", "--limit", "2", "-n", "6", "--rounds", "1"]

Sequence = Callable[..., SimpleNamespace]


@pytest.fixture()
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Sequence:
    """run(*flags) calls the program in this process, on one thread of the CPU."""

    def call(*flags: Any) -> SimpleNamespace:
        words = ["-t", "1", "-ngl", "0", *map(str, flags)]
        monkeypatch.setattr(sys, "argv", ["/usr/bin/dflash-bench", *words])
        try:
            code = cli.main(words)
        except SystemExit as e:  # from argparse
            code = int(e.code or 0)
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


def test_everything_small(run: Sequence, tmp_path: Path) -> None:
    """All suites on the embedded pair; three files with the same figures and what they were measured on."""
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("a.json", "a.md", "a.html", "a.svg")]
    flags = [f for pair in zip(("--json", "--markdown", "--html", "--svg"), files) for f in pair]
    done = run(*SMALL, "--suite", "quick", *flags)
    assert done.code == 0 and "\x1b" not in done.out + done.err
    result = json.loads(files[0].read_text())
    everyday = [name for name, suite in SUITES.items() if suite.everyday]
    assert result["complete"] is True and list(result["suites"]) == everyday
    assert result["model"] == "demo-target-q8_0.gguf" and result["draft"] == "demo-draft-q8_0.gguf"
    assert result["version"] == facts.version() and result["commit"] == facts.commit()
    assert result["threads"] == 1 and result["cpu"] and result["command"].startswith("dflash-bench -t 1")
    for name, suite in result["suites"].items():
        assert suite["rows"] and suite["texts"] and suite["forced_acceptance"] is None, name
        assert all(isinstance(text["repeats"], bool) for text in suite["texts"])
    page, tables = files[2].read_text(), files[1].read_text()
    for suite in result["suites"].values():
        assert all(suite["title"] in where for where in (done.out, tables, page))
    for fact in (result["commit"], result["cpu"], "demo-target-q8_0.gguf"):
        assert fact in tables and fact in page
    assert page.count("<svg ") == len(everyday) and files[3].read_text().count("<svg ") == len(everyday) + 1
    assert done.err.count(" written\n") == 4 and len(done.err.splitlines()) == 4 + len(everyday)
    chosen = result["suites"]["speed"]["auto_choices"]
    assert chosen and all(row["steps"] and row["ms"] > 0 for row in chosen) and "What auto chose" in page


def test_every_mode_writes_the_same_amount(
    run: Sequence, tmp_path: Path, toy_pair: tuple[Path, Path]
) -> None:
    target, draft = toy_pair
    (tmp_path / "p.jsonl").write_text('{"prompt": "the"}\n{"prompt": "a"}\n')
    file = tmp_path / "a.json"
    done = run("-m", target, "-md", draft, "--prompts", tmp_path / "p.jsonl", "-n", 20, "--suite", "speed,budget",
               "--rounds", 1, "--temp", 0.8, "--json", file)  # fmt: skip
    assert done.code == 0, done.err
    runs = json.loads(file.read_text())["suites"]["speed"]["texts"]
    assert len(runs) == 2 * 6 and {run["n"] for run in runs} == {20} and {t["style"] for t in runs} == {"p"}
    assert {t["setting"]: set(t["widths"]) for t in runs if t["setting"] != "auto"} == {
        "plain": {"0"}, "chain": {"7"}, "tree 7": {"7"}, "tree 15": {"15"}, "tree 31": {"31"},
    }  # fmt: skip
    assert "Fastest of the sweep" in done.out


def test_a_target_alone(run: Sequence, toy_pair: tuple[Path, Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone.gguf"
    alone.symlink_to(toy_pair[0])
    done = run("-m", alone, "--prompts", "json", *SMALL, "--suite", "speed,acceptance")
    assert done.code == 0 and "There is no draft: plain decoding only." in done.out
    assert "acceptance: nothing to measure without a draft (-md)" in done.err


@pytest.mark.parametrize("chat", [True, False])
def test_batches_of_sequences(
    run: Sequence, tmp_path: Path, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server in the same table, asked for the same prompts."""
    monkeypatch.setattr(cli, "FULL", replace(cli.FULL, lengths=(16, 32)))  # its context is short
    (tmp_path / "p.jsonl").write_text('{"prompt": "import os"}\n{"prompt": "class A:"}\n')
    with serving(application(ScriptedRunner())) as port:
        url, file = f"http://127.0.0.1:{port}", tmp_path / "a.json"
        flags = ["--suite", "speed,ttft", "--against", url, "--json", file, "--prompts", tmp_path / "p.jsonl"]
        done = run(*SMALL, *flags, "--chat" if chat else "--no-chat")
    assert done.code == 0, done.err
    result = json.loads(file.read_text())
    (server,) = result["against"]
    assert server["url"] == url and server["model"]
    label = f"{url} ({server['model']})"
    speed = result["suites"]["speed"]
    row = next(row for row in speed["rows"] if row["setting"] == label)
    assert row["texts"] == 2 and row["speed"] > 0 and row["length"] is None and label in done.out
    assert (
        "ttft_ms" not in row and "2 of 14 first tokens are not counted" in done.out
    )  # it says: 5 of 12 were cached
    ours = {t["prompt"] for t in speed["texts"] if t["setting"] == "plain"}
    assert {t["prompt"] for t in speed["texts"] if t["setting"] == label} == ours and len(ours) == 2
    others = [text for text in result["suites"]["ttft"]["texts"] if text["setting"] == label]
    assert bool(others) is not chat  # prompts of a set length cannot be wrapped


def test_a_server_that_fails_in_the_middle_leaves_what_was_measured(
    run: Sequence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_ggml.bench.servers import Server, ServerError

    def gone(self: Server, *args: object) -> None:
        raise ServerError("http://x: gone")

    monkeypatch.setattr(Server, "open", lambda self: setattr(self, "model", "m"))
    monkeypatch.setattr(Server, "complete", gone)
    file = tmp_path / "a.json"
    done = run(*SMALL, "--suite", "prefill,speed", "--against", "http://x", "--json", file)
    assert done.code == 1 and done.err.splitlines()[-1] == "dflash-bench: http://x: gone"
    result = json.loads(file.read_text())
    assert result["complete"] is False and list(result["suites"]) == ["prefill", "speed"]
    settings = [text["setting"] for text in result["suites"]["speed"]["texts"]]
    assert settings == [
        "plain",
        "chain",
        "tree 7",
        "tree 15",
        "tree 31",
        "auto",
    ]  # the server's turn was next
    assert "Speed by mode" in done.out


def test_a_limit_is_one_for_every_suite(run: Sequence, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    flags = ["--suite", "speed,temperature,acceptance", "--prompts", "all", "--json", file]
    done = run(*SMALL, *flags, "--limit", 1)
    assert done.code == 0, done.err
    for name, suite in json.loads(file.read_text())["suites"].items():
        assert len({text["prompt"] for text in suite["texts"]}) == 1, name


def test_a_file_that_cannot_be_written_leaves_the_others(run: Sequence, tmp_path: Path) -> None:
    tables = tmp_path / "a.md"
    done = run(*SMALL, "--suite", "prefill", "--json", "/dev/full", "--markdown", tables)
    assert done.code == 1 and done.err.endswith("can't write /dev/full: No space left on device\n")
    assert "## Prefill" in tables.read_text()


def test_a_name_that_is_no_text(run: Sequence, tmp_path: Path, toy_pair: tuple[Path, Path]) -> None:
    odd, file, tables = tmp_path / os.fsdecode(b"\xff.gguf"), tmp_path / "a.json", tmp_path / "a.md"
    odd.symlink_to(toy_pair[0])
    flags = ["--suite", "prefill", "--json", file, "--markdown", tables]
    done = run(*SMALL, "-m", odd, "--prompts", "json", *flags)
    assert done.code == 0 and json.loads(file.read_text())["model"] == odd.name
    assert r"\udcff.gguf" in tables.read_text()


def test_nothing_measured_is_no_success(run: Sequence, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    done = run(*SMALL, "--suite", "acceptance", "--mode", "plain", "--json", file)
    assert (done.code, done.out, file.exists()) == (1, "", False)
    assert done.err.endswith("dflash-bench: nothing was measured, so no file was written\n")


@pytest.mark.parametrize("words", [["--against-key", "hush 1"], ["--against-key=hush 1"]])
def test_a_key_is_in_no_file(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dflash-bench", *words, "--prompts", "my file.jsonl"])
    command = str(facts.header(["hush 1"])["command"])
    assert "hush" not in command and "--against-key" in command
    assert command.endswith("... --prompts 'my file.jsonl'")


def test_files_have_no_folders_in_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report is shared; it must not contain the author's paths."""
    words = [
        "-m",
        "/home/me/models/a.gguf",
        "--json=/home/me/out.json",
        "--against",
        "http://here:1/v1",
        "b/c",
    ]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dflash-bench", *words])
    assert (
        facts.header()["command"] == "dflash-bench -m a.gguf --json=out.json --against http://here:1/v1 b/c"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-m", "nowhere.gguf"], "-m: nowhere.gguf does not exist"),
        (["--suite", "speed,nope"], "--suite: 'nope' is none of quick, full, speed"),
        (["--prompts", "nowhere.jsonl"], "--prompts: nowhere.jsonl is neither a file nor one of all, chat"),
        (["--html", "nowhere/a.html"], "can't write nowhere/a.html: name a file in a folder that exists"),
        (["--json", "/"], "can't write /"),
        (["--against", "host:1"], "--against: host:1 is not an address"),
        (["--suite", "budget", "--against", "http://x"], "take part in speed and ttft only"),
        (["-n", "1"], "-n: 1 is below 2"),
        (["--limit", "0"], "--limit: 0 is below 1"),
        (["--rounds", "0"], "--rounds: 0 is below 1"),
        (["--temp", "nan"], "--temp: nan is not a number from 0"),
        (["--temp", "inf"], "--temp: inf is not a number from 0"),
        (["-s", "-1"], "-s: -1 is below 0"),
        (["speed"], "invalid choice: 'speed' (choose from"),
        (["--bogus"], "--bogus; --help lists the options"),
    ],
)
def test_mistakes_are_reported_in_one_line(run: Sequence, flags: list[str], words: str) -> None:
    done = run(*flags)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("dflash-bench: ") and done.err.count("\n") == 1 and words in done.err


def test_plots_without_their_library(run: Sequence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported before anything is measured."""
    for name in [m for m in sys.modules if m.partition(".")[0] == "matplotlib" or m.endswith(".bench.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("dflash_ggml.bench.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("--html", tmp_path / "a.html")
    assert (done.code, done.out) == (2, "")
    assert done.err == "dflash-bench: plots need matplotlib: pip install 'dflash-ggml[bench]'\n"


def test_help() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True, timeout=300)
    for word in (*SUITES, *STYLES, "quick", "full", "--against", "calibrate"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("redirection", "code", "words"),
    [(">&-", 1, "standard output is closed"), (">/dev/full", 1, "No space left"), ("2>&-", 0, "")],
)
def test_standard_streams_closed_or_full(redirection: str, code: int, words: str) -> None:
    command = " ".join([*COMMAND, "-c", "512", "--suite", "prefill", redirection])
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr


def test_interrupt(tmp_path: Path) -> None:
    """Ctrl-C: the suites so far and the runs of the current one are printed and written, exit code 130."""
    file = tmp_path / "a.json"
    flags = [
        "-c",
        "512",
        "--suite",
        "prefill,speed",
        "--limit",
        "9",
        "-n",
        "400",
        "--rounds",
        "2",
        "--json",
        str(file),
    ]
    with subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while b"speed" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert out.startswith(b"Prefill\n") and b"\x1b" not in out + err
    assert err.endswith(b"written\ndflash-bench: interrupted; what was measured so far is above\n")
    result = json.loads(file.read_text())
    assert result["complete"] is False and "prefill" in result["suites"]


def test_the_commit_is_ours_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that lies in somebody else's checkout does not give that one's commit."""
    for words in (
        ["init", "-q"],
        ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    installed = tmp_path / "site-packages" / "dflash_ggml"
    installed.mkdir(parents=True)
    monkeypatch.setattr(facts, "PACKAGE", installed)
    assert facts.commit() == "unknown"
