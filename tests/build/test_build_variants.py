"""Tests of wheels with several builds of the binding: which is chosen, what a merged wheel holds, and that it loads."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("dflash_ggml.ggml.bindings")

from dflash_ggml.ggml.bindings import _bindings
from dflash_ggml.ggml.bindings.variants import CUDA, VARIANTS, best_variant, cpu_flags

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "dflash_ggml/ggml/bindings"
AVX2 = frozenset(["sse4_2", "avx", "avx2", "bmi2", "fma", "f16c"])


def wheel_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "tools" / "wheels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_best_that_a_cpu_can_run_is_chosen(tmp_path: Path) -> None:
    assert best_variant(tmp_path, AVX2) is None  # a source build has none
    for name in VARIANTS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "_bindings.abi3.so").touch()
    avx512, amx = VARIANTS["avx512"][0], VARIANTS["amx"][0]
    assert avx512 < amx  # best first, and each needs what the next needs
    for flags, expected in (
        (AVX2, None),
        (AVX2 | avx512, "avx512"),
        (AVX2 | amx, "amx"),
        (amx - {"amx_int8"}, "avx512"),
    ):
        found = best_variant(tmp_path, flags)
        assert (found and found.parent.name) == expected
    for flag in avx512:
        assert best_variant(tmp_path, (AVX2 | amx) - {flag}) is None
    (tmp_path / CUDA).mkdir()
    (tmp_path / CUDA / "_bindings.abi3.so").touch()
    assert best_variant(tmp_path, AVX2 | amx) == tmp_path / CUDA / "_bindings.abi3.so"


def test_flags_are_those_of_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 avx512f\nbugs\t\t: none\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert cpu_flags(str(path)) == {"fpu", "avx2", "avx512f"}
    path.write_text("processor : 0\nFeatures : fp asimd\n")
    assert cpu_flags(str(path)) == cpu_flags(str(tmp_path / "none")) == frozenset()


def portable_wheel(folder: Path, binding: bytes) -> Path:
    wheel = folder / "dflash_ggml-1.2.3-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{FOLDER}/_bindings.abi3.so", binding)
        archive.writestr(f"{FOLDER}/_bindings.pyi", b"")
        archive.writestr("dflash_ggml-1.2.3.dist-info/WHEEL", b"Wheel-Version: 1.0\n")
        archive.writestr("dflash_ggml-1.2.3.dist-info/RECORD", f"{FOLDER}/_bindings.abi3.so,,\n")
    return wheel


def check_record(wheel: zipfile.ZipFile) -> None:
    """Every file is in the record, which comes last, and those with a digest have it."""
    record = wheel.namelist()[-1]
    lines = [line.split(",") for line in wheel.read(record).decode().splitlines()]
    assert record.endswith(".dist-info/RECORD") and lines[-1] == [record, "", ""]
    assert len(lines) == len({path for path, _, _ in lines})
    for path, digest, size in lines:
        if digest:
            data = wheel.read(path)
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={found}", str(len(data)))


def test_a_merged_wheel_has_all_of_them_and_a_record_that_fits(tmp_path: Path) -> None:
    found = {name: name.encode() for name in VARIANTS}
    out = wheel_tool().merge(portable_wheel(tmp_path, b"avx2"), found, tmp_path / "dist")
    with zipfile.ZipFile(out) as archive:
        check_record(archive)
        assert len(archive.namelist()) == 4 + len(VARIANTS)
        for name in VARIANTS:
            assert archive.read(f"{FOLDER}/{name}/_bindings.abi3.so") == name.encode()


def test_the_package_for_cuda_has_the_binding_alone(tmp_path: Path) -> None:
    tool = wheel_tool()
    with pytest.raises(SystemExit, match="GGML_CUDA=ON"):
        tool.cuda_package(portable_wheel(tmp_path, b"a build for the CPU"), tmp_path)
    out = tool.cuda_package(portable_wheel(tmp_path, b"needs libcublas.so.13"), tmp_path)
    assert out.name == "dflash_ggml_cu13-1.2.3-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(out) as archive:
        check_record(archive)
        info = "dflash_ggml_cu13-1.2.3.dist-info"
        binding = f"{FOLDER}/{CUDA}/_bindings.abi3.so"
        assert set(archive.namelist()) == {binding, *(f"{info}/{n}" for n in ("METADATA", "WHEEL", "RECORD"))}
        about = archive.read(f"{info}/METADATA").decode().splitlines()
        assert "Name: dflash-ggml-cu13" in about and "Requires-Dist: dflash-ggml==1.2.3" in about


def test_pages_of_an_index_name_what_lies_there(tmp_path: Path) -> None:
    wheel = portable_wheel(tmp_path, b"")
    wheel_tool().index(tmp_path)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert 'href="dflash-ggml/"' in (tmp_path / "simple" / "index.html").read_text()
    page = (tmp_path / "simple" / "dflash-ggml" / "index.html").read_text()
    assert f'href="../../{wheel.name}#sha256={digest}"' in page


def test_a_variant_is_loaded_instead_of_the_default_build(tmp_path: Path) -> None:
    """This build serves as a variant without CPU requirements."""
    name = next(iter(VARIANTS))
    (tmp_path / name).mkdir()
    binding = tmp_path / name / Path(_bindings.__file__).name
    os.symlink(_bindings.__file__, binding)
    code = f"""
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("v", {str(ROOT / "src/dflash_ggml/ggml/bindings/variants.py")!r})
v = importlib.util.module_from_spec(spec); spec.loader.exec_module(v)
v.__file__ = {str(tmp_path / "variants.py")!r}
v.Path = type("P", (), {{"__new__": lambda cls, p: Path(p)}})
import dflash_ggml.ggml
import types; sys.modules["dflash_ggml.ggml.bindings"] = types.ModuleType("dflash_ggml.ggml.bindings")
module = v.load_variant("dflash_ggml.ggml.bindings", v.VARIANTS[{name!r}][0])
assert sys.modules.pop("dflash_ggml.ggml.bindings")._bindings is module
import dflash_ggml.ggml.bindings as b
assert b.lib is module.lib and module.__file__ == {str(binding)!r}, module
print(b.lib.ggml_type_size(0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["4"], done.stderr
