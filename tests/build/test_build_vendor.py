"""Tests of filling vendor/llama.cpp: sources, hashes, the patch series, and what is left untouched on a second run."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

import vendor
from reference import vendored

ROOT = Path(__file__).resolve().parents[2]
TREE = {
    "LICENSE": b"terms\n",
    "ggml/CMakeLists.txt": b"project(ggml)\n",
    "ggml/include/ggml.h": b"int ggml(void);\n",
    "ggml/src/ggml.c": b"int ggml(void) {\n    return 1;\n}\n",
    "ggml/src/ggml-cpu/ops.cpp": b"// cpu\n",
    "models/templates/Qwen3.5-4B.jinja": b"{{ messages }}\n",
    "models/ggml-vocab-qwen35.gguf.inp": b"text\n",
}
UNUSED = {
    "ggml/src/ggml-sycl/big.cpp": b"x" * 1000,
    "ggml/src/nested/a.c": b"-\n",
    "src/llama.cpp": b"// not ours\n",
    "models/templates/other.jinja": b"-\n",
    "models/ggml-vocab-qwen2.gguf": b"-\n",
}
PATCH = b"""--- a/ggml/src/ggml.c
+++ b/ggml/src/ggml.c
@@ -1,3 +1,3 @@
 int ggml(void) {
-    return %d;
+    return %d;
 }
"""


def make_archive(path: Path, root: str = "llama_cpp_python-1/vendor/llama.cpp/") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in {**TREE, **UNUSED}.items():
            info = tarfile.TarInfo(root + name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "pin.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "0001-two.patch").write_bytes(PATCH % (1, 2))
    (folder / "0002-three.patch").write_bytes(PATCH % (2, 3))
    return folder


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive in place of the pinned sdist; fetching it copies it, as pip would."""
    archive = make_archive(tmp_path / "pinned.tar.gz")
    monkeypatch.setattr(vendor, "SHA256", vendor.sha256_of(archive))

    def fetch(folder: Path) -> Path:
        copy = folder / "fetched.tar.gz"
        copy.write_bytes(archive.read_bytes())
        return copy

    monkeypatch.setattr(vendor, "fetch", fetch)
    return archive


def test_keeps_what_is_needed_and_applies_the_series_in_order(
    tmp_path: Path, patches: Path, pinned: Path
) -> None:
    dest = tmp_path / "vendor" / "llama.cpp"
    assert vendor.fill(dest, patches, cache=tmp_path / "cache")
    assert contents(dest) == {**TREE, "ggml/src/ggml.c": TREE["ggml/src/ggml.c"].replace(b"1", b"3")}


def test_second_run_changes_nothing_and_needs_no_source(
    tmp_path: Path, patches: Path, pinned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest, cache = tmp_path / "llama.cpp", tmp_path / "cache"
    vendor.fill(dest, patches, cache=cache)
    monkeypatch.setattr(vendor, "pinned_sdist", lambda cache: pytest.fail("no source is needed"))
    stamps = {path: path.stat().st_mtime_ns for path in dest.rglob("*")}
    assert not vendor.fill(dest, patches, cache=cache)
    assert {path: path.stat().st_mtime_ns for path in dest.rglob("*")} == stamps


def test_a_changed_series_rewrites_only_the_files_that_differ(
    tmp_path: Path, patches: Path, pinned: Path
) -> None:
    dest, cache = tmp_path / "llama.cpp", tmp_path / "cache"
    vendor.fill(dest, patches, cache=cache)
    (dest / "ggml" / "include" / "stale.h").write_bytes(b"left over\n")
    stamps = {name: (dest / name).stat().st_mtime_ns for name in TREE}
    (patches / "0002-three.patch").write_bytes(PATCH % (2, 4))
    assert vendor.fill(dest, patches, cache=cache)
    assert contents(dest) == {**TREE, "ggml/src/ggml.c": TREE["ggml/src/ggml.c"].replace(b"1", b"4")}
    assert {n for n in TREE if (dest / n).stat().st_mtime_ns != stamps[n]} == {"ggml/src/ggml.c"}


def test_an_interrupted_run_is_done_again(tmp_path: Path, patches: Path, pinned: Path) -> None:
    dest, cache = tmp_path / "llama.cpp", tmp_path / "cache"
    vendor.fill(dest, patches, cache=cache)
    whole = contents(dest)
    (dest / "pin.json").unlink()
    (dest / "ggml/src/ggml.c").write_bytes(b"half")
    (dest / "ggml/src/ggml.c.part").write_bytes(b"ha")
    assert vendor.fill(dest, patches, cache=cache)
    assert contents(dest) == whole


def test_a_patch_that_does_not_apply_is_named_and_nothing_is_written(
    tmp_path: Path, patches: Path, pinned: Path
) -> None:
    (patches / "0002-three.patch").write_bytes(PATCH % (7, 3))
    dest = tmp_path / "llama.cpp"
    with pytest.raises(
        vendor.VendorError, match=r"patch 0002-three.patch does not apply: ggml/src/ggml.c: hunk 1"
    ):
        vendor.fill(dest, patches, cache=tmp_path / "cache")
    assert not dest.exists()


def test_a_fetched_file_with_another_hash_is_refused_and_not_kept(
    tmp_path: Path, patches: Path, pinned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tampered(folder: Path) -> Path:
        return make_archive(folder / "fetched.tar.gz", root="other/")

    monkeypatch.setattr(vendor, "fetch", tampered)
    with pytest.raises(vendor.VendorError, match="SHA-256 is .* expected"):
        vendor.fill(tmp_path / "llama.cpp", patches, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_cache_saves_the_network_and_a_damaged_cache_is_fetched_again(
    tmp_path: Path, pinned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, real_fetch = tmp_path / "cache", vendor.fetch
    cached = vendor.pinned_sdist(cache)
    monkeypatch.setattr(vendor, "fetch", lambda folder: pytest.fail("the cache holds it"))
    assert vendor.pinned_sdist(cache) == cached
    cached.write_bytes(b"damaged")
    monkeypatch.setattr(vendor, "fetch", real_fetch)
    assert vendor.sha256_of(vendor.pinned_sdist(cache)) == vendor.SHA256


@pytest.mark.parametrize("root", ["llama_cpp_python-9/vendor/llama.cpp/", "llama.cpp-b1/", ""])
def test_an_archive_given_by_the_user(tmp_path: Path, patches: Path, root: str) -> None:
    archive = make_archive(tmp_path / "given.tar.gz", root)
    assert vendor.fill(tmp_path / "llama.cpp", patches, source=archive)
    assert not vendor.fill(tmp_path / "llama.cpp", patches, source=archive)
    assert set(contents(tmp_path / "llama.cpp")) == set(TREE)


@pytest.mark.parametrize("inner", ["", "vendor/llama.cpp"])
def test_a_folder_given_by_the_user(tmp_path: Path, patches: Path, inner: str) -> None:
    given, dest = tmp_path / "given", tmp_path / "llama.cpp"
    for name, content in {**TREE, **UNUSED}.items():
        path = given / inner / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert vendor.fill(dest, patches, source=given)
    assert not vendor.fill(dest, patches, source=given)
    (given / inner / "LICENSE").write_bytes(b"other terms\n")
    assert vendor.fill(dest, patches, source=given)
    assert (dest / "LICENSE").read_bytes() == b"other terms\n"
    assert (given / inner / "ggml/src/ggml.c").read_bytes() == TREE["ggml/src/ggml.c"]


def test_sources_that_cannot_be_used_are_named(tmp_path: Path, patches: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_bytes(b"no tarball")
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz"):
        pass
    for name, message in {
        "missing": "no such file or folder",
        "empty": "no llama.cpp tree",
        "text": "cannot be read as a tarball",
        "other.tar.gz": "no llama.cpp tree in it",
    }.items():
        with pytest.raises(vendor.VendorError, match=message):
            vendor.fill(tmp_path / "llama.cpp", patches, source=tmp_path / name)


def test_the_command_prints_one_error_and_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--dest", str(tmp_path / "d"), "--patches", str(tmp_path), "--source", "/no/such"]
    monkeypatch.setattr(sys, "argv", ["vendor.py", *arguments])
    assert vendor.main() == 1
    assert capfd.readouterr().err == "error: DFLASH_LLAMA_CPP=/no/such: no such file or folder\n"


def test_pip_is_called_without_what_an_outer_build_leaves_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PYPROJECT_HOOKS_BUILD_BACKEND", "PEP517_BACKEND_PATH", "PIP_NO_BINARY", "PIP_TARGET"):
        monkeypatch.setenv(name, "leak")
    monkeypatch.setenv("PIP_CERT", "kept")
    environment = vendor._pip_environment()
    assert "leak" not in environment.values()
    assert environment["PIP_CERT"] == "kept"


def test_real_models_files_may_be_missing_from_another_source_only(
    tmp_path: Path, patches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests that need them are skipped there, and fail where the pinned source was taken."""
    monkeypatch.setattr(vendored, "TREE", tmp_path)
    vendor.fill(tmp_path, patches, source=make_archive(tmp_path.parent / f"{tmp_path.name}.tar.gz"))
    assert vendored.vendored("templates/Qwen3.5-4B.jinja").read_bytes() == b"{{ messages }}\n"
    with pytest.raises(pytest.skip.Exception, match="DFLASH_LLAMA_CPP has no models/templates/x"):
        vendored.vendored("templates/x")
    monkeypatch.setattr(vendor, "SHA256", json.loads((tmp_path / "pin.json").read_text())["source"])
    with pytest.raises(AssertionError, match="run `make build`"):
        vendored.vendored("templates/x")


def test_the_built_tree_is_the_one_these_patches_make() -> None:
    """The module under test was built from a tree that holds exactly the patches of this checkout."""
    pin = json.loads((ROOT / "vendor" / "llama.cpp" / "pin.json").read_text(encoding="utf-8"))
    series = vendor.patch_files(ROOT / "patches")
    assert pin["patches"] == [[path.name, vendor.sha256_of(path)] for path in series], "run `make build`"
