"""Tests of the strict patch applier: agrees with difflib on random edits and refuses whatever does not fit exactly."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unified_diff

SOURCE = b"".join(b"line %d\n" % i for i in range(30))


def make_patch(path: str, old: bytes | None, new: bytes | None, context: int = 3) -> bytes:
    """A patch as git would write it; None stands for a file that does not exist."""
    before = b"/dev/null" if old is None else b"a/" + path.encode()
    after = b"/dev/null" if new is None else b"b/" + path.encode()
    sides = split(old or b""), split(new or b"")
    lines = difflib.diff_bytes(difflib.unified_diff, *sides, before, after, n=context, lineterm=b"\n")
    out = b""
    for line in lines:
        out += line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
    return out


def split(content: bytes) -> list[bytes]:
    parts = content.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


WORDS = [b"a", b"b", b"", b"--- x", b"+++ y", b"@@ z", b"caf\xc3\xa9", b"tab\t"]
lines_of_text = st.lists(st.sampled_from(WORDS), max_size=25).map(
    lambda lines: b"".join(x + b"\n" for x in lines)
)
contents = st.builds(bytes.__add__, lines_of_text, st.sampled_from([b"", b"no newline at the end"]))


@given(old=contents, new=contents, context=st.integers(0, 4))
def test_applies_what_difflib_writes(old: bytes, new: bytes, context: int) -> None:
    if old == new:
        return
    files = {"dir/file.c": old, "other": b"kept\n"}
    unified_diff.apply(make_patch("dir/file.c", old, new, context), files)
    assert files == {"dir/file.c": new, "other": b"kept\n"}


def test_creates_and_deletes_files_and_skips_a_mail_header() -> None:
    files = {"old.c": b"gone\n"}
    header = b"From: someone\nSubject: [PATCH] two files\n\n---\n new.c | 1 +\n 2 files changed\n\n"
    patch = header + b"diff --git a/new.c b/new.c\n" + make_patch("new.c", None, b"here\n")
    patch += make_patch("old.c", b"gone\n", None) + b"-- \n2.39.5\n"
    unified_diff.apply(patch, files)
    assert files == {"new.c": b"here\n"}


def test_a_hunk_may_move_to_the_only_matching_location() -> None:
    patch = make_patch("f", SOURCE, SOURCE.replace(b"line 20\n", b"changed\n"))
    files = {"f": b"one more\n" + SOURCE}
    unified_diff.apply(patch, files)
    assert files["f"] == b"one more\n" + SOURCE.replace(b"line 20\n", b"changed\n")


def test_a_moved_hunk_that_fits_twice_is_refused() -> None:
    block = b"x\ny\nz\n"
    patch = make_patch("f", block, b"x\nY\nz\n")
    with pytest.raises(unified_diff.PatchError, match="occur at 2 places"):
        unified_diff.apply(patch, {"f": b"first\n" + block + block})


def test_no_fuzz_and_nothing_half_applied() -> None:
    patch = make_patch("good", SOURCE, SOURCE.replace(b"line 1\n", b"new\n"))
    patch += make_patch("bad", SOURCE, SOURCE.replace(b"line 9\n", b"new\n"))
    files = {"good": SOURCE, "bad": SOURCE.replace(b"line 8\n", b"line 8 \n")}
    before = dict(files)
    with pytest.raises(unified_diff.PatchError, match=r"bad: hunk 1 \(line 7\) does not apply"):
        unified_diff.apply(patch, files)
    assert files == before


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (b"just text\n", "no changes"),
        (b"--- a/f\n+++ b/f\n@@ broken\n", "malformed hunk"),
        (b"--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n line 0\n", "cut off"),
        (b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n line 0\n*line 1\n", "unexpected line"),
        (b"--- a/../f\n+++ b/../f\n@@ -1 +1 @@\n-line 0\n+x\n", "must be relative"),
        (b"--- /etc/f\n+++ /etc/f\n@@ -1 +1 @@\n-line 0\n+x\n", "must be relative|not in the source tree"),
        (b"diff --git a/f b/g\nrename from f\nrename to g\n", "only plain text"),
        (b"--- a/f\n+++ b/g\n@@ -1 +1 @@\n-line 0\n+x\n", "renames are not supported"),
        (b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n", "already there"),
        (b"--- a/nosuch\n+++ b/nosuch\n@@ -1 +1 @@\n-a\n+x\n", "not in the source tree"),
        (b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-line 0\n", "lines would remain"),
    ],
)
def test_refuses(patch: bytes, message: str) -> None:
    files = {"f": SOURCE}
    with pytest.raises(unified_diff.PatchError, match=message):
        unified_diff.apply(patch, files)
    assert files == {"f": SOURCE}
