"""Options of llama.cpp's programs that change no answer here: command lines that were written for those run as they are.

What would change the text, the model or who may ask (templates, adapters, keys, positions) is not among them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

# Memory mapping, devices and threads that are chosen here, logs, and what is always on.
FLAGS = (
    "--jinja", "--mmap", "--no-mmap", "--mlock", "-kvo", "--kv-offload", "-nkvo", "--no-kv-offload", "--swa-full",
    "--repack", "-nr", "--no-repack", "--no-host", "--op-offload", "--no-op-offload", "--warmup", "--no-warmup",
    "-cb", "--cont-batching", "-nocb", "--no-cont-batching", "-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified",
    "--no-context-shift", "--metrics", "--slots", "--props", "--ui", "--webui", "--check-tensors", "--perf",
    "--no-perf", "--log-disable", "--log-prefix", "--no-log-prefix", "--log-timestamps", "--no-log-timestamps",
)  # fmt: skip
VALUES = (
    "-ub", "--ubatch-size", "-tb", "--threads-batch", "-td", "--threads-draft", "-tbd", "--threads-batch-draft",
    "--prio", "--poll", "--numa", "-sm", "--split-mode", "-ts", "--tensor-split", "-ngld", "--gpu-layers-draft",
    "--n-gpu-layers-draft", "-cd", "--ctx-size-draft", "-ctxcp", "--ctx-checkpoints", "-lv", "--verbosity",
    "--log-verbosity", "--log-colors", "--draft-min", "--draft-n-min", "--draft-p-min", "--draft-p-split",
)  # fmt: skip
SWITCHES = ("-fa", "--flash-attn")  # one of STATES or nothing behind them
STATES = ("on", "off", "auto", "1", "0", "true", "false", "enabled", "disabled")


class _Noted(argparse.Action):
    """Remembers that the option was there."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        namespace.no_effect = [*getattr(namespace, "no_effect", ()), option]


def add_no_effect(parser: argparse.ArgumentParser) -> None:
    """Accept the options; those that were given stand in `no_effect` of what is parsed, if any were."""
    hidden: dict[str, Any] = {"action": _Noted, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for names, count in ((FLAGS, 0), (VALUES, None)):
        for name in _free(parser, names):
            parser.add_argument(name, nargs=count, **hidden)
    for name in _free(parser, SWITCHES):
        parser.add_argument(name, nargs="?", type=_state, **hidden)


def join_states(words: Sequence[str]) -> list[str]:
    """The command line with `-fa on` as `-fa=on`, and `-fa` before any other word as `-fa=`, which leaves that word alone."""
    joined: list[str] = []
    for i, word in enumerate(words):
        if word == "--":
            return [*joined, *words[i:]]
        if joined and joined[-1].removesuffix("=") in SWITCHES and word.lower() in STATES:
            joined[-1] += word
        else:
            joined.append(f"{word}=" if word in SWITCHES else word)
    return joined


def _state(word: str) -> str:
    if word and word.lower() not in STATES:
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(STATES)}")
    return word


def _free(parser: argparse.ArgumentParser, names: Sequence[str]) -> list[str]:
    """Names that the command does not use itself."""
    return [name for name in names if name not in parser._option_string_actions]
