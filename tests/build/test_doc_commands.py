"""Tests of the commands in README and docs: each is accepted by its own parser; `tools/doc_commands.py` runs them."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dflash_ggml.bench import cli as bench
from dflash_ggml.cli import chat, convert, doctor, run
from dflash_ggml.server import cli as serve
from dflash_ggml.train import cli as train

ROOT = Path(__file__).parents[2]
PARSERS = {
    "dflash-run": run, "dflash-chat": chat, "dflash-serve": serve, "dflash-bench": bench, "dflash-doctor": doctor,
    "dflash-convert": convert, "dflash-train": train,
}  # fmt: skip


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doc_commands", ROOT / "tools" / "doc_commands.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["doc_commands"] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module


TOOL = tool()
BLOCKS = [block for page in TOOL.pages() for block in TOOL.blocks(page)]
COMMANDS = [
    pytest.param(words, id=f"{block.page.name}:{block.line}")
    for block in BLOCKS
    if block.kind == "sh"
    for line in block.text.replace("\\\n", " ").splitlines()
    for part in re.split(r"[|;]|&&", line.split(" #")[0])
    if (words := [w for w in shlex.split(part.split(">")[0]) if "=" not in w or w.startswith("-")])
    and words[0] in PARSERS
]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_is_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parser = PARSERS[words[0]].build_parser()
    assert isinstance(parser, argparse.ArgumentParser)
    parser.parse_args(words[1:])


def test_the_extras_of_every_installation_exist():
    """pip only warns about one that does not."""
    project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^(\w+) = \[", project.partition("\n[project.scripts]")[0], re.MULTILINE))
    named = re.findall(r"pip install '(?:\.|dflash-ggml)\[(.*?)\]", "".join(block.text for block in BLOCKS))
    assert named and {extra for names in named for extra in names.split(",")} <= extras


def test_there_are_pages_with_commands_and_some_that_run_anywhere():
    assert len(COMMANDS) > 25
    assert {block.page.name for block in BLOCKS if not block.needs} >= {
        "chat.md", "coding-agents.md", "python.md", "team.md", "long-documents.md", "measure.md"
    }  # fmt: skip


def test_a_block_names_the_server_it_leaves_running():
    ports = {block.server for block in BLOCKS if not block.needs} - {0}
    assert ports == {8080, 8091, 8092, 8093}
