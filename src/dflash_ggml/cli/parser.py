"""Argument parser of all commands, and options that print something and exit."""

from __future__ import annotations

import argparse
import importlib.metadata as distributions
import sys
from typing import Any, NoReturn

from ..files.pairs import pairs_table
from .llama_cpp import SWITCHES, join_states
from .streams import end_output, named


class Parser(argparse.ArgumentParser):
    """Parser that reports errors in one line, without usage. Options without effect do not consume the next word.

    Args:
        usual: Flags shown by `--help`, space-separated; `--help-all` shows all. Without it `--help` shows all.
    """

    def __init__(self, *args: Any, usual: str = "", **more: Any) -> None:
        super().__init__(*args, **more)
        self._usual = frozenset(usual.split())
        if usual:
            self._usual |= {"--help", "--help-all", "--version"}
            self.add_argument("--help-all", action=HelpAll, nargs=0, help="show all options and exit")

    def format_help(self) -> str:
        """The help of the usual options."""
        if not self._usual:
            return super().format_help()
        rare = [a for a in self._actions if a.option_strings and self._usual.isdisjoint(a.option_strings)]
        helps, usage = [action.help for action in rare], self.usage
        for action in rare:
            action.help = argparse.SUPPRESS
        self.usage = "%(prog)s [options]"
        try:
            return super().format_help()
        finally:
            self.usage = usage
            for action, shown in zip(rare, helps):
                action.help = shown

    def format_all_help(self) -> str:
        """The help with every option."""
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None, **more: Any) -> Any:
        """As argparse's, which would consume any word as the value of `-fa`."""
        words = list(sys.argv[1:] if args is None else args)
        knows = any(name in self._option_string_actions for name in SWITCHES)
        return super().parse_known_args(join_states(words) if knows else words, namespace, **more)

    def _get_option_tuples(self, option_string: str) -> Any:
        """Disable abbreviations: an unknown `-cram 8192` would be parsed as `-c ram`."""
        if not self._negative_number_matcher.match(option_string) and " " not in option_string:
            near = [name for name in self._option_string_actions if name.startswith(option_string)]
            meant = f" (did you mean {near[0]}?)" if near and option_string.startswith("--") else ""
            self.error(f"unrecognized arguments: {option_string}{meant}")
        return []

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and a one-line message."""
        flag = "--help-all" if self._usual else "--help"
        self.exit(2, f"{self.prog}: {message}; {flag} lists the options\n")


class HelpAll(argparse.Action):
    """`--help-all`: every option."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        """Print them and exit."""
        assert isinstance(parser, Parser)
        _print_and_leave(parser, parser.format_all_help().rstrip("\n"))


class Version(argparse.Action):
    """`--version`: versions of the package and its ggml, loaded on demand."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        """Print it and exit."""
        from ..ggml.bindings import ffi, lib

        ggml = ffi.string(lib.ggml_version()).decode()
        _print_and_leave(
            parser, f"{parser.prog} {distributions.version('dflash-ggml')} (ggml {ggml}, patched)"
        )


class ListPairs(argparse.Action):
    """`--list-pairs`: the published targets and their drafts."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        """Print them and exit."""
        _print_and_leave(parser, pairs_table())


def _print_and_leave(parser: argparse.ArgumentParser, text: str) -> NoReturn:
    """Print and exit with code 0, or 1 if standard output cannot be written."""
    code = 0
    try:
        with named():
            print(text, flush=True)
    except OSError as error:
        code = end_output(parser.prog, error)
    parser.exit(code)
