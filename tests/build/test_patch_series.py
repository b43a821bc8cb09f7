"""Tests of the patch series in upstream's form: mails that plain `git am` applies to the pinned tree."""

from __future__ import annotations

import email
import email.policy
import email.utils
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import vendor

ROOT = Path(__file__).resolve().parents[2]
SERIES = vendor.patch_files(ROOT / "patches")
GIT = shutil.which("git")
# SHA-256 (vendor.digest_of) of the patched tree without models/, which only tests read: a reordered or rewritten series must end
# in the same sources
FINAL_TREE = "b0e5c26a3f15c3bf876cf915f377f1b0514194471d63983a3df47212d929ad88"
CXX = shutil.which("c++")
HIP_HEADERS = "hip/hip_runtime.h hip/hip_fp16.h hip/hip_bf16.h hip/hip_fp8.h hip/hip_cooperative_groups.h hipblas/hipblas.h"


def test_the_series_is_there_and_numbered_without_gaps() -> None:
    assert SERIES
    assert [path.name[:5] for path in SERIES] == [f"{number:04d}-" for number in range(1, len(SERIES) + 1)]


@pytest.mark.parametrize("path", SERIES, ids=lambda path: path.name[:4])
def test_every_patch_is_a_mail(path: Path) -> None:
    text = path.read_bytes()
    assert text.startswith(b"From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n")
    mail = email.message_from_bytes(text.partition(b"\n")[2], policy=email.policy.default)
    name, address = email.utils.parseaddr(mail["From"])
    assert name and "@" in address
    assert email.utils.parsedate_to_datetime(mail["Date"]).tzinfo is not None
    assert re.fullmatch(r"\[PATCH\] (ggml|ggml-cpu|CUDA) : \S.{5,}", mail["Subject"])
    message, _, rest = mail.get_payload(decode=True).partition(b"\n---\n")
    assert len(message.split()) >= 20  # says why, and what was measured
    assert max(map(len, message.splitlines())) <= 80
    stat, _, diff = rest.partition(b"\ndiff --git ")
    assert re.search(rb"^ \d+ files? changed, ", stat, re.MULTILINE)
    assert re.search(rb"\n-- \n\S+\n\n?\Z", diff)
    added = re.findall(rb"^\+(?!\+\+ )", diff, re.MULTILINE)
    assert added or b"\n-" in diff


@pytest.mark.skipif(GIT is None, reason="git is not installed")
def test_git_am_makes_the_tree_that_the_build_makes(tmp_path: Path) -> None:
    """Strict application: every context line has to match at its position."""
    files = vendor.read_archive(vendor.pinned_sdist(vendor.cache_folder()))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all", "--force")
    git(tmp_path, "commit", "--quiet", "--message", "the pinned tree")
    git(tmp_path, "am", "--quiet", *map(str, SERIES))
    vendor.apply_patches(files, SERIES)
    names = git(tmp_path, "ls-files", "-z").decode().split("\0")[:-1]
    assert {name: (tmp_path / name).read_bytes() for name in names} == files
    assert len(git(tmp_path, "log", "--format=%h").split()) == len(SERIES) + 1


def pinned_tree() -> dict[str, bytes]:
    return vendor.read_archive(vendor.pinned_sdist(vendor.cache_folder()))


def test_the_series_ends_in_the_recorded_sources() -> None:
    files = pinned_tree()
    vendor.apply_patches(files, SERIES)
    sources = {name: content for name, content in files.items() if not name.startswith("models/")}
    assert vendor.digest_of(sources) == FINAL_TREE


def test_factor_rollback_applies_alone() -> None:
    """Without the convolution's patch, and with a chain as its first case: the smallest useful offer."""
    files = pinned_tree()
    (patch,) = (path for path in SERIES if path.name.endswith("-ggml-add-gated_delta_net_tree.patch"))
    vendor.apply_patches(files, [patch])
    cases = files["tests/test-backend-ops.cpp"].decode()
    first = cases.index("new test_gated_delta_net_tree_persist(")
    assert re.findall(r"test_tree_kind kind : \{ (\w+)", cases[:first])[-1] == "TREE_CHAIN"
    assert "GGML_OP_SSM_CONV_TREE" not in files["ggml/include/ggml.h"].decode()


@pytest.mark.skipif(CXX is None, reason="no C++ compiler")
def test_shuffles_have_the_arguments_that_hip_takes(tmp_path: Path) -> None:
    """HIP's header defines __shfl_*_sync as macros of four arguments, CUDA's width is optional."""
    files = pinned_tree()
    stock = set(files)
    vendor.apply_patches(files, SERIES)
    for name, content in files.items():
        if name.startswith(("ggml/include/", "ggml/src/")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
    for header in HIP_HEADERS.split():
        (tmp_path / "stub" / header).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "stub" / header).touch()
    include = [
        f"-I{tmp_path / folder}" for folder in ("stub", "ggml/include", "ggml/src", "ggml/src/ggml-cuda")
    ]
    # of a folder of its own (sm90a/) are files for one NVIDIA architecture, which a HIP build leaves out
    ours = [
        name for name in files if name not in stock and re.fullmatch(r"ggml/src/ggml-cuda/[^/]+\.cu", name)
    ]
    assert ours
    for name in ours:
        command = [str(CXX), "-E", "-x", "c++", "-DGGML_USE_HIP", "-D__HIP_PLATFORM_AMD__", *include, name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]


def git(folder: Path, *arguments: str) -> bytes:
    """The output of a git command that knows no settings but these."""
    settings = {"user.name": "test", "user.email": "test@localhost", "core.autocrlf": "false"}
    options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
    environment = {"HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1", "PATH": str(Path(str(GIT)).parent)}
    done = subprocess.run(
        [str(GIT), *options, *arguments], cwd=folder, env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout
