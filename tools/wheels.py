"""Builder of wheels for many machines: CPU variants, the CUDA package, and a package index.

    pip wheel . --no-deps -w portable -C cmake.define.DFLASH_PORTABLE=ON
    python tools/wheels.py cpu portable/dflash_ggml-*.whl dist/

adds the builds for AVX-512 and AMX to a portable wheel; the best one for a machine is chosen at import. Each is a whole
build of ggml for the CPU, some minutes on two cores, in a build folder of its own. `[tool.cibuildwheel]` in pyproject.toml
runs this in manylinux's image, where `auditwheel` then sets the platform tag.

    pip wheel . --no-deps -w cuda -C cmake.define.DFLASH_PORTABLE=ON -C cmake.define.GGML_CUDA=ON \\
        -C "cmake.define.CMAKE_CUDA_ARCHITECTURES=86-real;90-real"
    python tools/wheels.py cuda cuda/dflash_ggml-*.whl dist/

makes of a wheel built with CUDA 13 the package dflash-ggml-cu13, which holds the binding alone and is used where it is
installed beside dflash-ggml of the same version; CUDA's libraries come from NVIDIA's packages.

    python tools/wheels.py index dist/

writes pages to dist/simple/ with which the folder, on any static host, is an index for `pip install --extra-index-url`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "dflash_ggml/ggml/bindings"
LARGEST = 48 * 10**6  # bytes of a wheel that PyPI and impatient users accept
NVIDIA = ("nvidia-cublas>=13,<14", "nvidia-cuda-runtime>=13,<14")  # what the module is linked with


def variants() -> ModuleType:
    """The module that chooses among a wheel's bindings."""
    path = ROOT / "src" / FOLDER / "variants.py"
    spec = importlib.util.spec_from_file_location("variants", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def binding_in(wheel: zipfile.ZipFile) -> str:
    """The compiled binding of a wheel: one, of whatever suffix the system has."""
    (found,) = (
        n for n in wheel.namelist() if n.startswith(f"{FOLDER}/_bindings.") and not n.endswith(".pyi")
    )
    return found


def built(name: str, options: tuple[str, ...], jobs: int | None) -> bytes:
    """The binding of a variant, stripped."""
    settings = {"DFLASH_PORTABLE": "ON", **{f"GGML_{option}": "ON" for option in options}}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "-w", folder]
        command += [f"-Cbuild-dir={ROOT}/build/wheel-{name}"]
        command += [f"-Ccmake.define.{key}={value}" for key, value in settings.items()]
        command += [f"-Cbuild.tool-args=-j{jobs}"] if jobs else []
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(binding_in(archive))


def write(out: Path, files: Mapping[str, bytes], dist_info: str, record: str = "") -> Path:
    """Write files and the record of them, which continues `record`, to a wheel."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for path, data in files.items():
            info = zipfile.ZipInfo(path)
            info.external_attr = (0o755 if "/_bindings." in path else 0o644) << 16
            wheel.writestr(info, data, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(data)}\n"
        wheel.writestr(f"{dist_info}/RECORD", f"{record}{dist_info}/RECORD,,\n")
    return out


def merge(wheel: Path, found: Mapping[str, bytes], dest: Path) -> Path:
    """Write a wheel that contains the bindings of all variants to a folder."""
    out = dest / wheel.name
    out.unlink(missing_ok=True)
    dest.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as old:
        (record,) = (n for n in old.namelist() if n.endswith(".dist-info/RECORD"))
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
            for info in old.infolist():
                if info.filename != record:
                    new.writestr(info, old.read(info), zipfile.ZIP_DEFLATED)
        binding = Path(binding_in(old)).name
        kept = "".join(
            line for line in old.read(record).decode().splitlines(True) if not line.startswith(record)
        )
    return write(
        out,
        {f"{FOLDER}/{name}/{binding}": data for name, data in found.items()},
        str(Path(record).parent),
        kept,
    )


def cuda_package(wheel: Path, dest: Path) -> Path:
    """Write the package with the binding of a wheel that was built with CUDA."""
    folder = variants().CUDA
    _, version, tags = wheel.name.removesuffix(".whl").split("-", 2)
    name = f"dflash_ggml_{folder}"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as old:
        binding = binding_in(old)
        data = old.read(binding)
        kept = {
            f"{info}/{n.partition('.dist-info/')[2]}": old.read(n)
            for n in old.namelist()
            if "dist-info/WHEEL" in n or "dist-info/licenses" in n
        }
    if b"libcublas.so" not in data:
        sys.exit(f"{wheel.name}: was not built with GGML_CUDA=ON")
    needs = (f"dflash-ggml=={version}", *NVIDIA)
    about = ["Metadata-Version: 2.1", f"Name: {name.replace('_', '-')}", f"Version: {version}"]
    about += ["Summary: The CUDA build of dflash-ggml's binding", "License: MIT"]
    about += [f"Requires-Dist: {need}" for need in needs]
    out = dest / f"{name}-{version}-{tags}.whl"
    out.unlink(missing_ok=True)
    files = {
        f"{FOLDER}/{folder}/{Path(binding).name}": data,
        f"{info}/METADATA": "\n".join(about).encode() + b"\n",
    }
    return write(out, {**files, **kept}, info)


def index(folder: Path) -> None:
    """Write the pages of a static index of a folder's wheels and sdists (PEP 503)."""
    found: dict[str, list[Path]] = {}
    for path in sorted((*folder.glob("*.whl"), *folder.glob("*.tar.gz"))):
        found.setdefault(path.name.partition("-")[0].replace("_", "-").lower(), []).append(path)
    pages = {"": [f'<a href="{name}/">{name}</a>' for name in found]}
    for name, paths in found.items():
        pages[name] = [
            f'<a href="../../{html.escape(p.name)}#sha256={hashlib.sha256(p.read_bytes()).hexdigest()}">{html.escape(p.name)}</a>'
            for p in paths
        ]
    for name, links in pages.items():
        page = folder / "simple" / name / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("<!DOCTYPE html>\n" + "<br>\n".join(links) + "\n")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    for name in ("cpu", "cuda"):
        command = commands.add_parser(name)
        command.add_argument("wheel", type=Path)
        command.add_argument("dest", type=Path, help="folder for the result")
    commands.choices["cpu"].add_argument("-j", "--jobs", type=int, help="compilers at once")
    commands.add_parser("index").add_argument("dest", type=Path, help="folder with the wheels")
    a = p.parse_args()
    if a.command == "index":
        index(a.dest)
        return
    if a.command == "cuda":
        out = cuda_package(a.wheel, a.dest)
    else:
        found = {name: built(name, options, a.jobs) for name, (_, options) in variants().VARIANTS.items()}
        out = merge(a.wheel, found, a.dest)
    size = out.stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB")
    if a.command == "cpu" and size > LARGEST:
        sys.exit(f"{out.name}: larger than {LARGEST / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
