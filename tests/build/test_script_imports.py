"""Tests that programs outside of the package import names that exist; most need a GPU, so that no other test runs them."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(path for folder in ("bench", "tools", "examples") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_a_program_imports_exists(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dflash_ggml"):
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                assert not (error.name or "dflash_ggml").startswith("dflash_ggml"), (
                    error
                )  # an extra is missing
                continue
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")
