"""dflash-chat: commands and answers on a toy engine, then the real program on a pseudo-terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_ggml.cli.chat import read_message
from dflash_ggml.cli.repl import Conversation, Quit
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.session.session import Session
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary


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
        ("/load /nonexistent/x.json", "No such file"),
        ("/set temperature hot", "not a number"),
        ("/set temperature", "NAME VALUE"),
        ("/set top_p 7", "top_p"),
        ("/think maybe", "on, off or auto"),
        ("/stats", "nothing has been answered"),
        ("/help", "/system"),
    ],
)
def test_refused_commands_say_why(line: str, words: str) -> None:
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
    write = chat.write

    def write_and_stop(text: str) -> None:
        write(text)
        chat.stop_asked = True

    chat.write = write_and_stop  # type: ignore[method-assign]
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
    assert read('"""a b"""') == "a b"


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self.main, side = pty.openpty()
        self.process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, start_new_session=True)
        os.close(side)
        self.seen = ""

    def wait_for(self, text: str, poke: signal.Signals | None = None) -> None:
        """Read until `text` appears after what was waited for before; send `poke` each second until it does.

        A signal that comes after readline's prompt and before its wait for input is only seen at the next one.
        """
        for attempt in range(60):
            while (
                text not in self.seen
                and select.select([self.main], [], [], 0 if poke and not attempt else 1)[0]
            ):
                self.seen += os.read(self.main, 65536).decode("utf-8", "replace")
            if text in self.seen:
                break
            if poke is not None:
                self.process.send_signal(poke)
        assert text in self.seen, f"{text!r} did not come; seen: {self.seen!r}"
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())


def test_on_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("dflash_ggml.ggml.bindings")
    history = tmp_path / "history"
    terminal = Terminal(
        sys.executable, "-m", "dflash_ggml.cli.chat", "-t", "1", "-ngl", "0", "--mode", "plain", "--temp", "0.9",
        "-s", "1", "--history", str(history),
    )  # fmt: skip
    try:
        terminal.wait_for("/help for help")
        terminal.wait_for("> ")
        terminal.type("def f(\n")
        terminal.wait_for("def f(\r\n")
        while len(terminal.seen) < 40:  # the answer has begun
            terminal.seen += os.read(terminal.main, 4096).decode("utf-8", "replace")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("[stopped]")
        terminal.wait_for("> ")
        terminal.wait_for("ends the program", poke=signal.SIGINT)
        terminal.wait_for("> ")  # what is typed before the prompt may be read in another terminal mode
        terminal.type(f"/save {tmp_path / 'chat.json'}\n")
        terminal.wait_for("saved 2 messages")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.main)
    assert len(json.loads((tmp_path / "chat.json").read_text())["messages"]) == 2
    assert "def f(" in history.read_text()
