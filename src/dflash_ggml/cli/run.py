"""The command `dflash-run`: complete one prompt. Text on stdout as it is committed, progress and statistics on stderr."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..decode.sampling_params import SamplingParams
from ..engine.engine import Engine
from ..errors import ConfigError, ContextOverflowError
from ..session.events import Event
from ..session.hooks import Hooks
from ..session.prompts import Prepared
from ..session.requests import ChatRequest, CompletionRequest
from ..session.session import Session, run_chat, run_completion
from . import chat_options as chats
from .arguments import USUAL, add_model_options, engine_config, token_limit, warn_of_threads
from .chat_options import file_text
from .command import run_command
from .interrupt import Interrupt
from .option_table import add_table
from .parser import Parser
from .report import Meter, Report, Steps, sizes
from .sampling_options import add_sampling_options, check_biases, sampling_params
from .streams import named, write_out
from .versus import compared, decode_again, versus_line
from .writer import Writer, write_answer

EXAMPLES = """examples:
  dflash-run --prompt "def fibonacci(n):"
  dflash-run -m Qwen3.5-27B-Q4_K_M.gguf -md Qwen3.5-27B-DFlash.gguf -f task.txt --chat -n 512
  git diff | dflash-run - --chat --json

With no -m the embedded demonstration pair is used: a small model trained on Python source."""

# tables of options, see `add_table`
_PROMPT = """
--chat | wrap the prompt as a user message in the model's chat template; thinking is shown dimmed, or on stderr
-sys --system TEXT | system message (with --chat)
-sysf --system-prompt-file FILE system | the same from a file
-e --escape | interpret escapes in --prompt, such as \\n for a new line
"""
_OUTPUT = """
--json | print one JSON object instead of streaming text
--versus-plain | decode the same again plainly, alternating for short runs, and print the speed-up in a line
-v --verbose | print widths that auto chose, device, memory plan
"""
_USUAL = f"-p -f --chat -sys --think -n -j --json -v {USUAL}"
_SOURCES = "give --prompt TEXT, -f FILE, or - for standard input"
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
ESCAPE = re.compile(r"""\\([nrt'"\\])""")


def build_parser() -> argparse.ArgumentParser:
    """The command line, with llama.cpp's names where it has one."""
    parser = Parser(
        prog="dflash-run",
        description="Complete a prompt, decoding with DFlash drafts and DDTree verification.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usual=_USUAL,
    )
    add = parser.add_argument_group("prompt").add_argument
    add_table(add, "-p --prompt TEXT | the prompt\n-f --file FILE | read the prompt from a file")
    where = "read the prompt from standard input (also without it, from a pipe)"
    add("stdin", nargs="?", metavar="-", help=where)
    add_table(add, _PROMPT, system={"dest": "system", "type": file_text})
    chats.add_chat_options(add)
    add = parser.add_argument_group("output").add_argument
    add_table(
        add,
        "-n --predict --n-predict N limit 256 | tokens to write, -1: until the end (default 256)",
        limit=token_limit,
    )
    chats.add_text_options(add)
    add_table(add, _OUTPUT)
    add_model_options(parser)
    add_sampling_options(parser)
    return parser


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt, from --prompt, -f or standard input.

    Raises:
        ConfigError: There is none, more than one, or it is empty.
    """
    if args.stdin not in (None, "-"):
        raise ConfigError(f"{args.stdin!r} is not an option: give the prompt with --prompt")
    if sum(source is not None for source in (args.prompt, args.file, args.stdin)) > 1:
        raise ConfigError("give one prompt only: --prompt, -f or -")
    if args.prompt is not None:
        text = ESCAPE.sub(lambda m: ESCAPES[m[1]], args.prompt) if args.escape else args.prompt
        name, data = "--prompt", os.fsencode(text)
    elif args.file is not None:
        try:
            name, data = args.file, Path(args.file).read_bytes()
        except OSError as e:
            raise ConfigError(f"-f: can't read {args.file}: {e.strerror}") from e
    elif args.stdin or not sys.stdin.isatty():
        with named("standard input"):
            name, data = "standard input", sys.stdin.buffer.read()
    else:
        raise ConfigError(f"no prompt: {_SOURCES}")
    if not data:
        raise ConfigError(f"the prompt is empty ({name}): {_SOURCES}")
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise ConfigError(f"{name} is not UTF-8 text (byte {e.start}): convert it first") from e


def run(args: argparse.Namespace) -> int:
    """Load, prefill, decode, print; returns the exit code."""
    text = read_prompt(args)
    sampling_params(args)  # check values before loading
    if args.system is not None and not args.chat:
        raise ConfigError("-sys goes with --chat")
    if args.think != "auto" and not args.chat:
        raise ConfigError("--think goes with --chat")
    if args.versus_plain and args.mode == "plain":
        raise ConfigError("--versus-plain: there is nothing to compare with --mode plain")
    warn_of_threads(args.threads)
    meter = Meter(sys.stderr)
    with meter, Engine.load(engine_config(args), meter.bytes) as engine:
        meter.clear()
        params = sampling_params(args, engine.metadata)
        if args.versus_plain and params.seed is None:
            params = replace(params, seed=secrets.randbits(32))  # the same random draws in both
        check_biases(params, engine.n_vocab)
        if args.versus_plain and not engine.sources:
            raise ConfigError("--versus-plain needs a draft (-md)")
        session = Session(engine, cache_bytes=0, **chats.session_options(args))
        steps = Steps()
        prepared = prepare(session, text, args, params)
        start = run_chat if args.chat else run_completion
        with Interrupt() as interrupt:
            hooks = Hooks(on_step=steps.add)
            writer = None if args.json else Writer(sys.stdout, sys.stderr)
            asked = start(session, prepared, hooks=hooks, should_stop=lambda: interrupt.asked)
            with closing(asked) as events:
                report = follow(events, steps, meter, writer, args.chat)
            cancelled = report.finish_reason == "cancelled"
            if not args.json:
                print(report.line(), file=sys.stderr)
            plain, rounds = None, list[float]()
            if args.versus_plain and not cancelled:
                how = meter, lambda: interrupt.asked
                plain = decode_again(session, prepared, len(steps.token_ids), *how)
                if plain is not None and report.usage.steps:
                    rounds = compared(session, prepared, report.usage.predicted_ms, plain, *how)
                cancelled = interrupt.asked or plain is None
        if args.json:
            speed: dict[str, Any] = {} if plain is None else {"plain_per_second": round(plain.per_second, 2)}
            if rounds:
                speed["times_plain"] = [round(ratio, 3) for ratio in rounds]
            write_out(json.dumps(report.as_dict() | speed, ensure_ascii=False) + "\n")
        if args.verbose:
            print(*report.drafts(), *report.choices(), *sizes(engine), sep="\n", file=sys.stderr)
        if plain is not None and not args.json:
            print(versus_line(report, plain, session, rounds), file=sys.stderr)
        if report.is_cut_in_thinking and not args.json:
            more = "the limit fell inside the thinking: -n N"
            if args.predict is None or report.usage.predicted_n < args.predict:
                more = f"the context of {engine.n_ctx} ended inside the thinking: raise -c"
            print(f"dflash-run: {more} or --think off", file=sys.stderr)
        return 130 if cancelled else 0


def prepare(session: Session, text: str, args: argparse.Namespace, params: SamplingParams) -> Prepared:
    """The rendered and tokenised request: a continuation of the prompt, or with --chat an answer to it.

    Args:
        text: The prompt.
        params: Sampling parameters.

    Raises:
        ConfigError: The model has no chat template, or the prompt cannot be rendered.
        ContextOverflowError: The prompt fills the context.
    """
    options: dict[str, Any] = {"sampling": params, "max_tokens": args.predict, **chats.text_options(args)}
    tokenizer = session.tokenizer
    request: ChatRequest | CompletionRequest
    if args.chat:
        if session.templates.source is None:
            model = session.engine.config.model
            raise ConfigError(f"--chat: {model} has no chat template; --chat-template gives one")
        messages = [{"role": "system", "content": args.system}] if args.system else []
        messages.append({"role": "user", "content": text})
        thinking = chats.thinking_choice(args.think, session)
        request = ChatRequest(messages=messages, enable_thinking=thinking, **options)
    else:
        # as ids, so that control tokens in the text stay text
        ids = [*tokenizer.bos_ids, *tokenizer.encode(text, special=False)]
        request = CompletionRequest(prompt=ids, **options)
    try:
        return session.prepare(request)
    except ContextOverflowError:
        n, n_ctx = session.count_tokens(request), session.engine.n_ctx
        message = f"the prompt's {n} tokens leave no room in the context of {n_ctx}: shorten it or raise -c"
        raise ContextOverflowError(message) from None


def follow(
    events: Iterable[Event], steps: Steps, meter: Meter, writer: Writer | None, is_chat: bool = False
) -> Report:
    """Show progress, stream text and reasoning, and report.

    Args:
        events: Events of the answer.
        steps: Collects the engine's steps.
        meter: Shows the progress.
        writer: Destination of the answer; None: none.
        is_chat: Whether to report the reasoning too.
    """
    answer = write_answer(events, writer, meter.tokens)
    meter.clear()
    usage, finish = answer.done()
    return Report(answer.text, finish.reason, usage, steps, answer.reasoning if is_chat else None)


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 1 failed, 2 bad option or file, 130 interrupted."""
    return run_command("dflash-run", build_parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
