"""Tests that another Python with this package (another processor under qemu-user, or a wheel) gives this build's output.

Run with DFLASH_OTHER_PYTHON="COMMAND", which starts that Python (docs/build.md, "Working on the code").
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

OTHER = shlex.split(os.environ.get("DFLASH_OTHER_PYTHON", ""))
CODE = """
import sys
from dflash_ggml.cli.run import main
sys.exit(main(["--mode", sys.argv[1], "--temp", "0", "-n", "40", "-ngl", "0", "-p", "def fibonacci(n):"]))
"""

pytestmark = pytest.mark.skipif(not OTHER, reason="DFLASH_OTHER_PYTHON names no other Python")


def text(python: list[str], mode: str) -> str:
    done = subprocess.run(
        [*python, "-c", CODE, mode], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("mode", ["plain", "chain", "tree"])
def test_the_text_is_the_same(mode: str) -> None:
    found = text(OTHER, mode)
    assert found.strip() and found == text([sys.executable], mode)
