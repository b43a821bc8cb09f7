"""Compilation of our own CUDA files, and of the benchmarks of their kernels, where nvcc is installed, and for HIP, with
those that our patches change, where hipcc is (all of ggml-cuda would take half an hour)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GGML = ROOT / "vendor" / "llama.cpp" / "ggml"
NVCC, HIPCC = shutil.which("nvcc"), shutil.which("hipcc")
OURS = sorted(
    name
    for patch in (ROOT / "patches").glob("*.patch")
    for name in re.findall(r"^--- /dev/null\n\+\+\+ b/(\S+\.cu)$", patch.read_text(), re.MULTILINE)
)
BENCHES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "bench" / "cuda").glob("*.cu"))
# and those of ggml that they change; sm90a/ has files for one NVIDIA architecture, which a HIP build leaves out
FOR_HIP = sorted(
    {
        name
        for patch in (ROOT / "patches").glob("*.patch")
        for name in re.findall(
            r"^\+\+\+ b/(ggml/src/ggml-cuda/[^/\n]+\.cu)$", patch.read_text(), re.MULTILINE
        )
    }
)


def test_patches_bring_cuda_files():
    assert OURS and FOR_HIP and BENCHES


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("name", [*OURS, *BENCHES])
def test_compiles(name, tmp_path):
    """One architecture, no optimisation, no code below PTX: that is enough to find what the compiler refuses."""
    _compile_cuda(["-ptx", "-arch=compute_90a", "-Xcicc", "-O0"], name, tmp_path / "out.ptx")


@pytest.mark.skipif(NVCC is None or shutil.which("nm") is None, reason="nvcc or nm is not installed")
@pytest.mark.parametrize("name", ["mmn.cu", "mmw.cu", "fattn-narrow.cu"])
def test_other_architectures_need_nothing_of_hopper(name, tmp_path):
    """What is compiled for one architecture only is missing in builds for others."""
    cuda = GGML / "src" / "ggml-cuda"
    there = "\n".join(path.read_text() for path in (cuda / "sm90a").glob("*.cu"))
    functions = re.findall(r"^(?:void|const) .*?(\w+)\(", there, re.MULTILINE)
    assert len(functions) >= 4
    flags = ["-c", "-arch=sm_80", "-Xptxas", "-O0"]
    _compile_cuda(flags, f"ggml/src/ggml-cuda/{name}", tmp_path / "out.o")
    symbols = subprocess.run(
        ["nm", "-u", tmp_path / "out.o"], capture_output=True, text=True, check=True
    ).stdout
    assert [f for f in functions if f in symbols] == []


@pytest.mark.skipif(HIPCC is None, reason="hipcc is not installed")
@pytest.mark.parametrize("name", FOR_HIP)
def test_compiles_for_hip(name, tmp_path):
    """Down to an AMD chip's assembly, with graphs and without virtual memory, as the build does by default."""
    flags = ["-S", "-O1", "-std=c++17", "-DGGML_USE_HIP", "-D__HIP_PLATFORM_AMD__"]
    flags += ["-DGGML_HIP_GRAPHS", "-DGGML_HIP_NO_VMM"]
    command = [HIPCC, "-x", "hip", "--offload-arch=gfx1151", "--cuda-device-only", *flags]
    _compile(command, name, tmp_path / "out.s")


def _compile_cuda(flags: list[str], name: str, into: Path) -> None:
    stub = [] if _has_cublas() else ["-I", str(ROOT / "tests" / "reference" / "cublas_stub")]
    usual = ["-std=c++17", "--expt-relaxed-constexpr", "--extended-lambda"]
    _compile([NVCC, *flags, *usual, *stub], name, into)


def _compile(command: list[str], name: str, into: Path) -> None:
    """Compile a file of the vendored tree."""
    include = [f"-I{GGML / folder}" for folder in ("include", "src", "src/ggml-cuda")]
    source = ROOT / name if name in BENCHES else ROOT / "vendor" / "llama.cpp" / name
    done = subprocess.run([*command, *include, str(source), "-o", str(into)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def _has_cublas() -> bool:
    probe = subprocess.run(
        [NVCC, "-E", "-x", "cu", "-"], input="#include <cublas_v2.h>\n", capture_output=True, text=True
    )
    return probe.returncode == 0
