"""`dflash-run`: complete one prompt. Text on stdout as it is committed, progress and statistics on stderr."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from ..decode.sampling import Sampler
from ..engine.engine import Engine
from ..errors import ConfigError, ContextOverflowError, DflashError, ModelFileError
from .arguments import add_model_options, add_sampling_options, engine_config, sampling_params
from .interrupt import Interrupt
from .report import Meter, Run

EXAMPLES = """examples:
  dflash-run --prompt "def fibonacci(n):"
  dflash-run -m Qwen3.5-27B-Q4_K_M.gguf -md Qwen3.5-27B-DFlash.gguf -f task.txt --chat -n 512
  git diff | dflash-run - --chat --json

With no -m the embedded demonstration pair is used: a small model trained on Python source."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")


def build_parser() -> argparse.ArgumentParser:
    """The command line; names follow llama.cpp where it has one."""
    parser = Parser(
        prog="dflash-run",
        description="Complete a prompt, decoding with DFlash drafts and DDTree verification.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("prompt").add_argument
    add("-p", "--prompt", metavar="TEXT", help="the prompt")
    add("-f", "--file", metavar="FILE", help="read the prompt from a file")
    add(
        "stdin",
        nargs="?",
        metavar="-",
        help="read the prompt from standard input (also without it, from a pipe)",
    )
    add("--chat", action="store_true", help="wrap the prompt as a user message in the model's chat template")
    add("-sys", "--system", metavar="TEXT", help="system message (with --chat)")
    add = parser.add_argument_group("output").add_argument
    add(
        "-n",
        "--predict",
        type=int,
        default=256,
        metavar="N",
        help="tokens to write, -1: until the end (default 256)",
    )
    add("--json", action="store_true", help="print one JSON object instead of streaming text")
    add("-v", "--verbose", action="store_true", help="print the device and the sizes of everything on it")
    add_model_options(parser)
    add_sampling_options(parser)
    return parser


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from its one source. Raises ConfigError when there is none, more than one, or it is empty."""
    if args.stdin not in (None, "-"):
        raise ConfigError(f"{args.stdin!r} is no option: give the prompt with --prompt")
    if sum(source is not None for source in (args.prompt, args.file, args.stdin)) > 1:
        raise ConfigError("give one prompt only: --prompt, -f or -")
    if args.prompt is not None:
        name, data = "--prompt", os.fsencode(args.prompt)
    elif args.file is not None:
        try:
            name, data = args.file, Path(args.file).read_bytes()
        except OSError as e:
            raise ConfigError(f"-f: can't read {args.file}: {e.strerror}") from e
    elif args.stdin or not sys.stdin.isatty():
        name, data = "standard input", sys.stdin.buffer.read()
    else:
        raise ConfigError("no prompt: give --prompt TEXT, -f FILE, or - for standard input")
    if not data:
        raise ConfigError(
            f"the prompt is empty ({name}): give --prompt TEXT, -f FILE, or - for standard input"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise ConfigError(f"{name} is not UTF-8 text (byte {e.start}): convert it first") from e


def run(args: argparse.Namespace) -> int:
    """Load, prefill, decode, print; returns the exit code."""
    text = read_prompt(args)
    params = sampling_params(args)
    if args.predict == 0 or args.predict < -1:
        raise ConfigError(f"-n: {args.predict} is neither -1 nor a count")
    if args.system is not None and not args.chat:
        raise ConfigError("-sys goes with --chat")
    meter = Meter(sys.stderr)
    with Engine.load(engine_config(args), meter.bytes) as engine:
        meter.clear()
        ids = prompt_ids(engine, text, args)
        if len(ids) >= engine.n_ctx:
            raise ContextOverflowError(
                f"the prompt's {len(ids)} tokens leave no room in the context of {engine.n_ctx}: shorten it or raise -c"
            )
        limit = None if args.predict < 0 else args.predict
        with Interrupt() as interrupt:
            report = Run(engine, len(ids))
            engine.prefill(ids, progress=meter.tokens, should_stop=lambda: interrupt.asked)
            meter.clear()
            report.prefilled()
            decoder = engine.tokenizer.stream(special=False)
            if engine.n_tokens == len(ids):
                sampler = Sampler(params, engine.n_vocab)
                for step in engine.generate(sampler, max_tokens=limit, should_stop=lambda: interrupt.asked):
                    report.add(step, decoder.feed(step.tokens))
                    if not args.json:
                        write_out(report.pieces[-1])
            else:
                report.finish_reason = "cancelled"
            report.pieces.append(decoder.flush())
        if args.json:
            write_out(json.dumps(report.as_dict(), ensure_ascii=False) + "\n")
        else:
            write_out(report.pieces[-1] + "\n")
            print(report.line(), file=sys.stderr)
        if args.verbose:
            print(
                f"{engine.device.info.description}, {engine.device.n_threads} threads",
                file=sys.stderr,
            )
            for name, size in engine.nbytes.items():
                print(f"  {name:16} {size / 2**20:9.1f} MiB", file=sys.stderr)
            counts = engine.run_counts()
            print(f"  {counts['graphs']} graphs built, {counts['runs']} runs of them", file=sys.stderr)
        return 130 if report.finish_reason == "cancelled" else 0


def prompt_ids(engine: Engine, text: str, args: argparse.Namespace) -> list[int]:
    """Token ids of the prompt, through the chat template with --chat."""
    tokenizer = engine.tokenizer
    if args.chat:
        if not tokenizer.chat_template:
            raise ConfigError(f"--chat: {engine.config.model} has no chat template")
        from ..text.template import ChatTemplate

        messages = [{"role": "system", "content": args.system}] if args.system else []
        messages.append({"role": "user", "content": text})
        text = ChatTemplate(tokenizer.chat_template).render(messages)
        return tokenizer.encode(text, special=True)
    ids = tokenizer.encode(text, special=False)
    return [tokenizer.bos_id, *ids] if tokenizer.add_bos and tokenizer.bos_id is not None else ids


def write_out(text: str) -> None:
    """Text to stdout as UTF-8, at once."""
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 1 failed, 2 bad option or file, 130 interrupted."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, mode))
    args = build_parser().parse_args(argv)
    logging.basicConfig(
        format="dflash-run: %(message)s", level=logging.INFO if args.verbose else logging.WARNING
    )
    try:
        return run(args)
    except (ConfigError, ModelFileError, ContextOverflowError) as e:
        print(f"dflash-run: {e}", file=sys.stderr)
        return 2
    except DflashError as e:
        print(f"dflash-run: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as e:
        # keep the interpreter from complaining again when it flushes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(e, BrokenPipeError):  # the reader has seen enough
            return 0
        print(f"dflash-run: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
