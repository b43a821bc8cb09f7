"""`dflash-chat`: talk to a model in the terminal. Model text on stdout, notes and progress on stderr.

Line editing and history come from the standard library's readline: nothing to install.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..engine.engine import Engine
from ..errors import ConfigError, DflashError, ModelFileError
from ..session.session import Session
from .arguments import (
    Parser,
    add_model_options,
    add_sampling_options,
    check_biases,
    engine_config,
    sampling_params,
)
from .repl import Conversation, Look, Quit
from .report import Meter

HISTORY = Path("~/.dflash_chat_history")
FENCE = '"""'


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="dflash-chat", description="Talk to a model in the terminal; /help lists commands.")
    add = parser.add_argument_group("conversation").add_argument
    add("-sys", "--system", default="", metavar="TEXT", help="system message")
    add(
        "-n",
        "--predict",
        type=int,
        metavar="N",
        help="longest answer in tokens (default: what the context holds)",
    )
    add("--think", dest="thinking", action=argparse.BooleanOptionalAction, help="turn thinking on or off")
    add("--load", metavar="FILE", help="go on with a saved conversation")
    add("--history", type=Path, default=HISTORY, metavar="FILE", help=f"input history (default {HISTORY})")
    add("--no-history", action="store_true", help="keep no input history")
    add("-v", "--verbose", action="store_true", help="log what is loaded")
    add_model_options(parser)
    add_sampling_options(parser)
    return parser


def read_message(read: Callable[[str], str]) -> str:
    """One input: a line, lines joined by a trailing backslash, or a text between triple quotes.

    read(prompt) gives a line without its end; EOFError passes through.
    """
    line = read("> ")
    if line.strip() == FENCE or (line.lstrip().startswith(FENCE) and line.count(FENCE) == 1):
        lines = [line.lstrip()[len(FENCE) :]]
        while FENCE not in (line := read("… ")):
            lines.append(line)
        lines.append(line.partition(FENCE)[0])
        return "\n".join(lines).strip("\n")
    if line.strip().startswith(FENCE) and line.strip().endswith(FENCE) and line.count(FENCE) == 2:
        return line.strip()[len(FENCE) : -len(FENCE)]
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read("… "))
    return "\n".join(lines)


@contextmanager
def line_history(file: Path | None) -> Iterator[None]:
    """Line editing with a history that is kept in `file`."""
    if not sys.stdin.isatty():
        yield
        return
    import readline

    readline.set_history_length(2000)
    if file is not None and file.exists():
        readline.read_history_file(file)
    try:
        yield
    finally:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
            file.chmod(0o600)


def talk(conversation: Conversation, read: Callable[[str], str]) -> None:
    """Read and answer until the end of input or /quit. Ctrl-C drops the line being written."""
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
            with stopping(conversation):
                conversation.say(message)
        except Quit:
            return


@contextmanager
def stopping(conversation: Conversation) -> Iterator[None]:
    """While an answer runs, Ctrl-C stops it; a second one, if it still does not end, leaves the program."""

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        if conversation.stop_asked:
            os._exit(130)
        conversation.stop_asked = True

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def read_line(prompt: str) -> str:
    """A line of standard input; the prompt is shown on terminals only."""
    if sys.stdin.isatty():
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def run(args: argparse.Namespace) -> None:
    """Load the model and talk."""
    if args.predict is not None and args.predict < 1:
        raise ConfigError(f"-n: {args.predict} is below 1")
    sampling_params(args)  # a bad value is told of before anything is loaded
    config = engine_config(args)
    meter = Meter(sys.stderr)
    with meter, Engine.load(config, meter.bytes) as engine:
        meter.clear()
        sampling = sampling_params(args, engine.metadata)
        check_biases(sampling, engine.n_vocab)

        def progress(done: int, total: int) -> None:
            meter.tokens(done, total)
            if done >= total:
                meter.clear()

        conversation = Conversation(
            Session(engine),
            sys.stdout,
            sys.stderr,
            sampling=sampling,
            max_tokens=args.predict,
            system=args.system,
            thinking=args.thinking,
            look=Look("\x1b[2m", "\x1b[22m") if sys.stdout.isatty() else Look(),
            progress=progress,
        )
        if args.load is not None:
            conversation.say(f"/load {args.load}")
        if sys.stdin.isatty():
            draft = engine.config.draft
            drafting = f"draft {draft.name}" if draft else "no draft"
            conversation.note(
                f"{config.model.name}, {drafting}, {engine.n_ctx} tokens of context; /help for help"
            )
        with line_history(None if args.no_history else args.history.expanduser()):
            talk(conversation, read_line)


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 1 failed, 2 bad option or file, 130 interrupted."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(
        format="dflash-chat: %(message)s", level=logging.INFO if args.verbose else logging.WARNING
    )
    try:
        run(args)
    except (ConfigError, ModelFileError) as error:
        print(f"dflash-chat: {error}", file=sys.stderr)
        return 2
    except (DflashError, OSError) as error:
        print(f"dflash-chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
