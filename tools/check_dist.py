"""Full check of the distributions: builds sdist and wheel into dist/ and tests them (`make dist`, some minutes).

The wheel is built from the unpacked sdist without any network: no package index, an empty cache. Then it is
installed into a venv of its own and asked for its ggml version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
BUILD_TOOLS = ["build", "scikit-build-core>=1.0", "cffi>=1.17", "cmake", "ninja"]
IN_WHEEL = [
    "dflash_ggml/__init__.py",
    "dflash_ggml/py.typed",
    "dflash_ggml/ggml/bindings/_bindings.abi3.so",
    "dflash_ggml/decode/native/_native.abi3.so",
    "dflash_ggml/data/README.md",
    "dflash_ggml/data/demo-target-q8_0.gguf",
    "dflash_ggml/data/demo-draft-q8_0.gguf",
    "dflash_ggml/data/prompts/python.jsonl",
    "/licenses/LICENSE",
    "dflash_ggml/server/static/vendor/marked.esm.js",
    "/licenses/licenses/ggml.txt",
    "/licenses/licenses/highlight.js.txt",
    "/licenses/licenses/marked.txt",
    "/licenses/licenses/temml.txt",
]
NOT_IN_WHEEL = (".c", ".h", ".a", ".cmake", ".jinja", "build_ffi.py")


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Runs a command, shows it, and returns its standard output; exits when it fails."""
    print("+", *command, flush=True)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def make_venv(path: Path) -> Path:
    """A new venv with pip; returns its python."""
    venv.create(path, with_pip=True)
    return path / "bin" / "python"


def check_wheel(wheel: Path) -> None:
    """Exits unless the wheel holds what it must and no build leftovers."""
    names = zipfile.ZipFile(wheel).namelist()
    missing = [part for part in IN_WHEEL if not any(name.endswith(part) for name in names)]
    left = [name for name in names if name.endswith(NOT_IN_WHEEL)]
    if missing or left:
        sys.exit(f"{wheel.name}: missing {missing}, should not be there {left}")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        python = make_venv(tmp / "build-venv")
        run(python, "-m", "pip", "install", "--quiet", *BUILD_TOOLS)
        run(python, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, ROOT)
        sdist = max(DIST.glob("dflash_ggml-*.tar.gz"), key=lambda path: path.stat().st_mtime)
        with tarfile.open(sdist) as tar:
            tar.extractall(tmp / "source")
        source = next((tmp / "source").iterdir())

        offline = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
        offline |= {
            "PIP_NO_INDEX": "1",
            "XDG_CACHE_HOME": str(tmp / "empty-cache"),
            "PATH": os.environ["PATH"],
        }
        # a dead proxy: any attempt to reach a network fails
        offline |= dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
        run(python, "-m", "build", "--wheel", "--no-isolation", "--outdir", DIST, source, env=offline)
        wheel = max(DIST.glob("dflash_ggml-*.whl"), key=lambda path: path.stat().st_mtime)
        check_wheel(wheel)

        user = make_venv(tmp / "user-venv")
        run(user, "-m", "pip", "install", "--quiet", wheel)
        code = (
            "from dflash_ggml.ggml.bindings import ffi, lib; print(ffi.string(lib.ggml_version()).decode())"
        )
        print("ggml in the installed wheel:", run(user, "-c", code, cwd=tmp).strip())


if __name__ == "__main__":
    main()
