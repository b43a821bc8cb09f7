"""Build ggml after every patch of the series and run the test-backend-ops cases that the patch's mail names.

    python patches/check.py --work DIR [--cuda] [--arch 90] [--first N] [--last N]

Needs CMake, Ninja and a C++ compiler, with --cuda also the CUDA toolkit and a GPU. Takes about two minutes of processor
time for a patch that touches ggml.h. Exit code 1 if a patch does not build or one of its cases fails.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "cmake"))

import vendor  # noqa: E402

PROJECT = """cmake_minimum_required(VERSION 3.18...3.31)
project(check LANGUAGES C CXX)
set(BUILD_SHARED_LIBS OFF)
set(GIT_EXE "" CACHE INTERNAL "")
set(GGML_BUILD_COMMIT pinned)
add_subdirectory(tree/ggml ggml)
add_executable(test-backend-ops tree/tests/test-backend-ops.cpp)
target_link_libraries(test-backend-ops PRIVATE ggml)
"""


def cases(mail: str) -> list[list[str]]:
    """Arguments of the `test-backend-ops` lines of a patch's message."""
    message = mail.partition("\n---\n")[0].replace("\\\n", "")
    return [
        shlex.split(line)[1:] for line in re.findall(r"^ +(test-backend-ops test .*)$", message, re.MULTILINE)
    ]


def main() -> int:
    """Check the prefixes of the series one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for sources and objects")
    parser.add_argument("--cuda", action="store_true", help="build the CUDA backend and run its cases")
    parser.add_argument("--arch", default="native", help="CMAKE_CUDA_ARCHITECTURES")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--last", type=int, default=9999)
    args = parser.parse_args()
    files = vendor.read_archive(vendor.pinned_sdist(vendor.cache_folder()))
    work: Path = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    (work / "CMakeLists.txt").write_text(PROJECT, encoding="utf-8")
    cuda = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={args.arch}"] if args.cuda else ["-DGGML_CUDA=OFF"]
    configure = [
        "cmake",
        "-G",
        "Ninja",
        "-S",
        work,
        "-B",
        work / "build",
        "-DCMAKE_BUILD_TYPE=Release",
        *cuda,
    ]
    configure += [
        "-DGGML_OPENMP=OFF",
        "-DGGML_LLAMAFILE=ON",
        "-DGGML_BUILD_TESTS=OFF",
        "-DGGML_BUILD_EXAMPLES=OFF",
    ]
    failed = 0
    for number, path in enumerate(vendor.patch_files(HERE), 1):
        vendor.apply_patches(files, [path])
        if not args.first <= number <= args.last:
            continue
        vendor.write_tree(work / "tree", files, {})
        commands = [
            configure,
            ["ninja", "-C", work / "build", "test-backend-ops"],
        ]  # new files are globbed by CMake
        device = ["-b", "CUDA0"] if args.cuda else ["-b", "CPU"]
        for arguments in cases(path.read_text(encoding="utf-8")):
            commands.append([work / "build" / "test-backend-ops", *arguments, *device])
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode:
                failed += 1
                print(
                    f"{path.name}: failed: {shlex.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
                )
                break
        else:
            print(f"{path.name}: builds, {len(commands) - 2} runs of its cases pass", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
