"""Tests of options that are defined by tables."""

from __future__ import annotations

import argparse

import pytest

from dflash_ggml.cli.option_table import add_table, entries

TABLE = """
-c --ctx-size N int 0 | context in tokens,
    0: as trained
--ratio X float 0.5 | a share | or more
--mode _ mode auto | one of two
--quiet | say nothing
--stop TEXT stops | may be repeated
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    modes = {"choices": ("auto", "plain")}
    add_table(made.add_argument, TABLE, mode=modes, stops={"action": "append", "default": []})
    return made


def test_defaults_and_kinds() -> None:
    expected = {"ctx_size": 0, "ratio": 0.5, "mode": "auto", "quiet": False, "stop": []}
    assert vars(parser().parse_args([])) == expected
    words = ["-c", "7", "--ratio", "1", "--mode", "plain", "--quiet", "--stop", "a", "--stop", "b"]
    given = {"ctx_size": 7, "ratio": 1.0, "mode": "plain", "quiet": True, "stop": ["a", "b"]}
    assert vars(parser().parse_args(words)) == given
    with pytest.raises(SystemExit):
        parser().parse_args(["--mode", "fast"])


def test_help() -> None:
    shown = " ".join(parser().format_help().split())
    assert "-c N, --ctx-size N context in tokens, 0: as trained" in shown
    assert "--ratio X a share | or more" in shown and "--mode {auto,plain}" in shown
    assert next(flags for flags, _, _ in entries(TABLE)) == ["-c", "--ctx-size"]
