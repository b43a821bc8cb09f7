"""Tests of dflash-chat: commands and answers on a toy engine, then the real program on a pseudo-terminal."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.cli.chat import main, read_message
from dflash_ggml.cli.repl import Conversation, Quit
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.decode.sampling_params import OPTIONS
from dflash_ggml.session.session import Session
from reference.fake_engine import TEMPLATE, TOOL_TEMPLATE, FakeEngine, byte_vocabulary
from reference.terminal import Terminal


def conversation(*replies: str, template: str | None = None) -> Conversation:
    vocabulary = byte_vocabulary() if template is None else byte_vocabulary(template=template)
    engine = FakeEngine(tokenizer=vocabulary, replies=list(replies))
    greedy = SamplingParams(temperature=0)
    return Conversation(Session(engine), io.StringIO(), io.StringIO(), sampling=greedy, max_tokens=200)


def notes(chat: Conversation) -> str:
    assert isinstance(chat.notes, io.StringIO)
    text = chat.notes.getvalue()
    chat.notes.truncate(0)
    chat.notes.seek(0)
    return text


def test_answers_build_a_conversation() -> None:
    chat = conversation("hello", "again")
    chat.say("Hi")
    chat.say("//etc is a path")
    assert chat.out.getvalue() == "hello\nagain\n"
    assert [m["content"] for m in chat.messages] == ["Hi", "hello", "/etc is a path", "again"]
    assert "tokens at" in notes(chat)
    chat.say("/stats")
    assert "2 answers" in notes(chat)
    chat.say("/undo")
    assert [m["content"] for m in chat.messages] == ["Hi", "hello"]


def test_options_of_every_request() -> None:
    chat = conversation("hello")
    chat.options = {"ignore_eos": True, "stop": ("lo",)}
    chat.say("Hi")
    assert chat._request().ignore_eos and chat.messages[1]["content"] == "hel"


def test_reasoning_is_kept_apart() -> None:
    chat = conversation("Hm.</think>\n\nYes", template=TOOL_TEMPLATE)
    chat.say("Well?")
    assert (
        chat.messages[1]["content"].strip() == "Yes"
        and chat.messages[1]["reasoning_content"].strip() == "Hm."
    )


def test_commands(tmp_path: Path) -> None:
    chat = conversation("hello")
    chat.say("/system Be brief")
    chat.say("Hi")
    file = tmp_path / "chat.json"
    chat.say(f"/save {file}")
    chat.say("/reset")
    chat.say("/system -")
    assert chat.messages == [] and chat.system == ""
    chat.say(f"/load {file}")
    assert chat.system == "Be brief" and len(chat.messages) == 2
    chat.say("/set temperature 0.5")
    chat.say("/set top_k 3")
    assert (chat.sampling.temperature, chat.sampling.top_k) == (0.5, 3)
    chat.say("/think off")
    assert chat.thinking is False
    chat.say("/tokens")
    assert "of 1024 tokens" in notes(chat)
    with pytest.raises(Quit):
        chat.say("/quit")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/nonsense", "unknown command"),
        ("/save", "file name"),
        ("/load /nonexistent/x.json", "[/nonexistent/x.json: No such file"),
        ("/load /", "[/: Is a directory"),
        ("/save /dev/full", "[No space left"),
        ("h\udcffi", "not UTF-8"),
        ("x" * 2000, "/reset make room"),
        ("/set temperature hot", "not a number"),
        ("/set heat", "NAME is one of max_tokens, temperature"),
        ("/set max_tokens 0", "neither a count nor none"),
        ("/set top_p 7", "top_p"),
        ("/think maybe", "on, off or auto"),
        ("/stats", "nothing has been answered"),
        ("/help", "/system"),
    ],
)
def test_refused_commands_give_a_reason(line: str, words: str) -> None:
    chat = conversation()
    chat.say(line)
    assert words in notes(chat) and chat.messages == []


@pytest.mark.parametrize("data", ["{", "[]", '{"version": 9}', '{"version": 1, "messages": [{"role": "x"}]}'])
def test_bad_saves(tmp_path: Path, data: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(data)
    chat = conversation()
    chat.say(f"/load {file}")
    assert str(file) in notes(chat) and chat.messages == []


def test_failed_question_is_taken_back() -> None:
    chat = conversation()
    chat.say("x" * 5000)
    assert "exceed context window" in notes(chat) and chat.messages == []


def test_stopped_answer_is_kept() -> None:
    chat = conversation()
    chat.sampling = SamplingParams(temperature=1.0, seed=1)
    write = chat._writer.text

    def write_and_stop(text: str) -> None:
        write(text)
        chat.stop_asked = True

    chat._writer.text = write_and_stop  # type: ignore[method-assign]
    chat.say("Go on")
    assert "stopped" in notes(chat) and [m["role"] for m in chat.messages] == ["user", "assistant"]


def test_message_of_many_lines() -> None:
    def read(*lines: str) -> str:
        rest = iter(lines)
        return read_message(lambda prompt: next(rest))

    assert read("one") == "one"
    assert read("one\\", "two\\", "three") == "one\ntwo\nthree"
    assert read('"""', "def f():", "    pass", '"""') == "def f():\n    pass"
    assert read('"""a', 'b"""') == "a\nb"
    assert read('"""a', 'b""" and more  ') == "a\nb and more"
    assert read('"""', "a", '"""  ') == "a"
    assert read('"""a b"""') == "a b"


def test_set_shows_values() -> None:
    chat = conversation()
    chat.say("/set")
    shown = dict(line.split()[:2] for line in notes(chat).splitlines())
    assert set(shown) == {*OPTIONS, "max_tokens"}
    assert (shown["temperature"], shown["seed"], shown["logit_bias"]) == ("0", "random", "none")
    chat.say("/set top_k")
    assert notes(chat) == "[top_k = 40]\n"
    chat.say("/set logit_bias 7+1.5")
    assert notes(chat) == "[logit_bias = 7+1.5]\n"
    chat.say("/set max_tokens  64")
    assert notes(chat) == "[max_tokens = 64]\n" and chat.max_tokens == 64
    chat.say("/set max_tokens none")
    assert chat.max_tokens is None


def test_help_names_every_command() -> None:
    chat = conversation()
    chat.say("/help")
    text = notes(chat)
    assert [name for name in chat._commands() if f"/{name}" not in text] == [] and "//" in text


def test_singular_and_plural() -> None:
    chat = conversation("a", "b")
    chat.say("Hi")
    chat.say("/undo")
    chat.say("Hi")
    chat.say("/stats")
    chat.say("/save /dev/null")
    assert "[0 questions left]" in (text := notes(chat)) and "all: 2 answers" in text
    assert "saved 2 messages" in text and " 1 token at" in text and "1 tokens" not in text


class Screen(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_thinking_is_dimmed_on_a_terminal_and_aside_in_a_pipe() -> None:
    reply = "Hm.\nSo.</think>\n\nYes"
    greedy = SamplingParams(temperature=0)
    for out, err, shown, aside in (
        (Screen(), Screen(), "\x1b[2mHm.\nSo.\x1b[22m\n\nYes\n", ""),
        (io.StringIO(), io.StringIO(), "Yes\n", "Hm.\nSo.\n"),
        (io.StringIO(), Screen(), "Yes\n", "\x1b[2mHm.\nSo.\x1b[22m\n"),
    ):
        engine: Any = FakeEngine(tokenizer=byte_vocabulary(template=TOOL_TEMPLATE), replies=[reply])
        chat = Conversation(Session(engine), out, err, sampling=greedy, max_tokens=200)
        chat.say("Well?")
        assert out.getvalue() == shown and err.getvalue().startswith(aside + "[prompt")


def test_the_limit_inside_the_thinking_is_reported_last() -> None:
    chat = conversation("Hm, let me see.", template=TOOL_TEMPLATE)
    chat.max_tokens = 8
    chat.say("Well?")
    lines = notes(chat).splitlines()
    assert lines[-1] == "[the limit fell inside the thinking: /set max_tokens N or /think off]"
    assert not any("cut:" in line for line in lines)
    chat = conversation("A long answer", template=TOOL_TEMPLATE)
    chat.thinking, chat.max_tokens = False, 4
    chat.say("Well?")
    assert "cut: the token limit" in (text := notes(chat)) and "thinking" not in text


def test_think() -> None:
    chat = conversation(template=TOOL_TEMPLATE)
    for word, choice in (("on", True), ("off", False), ("auto", None)):
        chat.say(f"/think {word}")
        assert chat.thinking is choice
        chat.say("/think")
        assert notes(chat) == f"[thinking: {word}]\n" * 2
    chat = conversation(template=TEMPLATE.replace("enable_thinking", "nothing"))
    chat.say("/think off")
    assert "template knows no switch" in notes(chat)


COMMAND = [
    sys.executable, "-m", "dflash_ggml.cli.chat", "-t", "1", "-ngl", "0", "--mode", "plain", "--temp", "0.9", "-s", "1",
    "-c", "2048",
]  # fmt: skip


def test_on_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C stops an answer, what was typed meanwhile is taken next, and the lines are there in the next session."""
    pytest.importorskip("dflash_ggml.ggml.bindings")
    history = tmp_path / "state" / "history"
    with Terminal(*COMMAND, "--history", str(history)) as terminal:
        terminal.wait_for("/help for help")
        terminal.wait_for("> ")
        terminal.type("def f(\n")
        terminal.wait_for("def f(\r\n")
        while len(terminal.seen) < 40:  # the answer has begun
            terminal.more()
        terminal.type("/set top_k\n/set top_")
        terminal.type("\x03")
        terminal.wait_for("[stopped]", without="/set top")
        terminal.wait_for("> /set top_k\r\n")
        terminal.wait_for("[top_k = 40]")
        terminal.wait_for("> /set top_")
        terminal.type("p\n")
        terminal.wait_for("[top_p = 0.95]")
        terminal.wait_for("> ")
        terminal.wait_for("ends the program", poke=signal.SIGINT)
        terminal.wait_for("> ")  # what is typed before the prompt may be read in another terminal mode
        terminal.type(f"/save {tmp_path / 'chat.json'}\n")
        terminal.wait_for("saved 2 messages")
        terminal.wait_for("> ")
        terminal.type("\x04")
        terminal.rest()
        assert terminal.process.wait(60) == 0
    assert len(json.loads((tmp_path / "chat.json").read_text())["messages"]) == 2
    assert history.read_text().splitlines()[:3] == ["def f(", "/set top_k", "/set top_p"]
    assert history.stat().st_mode & 0o777 == 0o600
    with Terminal(*COMMAND, "--history", str(history), "--load", str(tmp_path / "chat.json")) as terminal:
        terminal.wait_for("loaded 2 messages")
        terminal.wait_for("> ")
        terminal.type("\x1b[A\x1b[A\n")  # up twice: the line before the last
        terminal.wait_for("[top_p = 0.95]")
        terminal.type("/quit\n")
        terminal.rest()
        assert terminal.process.wait(60) == 0
    assert history.read_text().splitlines()[-2:] == ["/set top_p", "/quit"]


def test_the_history_is_bounded_and_no_condition(tmp_path: Path) -> None:
    """Too many lines lose the oldest, another session's stay; a file that cannot be is a note."""
    script = """if True:
        import readline, sys
        from pathlib import Path
        from dflash_ggml.cli import terminal
        sys.stdin.isatty = lambda: True
        terminal.N_LINES = 5
        file = Path(sys.argv[1])
        with terminal.line_history(file, print):
            for i in range(4):
                readline.add_history(f"mine {i}")
            with file.open("a") if file.parent.is_dir() else open("/dev/null", "w") as other:
                other.write("theirs\\n")
    """
    file = tmp_path / "history"
    file.write_text("".join(f"old {i}\n" for i in range(9)))

    def run(file: Path) -> str:
        command = [sys.executable, "-c", script, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert run(file) == ""
    assert file.read_text().splitlines() == ["theirs", *(f"mine {i}" for i in range(4))]
    assert "is not kept" in run(Path("/dev/null/nowhere"))


@pytest.mark.parametrize("content", [None, "{"])
def test_a_conversation_that_cannot_be_continued_is_reported_before_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    file = tmp_path / "chat.json"
    if content is not None:
        file.write_text(content)
    model = tmp_path / "no.gguf"
    model.write_text("would be told of next")
    assert main(["--load", str(file), "-m", str(model)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("dflash-chat: ") and f"{file}: " in printed and "no.gguf" not in printed


def test_standard_output_closed_or_full() -> None:
    for redirection, code, words in (
        (">&-", 1, "standard output is closed"),
        (">/dev/full", 1, "No space left"),
    ):
        line = f'echo Hi | exec "$@" -n 2 {redirection}'
        done = subprocess.run(["sh", "-c", line, "sh", *COMMAND], capture_output=True, text=True, timeout=300)
        assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr


def test_bytes_that_are_no_text_end_nothing() -> None:
    """Where Python reads strictly, as in most locales."""
    pytest.importorskip("dflash_ggml.ggml.bindings")
    line = 'printf "\\377\n/set top_k\n" | PYTHONIOENCODING=utf-8:strict exec "$@"'
    done = subprocess.run(["sh", "-c", line, "sh", *COMMAND], capture_output=True, text=True, timeout=300)
    assert (
        done.returncode == 0 and done.stderr == "[that is not UTF-8 text, and was not taken]\n[top_k = 40]\n"
    )


def test_a_program_that_is_ended_leaves_its_terminal_in_order(tmp_path: Path) -> None:
    """SIGTERM during an answer: what is typed is shown again, and the lines so far are kept."""
    pytest.importorskip("dflash_ggml.ggml.bindings")
    with Terminal(*COMMAND, "--history", str(tmp_path / "history")) as terminal:
        terminal.wait_for("> ")
        terminal.type("def f(\n")
        terminal.wait_for("def f(\r\n")
        while len(terminal.seen) < 40:
            terminal.more()
        assert not terminal.echoes()
        terminal.process.terminate()
        terminal.rest()
        assert terminal.echoes() and terminal.process.returncode == 143
    assert (tmp_path / "history").read_text() == "def f(\n"
