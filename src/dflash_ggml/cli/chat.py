"""`dflash-chat`: conversation with a model in the terminal. Model output on stdout, notes and progress on stderr.

Line editing and history use the standard library's readline.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
from collections.abc import Callable

from ..engine.engine import Engine
from ..errors import ConfigError
from ..session.session import Session
from . import chat_options as chats
from .arguments import USUAL, add_model_options, engine_config, token_limit, warn_of_threads
from .chat_options import file_text
from .command import run_command
from .interrupt import Interrupt
from .option_table import add_table
from .parser import Parser
from .repl import Conversation, Quit, Save, read_save
from .report import Meter
from .sampling_options import add_sampling_options, check_biases, sampling_params
from .terminal import HISTORY, Keyboard, line_history

FENCE = '"""'
_CONVERSATION = """
-sys --system TEXT text | system message
-sysf --system-prompt-file FILE system | the same from a file
-n --predict --n-predict N limit | most tokens of an answer, -1: as many as the context holds (default)
"""
_FILES = f"""
--load FILE | continue a saved conversation
--history FILE path {HISTORY} | file with the lines typed in earlier sessions (default {HISTORY})
--no-history | save no lines
-v --verbose | log what is loaded
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog="dflash-chat",
        description="Talk to a model in the terminal; /help lists commands.",
        usual=f"-sys -n --think --load -v {USUAL}",
    )
    add = parser.add_argument_group("conversation").add_argument
    add_table(
        add,
        _CONVERSATION,
        limit=token_limit,
        text={"default": ""},
        system={"dest": "system", "type": file_text},
    )
    chats.add_text_options(add)
    chats.add_chat_options(add)
    add_table(add, _FILES)
    add_model_options(parser)
    add_sampling_options(parser)
    return parser


def read_message(read: Callable[[str], str]) -> str:
    """One input: a line, lines joined by a trailing backslash, or a text between triple quotes.

    read(prompt) returns a line without its end; EOFError passes through.
    """
    line = read("> ")
    if line.strip() == FENCE or (line.lstrip().startswith(FENCE) and line.count(FENCE) == 1):
        lines = [line.lstrip()[len(FENCE) :]]
        while FENCE not in (line := read("… ")):
            lines.append(line)
        head, _, tail = line.partition(FENCE)
        lines.append((head + tail).rstrip())  # the rest of the line belongs to the message too
        return "\n".join(lines).strip("\n")
    if line.strip().startswith(FENCE) and line.strip().endswith(FENCE) and line.count(FENCE) == 2:
        return line.strip()[len(FENCE) : -len(FENCE)]
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read("… "))
    return "\n".join(lines)


def talk(conversation: Conversation, read: Callable[[str], str], keyboard: Keyboard) -> None:
    """Read and answer until the end of input or /quit. Ctrl-C discards the current line."""
    while True:
        try:
            message = read_message(read)
        except KeyboardInterrupt:
            conversation.notes.write("\n")
            conversation.note("Ctrl-D or /quit ends the program")
            continue
        except EOFError:
            return
        try:
            with keyboard.quiet(), Interrupt(conversation.stop, keyboard.restore):
                conversation.say(message)
        except Quit:
            return


def read_line(prompt: str) -> str:
    """A line of standard input; the prompt is shown on terminals only."""
    if sys.stdin.isatty():
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _saved(name: str) -> Save:
    """The conversation of --load. Raises ConfigError."""
    try:
        return read_save(name)
    except OSError as error:
        raise ConfigError(f"--load: {name}: {error.strerror}") from None


def run(args: argparse.Namespace) -> int:
    """Load the model and run the conversation; returns the exit code."""
    sampling_params(args)  # check values before loading
    save = None if args.load is None else _saved(args.load)
    config = engine_config(args)
    warn_of_threads(args.threads)
    meter, keyboard = Meter(sys.stderr), Keyboard()
    if isinstance(sys.stdin, io.TextIOWrapper):  # report bytes that are not UTF-8, without exiting
        sys.stdin.reconfigure(errors="surrogateescape")
    for name in (signal.SIGTERM, signal.SIGHUP):  # restore the terminal, and keep the history
        signal.signal(name, lambda signum, frame: sys.exit(128 + signum))
    with meter, contextlib.ExitStack() as loaded:
        with keyboard.quiet():
            engine = loaded.enter_context(Engine.load(config, meter.bytes))
        meter.clear()
        sampling = sampling_params(args, engine.metadata)
        check_biases(sampling, engine.n_vocab)

        session = Session(engine, **chats.session_options(args))
        conversation = Conversation(
            session,
            sys.stdout,
            sys.stderr,
            sampling=sampling,
            max_tokens=args.predict,
            system=args.system,
            thinking=chats.thinking_choice(args.think, session),
            options=chats.text_options(args),
            progress=meter.tokens,
        )
        if save is not None:
            conversation.take(args.load, save)
        if sys.stdin.isatty():
            draft = engine.config.draft
            own = "the target's prediction head" if engine.has_draft else "no draft"
            drafting = f"draft {draft.name}" if draft else own
            conversation.note(
                f"{config.model.name}, {drafting}, {engine.n_ctx} tokens of context; /help for help"
            )
        history = None if args.no_history else args.history.expanduser()
        with line_history(history, conversation.note):
            talk(conversation, read_line, keyboard)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 1 failed, 2 bad option or file, 130 interrupted."""
    return run_command("dflash-chat", build_parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
