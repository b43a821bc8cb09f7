"""Tests of the distributions: an sdist that builds offline, licence texts, the embedded models."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

IN_SDIST = [
    "LICENSE",
    "licenses/ggml.txt",
    "licenses/highlight.js.txt",
    "licenses/marked.txt",
    "licenses/temml.txt",
    "README.md",
    "CMakeLists.txt",
    "Makefile",
    "examples/complete.py",
    "cmake/vendor.py",
    "src/dflash_ggml/ggml/bindings/shims.c",
    "src/dflash_ggml/decode/native/trees.c",
    "src/dflash_ggml/decode/native/trees.h",
    "src/dflash_ggml/py.typed",
    "src/dflash_ggml/server/static/index.html",
    "src/dflash_ggml/server/static/vendor/manifest.json",
    "src/dflash_ggml/data/README.md",
    "src/dflash_ggml/data/demo-target-q8_0.gguf",
    "src/dflash_ggml/data/demo-draft-q8_0.gguf",
    "vendor/llama.cpp/pin.json",
    "vendor/llama.cpp/LICENSE",
    "vendor/llama.cpp/AUTHORS",
    "vendor/llama.cpp/ggml/include/ggml.h",
    "vendor/llama.cpp/ggml/src/ggml-cuda/ggml-cuda.cu",
    "vendor/llama.cpp/tests/test-backend-ops.cpp",
]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of this checkout; vendor/ is already filled, so CMake need not run."""
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed (extra: test)")
    out = tmp_path_factory.mktemp("sdist")
    code = f"import scikit_build_core.build as b; b.build_sdist({str(out)!r}, {{'sdist.cmake': 'false'}})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    return next(out.glob("*.tar.gz"))


def test_the_sdist_holds_the_patched_source_and_both_licences(sdist: Path) -> None:
    with tarfile.open(sdist) as tar:
        root = tar.getnames()[0].split("/")[0]
        names = {name.removeprefix(root + "/") for name in tar.getnames()}
        header = tar.extractfile(f"{root}/vendor/llama.cpp/ggml/include/ggml.h")
        assert header is not None
        assert b"ggml_ssm_conv_tree" in header.read()
    assert [name for name in IN_SDIST if name not in names] == []
    patches = {f"patches/{path.name}" for path in (ROOT / "patches").glob("*.patch")}
    assert patches and patches <= names
    folders, endings = (
        (".venv/", "build/", "dist/", ".git/", "vendor/llama.cpp/models/"),
        (".so", ".pyc", ".part"),
    )
    assert [name for name in names if name.startswith(folders) or name.endswith(endings)] == []


def test_the_licence_text_we_ship_is_the_one_in_the_source() -> None:
    assert (ROOT / "licenses/ggml.txt").read_bytes() == (ROOT / "vendor/llama.cpp/LICENSE").read_bytes()


def test_the_installed_package_names_its_licences_commands_and_version() -> None:
    import dflash_ggml

    package = metadata.distribution("dflash-ggml")
    assert package.version == dflash_ggml.__version__
    assert package.metadata["License-Expression"] == "MIT"
    licences = {"LICENSE", *(f"licenses/{name}.txt" for name in ("ggml", "highlight.js", "marked", "temml"))}
    assert set(package.metadata.get_all("License-File") or []) == licences
    commands = {entry.name: entry.value for entry in package.entry_points if entry.group == "console_scripts"}
    assert commands == {
        "dflash-run": "dflash_ggml.start:run",
        "dflash-serve": "dflash_ggml.start:serve",
        "dflash-chat": "dflash_ggml.start:chat",
        "dflash-doctor": "dflash_ggml.start:doctor",
        "dflash-convert": "dflash_ggml.start:convert",
        "dflash-train": "dflash_ggml.start:train",
        "dflash-bench": "dflash_ggml.start:bench",
    }


def test_importing_the_package_loads_neither_the_binding_nor_numpy() -> None:
    code = (
        "import sys, dflash_ggml; print('numpy' in sys.modules, 'dflash_ggml.ggml.bindings' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "False False"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import dflash_ggml

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dflash_ggml.nothing  # noqa: B018
    assert "Llama" in dir(dflash_ggml)


def test_the_version_is_the_newest_of_the_changelog() -> None:
    (version,) = re.findall(r'^version = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version
