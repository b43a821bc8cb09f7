"""Our own C for processors and systems that the tests do not run on: it compiles without a warning, and the check for what a
processor lacks is in it. Needs the Python package `ziglang`, a C compiler with the headers of other systems; its first run for
a target takes seconds."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GGML = ROOT / "vendor" / "llama.cpp" / "ggml"
BINDINGS = ROOT / "src" / "dflash_ggml" / "ggml" / "bindings"
NATIVE = ROOT / "src" / "dflash_ggml" / "decode" / "native"
TARGETS = {
    "macOS": ["-target", "aarch64-macos", "-mcpu=apple_m1"],
    "Linux on Arm": ["-target", "aarch64-linux-gnu", "-mcpu=generic+v8_2a+dotprod"],
    "Linux": ["-target", "x86_64-linux-gnu", "-mcpu=x86_64_v3"],
}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed (pip install ziglang)"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a compiler that writes nowhere else."""
    folder = str(tmp_path_factory.mktemp("zig"))
    return {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}


def compiled(cache: dict[str, str], target: str, source: Path, into: Path, *flags: str) -> bytes:
    """The object that a source becomes."""
    command = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        *TARGETS[target],
        "-c",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    done = subprocess.run(
        [*command, *flags, str(source), "-o", str(into)], env=cache, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return into.read_bytes()


@pytest.mark.parametrize("target", TARGETS)
def test_shims(cache: dict[str, str], tmp_path: Path, target: str) -> None:
    headers = [f"-I{folder}" for folder in (GGML / "include", GGML / "src", BINDINGS)]
    flags = [
        "-std=gnu11",
        '-DDFLASH_BACKENDS="CPU"',
        "-Wno-unused-parameter",
        "-Wno-unused-function",
        *headers,
    ]
    found = compiled(cache, target, BINDINGS / "shims.c", tmp_path / "shims.o", *flags)
    assert (b"Armv8.2" in found) == (target != "Linux") and (b"AVX2" in found) == (target == "Linux")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", sorted(NATIVE.glob("*.c")), ids=lambda path: path.stem)
def test_native(cache: dict[str, str], tmp_path: Path, target: str, source: Path) -> None:
    flags = ["-std=c11", "-ffp-contract=off", f"-I{NATIVE}"]
    assert compiled(cache, target, source, tmp_path / "native.o", *flags)
