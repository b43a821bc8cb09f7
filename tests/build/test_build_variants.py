"""Wheels with several builds of the binding: which is chosen, what a merged wheel holds, and that it loads."""

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
from dflash_ggml.ggml.bindings.variants import VARIANTS, best_variant, cpu_flags

ROOT = Path(__file__).resolve().parents[2]
AVX2 = frozenset(["sse4_2", "avx", "avx2", "bmi2", "fma", "f16c"])


def wheel_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheel_variants", ROOT / "tools" / "wheel_variants.py")
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


def test_flags_are_those_of_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 avx512f\nbugs\t\t: none\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert cpu_flags(str(path)) == {"fpu", "avx2", "avx512f"}
    path.write_text("processor : 0\nFeatures : fp asimd\n")
    assert cpu_flags(str(path)) == cpu_flags(str(tmp_path / "none")) == frozenset()


def test_a_merged_wheel_has_all_of_them_and_a_record_that_fits(tmp_path: Path) -> None:
    folder = "dflash_ggml/ggml/bindings"
    wheel = tmp_path / "dflash_ggml-0.1.0-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{folder}/_bindings.abi3.so", b"avx2")
        archive.writestr(f"{folder}/_bindings.pyi", b"")
        archive.writestr("dflash_ggml-0.1.0.dist-info/RECORD", f"{folder}/_bindings.abi3.so,,\n")
    out = wheel_tool().merge(wheel, {name: name.encode() for name in VARIANTS}, tmp_path / "dist")
    with zipfile.ZipFile(out) as archive:
        record = archive.read("dflash_ggml-0.1.0.dist-info/RECORD").decode().splitlines()
        assert archive.namelist()[-1].endswith("RECORD") and len(archive.namelist()) == 3 + len(VARIANTS)
        for name in VARIANTS:
            path = f"{folder}/{name}/_bindings.abi3.so"
            assert archive.read(path) == name.encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(name.encode()).digest()).rstrip(b"=").decode()
            assert f"{path},sha256={digest},{len(name)}" in record


def test_a_variant_is_loaded_in_place_of_the_one_beside_it(tmp_path: Path) -> None:
    """This build stands in for a variant that needs nothing."""
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
