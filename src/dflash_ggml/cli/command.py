"""Common parts of all commands: closed streams, the log on stderr, and errors as one line and an exit code."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from ..errors import ConfigError, ContextOverflowError, DflashError, ModelFileError
from .streams import can_write, end_output


def run_command(
    name: str,
    build_parser: Callable[[], argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
    *,
    writes_output: bool = True,
) -> int:
    """Parse the arguments and run; returns the exit code of `run`, or 1 failed, 2 bad option or file, 130 interrupted.

    The parser must have `--verbose`.

    Args:
        writes_output: Whether the command is of no use with a closed standard output.
    """
    if writes_output and not can_write(name):
        return 1
    args = build_parser().parse_args(argv)
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(format=f"{name}: %(message)s", level=level)
    try:
        return run(args)
    except DflashError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return end_output(name, error)


def exit_code(error: BaseException) -> int:
    """2 for a bad option or file, else 1."""
    return 2 if isinstance(error, (ConfigError, ModelFileError, ContextOverflowError)) else 1
