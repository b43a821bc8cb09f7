"""Tests of `dflash-run`: most runs in this process, those that need pipes or signals in their own."""

from __future__ import annotations

import fcntl
import importlib
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from reference import toys

pytest.importorskip("dflash_ggml.ggml.bindings")

from dflash_ggml.cli import run as cli
from dflash_ggml.cli.report import Meter
from dflash_ggml.cli.run import main
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml.device import physical_cores
from dflash_ggml.text.tokenizer import Tokenizer
from reference.fake_engine import TEMPLATE, TOOL_TEMPLATE, FakeEngine, byte_vocabulary

COMMAND = [sys.executable, "-m", "dflash_ggml", "-t", "1", "-ngl", "0"]
# greedy text of the embedded target; over its first 24 tokens no second-best logit comes nearer than 1.0, so that
# every mode writes it on every machine
PROMPT = "class Item:\n    def __init__(self, name, price, quantity):\n"
GREEDY = ["--temp", "0", "-n", "24", "-p", PROMPT]
FIELDS = [
    "text", "token_ids", "prompt_n", "predicted_n", "prompt_ms", "predicted_ms", "steps", "draft_n", "draft_n_accepted",
    "sources", "acceptance_length", "mode", "budget", "widths", "finish_reason", "step_ms",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture()
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(*flags, stdin=b"") calls the program in this process, on one thread of the CPU."""

    def call(*flags: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            code = main(["-t", "1", "-ngl", "0", *flags])
        except SystemExit as e:  # from argparse
            code = int(e.code or 0)
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def tokenizer(demo_target: Path) -> Tokenizer:
    with GGUFFile(demo_target) as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture(scope="module")
def plain_text() -> str:
    """What plain decoding in a process of its own writes for GREEDY."""
    done = subprocess.run(
        [*COMMAND, *GREEDY, "--mode", "plain"], capture_output=True, check=True, timeout=300
    )
    text = done.stdout.decode()
    assert text.endswith("\n") and len(text.split()) >= 6
    return text[:-1]


# ---- what it writes


@pytest.mark.parametrize("mode", ["auto", "plain", "chain", "tree"])
def test_text_and_statistics(run: Run, plain_text: str, mode: str) -> None:
    """Every mode writes the same text; stdout holds nothing else, stderr one line of statistics."""
    done = run(*GREEDY, "--mode", mode)
    assert done.code == 0 and done.out == plain_text + "\n"
    shown = {"chain": "chain 15", "tree": "tree 31"}.get(mode, mode)
    assert done.err.count("\n") == 1 and "24 tokens at" in done.err and f"({shown}," in done.err


@pytest.mark.parametrize(
    ("mode", "budget", "offered"),
    [("plain", None, 0), ("chain", None, 15), ("tree", None, 31), ("tree", 7, 7)],
)
def test_json(
    run: Run, plain_text: str, tokenizer: Tokenizer, mode: str, budget: int | None, offered: int
) -> None:
    done = run(*GREEDY, "--mode", mode, "--json", *(["--budget", str(budget)] if budget else []))
    assert done.code == 0 and done.err == ""
    report = json.loads(done.out)
    assert list(report) == FIELDS
    assert report["text"] == plain_text == tokenizer.decode_bytes(report["token_ids"]).decode()
    assert report["prompt_n"] == len(tokenizer.encode(PROMPT, special=False))
    assert report["predicted_n"] == len(report["token_ids"]) == 24
    assert (report["mode"], report["budget"], report["finish_reason"]) == (mode, offered, "length")
    # the prompt's pass gave the first token, and every step one of the target's own beside the accepted ones; but the last
    # may end with a drafted one
    assert report["predicted_n"] - 1 - report["steps"] - report["draft_n_accepted"] in (-1, 0)
    assert report["draft_n"] == offered * report["steps"]
    sources = {source["name"]: source for source in report["sources"]}
    assert set(sources) <= {"dflash", "suffix"} and bool(sources) == (mode != "plain")
    assert sum(source["draft_n_accepted"] for source in sources.values()) >= report["draft_n_accepted"]
    assert report["acceptance_length"] == round((report["predicted_n"] - 1) / report["steps"], 4)
    assert report["acceptance_length"] > 1 or mode == "plain"
    (use,) = report["widths"]
    assert (use["nodes"], use["steps"], use["tokens"]) == (
        offered,
        report["steps"],
        report["predicted_n"] - 1,
    )
    assert list(report["step_ms"]) == ["draft", "tree", "verify", "commit", "host"]
    times = [report["prompt_ms"], report["predicted_ms"], *report["step_ms"].values()]
    assert all(isinstance(ms, float) and ms >= 0 for ms in times)


def test_end_of_text(run: Run, tmp_path: Path) -> None:
    """An end-of-generation token counts but is not text."""
    target, draft = toys.write_pair(tmp_path, seed=2, special_logit=30.0)
    done = run("-m", str(target), "-md", str(draft), "-p", "the", "--temp", "0", "--json")
    report = json.loads(done.out)
    assert done.code == 0 and report["finish_reason"] == "stop" and report["text"] == ""
    assert report["predicted_n"] == 1 and report["steps"] == 0 and report["acceptance_length"] == 0
    assert (report["mode"], report["budget"]) == ("auto", 31)  # what a step could have been
    more = ("--ignore-eos", "-n", "5", "--versus-plain")
    done = run("-m", str(target), "-md", str(draft), "-p", "the", "--temp", "0", "--json", *more)
    report = json.loads(done.out)
    assert (done.code, report["finish_reason"], report["predicted_n"]) == (0, "length", 5)
    assert report["plain_per_second"] > 0


def test_seed(run: Run) -> None:
    texts = [run("-p", PROMPT, "-n", "16", "--temp", "1.5", "-s", seed).out for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_verbose(run: Run) -> None:
    """-v prints the sizes, with --json too, and leaves stdout alone."""
    for flags in (["-v"], ["-v", "--json"]):
        done = run(*GREEDY[:-4], "-p", "x", "-n", "2", *flags)
        assert (
            done.code == 0
            and "target weights" in done.err
            and "MiB" in done.err
            and ", 1 thread\n" in done.err
        )
        # a prefill, one step, and what draft and commit take; every graph was run
        counts = re.search(r"graphs: (\d+) built, (\d+) runs", done.err)
        assert counts and 2 <= int(counts[1]) <= int(counts[2]) and "replayed" not in done.err
        assert "MiB" not in done.out
    assert json.loads(done.out)["predicted_n"] == 2


def test_no_draft(run: Run, alone: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a draft to be found, auto has only prompt lookup, which finds nothing here, and reports so."""
    report = json.loads(run("-m", str(alone), "-p", "x", "-n", "2", "--json").out)
    assert report["mode"] == "auto" and report["draft_n"] == 0 and report["sources"] == []
    assert "no draft beside" in caplog.text and "-md" in caplog.text


def test_a_bad_draft_beside_the_target(
    run: Run, tmp_path: Path, demo_target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was only found: a warning, and plain decoding. A damaged target is reported, not its missing draft."""
    target = tmp_path / "target.gguf"
    target.symlink_to(demo_target)
    (tmp_path / "a-dflash.gguf").write_bytes(b"GGUF nonsense")
    report = json.loads(run("-m", str(target), "-p", "x", "-n", "2", "--json").out)
    assert report["mode"] == "auto" and report["draft_n"] == 0 and "a-dflash.gguf: " in caplog.text
    assert caplog.text.count("decoding without a draft model") == 1
    done = run("-m", str(target), "-p", "x", "--mode", "tree")
    assert done.code == 2 and "mode tree: no draft beside" in done.err and "a-dflash.gguf: " in done.err
    caplog.clear()
    target.unlink()
    target.write_bytes(b"GGUF nonsense")
    done = run("-m", str(target), "-p", "x")
    assert done.code == 2 and "target.gguf: " in done.err and not caplog.text


def test_the_list_of_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--list-pairs"])
    assert end.value.code in (0, None)
    assert "spiritbuun/Qwen3.6-27B-DFlash-GGUF:Q8_0" in capsys.readouterr().out


def test_progress_on_a_terminal() -> None:
    """A bar that is erased at the end; nothing where stderr is no terminal."""
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        meter = Meter(stream)
        meter.bytes("target", 1 << 20, 4 << 20)
        meter.tokens("prefill", 512, 512)
        meter.clear()
    assert "target [######....." in terminal.getvalue() and "1/4 MiB" in terminal.getvalue()
    assert "512/512 tokens" in terminal.getvalue() and terminal.getvalue().endswith("\r\x1b[K")
    assert pipe.getvalue() == ""
    with pytest.raises(KeyboardInterrupt), Meter(terminal) as meter:  # what comes next has a line of its own
        meter.bytes("target", 1, 4)
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("columns", [12, 20, 40, 80])
def test_progress_fits_the_terminal(columns: int) -> None:
    """On a terminal this wide nothing wraps, and what counts is shown."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(side, "w") as stream, Meter(stream) as meter:
        meter.bytes("target weights", 7 << 20, 28 << 20)
        stream.flush()
        text = os.read(main, 4096).decode().strip("\r").removesuffix("\x1b[K")
        meter.tokens("prefill", 128, 512)
        text_too = os.read(main, 4096).decode().strip("\r").removesuffix("\x1b[K")
    os.close(main)
    assert len(text) < columns and "7/28 MiB" in text
    assert len(text_too) < columns and "128/512 tok" in text_too
    assert ("[######..................]" in text) == (columns == 80)


def test_more_threads_than_cores(
    run: Run, thinker: Callable[..., FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """Warned once; an impossible number alone is refused."""
    thinker("x")
    cores = physical_cores()
    run("-p", "x", "-n", "1", "-t", str(cores + 1))
    assert caplog.text.count(f"-t {cores + 1}: here ") == 1
    caplog.clear()
    thinker("x")
    run("-p", "x", "-n", "1", "-t", str(cores))
    assert caplog.text == ""


# ---- where the prompt comes from


def test_prompt_sources(run: Run, tmp_path: Path) -> None:
    """-p, -f, - and a pipe without any flag are the same; line ends and non-ASCII text stay as they are."""
    text = "# Größe → 尺寸\r\nclass Point:\n"
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode())
    short = ["--temp", "0", "-n", "6", "--mode", "plain", "--json"]
    ways = [
        run(*short, "-p", text),
        run(*short, "--prompt", text),
        run(*short, "-f", str(file)),
        run(*short, "-", stdin=text.encode()),
        run(*short, stdin=text.encode()),
        run(*short, "-p", text, stdin=b"not this"),
    ]
    reports = [json.loads(way.out) for way in ways]
    assert all(
        r["token_ids"] == reports[0]["token_ids"] and r["prompt_n"] == reports[0]["prompt_n"] for r in reports
    )


def test_chat(run: Run, tokenizer: Tokenizer) -> None:
    """--chat wraps the prompt in the template, with the system message if there is one."""
    bare, chat, system = (
        json.loads(run("-p", "Write a class.", "-n", "1", "--json", *flags).out)["prompt_n"]
        for flags in ([], ["--chat"], ["--chat", "-sys", "Be brief."])
    )
    assert bare == len(tokenizer.encode("Write a class.")) < chat < system


@pytest.fixture
def thinker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeEngine]:
    """thinker(reply) replaces the program's engine by one with a thinking model, and returns it."""

    def put(reply: str, template: str = TOOL_TEMPLATE) -> FakeEngine:
        engine = FakeEngine(tokenizer=byte_vocabulary(template=template), replies=[reply])
        monkeypatch.setattr(cli.Engine, "load", lambda config, progress: engine)
        return engine

    return put


THOUGHT = "Hm.</think>\n\nYes"
ASK = ["--chat", "-p", "Well?", "--temp", "0"]


def test_thinking_goes_aside_in_a_pipe(run: Run, thinker: Callable[..., FakeEngine]) -> None:
    """Standard output holds the answer alone; the report has both."""
    thinker(THOUGHT)
    done = run(*ASK)
    assert done.code == 0 and done.out == "Yes\n" and done.err.startswith("Hm.\nprompt ")
    thinker(THOUGHT)
    report = json.loads(run(*ASK, "--json").out)
    assert (report["text"], report["reasoning"]) == ("Yes", "Hm.")
    assert list(report) == [FIELDS[0], "reasoning", *FIELDS[1:]]


def test_thinking_is_switched_through_the_template(
    run: Run, thinker: Callable[..., FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    for word, opens in (("on", True), ("off", False), ("auto", True)):
        engine = thinker("</think>" if opens else "Yes")
        run(*ASK, "--think", word)
        assert engine.tokenizer.decode(engine.tokens, special=True).count("<think>\n\n</think>") == (
            not opens
        )
    assert caplog.text == ""
    thinker("Yes", TEMPLATE.replace("enable_thinking", "nothing"))
    run(*ASK, "--think", "off")
    assert caplog.text.count("template knows no such switch") == 1


def shown(engine: FakeEngine) -> str:
    """What the model has read and written."""
    return engine.tokenizer.decode(engine.tokens, special=True)


def test_options_of_chats_and_texts_reach_the_request(run: Run, thinker: Callable[..., FakeEngine]) -> None:
    thinker(THOUGHT)
    assert run(*ASK, "--reasoning-format", "none").out == "Hm.</think>\n\nYes\n"
    engine = thinker("Yes")
    assert run(*ASK, "--chat-template-kwargs", '{"enable_thinking": false}').out == "Yes\n"
    assert "<think>\n\n</think>" in shown(engine)
    engine = thinker("Yes, and no", template="")
    assert run(*ASK, "--chat-template", "chatml", "-r", ", and").out == "Yes\n"
    assert "<|im_start|>user\nWell?<|im_end|>" in shown(engine)
    engine = thinker("Yes")
    run("-p", r"one\ttwo\\n", "-e", "--temp", "0")
    assert shown(engine).startswith("one\ttwo\\n")
    engine = thinker("Yes")
    run("-p", r"one\ttwo", "--temp", "0")
    assert shown(engine).startswith(r"one\ttwo")
    pytest.importorskip("llguidance")
    thinker("Yes")
    assert isinstance(json.loads(run("-p", "x", "--temp", "0", "-j", '{"type": "integer"}').out), int)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-n", "3"], "the limit fell inside the thinking: -n N or --think off"),
        (["-n", "-1"], "the context of 1024 ended inside the thinking: raise -c or --think off"),
    ],
)
def test_the_limit_inside_the_thinking_is_reported_last(
    run: Run, thinker: Callable[..., FakeEngine], flags: list[str], message: str
) -> None:
    thinker("Hm. " * 2000)
    done = run(*ASK, *flags)
    assert done.out == "\n" and done.err.endswith(f"dflash-run: {message}\n")
    thinker(THOUGHT)
    assert "inside the thinking" not in run(*ASK, "-n", "8").err


# ---- what it refuses


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, demo_target: Path) -> Path:
    """The embedded target in a folder without a draft."""
    file = tmp_path_factory.mktemp("alone") / "target.gguf"
    file.symlink_to(demo_target)
    return file


@pytest.fixture(scope="module")
def folder(alone: Path, demo_target: Path, demo_draft: Path) -> Path:
    """Files that are no use, beside `alone`."""
    (alone.parent / "latin1.txt").write_bytes("Größe".encode("latin-1"))
    (alone.parent / "empty.txt").touch()
    (alone.parent / "text.gguf").write_text("This is not a model.")
    (alone.parent / "cut.gguf").write_bytes(demo_target.read_bytes()[:100_000])
    (alone.parent / "draft.gguf").symlink_to(demo_draft)
    return alone.parent


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--bogus"], "--bogus"),
        (["-p"], "-p/--prompt"),
        (["-p", "x", "-n", "many"], "'many'"),
        (["-p", "x", "--mode", "fast"], "'plain', 'chain', 'tree'"),
        (["def f("], "--prompt"),
        ([], "-f FILE"),
        (["-p", ""], "empty"),
        (["-f", "empty.txt"], "empty"),
        (["-p", "x", "-f", "empty.txt"], "one prompt only"),
        (["-f", "nothing.txt"], "nothing.txt: No such file"),
        (["-f", "."], "Is a directory"),
        (["-f", "latin1.txt"], "latin1.txt is not UTF-8 text (byte 2)"),
        (["-p", "a\udcff"], "not UTF-8"),
        (["-p", "x", "-sys", "y"], "--chat"),
        (["-p", "x", "--think", "off"], "--think goes with --chat"),
        (["-p", "x", "--chat", "--think", "maybe"], "'on', 'off', 'auto'"),
        (["-p", "x", "-n", "0"], "-n"),
        (["-p", "x", "-n", "-3"], "-n/--predict/--n-predict: -3 is neither -1 nor a count"),
        (["-p", "x", "--versus-plain", "--mode", "plain"], "nothing to compare"),
        (
            ["-p", "x", "--versus-plain", "-m", "target.gguf", "--spec", "none"],
            "--versus-plain needs a draft",
        ),
        (["-p", "x", "--budget", "0"], "budget: 0 is outside 1..256"),
        (["-p", "x", "--budget", "257"], "budget: 257 is outside 1..256"),
        (["-p", "x", "-c", "-1"], "n_ctx"),
        (["-p", "x", "-b", "-1"], "n_batch"),
        (["-p", "x", "-t", "0"], "n_threads"),
        (["-p", "x", "-t", "99999"], "n_threads: 99999 is outside 1..512"),
        (["-p", "x", "--temp", "nan"], "--temp"),
        (["-p", "x", "-l", "99999+1"], "-l/--logit-bias: 99999 is not a token of this model"),
        (["-p", "x", "--top-p", "1.5"], "--top-p"),
        (["-p", "x", "--min-p", "-1"], "--min-p"),
        (["-p", "x", "-m", "nothing.gguf"], "nothing.gguf does not exist"),
        (["-p", "x", "-md", "nothing.gguf"], "nothing.gguf does not exist"),
        (["-p", "x", "-m", "."], "not a regular file but a folder; name the file in it"),
        (["-p", "x", "-m", ""], "-m: the name is empty"),
        (["-p", "x", "-hf", "nobody/nothing", "-md", "nothing.gguf"], "nothing.gguf does not exist"),
        (["-p", "x", "-hf", "nobody/nothing", "-hfd", "nothing"], "'nothing' does not name a repository"),
        (["-p", "x", "-md", "."], ".safetensors"),
        (["-p", "x", "-m", "text.gguf"], "text.gguf: not a GGUF file"),
        (["-p", "x", "-m", "cut.gguf"], "cut.gguf"),
        (["-p", "x", "-m", "draft.gguf"], "'dflash' is not a target"),
        (["-p", "x", "-md", "target.gguf"], "'qwen35' is not a draft"),
        (["-p", "x", "-m", "target.gguf", "--mode", "tree"], "-md"),
        (["-p", "x", "-m", "target.gguf", "--mode", "chain"], "-md"),
        (
            ["-p", "x = 1\n" * 20, "-c", "32"],
            "tokens leave no room in the context of 32: shorten it or raise -c",
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_refusals(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str
) -> None:
    """One line that names the thing at fault, and exit code 2."""
    monkeypatch.chdir(folder)
    done = run(*flags)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("dflash-run: ") and done.err.count("\n") == 1 and words in done.err


def test_prompt_that_just_fits(run: Run, tokenizer: Tokenizer) -> None:
    """The context may be filled to its last token, and no further."""
    n = len(tokenizer.encode(PROMPT))
    report = json.loads(run("-p", PROMPT, "-c", str(n + 1), "--json").out)
    assert report["predicted_n"] == 1 and report["finish_reason"] == "length"
    done = run("-p", PROMPT, "-c", str(n))
    assert done.code == 2 and f"the prompt's {n} tokens leave no room in the context of {n}: " in done.err


def test_draft_of_another_model(run: Run, toy_pair: tuple[Path, Path]) -> None:
    done = run("-p", "x", "-md", str(toy_pair[1]))
    assert done.code == 2 and toy_pair[1].name in done.err and done.err.count("\n") == 1


def test_model_without_a_chat_template(run: Run, toy_pair: tuple[Path, Path]) -> None:
    done = run("-p", "x", "--chat", "-m", str(toy_pair[0]), "-md", str(toy_pair[1]))
    assert done.code == 2 and "has no chat template; --chat-template gives one" in done.err


def test_nothing_to_read_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a prompt or a pipe it exits with an error instead of waiting."""
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main([]) == 2
    assert "no prompt" in capsys.readouterr().err


# ---- Ctrl-C


class StopAfter:
    """Stands in for Interrupt: asked from the n-th question on."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __enter__(self) -> StopAfter:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    @property
    def asked(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("questions", [0, 1, 2, 4])
def test_interrupted_report(
    run: Run, monkeypatch: pytest.MonkeyPatch, plain_text: str, questions: int
) -> None:
    """An interrupt during the prompt, which is two batches, or the output: what there is so far, marked as cancelled."""
    monkeypatch.setattr(cli, "Interrupt", lambda: StopAfter(questions))
    done = run(*GREEDY, "--json")
    report = json.loads(done.out)
    assert done.code == 130 and report["finish_reason"] == "cancelled"
    assert report["predicted_n"] == len(report["token_ids"]) < 24 and bool(report["token_ids"]) == (
        questions > 1
    )
    assert plain_text.startswith(report["text"]) and list(report) == FIELDS


def test_interrupted_comparison(run: Run, monkeypatch: pytest.MonkeyPatch, plain_text: str) -> None:
    """A Ctrl-C during the plain run for comparison: the output stays, and no comparison is printed."""
    steps = json.loads(run(*GREEDY, "--mode", "tree", "--json").out)["steps"]
    monkeypatch.setattr(cli, "Interrupt", lambda: StopAfter(steps + 4))
    done = run(*GREEDY, "--mode", "tree", "--versus-plain")
    assert done.code == 130 and done.out == plain_text + "\n"
    assert done.err.count("\n") == 1 and "24 tokens at" in done.err


def test_interrupt_while_reading_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends a program that waits for its prompt."""

    class Waiting(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            signal.raise_signal(signal.SIGINT)
            return b"never"

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Waiting()))
    assert main(["-"]) == 130
    assert capsys.readouterr() == ("", "")


# ---- as a process


def start(*flags: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_help() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True, timeout=300)
    assert "usage: dflash-run" in done.stdout and "--budget" in done.stdout and done.stderr == ""


@pytest.mark.parametrize("module", ["cli.run", "cli.chat", "server.cli"])
def test_help_fits_two_screens(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 rows; --help-all has every option, and --help no other than those."""
    monkeypatch.setenv("COLUMNS", "80")
    parser = importlib.import_module(f"dflash_ggml.{module}").build_parser()
    usual, every = parser.format_help(), parser.format_all_help()
    assert usual.count("\n") <= 80 and every.count("\n") > 120
    assert set(re.findall(r"^  (-\S+)", usual, re.MULTILINE)) < set(
        re.findall(r"^  (-\S+)", every, re.MULTILINE)
    )
    assert "--help-all" in usual and "--prompt-keep" not in usual and "--prompt-keep" in every
    for flag in (*parser._usual, "--help-all"):  # a name that the command lacks would show nothing
        assert flag in parser._option_string_actions


def test_interrupt() -> None:
    """Ctrl-C while text streams: what was written stays, one line of statistics, exit code 130."""
    with start("-p", "def f(", "--temp", "0", "-n", "-1", "--mode", "plain") as process:
        assert process.stdout is not None
        first = process.stdout.read(20)  # of some 6,300
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert len(first) == 20 and rest.endswith(b"\n")
    assert err.count(b"\n") == 1 and b"tokens at" in err


def test_reader_that_goes_away() -> None:
    """`dflash-run ... | head -c 10` ends without a word."""
    with start("-p", "def f(", "--temp", "0", "-n", "-1") as process:
        assert process.stdout is not None
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        assert process.wait(300) == 0 and err == b""


@pytest.mark.parametrize(
    ("redirection", "code", "words"),
    [
        ("<&-", 2, "prompt is empty"),
        ("-p x >&-", 1, "standard output is closed"),
        ("-p x >/dev/full", 1, "No space left"),
        ("--version >/dev/full", 1, "No space left"),
        ("--list-pairs >/dev/full", 1, "No space left"),
        ("-p x 2>&-", 0, ""),
    ],
)
def test_standard_streams_closed_or_full(redirection: str, code: int, words: str) -> None:
    line = f'exec "$@" -n 2 {redirection}'
    done = subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND], capture_output=True, check=False, text=True, timeout=300
    )
    assert done.returncode == code and words in done.stderr and done.stderr.count("\n") == (words != "")
