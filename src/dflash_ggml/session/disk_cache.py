"""Prefixes that outlive the process: snapshots with their K/V rows as files, so that an agent's long prompt survives a restart.

Two forms were weighed: a format of our own, and safetensors, which other tools can open, whose reader checks its header, and
which is read through a memory map; it won. Nothing is ever unpickled. A file is written beside its place and renamed, so a
reader sees all of it or nothing; sums over the bytes tell a damaged one, which is removed.

They lie in a folder of our own within the one that is named, which belongs to one user (mode 0700), there in a subfolder named by
what the state depends on: model, draft and cache types. Nothing else is counted, changed or removed. The one that was
longest not used goes first when all together exceed the limit, whatever model they belong to.
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

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..state.snapshot import Snapshot

log = logging.getLogger("dflash_ggml")

FORMAT = "3"
SHORTEST = 1024  # tokens; prefilling fewer is about as fast as reading them
OWN = "dflash-prefixes"  # the folder that is made in the one that is named
SUFFIX = ".safetensors"
_KINDS = ("live", "rows", "rings")  # of a snapshot's parts
WRITING = "writing-"  # what names of unfinished files begin with
WAITING = 2  # snapshots that wait to be written; each may hold gigabytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A file and the tokens whose state it holds."""

    path: Path
    tokens: NDArray[np.int32]


def state_identity(engine: Engine) -> list[str]:
    """What a snapshot of this engine depends on: the models' bytes, and the form of the state. Raises OSError."""
    config, state = engine.config, engine.passes.state
    drafter = engine.drafter
    rows: list[Any] = [(t, 0) for t in (*state.kv.slices, *(drafter.rows if drafter else ()))]
    rings = [*(kept for ring in state.rings for kept in ring.kept), *(drafter.rings if drafter else ())]
    rows += [(t, kept) for t, _, kept in rings]
    shapes = [[int(t.type), int(t.ne[0]), int(t.nb[1]), around] for t, around in rows]
    live = [[int(n) for n in t.ne] for t in state.live()]
    models = [fingerprint(path) for path in (config.model, config.draft) if path is not None]
    return [*models, json.dumps([shapes, live, config.fa_window])]


class DiskCache:
    """Snapshots of one model in a folder. `best` and `put` belong to the inference thread; another one writes."""

    def __init__(self, folder: Path, limit: int, identity: Sequence[str]) -> None:
        """limit: bytes of all files. identity: what the state depends on. Raises ConfigError for a folder that cannot be used."""
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
            for left in self._folder.glob(f"{WRITING}*"):  # by a process that was ended while it wrote
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            raise ConfigError(f"--cache-disk: {folder} cannot be used: {error.strerror or error}") from None
        self._entries = {path.stem: entry for path in self._files(self._folder) if (entry := _entry(path))}
        self._waiting: queue.Queue[Snapshot | None] = queue.Queue(WAITING)
        self._lock = threading.Lock()  # of the entries
        self._writer: threading.Thread | None = None
        self._warned = False

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, ids: Sequence[int], limit: int) -> int:
        """Tokens of the longest kept prefix of ids[:limit], 0 for none."""
        entry = self._find(np.asarray(ids[:limit], np.int32))
        return 0 if entry is None else len(entry.tokens)

    def load(self, ids: Sequence[int], limit: int) -> Snapshot | None:
        """The snapshot of the longest kept prefix of ids[:limit]; its arrays are mapped from the file.

        A file that is damaged or cannot be read is removed, with a warning, and the next best is taken.
        """
        wanted = np.asarray(ids[:limit], np.int32)
        while (entry := self._find(wanted)) is not None:
            try:
                snapshot = _read(entry.path)
                if tuple(entry.tokens.tolist()) != snapshot.tokens:
                    raise ValueError("its tokens have changed")
                with contextlib.suppress(OSError):
                    os.utime(entry.path)  # used just now
                return snapshot
            except (DflashError, OSError, ValueError, KeyError) as error:
                log.warning("--cache-disk: %s is not used and removed: %s", entry.path, error)
                self.drop(entry)
        return None

    def put(self, snapshot: Snapshot) -> bool:
        """Have a snapshot with rows written; False for one that is too short, too large, there already, or one too many."""
        if snapshot.rows is None or len(snapshot.tokens) < SHORTEST or snapshot.nbytes > self.limit:
            return False
        if _name(snapshot.tokens) in self._entries:
            return False
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="dflash-disk", daemon=True)
            self._writer.start()
        try:
            self._waiting.put_nowait(snapshot)
        except queue.Full:
            return False
        return True

    def drop(self, entry: Entry) -> None:
        """Forget an entry and remove its file."""
        with self._lock:
            self._entries.pop(entry.path.stem, None)
        with contextlib.suppress(OSError):
            entry.path.unlink()

    def close(self) -> None:
        """Wait until what was put is written."""
        writer, self._writer = self._writer, None
        while writer is not None and writer.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=1)
                writer.join()

    def _find(self, ids: NDArray[np.int32]) -> Entry | None:
        with self._lock:
            fitting = [e for e in self._entries.values() if _is_prefix(e.tokens, ids)]
        return max(fitting, key=lambda entry: len(entry.tokens), default=None)

    def _write_all(self) -> None:
        while (snapshot := self._waiting.get()) is not None:
            try:
                self._write(snapshot)
            except (OSError, SafetensorError) as error:
                if not self._warned:
                    log.warning("--cache-disk: %s: nothing more is kept: %s", self._folder, error)
                    self._warned = True
            del snapshot

    def _write(self, snapshot: Snapshot) -> None:
        path = self._folder / (_name(snapshot.tokens) + SUFFIX)
        self._make_room(snapshot.nbytes)
        # in a folder of its own, since the package writes beside the file that it is given
        with tempfile.TemporaryDirectory(prefix=WRITING, dir=self._folder) as folder:
            temporary = Path(folder) / path.name
            tensors = _tensors(snapshot)
            sums = {name: str(_sum(data)) for name, data in tensors.items()}
            save_file(tensors, temporary, metadata=sums)
            temporary.chmod(0o600)
            temporary.replace(path)
        with self._lock:
            self._entries[path.stem] = Entry(path, np.asarray(snapshot.tokens, np.int32))

    def _make_room(self, wanted: int) -> None:
        """Remove the files that were longest not used until `wanted` bytes more fit."""
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

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        return sorted(folder.glob("*" + SUFFIX))


def _name(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:32]


def _is_prefix(tokens: NDArray[np.int32], ids: NDArray[np.int32]) -> bool:
    return len(tokens) <= len(ids) and bool(np.array_equal(tokens, ids[: len(tokens)]))


def _tensors(snapshot: Snapshot) -> dict[str, NDArray]:
    tensors: dict[str, NDArray] = {"tokens": np.asarray(snapshot.tokens, np.int32)}
    tensors["types"] = np.asarray(snapshot.types or [-1], np.int64)
    tensors["in_draft"] = snapshot.in_draft.astype(np.int8)
    if snapshot.logits is not None:
        tensors["logits"] = snapshot.logits
    for kind in _KINDS:
        parts = getattr(snapshot, kind) or ()
        # an empty part has no place in the file
        tensors |= {f"{kind}.{i}": part.view(np.int8) for i, part in enumerate(parts) if part.size}
        tensors[f"{kind}.parts"] = np.asarray([part.nbytes for part in parts] or [-1], np.int64)
    return {name: np.ascontiguousarray(data) for name, data in tensors.items()}


def _entry(path: Path) -> Entry | None:
    """What a file holds; None, and no file any more, when that cannot be read."""
    try:
        tokens = next(data for info, data in read_shard(path) if info.name == "tokens")
        return Entry(path, tokens.view(np.int32).copy())
    except (DflashError, OSError, StopIteration, ValueError) as error:
        log.warning("--cache-disk: %s is not used and removed: %s", path, error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _read(path: Path) -> Snapshot:
    """The snapshot in a file, mapped. Raises ModelFileError, OSError, ValueError or KeyError for a damaged one."""
    from ..state.snapshot import Snapshot  # with the binding, which is there where an engine is

    found = {info.name: data for info, data in read_shard(path)}
    with safe_open(path, framework="np") as file:
        sums = file.metadata() or {}
    for name, data in found.items():
        if str(_sum(data)) != sums.get(name):
            raise ValueError(f"tensor {name!r} is damaged")
    parts = {}
    for kind in _KINDS:
        sizes = [size for size in found[f"{kind}.parts"].view(np.int64).tolist() if size >= 0]
        parts[kind] = tuple(
            found[f"{kind}.{i}"] if size else np.empty(0, np.uint8) for i, size in enumerate(sizes)
        )
        if [part.nbytes for part in parts[kind]] != sizes:
            raise ValueError(f"its {kind} parts have other sizes")
    logits = found.get("logits")
    return Snapshot(
        tuple(found["tokens"].view(np.int32).tolist()),
        parts["live"],
        parts["rows"],
        found["in_draft"].astype(bool),
        None if logits is None else logits.view(np.float32).copy(),
        tuple(kind for kind in found["types"].view(np.int64).tolist() if kind >= 0),
        parts["rings"],
    )


def _sum(data: NDArray) -> int:
    """A sum over the bytes, as fast as memory is read."""
    raw = data.reshape(-1).view(np.uint8)
    whole = raw.size // 8 * 8
    return int(np.add.reduce(raw[:whole].view(np.uint64), dtype=np.uint64)) + int(raw[whole:].sum())
