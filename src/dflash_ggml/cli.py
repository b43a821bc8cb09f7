"""`dflash-run`: complete one prompt. Text on stdout as it is committed, progress and statistics on stderr."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import get_args

from .config import MAX_BUDGET, EngineConfig, Mode
from .engine import Engine
from .errors import ConfigError, ContextOverflowError, DflashError, ModelFileError
from .loading import EMBEDDED_DRAFT, EMBEDDED_TARGET, draft_beside
from .report import Meter, Run
from .sampling import Sampler, SamplingParams

EXAMPLES = """examples:
  dflash-run --prompt "def fibonacci(n):"
  dflash-run -m Qwen3.5-27B-Q4_K_M.gguf -md Qwen3.5-27B-DFlash.gguf -f task.txt --chat -n 512
  git diff | dflash-run - --chat --json

With no -m the embedded demonstration pair is used: a small model trained on Python source."""


def build_parser() -> argparse.ArgumentParser:
    """The command line; names follow llama.cpp where it has one."""
    p = argparse.ArgumentParser(
        prog="dflash-run", description="Complete a prompt, decoding with DFlash drafts and DDTree verification.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = p.add_argument_group("prompt")
    what.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    what.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    what.add_argument("stdin", nargs="?", choices=["-"], metavar="-", help="read the prompt from standard input")
    what.add_argument("--chat", action="store_true", help="wrap the prompt as a user message in the model's chat template")
    what.add_argument("-sys", "--system", metavar="TEXT", help="system message (with --chat)")
    model = p.add_argument_group("model")
    model.add_argument("-m", "--model", metavar="GGUF", help="target model, arch qwen35 (default: the embedded one)")
    model.add_argument("-md", "--model-draft", metavar="PATH", help="DFlash draft: GGUF, or a safetensors folder (default: found beside the target)")
    model.add_argument("-c", "--ctx-size", type=int, default=4096, metavar="N", help="context window in tokens, 0: as trained (default 4096)")
    model.add_argument("-b", "--batch-size", type=int, default=512, metavar="N", help="tokens per prefill pass (default 512)")
    model.add_argument("-t", "--threads", type=int, metavar="N", help="CPU threads (default: physical cores)")
    model.add_argument("-ngl", "--gpu-layers", type=int, default=-1, metavar="N", help="0: stay on the CPU; else use a GPU when there is one")
    decode = p.add_argument_group("decoding")
    decode.add_argument("-n", "--predict", type=int, default=256, metavar="N", help="tokens to write, -1: until the end (default 256)")
    decode.add_argument("--mode", choices=get_args(Mode), default="auto", help="how to draft (default auto: a tree if there is a draft)")
    decode.add_argument("--budget", type=int, default=31, metavar="B", help=f"tree nodes without the root, 1..{MAX_BUDGET} (default 31)")
    decode.add_argument("--chain-seed", action="store_true", help="put the most likely chain into the tree first")
    sampling = p.add_argument_group("sampling")
    default = SamplingParams()
    sampling.add_argument("--temp", type=float, default=default.temperature, metavar="T", help="temperature, 0: greedy (default %(default)s)")
    sampling.add_argument("--top-k", type=int, default=default.top_k, metavar="K", help="keep the K best, 0: all (default %(default)s)")
    sampling.add_argument("--top-p", type=float, default=default.top_p, metavar="P", help="nucleus, 1: off (default %(default)s)")
    sampling.add_argument("--min-p", type=float, default=default.min_p, metavar="P", help="share of the best, 0: off (default %(default)s)")
    sampling.add_argument("--repeat-penalty", type=float, default=default.repeat_penalty, metavar="R", help="1: off (default)")
    sampling.add_argument("--presence-penalty", type=float, default=default.presence_penalty, metavar="R", help="0: off (default)")
    sampling.add_argument("--frequency-penalty", type=float, default=default.frequency_penalty, metavar="R", help="0: off (default)")
    sampling.add_argument("-s", "--seed", type=int, metavar="N", help="seed of the draws (default: random)")
    out = p.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    out.add_argument("-v", "--verbose", action="store_true", help="print sizes, devices and per-step times")
    return p


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from its one source. Raises ConfigError when there is none, more than one, or it is empty."""
    given = [args.prompt is not None, args.file is not None, args.stdin is not None]
    if sum(given) > 1:
        raise ConfigError("give one prompt only: --prompt, -f or -")
    if args.prompt is not None:
        text = args.prompt
    elif args.file is not None:
        try:
            text = Path(args.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"{args.file}: {getattr(e, 'strerror', None) or 'is not UTF-8 text'}") from e
    elif args.stdin or not sys.stdin.isatty():
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as e:
            raise ConfigError("standard input is not UTF-8 text") from e
    else:
        raise ConfigError("no prompt: give --prompt TEXT, -f FILE, or - for standard input")
    if not text:
        raise ConfigError("the prompt is empty")
    return text


def make_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's configuration; finds the draft when none is named."""
    if args.model is None and args.model_draft is None:
        model, draft = EMBEDDED_TARGET, EMBEDDED_DRAFT
    else:
        model = Path(args.model) if args.model else EMBEDDED_TARGET
        draft = Path(args.model_draft) if args.model_draft else draft_beside(model)
    if draft is None and args.mode == "auto":
        print(f"dflash-run: no draft beside {model}, decoding plainly; name one with -md", file=sys.stderr)
    return EngineConfig(
        model=model, draft=None if args.mode == "plain" else draft, n_ctx=args.ctx_size, n_batch=args.batch_size,
        n_threads=args.threads, n_gpu_layers=args.gpu_layers, mode=args.mode, budget=args.budget, chain_seed=args.chain_seed,
    )


def run(args: argparse.Namespace, stop_asked: list[bool]) -> int:
    """Load, prefill, decode, print; returns the exit code."""
    text = read_prompt(args)
    params = SamplingParams(
        temperature=args.temp, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, repeat_penalty=args.repeat_penalty,
        presence_penalty=args.presence_penalty, frequency_penalty=args.frequency_penalty, seed=args.seed,
    )
    params.validate()
    if args.predict == 0 or args.predict < -1:
        raise ConfigError(f"-n: {args.predict} is neither -1 nor a count")
    if args.system and not args.chat:
        raise ConfigError("-sys goes with --chat")
    meter = Meter(sys.stderr)
    with Engine.load(make_config(args), meter.bytes) as engine:
        meter.clear()
        if args.verbose:
            print(f"device {engine.passes.device.info.description}, {engine.passes.device.n_threads} threads", file=sys.stderr)
        ids = prompt_ids(engine, text, args)
        report = Run(engine, len(ids))
        engine.prefill(ids, progress=meter.tokens, should_stop=lambda: stop_asked[0])
        meter.clear()
        report.prefilled()
        decoder = engine.tokenizer.stream(special=False)
        sampler = Sampler(params, engine.n_vocab)
        if engine.n_tokens == len(ids):
            limit = None if args.predict < 0 else args.predict
            for step in engine.generate(sampler, max_tokens=limit, should_stop=lambda: stop_asked[0]):
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
                for name, size in engine.passes.nbytes.items():
                    print(f"  {name:16} {size / 2**20:9.1f} MiB", file=sys.stderr)
        return 130 if report.finish_reason == "cancelled" else 0


def prompt_ids(engine: Engine, text: str, args: argparse.Namespace) -> list[int]:
    """Token ids of the prompt, through the chat template with --chat."""
    tokenizer = engine.tokenizer
    if args.chat:
        if not tokenizer.chat_template:
            raise ConfigError(f"--chat: {engine.config.model} has no chat template")
        from .chat import ChatTemplate

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
    parser = build_parser()
    args = parser.parse_args(argv)
    logging.basicConfig(format="dflash-run: %(message)s", level=logging.INFO if args.verbose else logging.WARNING)
    stop_asked = [False]

    def on_interrupt(signum, frame):
        if stop_asked[0]:
            os._exit(130)  # asked twice: do not wait for the pass under way
        stop_asked[0] = True

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        return run(args, stop_asked)
    except (ConfigError, ModelFileError, ContextOverflowError) as e:
        print(f"dflash-run: {e}", file=sys.stderr)
        return 2
    except DflashError as e:
        print(f"dflash-run: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # the reader went away; keep the interpreter from complaining when it flushes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        signal.signal(signal.SIGINT, previous)


if __name__ == "__main__":
    sys.exit(main())
