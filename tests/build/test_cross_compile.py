"""Cross-compilation of the CPU build's C and C++: ours without a warning, with the check for missing CPU features, and ggml's,
patched. Needs the Python package `ziglang` and a compiler with the headers of other systems; the first run for a target takes
seconds, all of it two minutes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from sysconfig import get_path

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
STRICT = ["-O2", "-Wall", "-Wextra", "-Werror"]
# what CMake compiles of ggml for the CPU; of other processors' folders, nothing is in an object for these
CPU = GGML / "src" / "ggml-cpu"
GGML_SOURCES = sorted(
    path
    for folder in (GGML / "src", CPU, CPU / "amx", CPU / "arch" / "arm", CPU / "llamafile", CPU / "tiled")
    for path in (*folder.glob("*.c"), *folder.glob("*.cpp"))
)

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
    language = "c++" if source.suffix == ".cpp" else "cc"
    command = [sys.executable, "-m", "ziglang", language, *TARGETS[target], "-c"]
    done = subprocess.run(
        [*command, *flags, str(source), "-o", str(into)], env=cache, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return into.read_bytes()


@pytest.mark.parametrize("target", TARGETS)
def test_shims(cache: dict[str, str], tmp_path: Path, target: str) -> None:
    headers = [f"-I{folder}" for folder in (GGML / "include", GGML / "src", BINDINGS)]
    flags = [
        *STRICT,
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
    flags = [*STRICT, "-std=c11", "-ffp-contract=off", f"-I{NATIVE}"]
    assert compiled(cache, target, source, tmp_path / "native.o", *flags)


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "Linux"])
@pytest.mark.parametrize("source", GGML_SOURCES, ids=lambda path: path.relative_to(GGML / "src").as_posix())
def test_ggml(cache: dict[str, str], tmp_path: Path, target: str, source: Path) -> None:
    (tmp_path / "ggml-version.h").write_text('#define GGML_VERSION "0"\n#define GGML_COMMIT "0"\n')
    system = "-D_DARWIN_C_SOURCE" if target == "macOS" else "-D_GNU_SOURCE"
    standard = "-std=gnu++17" if source.suffix == ".cpp" else "-std=gnu11"
    headers = [f"-I{folder}" for folder in (GGML / "include", GGML / "src", CPU, tmp_path)]
    uses = [f"-DGGML_USE_{name}" for name in ("CPU", "CPU_REPACK", "LLAMAFILE")]
    flags = ["-O0", "-w", standard, system, "-D_XOPEN_SOURCE=600", "-DGGML_SCHED_MAX_COPIES=4", *uses]
    assert compiled(cache, target, source, tmp_path / "out.o", *flags, *headers)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("folder", [BINDINGS, NATIVE], ids=["bindings", "native"])
def test_generated_binding(cache: dict[str, str], tmp_path: Path, target: str, folder: Path) -> None:
    source = tmp_path / "generated.c"
    subprocess.run([sys.executable, str(folder / "build_ffi.py"), str(source)], check=True)
    headers = [f"-I{path}" for path in (GGML / "include", GGML / "src", folder, get_path("include"))]
    flags = ["-O0", "-w", "-std=gnu11", "-DPy_LIMITED_API=0x030A0000", "-DDFLASH_PATCHES=0", *headers]
    assert compiled(cache, target, source, tmp_path / "out.o", *flags)
