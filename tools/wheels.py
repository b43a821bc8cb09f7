"""Add the builds for AVX-512 and AMX to a portable wheel; the best one for a machine is chosen at import.

    pip wheel . --no-deps -w portable -C cmake.define.DFLASH_PORTABLE=ON
    python tools/wheel_variants.py portable/dflash_ggml-*.whl dist/

Each variant is a whole build of ggml for the CPU, some minutes on two cores, in a build folder of its own. `[tool.cibuildwheel]`
in pyproject.toml runs this in manylinux's image, where `auditwheel` then names the wheel by the libraries that it needs.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "dflash_ggml/ggml/bindings"
LARGEST = 48 * 10**6  # bytes of a wheel that PyPI and impatient users accept


def variants() -> dict[str, tuple[str, ...]]:
    """What ggml is built with for each variant, from the module that chooses among them."""
    path = ROOT / "src" / FOLDER / "variants.py"
    spec = importlib.util.spec_from_file_location("variants", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: options for name, (_, options) in module.VARIANTS.items()}


def bindings_in(wheel: zipfile.ZipFile) -> list[str]:
    """The compiled bindings of a wheel: one, of whatever suffix the system has."""
    return [n for n in wheel.namelist() if n.startswith(f"{FOLDER}/_bindings.") and not n.endswith(".pyi")]


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
            (member,) = bindings_in(archive)
            return archive.read(member)


def recorded(path: str, data: bytes) -> str:
    """A line of a wheel's RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}\n"


def merge(wheel: Path, found: dict[str, bytes], dest: Path) -> Path:
    """Write the wheel with the bindings of the variants to a folder."""
    dest.mkdir(parents=True, exist_ok=True)
    out = dest / wheel.name
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        (binding,) = [Path(name).name for name in bindings_in(old)]
        record = ""
        for info in old.infolist():
            if info.filename.endswith(".dist-info/RECORD"):
                record = info.filename
            else:
                new.writestr(info, old.read(info), zipfile.ZIP_DEFLATED)
        lines = old.read(record).decode()
        for name, data in found.items():
            info = zipfile.ZipInfo(f"{FOLDER}/{name}/{binding}")
            info.external_attr = 0o755 << 16
            new.writestr(info, data, zipfile.ZIP_DEFLATED)
            lines = recorded(info.filename, data) + lines
        new.writestr(record, lines)
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("wheel", type=Path, help="the portable wheel")
    p.add_argument("dest", type=Path, help="folder for the result")
    p.add_argument("-j", "--jobs", type=int, help="compilers at once")
    a = p.parse_args()
    out = merge(a.wheel, {name: built(name, options, a.jobs) for name, options in variants().items()}, a.dest)
    size = out.stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB")
    if size > LARGEST:
        sys.exit(f"{out.name}: larger than {LARGEST / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
