"""Tests of the extension of `decode`: every declaration is used, and no other symbol is exported."""

from __future__ import annotations

import re
import subprocess
import zlib
from pathlib import Path

from dflash_ggml.decode.native import VERSION, _native, build_ffi, lib

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "src" / "dflash_ggml" / "decode" / "native"


def declared() -> set[str]:
    """Functions of all headers."""
    text = "".join((FOLDER / name).read_text(encoding="utf-8") for name in build_ffi.HEADERS)
    return set(re.findall(r"^[a-z_ 0-9]+[ *](\w+)\(", re.sub(r"//[^\n]*", "", text), re.MULTILINE))


def test_every_header_is_read_and_every_function_is_bound() -> None:
    assert set(build_ffi.HEADERS) == {path.name for path in FOLDER.glob("*.h")}
    assert declared() and declared() == {name for name in dir(lib) if callable(getattr(lib, name))}


def test_a_change_of_declarations_has_a_version_of_its_own() -> None:
    """Where this fails, raise the version in version.h and __init__.py, and put both numbers here."""
    texts = ((FOLDER / name).read_text(encoding="utf-8") for name in build_ffi.HEADERS if name != "version.h")
    words = " ".join(re.sub(r"//[^\n]*", "", "\n".join(texts)).split())
    assert lib.NATIVE_VERSION == VERSION
    assert (VERSION, zlib.crc32(words.encode())) == (6, 845096094)


def test_every_function_is_called() -> None:
    """By the package, or elsewhere in the C code."""
    python = "".join(path.read_text(encoding="utf-8") for path in FOLDER.parent.rglob("*.py"))
    c = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.c"))
    assert {
        n for n in declared() if f"lib.{n}" not in python and len(re.findall(rf"\b{n}\(", c)) < 2
    } == set()


def test_the_module_exports_nothing_but_its_init_function() -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", _native.__file__], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in symbols.stdout.splitlines()] == ["PyInit__native"]
