"""Prefix cache on disk: snapshots with their K/V rows as files, so that an agent's long prompt survives a restart.

Files are safetensors, memory-mapped, never unpickled. A file is written under another name and renamed, so a reader
sees all of it or nothing; checksums detect a damaged file, which is removed.

They are in a folder of our own (mode 0700) within the configured one, in a subfolder per model, draft and cache types.
Nothing else there is counted, changed or removed. Above the limit the least recently used file of any model is removed
first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..errors import ConfigError, DflashError
from ..files.fingerprint import fingerprint
from ..files.safetensors import read_shard
from .prefix_cache import Ids, common_prefix

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..state.snapshot import Snapshot

log = logging.getLogger("dflash_ggml")

FORMAT = "4"
SHORTEST = 1024  # minimum tokens; prefilling fewer is about as fast as reading a file
OWN = "dflash-prefixes"  # our folder within the configured one
SUFFIX = ".safetensors"
WRITING = "writing-"  # prefix of unfinished files
WAITING = 2  # most prompts in the write queue; each may hold gigabytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, the tokens whose K/V rows it holds, and the lengths of the prefixes with a state in it, longest first."""

    path: Path
    tokens: NDArray[np.int32]
    states: tuple[int, ...]

    def longest(self, ids: NDArray[np.int32]) -> int:
        """Tokens of its longest state that is a prefix of ids, 0 for none."""
        shared = common_prefix(self.tokens, ids)
        return next((n for n in self.states if n <= shared), 0)


def state_identity(engine: Engine) -> list[str]:
    """Everything that a snapshot depends on: the models' bytes, and the layout of the state.

    Raises:
        OSError: A model file cannot be read.
    """
    config, state = engine.config, engine.passes.state
    drafter = engine.drafter
    rows: list[Any] = [(t, 0) for t in (*state.kv.slices, *(drafter.rows if drafter else ()))]
    rings = [*(kept for ring in state.rings for kept in ring.kept), *(drafter.rings if drafter else ())]
    rows += [(t, kept) for t, _, kept in rings]
    shapes = [[int(t.type), int(t.ne[0]), int(t.nb[1]), around] for t, around in rows]
    live = [
        # the layers' dimension is the last: as long as on one device
        [int(n) if dim != 2 + i else sum(int(t.ne[dim]) for t in part) for dim, n in enumerate(part[0].ne)]
        for i, part in enumerate(state.live_parts())
    ]
    models = [fingerprint(path) for path in (config.model, config.draft) if path is not None]
    lossy = ["prefill_fp8"] if engine.prefill_fp8 else []
    return [*models, json.dumps([shapes, live, config.fa_window, *lossy])]


class DiskCache:
    """Snapshots of one model in a folder, one file per prompt. `load` and `put` are for the engine's thread; another thread
    writes.

    Args:
        limit: Bytes of all files.
        identity: See `state_identity`.

    Raises:
        ConfigError: The folder cannot be used.
    """

    def __init__(self, folder: Path, limit: int, identity: Sequence[str]) -> None:
        self.limit = limit
        self._root = folder / OWN
        name = hashlib.sha256(json.dumps([FORMAT, *identity]).encode()).hexdigest()[:24]
        self._folder = self._root / name
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for made in (self._root, self._folder):
                if made.stat().st_uid != os.getuid():
                    raise PermissionError(0, f"{made} belongs to another user")
                made.chmod(0o700)
            for left in self._folder.glob(f"{WRITING}*"):  # left by a process that ended while writing
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            raise ConfigError(f"--cache-disk: {folder} cannot be used: {error.strerror or error}") from None
        files = sorted(self._folder.glob("*" + SUFFIX))
        self._entries = {path.stem: entry for path in files if (entry := _entry(path))}
        self._waiting: queue.Queue[tuple[Snapshot, ...] | None] = queue.Queue(WAITING)
        self._lock = threading.Lock()  # of the entries
        self._writer: threading.Thread | None = None
        self._warned = False

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, ids: Ids, limit: int) -> int:
        """Tokens of the longest cached prefix of ids[:limit], 0 for none."""
        wanted = np.asarray(ids[:limit], np.int32)
        entry = self._find(wanted)
        return 0 if entry is None else entry.longest(wanted)

    def load(self, ids: Ids, limit: int) -> Snapshot | None:
        """The snapshot of the longest cached prefix of ids[:limit]; its arrays are mapped from the file.

        A damaged or unreadable file is removed, with a warning, and the next best is tried.
        """
        wanted = np.asarray(ids[:limit], np.int32)
        while (entry := self._find(wanted)) is not None:
            try:
                n = entry.longest(wanted)
                snapshot = _read(entry.path, n)
                if tuple(entry.tokens[:n].tolist()) != snapshot.tokens:
                    raise ValueError("its tokens have changed")
                with contextlib.suppress(OSError):
                    os.utime(entry.path)  # used just now
                return snapshot
            except (DflashError, OSError, ValueError, KeyError) as error:
                log.warning("--cache-disk: %s is not used and removed: %s", entry.path, error)
                self.drop(entry)
        return None

    def takes(self, snapshot: Snapshot, row_nbytes: int) -> bool:
        """Whether a snapshot, with K/V rows of so many bytes a token, has the right length and is not cached yet."""
        n = len(snapshot.tokens)
        return n >= SHORTEST and n * row_nbytes <= self.limit and _name(snapshot.tokens) not in self._entries

    def put(self, snapshot: Snapshot, *marks: Snapshot, wait: bool = False) -> bool:
        """Queue a snapshot with rows, and `marks` (states of its prefixes), for writing.

        Args:
            wait: Wait for earlier snapshots.

        Returns:
            False if it is too short, too large, cached already, or the queue is full.
        """
        if snapshot.rows is None or len(snapshot.tokens) < SHORTEST or _size(snapshot, *marks) > self.limit:
            return False
        if _name(snapshot.tokens) in self._entries:
            return False
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="dflash-disk", daemon=True)
            self._writer.start()
        while True:
            try:
                self._waiting.put((snapshot, *marks), wait, 1)
                return True
            except queue.Full:
                if not (wait and self._writer.is_alive()):
                    return False

    def drop(self, entry: Entry) -> None:
        """Forget an entry and remove its file."""
        with self._lock:
            self._entries.pop(entry.path.stem, None)
        with contextlib.suppress(OSError):
            entry.path.unlink()

    def close(self) -> None:
        """Wait for all writes."""
        writer, self._writer = self._writer, None
        while writer is not None and writer.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=1)
                writer.join()

    def _find(self, ids: NDArray[np.int32]) -> Entry | None:
        with self._lock:
            entries = list(self._entries.values())
        best = max(entries, key=lambda entry: entry.longest(ids), default=None)
        return best if best is not None and best.longest(ids) else None

    def _write_all(self) -> None:
        while (snapshots := self._waiting.get()) is not None:
            try:
                self._write(*snapshots)
            except (OSError, SafetensorError) as error:
                if not self._warned:
                    log.warning("--cache-disk: %s: nothing more is kept: %s", self._folder, error)
                    self._warned = True
            del snapshots

    def _write(self, *snapshots: Snapshot) -> None:
        tokens = snapshots[0].tokens
        path = self._folder / (_name(tokens) + SUFFIX)
        self._make_room(_size(*snapshots))
        # in a folder of its own, since the package writes next to the target file
        with tempfile.TemporaryDirectory(prefix=WRITING, dir=self._folder) as folder:
            temporary = Path(folder) / path.name
            tensors = _tensors(*snapshots)
            sums = {name: str(_sum(data)) for name, data in tensors.items()}
            save_file(tensors, temporary, metadata=sums)
            temporary.chmod(0o600)
            temporary.replace(path)
        with self._lock:
            states = tuple(len(snapshot.tokens) for snapshot in snapshots)
            self._entries[path.stem] = Entry(path, np.asarray(tokens, np.int32), states)

    def _make_room(self, wanted: int) -> None:
        """Remove the least recently used files until `wanted` more bytes fit."""
        found = []
        for path in self._root.glob("*/*" + SUFFIX):
            with contextlib.suppress(OSError):
                about = path.stat()
                found.append((about.st_mtime, about.st_size, path))
        held = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if held + wanted <= self.limit:
                return
            with self._lock:
                if path.parent == self._folder:
                    self._entries.pop(path.stem, None)
            with contextlib.suppress(OSError):
                path.unlink()
                held -= size


def _name(tokens: Ids) -> str:
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:32]


def _size(snapshot: Snapshot, *marks: Snapshot) -> int:
    return snapshot.nbytes + sum(mark.state_nbytes for mark in marks)


def _tensors(*snapshots: Snapshot) -> dict[str, NDArray]:
    """Tensors of a file: the rows of the first snapshot, by blocks, and the states of all."""
    first = snapshots[0]
    tensors: dict[str, NDArray] = {"tokens": np.asarray(first.tokens, np.int32)}
    tensors["types"] = np.asarray(first.types or [-1], np.int64)
    tensors["states"] = np.asarray([len(snapshot.tokens) for snapshot in snapshots], np.int64)
    rows = first.rows or ()
    tensors["blocks"] = np.asarray([block.n_tokens for block in rows] or [-1], np.int64)
    groups = {f"rows.{i}": block.parts for i, block in enumerate(rows)}
    for snapshot in snapshots:
        n = len(snapshot.tokens)
        tensors[f"{n}.in_draft"] = snapshot.in_draft.astype(np.int8)
        if snapshot.logits is not None:
            tensors[f"{n}.logits"] = snapshot.logits
        groups |= {f"{n}.live": snapshot.live, f"{n}.rings": snapshot.rings}
    for name, parts in groups.items():
        # an empty part is not stored in the file
        tensors |= {f"{name}.{i}": part.view(np.int8) for i, part in enumerate(parts) if part.size}
        tensors[f"{name}.parts"] = np.asarray([part.nbytes for part in parts] or [-1], np.int64)
    return {name: np.ascontiguousarray(data) for name, data in tensors.items()}


def _entry(path: Path) -> Entry | None:
    """The entry of a file; None for an unreadable file, which is removed."""
    try:
        found = {info.name: data for info, data in read_shard(path) if info.name in ("tokens", "states")}
        states = tuple(found["states"].view(np.int64).tolist())
        return Entry(path, found["tokens"].view(np.int32).copy(), states)
    except (DflashError, OSError, KeyError, ValueError) as error:
        log.warning("--cache-disk: %s is not used and removed: %s", path, error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _read(path: Path, n: int) -> Snapshot:
    """The snapshot of n tokens in a file, mapped. Raises ModelFileError, OSError, ValueError or KeyError for a damaged one."""
    from ..state.snapshot import RowBlock, Snapshot  # with the binding, which is there where an engine is

    found = {info.name: data for info, data in read_shard(path)}
    with safe_open(path, framework="np") as file:
        sums = file.metadata() or {}

    def checked(name: str) -> NDArray:
        if str(_sum(found[name])) != sums.get(name):
            raise ValueError(f"tensor {name!r} is damaged")
        return found[name]

    def numbers(name: str) -> list[int]:
        return [number for number in checked(name).view(np.int64).tolist() if number >= 0]

    def parts(name: str) -> tuple[NDArray, ...]:
        sizes = numbers(f"{name}.parts")
        read = tuple(
            checked(f"{name}.{i}") if size else np.empty(0, np.uint8) for i, size in enumerate(sizes)
        )
        if [part.nbytes for part in read] != sizes:
            raise ValueError(f"the parts of {name!r} have other sizes")
        return read

    rows, at = list[RowBlock](), 0
    for i, n_tokens in enumerate(numbers("blocks")):
        if at < n:
            rows.append(RowBlock(n_tokens, parts(f"rows.{i}")))
        at += n_tokens
    return Snapshot(
        tuple(checked("tokens").view(np.int32)[:n].tolist()),
        parts(f"{n}.live"),
        tuple(rows),
        checked(f"{n}.in_draft").astype(bool),
        checked(f"{n}.logits").view(np.float32).copy() if f"{n}.logits" in found else None,
        tuple(numbers("types")),
        parts(f"{n}.rings"),
    )


def _sum(data: NDArray) -> int:
    """A checksum of the bytes, at memory speed."""
    raw = data.reshape(-1).view(np.uint8)
    whole = raw.size // 8 * 8
    return int(np.add.reduce(raw[:whole].view(np.uint64), dtype=np.uint64)) + int(raw[whole:].sum())
