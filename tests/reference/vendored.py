"""Real models' files in the vendored tree: chat templates, and a vocabulary with its expected tokenisations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import vendor

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "vendor" / "llama.cpp"


def vendored(name: str) -> Path:
    """A file under vendor/llama.cpp/models; skips where the build took its source from elsewhere, or from our sdist."""
    file = TREE / "models" / name
    if not file.is_file():
        pin = json.loads((TREE / "pin.json").read_text(encoding="utf-8"))
        if pin["source"] != vendor.SHA256:
            pytest.skip(f"the source given with DFLASH_LLAMA_CPP has no models/{name}")
        if (ROOT / "PKG-INFO").is_file():
            pytest.skip(f"an sdist leaves models/{name} out")
    assert file.is_file(), f"{file} is missing: run `make build`"
    return file
