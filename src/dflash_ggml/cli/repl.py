"""The conversation of `dflash-chat`: messages, streamed answers, slash commands. No terminal code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from ..decode.sampling_params import SamplingParams
from ..errors import ConfigError, ContextOverflowError, DflashError
from ..session.answer import Answer
from ..session.events import Usage
from ..session.requests import ChatRequest
from ..session.session import Session, run_chat
from .chat_options import THINKING
from .sampling_options import ABOUT, parse_option
from .wording import count
from .writer import Writer, write_answer

HELP = """Write a message and press Enter. A line that ends in \\ continues on the next; \"\"\" begins and ends several lines.
Ctrl-C stops the answer, Ctrl-D ends the program.

/system [TEXT]       set the system message; without TEXT show it, "/system -" removes it
/reset               forget the conversation (the system message stays)
/undo                remove the last question and its answer
/save FILE           write the conversation as JSON
/load FILE           replace it by a saved one
/think on|off|auto   set the model's thinking; alone it shows the setting
/set                 show all sampling options; /set NAME shows one, /set NAME VALUE sets it: /set temperature 0.2
                     /set max_tokens N limits an answer; "none": up to the end of the context
/tokens              show how full the context is
/stats               show speed and acceptance, of the last answer and of all
/help                show this help
/quit                end the program, as /exit does

A message that begins with a slash is written with two: //etc is a path. What is typed during an answer is read next."""

SAVE_VERSION = 1
Save = tuple[str, list[dict[str, Any]]]  # system message, messages


class Quit(Exception):
    """The user wants to quit."""


def totals_line(usages: Sequence[Usage]) -> str:
    """The totals over all answers of a session in one line."""
    tokens, steps = sum(u.predicted_n for u in usages), sum(u.steps for u in usages)
    drafted, accepted = sum(u.draft_n for u in usages), sum(u.draft_n_accepted for u in usages)
    ms = sum(u.predicted_ms for u in usages)
    speed = 1e3 * tokens / ms if ms else 0.0
    per_step = 1.0 + accepted / steps if steps else 0.0
    return (
        f"{count(len(usages), 'answer')}, {count(tokens, 'token')} at {speed:.1f}/s, {per_step:.2f} per step, "
        f"{accepted} of {count(drafted, 'candidate')} accepted"
    )


def answer_line(usage: Usage) -> str:
    """One answer's speed and acceptance in one line."""
    mode = f"{usage.mode} {usage.budget}" if usage.mode == "tree" else usage.mode
    return (
        f"prompt {count(usage.prompt_n, 'token')} ({usage.cached_n} cached), {count(usage.predicted_n, 'token')} at "
        f"{usage.predicted_per_second:.1f}/s, {usage.tokens_per_step:.2f} per step ({mode})"
    )


@dataclass
class Conversation:
    """One conversation with a model. Text goes to `out`, everything else to `notes`."""

    session: Session
    out: TextIO
    notes: TextIO
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    system: str = ""
    thinking: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request
    progress: Callable[[str, int, int], object] = lambda stage, done, total: None
    messages: list[dict[str, Any]] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)  # one per answer
    stop_asked: bool = False

    def __post_init__(self) -> None:
        self._writer = Writer(self.out, self.notes)

    def say(self, line: str) -> None:
        """Handle one input: a slash command or a message.

        Raises:
            Quit: The user wants to quit.
        """
        text = line.strip()
        if not text:
            return
        try:
            line.encode()
        except UnicodeEncodeError:  # invalid bytes arrive as lone surrogates
            self.note("that is not UTF-8 text, and was not taken")
            return
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text[1:].partition(" ")
            command = self._commands().get(name)
            if command is None:
                self.note(f"unknown command /{name}; /help lists them, // begins a message with a slash")
                return
            try:
                command(argument.strip())
            except OSError as error:
                self.note(": ".join(part for part in (error.filename, error.strerror) if part))
            except DflashError as error:
                self.note(str(error))
            return
        self.answer(text[1:] if text.startswith("//") else line)

    def answer(self, text: str) -> None:
        """Stream the model's answer; on failure the message is removed again."""
        self.messages.append({"role": "user", "content": text})
        self.stop_asked = False
        try:
            answer = self._stream()
        except DflashError as error:
            self.messages.pop()
            is_full = isinstance(error, ContextOverflowError)
            self.note(
                f"{error}; /undo and /reset make room, -c at the start gives more" if is_full else str(error)
            )
            return
        reply: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            reply["reasoning_content"] = answer.reasoning
        self.messages.append(reply)

    def _stream(self) -> Answer:
        events = run_chat(self.session, self._request(), should_stop=lambda: self.stop_asked)
        answer = write_answer(events, self._writer, self.progress)
        usage, finish = answer.done()
        self.usages.append(usage)
        is_cut = finish.reason == "length"
        in_thinking = bool(answer.reasoning) and not answer.text
        if is_cut and not in_thinking:
            self.note("cut: the token limit or the end of the context was reached")
        elif finish.reason == "cancelled":
            self.note("stopped")
        self.note(answer_line(usage))
        if is_cut and in_thinking:
            self.note("the limit fell inside the thinking: /set max_tokens N or /think off")
        return answer

    def stop(self) -> None:
        """Stop the running answer at its next step."""
        self.stop_asked = True

    def _request(self) -> ChatRequest:
        head = [{"role": "system", "content": self.system}] if self.system else []
        # reasoning of earlier turns is kept; the template decides whether the model sees it
        return ChatRequest(
            messages=[*head, *self.messages],
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            enable_thinking=self.thinking,
            **self.options,
        )

    def note(self, text: str) -> None:
        """A line about the conversation."""
        self.notes.write(f"[{text}]\n" if "\n" not in text else f"{text}\n")
        self.notes.flush()

    def take(self, name: str, save: Save) -> None:
        """Continue a saved conversation from a file."""
        self.system, self.messages = save
        self.note(f"loaded {count(len(self.messages), 'message')} from {name}")

    # ---- commands

    def _commands(self) -> Mapping[str, Callable[[str], None]]:
        own = ("system", "reset", "undo", "save", "load", "think", "set", "tokens", "stats", "quit")
        named = {name: getattr(self, f"_{name}") for name in own}
        return {**named, "help": lambda _: self.note(HELP), "exit": self._quit}

    def _system(self, text: str) -> None:
        if text == "-":
            self.system = ""
        elif text:
            self.system = text
        self.note(f"system message: {self.system}" if self.system else "no system message")

    def _reset(self, _: str) -> None:
        self.messages.clear()
        self.note("the conversation is empty")

    def _undo(self, _: str) -> None:
        del self.messages[-2:]
        self.note(f"{count(len(self.messages) // 2, 'question')} left")

    def _save(self, name: str) -> None:
        if not name:
            raise ConfigError("/save needs a file name")
        data = {"version": SAVE_VERSION, "system": self.system, "messages": self.messages}
        Path(name).expanduser().write_text(json.dumps(data, ensure_ascii=False, indent=1), encoding="utf-8")
        self.note(f"saved {count(len(self.messages), 'message')} to {name}")

    def _load(self, name: str) -> None:
        if not name:
            raise ConfigError("/load needs a file name")
        self.take(name, read_save(name))

    def _think(self, word: str) -> None:
        if word:
            if word not in THINKING:
                raise ConfigError("/think on, off or auto")
            self.thinking = THINKING[word]
        if self.thinking is not None and not self.session.can_switch_thinking:
            self.note("this model's chat template knows no switch for thinking, the model decides")
        self.note(f"thinking: {next(w for w, choice in THINKING.items() if choice is self.thinking)}")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        value = value.strip()
        known = {"max_tokens": "longest answer", **ABOUT}
        if name and name not in known:
            raise ConfigError(f"/set NAME VALUE, where NAME is one of {', '.join(known)}")
        if not name:
            width = max(map(len, known))
            self.note("\n".join(f"{n:{width}}  {self._shown(n):<8} {about}" for n, about in known.items()))
            return
        if value and name == "max_tokens":
            self._set_limit(value)
        elif value:
            try:
                number = parse_option(name, value)
            except ValueError:
                raise ConfigError(f"{name}: {value!r} is not a number of its kind") from None
            changed = replace(self.sampling, **{name: number})
            changed.validate()
            self.sampling = changed
        self.note(f"{name} = {self._shown(name)}")

    def _set_limit(self, value: str) -> None:
        if value != "none" and not (value.isascii() and value.isdigit() and int(value)):
            raise ConfigError(f"max_tokens: {value!r} is neither a count nor none")
        self.max_tokens = None if value == "none" else int(value)

    def _shown(self, name: str) -> str:
        value = self.max_tokens if name == "max_tokens" else getattr(self.sampling, name)
        if isinstance(value, Mapping):
            return ",".join(f"{token}{bias:+g}" for token, bias in value.items()) or "none"
        if value is None:
            return "random" if name == "seed" else "none"
        return str(value)

    def _tokens(self, _: str) -> None:
        used = self.session.count_tokens(self._request()) if self.messages or self.system else 0
        self.note(f"{used} of {self.session.engine.n_ctx} tokens")

    def _stats(self, _: str) -> None:
        if not self.usages:
            self.note("nothing has been answered yet")
            return
        self.note(f"last: {answer_line(self.usages[-1])}")
        self.note(f"all: {totals_line(self.usages)}")

    def _quit(self, _: str) -> None:
        raise Quit


def read_save(name: str) -> Save:
    """System message and messages of a saved conversation.

    Raises:
        ConfigError: The file is not a saved conversation; the message names the fault.
        OSError: It cannot be read.
    """
    try:
        data = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{name}: not a saved conversation: {error}") from None
    if not isinstance(data, dict) or data.get("version") != SAVE_VERSION:
        raise ConfigError(f"{name}: not a conversation saved by this version")
    system, messages = data.get("system", ""), data.get("messages")
    if not isinstance(system, str) or not isinstance(messages, list):
        raise ConfigError(f"{name}: system must be text and messages a list")
    for i, message in enumerate(messages):
        whole = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not whole or message.get("role") not in ("user", "assistant"):
            raise ConfigError(f"{name}: messages[{i}] is not a message of the user or the assistant")
    return system, messages
