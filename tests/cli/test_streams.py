"""Tests of errors from broken output streams, and of errors that have nothing to do with streams."""

from __future__ import annotations

import argparse
import errno
import io
import sys

import pytest

from dflash_ggml.bench.sections import Section
from dflash_ggml.bench.terminal import show
from dflash_ggml.cli.command import run_command
from dflash_ggml.cli.run import read_prompt, write_out
from dflash_ggml.cli.writer import Writer


class Full(io.RawIOBase):
    """A device that takes and gives nothing."""

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, room: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def full() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(Full(), 1), write_through=True)


def mapped(args: argparse.Namespace) -> int:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def opened(args: argparse.Namespace) -> int:
    raise OSError(errno.ENOENT, "No such file or directory", "a.gguf")


def answered(args: argparse.Namespace) -> int:
    Writer(full(), io.StringIO()).text("x")
    return 0


def reported(args: argparse.Namespace) -> int:
    write_out("x")
    return 0


def measured(args: argparse.Namespace) -> int:
    show(Section("a", "b", [], []), full())
    return 0


def asked(args: argparse.Namespace) -> int:
    read_prompt(argparse.Namespace(stdin="-", prompt=None, file=None))
    return 0


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (mapped, "Cannot allocate memory"),
        (opened, "a.gguf: No such file or directory"),
        (answered, "standard output: No space left on device"),
        (reported, "standard output: No space left on device"),
        (measured, "standard output: No space left on device"),
        (asked, "standard input: Input/output error"),
    ],
)
def test_only_what_broke_is_named(
    run: object, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parser() -> argparse.ArgumentParser:
        made = argparse.ArgumentParser()
        made.add_argument("--verbose", action="store_true")
        return made

    monkeypatch.setattr(sys, "stdout", full())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Full())))
    assert run_command("dflash-run", parser, run, []) == 1  # type: ignore[arg-type]
    assert capsys.readouterr().err == f"dflash-run: {message}\n"
