"""Tests that the imports of the scripts in bench/ resolve."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("dflash_ggml.ggml.bindings")

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.parametrize("script", sorted(BENCH.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_script_imports_is_there(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    scripts = {path.stem for path in BENCH.glob("*.py")}
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in {
            "dflash_ggml",
            *scripts,
        }:
            module = importlib.import_module(str(node.module))
            for name in node.names:
                found = hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}")
                assert found, f"{node.module}.{name.name}"
    for name in scripts:  # names as common as these are not to stay
        sys.modules.pop(name, None)


@pytest.mark.skipif(not (BENCH / "results").is_dir(), reason="an sdist has no results")
def test_the_figures_page_is_what_its_script_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "figures.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not (BENCH / "results").is_dir(), reason="an sdist has no results")
def test_the_picture_is_drawn_from_the_result_that_its_script_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCH))
    script = importlib.import_module("speed_picture")
    about = "\n".join(
        f"{name}: {value}" for name, value in script.facts(json.loads(script.RESULT.read_text()))
    )
    assert f"<desc>{about}</desc>" in script.PICTURE.read_text(), "run bench/speed_picture.py"
