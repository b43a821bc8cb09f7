"""Our own CUDA files compile, where nvcc is installed (all of ggml-cuda would take half an hour)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GGML = ROOT / "vendor" / "llama.cpp" / "ggml"
NVCC = shutil.which("nvcc")
OURS = sorted(
    name
    for patch in (ROOT / "patches").glob("*.patch")
    for name in re.findall(r"^--- /dev/null\n\+\+\+ b/(\S+\.cu)$", patch.read_text(), re.MULTILINE)
)


def test_patches_bring_cuda_files():
    assert OURS


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("name", OURS)
def test_compiles(name, tmp_path):
    """One architecture, no optimisation, no code below PTX: that is enough to find what the compiler refuses."""
    stub = [] if _has_cublas() else ["-I", str(ROOT / "tests" / "reference" / "cublas_stub")]
    command = [
        NVCC,
        "-ptx",
        "-arch=compute_90a",
        "-std=c++17",
        "-Xcicc",
        "-O0",
        "--expt-relaxed-constexpr",
        "--extended-lambda",
    ]
    include = [
        "-I",
        str(GGML / "include"),
        "-I",
        str(GGML / "src"),
        "-I",
        str(GGML / "src" / "ggml-cuda"),
        *stub,
    ]
    source = ROOT / "vendor" / "llama.cpp" / name
    done = subprocess.run(
        [*command, *include, str(source), "-o", str(tmp_path / "out.ptx")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def _has_cublas() -> bool:
    probe = subprocess.run(
        [NVCC, "-E", "-x", "cu", "-"], input="#include <cublas_v2.h>\n", capture_output=True, text=True
    )
    return probe.returncode == 0
