"""A strict applier of unified diffs to files held in memory.

No fuzz: every context and removed line must match byte for byte. A hunk whose line numbers have moved is
accepted only if its lines occur at exactly one place after the previous hunk. Anything that a text patch
cannot express (renames, binary files) is refused. Written here because neither git nor patch(1) may be
assumed on the machine that builds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_REFUSED = (b"rename from ", b"rename to ", b"copy from ", b"copy to ", b"GIT binary patch", b"Binary files ")
_NO_NEWLINE = b"\\ No newline at end of file"


class PatchError(Exception):
    """A patch that is malformed or does not fit; the message names file and hunk."""


@dataclass(slots=True)
class Hunk:
    """One change: the ``old`` lines expected at 1-based line ``start``; ``new`` lines take their place."""

    start: int
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class FileDiff:
    """The hunks of one file; ``old_path`` is None for a new file, ``new_path`` for a deleted one."""

    old_path: str | None
    new_path: str | None
    hunks: list[Hunk] = field(default_factory=list)


def _path(header: bytes) -> str | None:
    """The path of a ``---``/``+++`` line without its a/ or b/ prefix; None for /dev/null."""
    name = header[4:].split(b"\t")[0].strip().decode("utf-8")
    if name == "/dev/null":
        return None
    _, slash, rest = name.partition("/")
    if not slash or rest.startswith("/") or ".." in rest.split("/"):
        raise PatchError(f"path {name!r} must be relative, with an a/ or b/ prefix")
    return rest


def _read_hunk(lines: list[bytes], at: int) -> tuple[Hunk, int]:
    """The hunk whose ``@@`` line is ``lines[at]`` and the index of the line after it."""
    match = _HUNK.match(lines[at])
    if match is None:
        raise PatchError(f"malformed hunk header {lines[at]!r}")
    start, n_old, n_new = int(match[1]), int(match[2] or 1), int(match[4] or 1)
    hunk = Hunk(start)
    at += 1
    while n_old > 0 or n_new > 0 or (at < len(lines) and lines[at].startswith(_NO_NEWLINE)):
        if at >= len(lines):
            raise PatchError(f"the hunk at line {start} is cut off")
        kind, text = lines[at][:1], lines[at][1:] + b"\n"
        if lines[at].startswith(_NO_NEWLINE):
            for side in _sides_of_last(lines[at - 1][:1], hunk):
                side[-1] = side[-1][:-1]
        elif kind in (b" ", b""):  # some tools strip the space of an empty context line
            hunk.old.append(text)
            hunk.new.append(text)
            n_old, n_new = n_old - 1, n_new - 1
        elif kind == b"-":
            hunk.old.append(text)
            n_old -= 1
        elif kind == b"+":
            hunk.new.append(text)
            n_new -= 1
        else:
            raise PatchError(f"unexpected line {lines[at]!r} in the hunk at line {start}")
        if n_old < 0 or n_new < 0:
            raise PatchError(f"the hunk at line {start} has more lines than its header says")
        at += 1
    return hunk, at


def _sides_of_last(kind: bytes, hunk: Hunk) -> list[list[bytes]]:
    if kind == b"-":
        return [hunk.old]
    if kind == b"+":
        return [hunk.new]
    return [hunk.old, hunk.new]


def parse(patch: bytes) -> list[FileDiff]:
    """Splits a patch (plain, or with a mail header and a diffstat) into the changes of each file.

    Raises PatchError for anything that is not a text diff, and for a patch without a single hunk.
    """
    lines = patch.split(b"\n")
    diffs: list[FileDiff] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(_REFUSED):
            raise PatchError(f"{line.decode('utf-8', 'replace')!r}: only plain text changes are supported")
        if line.startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ "):
            diffs.append(FileDiff(_path(line), _path(lines[at + 1])))
            at += 2
        elif line.startswith(b"@@ "):
            if not diffs:
                raise PatchError("a hunk comes before any file name")
            hunk, at = _read_hunk(lines, at)
            diffs[-1].hunks.append(hunk)
        else:
            at += 1
    if not any(diff.hunks for diff in diffs):
        raise PatchError("no changes found in it")
    return diffs


def _places(lines: list[bytes], old: list[bytes], first: int) -> Iterator[int]:
    for at in range(first, len(lines) - len(old) + 1):
        if lines[at : at + len(old)] == old:
            yield at


def _apply_hunks(path: str, content: bytes, hunks: list[Hunk]) -> bytes:
    lines = content.splitlines(keepends=True) if content else []
    done: list[bytes] = []
    used = 0  # lines of the old file already copied or replaced
    for number, hunk in enumerate(hunks, 1):
        expected = hunk.start - 1 if hunk.old else hunk.start
        at = expected
        if at < used or lines[at : at + len(hunk.old)] != hunk.old:
            places = list(_places(lines, hunk.old, used)) if hunk.old else []
            if len(places) != 1:
                why = "its lines are not there" if not places else f"its lines occur at {len(places)} places"
                raise PatchError(f"{path}: hunk {number} (line {hunk.start}) does not apply: {why}")
            at = places[0]
        done += lines[used:at] + hunk.new
        used = at + len(hunk.old)
    return b"".join(done + lines[used:])


def apply(patch: bytes, files: MutableMapping[str, bytes]) -> None:
    """Applies ``patch`` to ``files`` (path -> content), all of it or nothing.

    Raises PatchError naming the file that is missing, already there, or does not match.
    """
    changed: dict[str, bytes | None] = {}
    for diff in parse(patch):
        path = diff.new_path or diff.old_path
        if path is None or (diff.old_path and diff.new_path and diff.old_path != diff.new_path):
            raise PatchError(f"{diff.old_path} -> {diff.new_path}: renames are not supported")
        if path in changed:
            raise PatchError(f"{path}: appears twice in one patch")
        current = files.get(path)
        if diff.old_path is None and current is not None:
            raise PatchError(f"{path}: to be created, but it is already there")
        if diff.old_path is not None and current is None:
            raise PatchError(f"{path}: to be changed, but it is not in the source tree")
        result = _apply_hunks(path, current or b"", diff.hunks)
        if diff.new_path is None and result:
            raise PatchError(f"{path}: to be deleted, but lines would remain")
        changed[path] = result if diff.new_path is not None else None
    for path, content in changed.items():
        if content is None:
            del files[path]
        else:
            files[path] = content
