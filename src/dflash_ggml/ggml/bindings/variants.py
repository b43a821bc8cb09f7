"""Choice of the binding's variant: a portable wheel contains one per instruction set, a source build only one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

CUDA = "cu13"  # folder of the package dflash-ggml-cu13: takes precedence
_AVX512 = frozenset(["avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"])
_AVX512_OPTIONS = ("AVX512", "AVX512_VNNI", "AVX512_BF16")
# best first: folder in the package, required CPU flags (names of /proc/cpuinfo), and ggml's options beyond AVX2
VARIANTS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "amx": (_AVX512 | {"amx_tile", "amx_int8"}, (*_AVX512_OPTIONS, "AMX_TILE", "AMX_INT8")),
    "avx512": (_AVX512, _AVX512_OPTIONS),
}


def cpu_flags(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    """Flags of the first CPU, by the kernel's names; empty if unknown."""
    try:
        lines = Path(cpuinfo).read_text().splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset()
    )


def best_variant(folder: Path, flags: Iterable[str]) -> Path | None:
    """The best available variant that a CPU with these flags can run; None: the one next to this file."""
    has = frozenset(flags)
    for name, (needed, _) in {CUDA: (frozenset[str](), ()), **VARIANTS}.items():
        found = sorted((folder / name).glob("_bindings.*"))
        if found and needed <= has:
            return found[0]
    return None


def load_variant(package: str, flags: Iterable[str] | None = None) -> ModuleType | None:
    """Load the best variant as the module `_bindings` of the package; None if there are no variants."""
    folder = Path(__file__).parent
    if not any((folder / name).is_dir() for name in (CUDA, *VARIANTS)):
        return None
    path = best_variant(folder, cpu_flags() if flags is None else flags)
    if path is None:
        return None
    name = f"{package}._bindings"
    loader = ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    vars(sys.modules[package])["_bindings"] = module
    return module
