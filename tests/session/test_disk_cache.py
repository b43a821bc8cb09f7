"""Tests of prefixes stored as files: read back as stored, and never if damaged."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from dflash_ggml.errors import ConfigError
from dflash_ggml.session import disk_cache
from dflash_ggml.session.disk_cache import DiskCache
from dflash_ggml.state.snapshot import RowBlock, Snapshot

GB = 1 << 30
GUARD_S = 60.0  # a bound that only a hang can reach


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "SHORTEST", 4)


def blocks(rng: np.random.Generator, n: int) -> tuple[RowBlock, ...]:
    sizes = [3] * (n // 3) + [n % 3] * (n % 3 > 0)
    return tuple(
        RowBlock(m, (rng.integers(0, 256, 34 * m, dtype=np.uint8), np.empty(0, np.uint8))) for m in sizes
    )


def snapshot(n: int, seed: int = 0, logits: bool = True, live: int = 2) -> Snapshot:
    rng = np.random.default_rng(seed)
    return Snapshot(
        tuple(range(seed, seed + n)),
        tuple(rng.integers(0, 256, 1003, dtype=np.uint8) for _ in range(live)),
        blocks(rng, n),
        rng.integers(0, 2, n).astype(bool),
        rng.normal(size=7).astype(np.float32) if logits else None,
        (8, 2) if logits else (),
        tuple(rng.integers(0, 256, 77, dtype=np.uint8) for _ in range(live)),
    )


def kept(
    folder: Path, *snapshots: Snapshot, limit: int = GB, identity: tuple[str, ...] = ("m",)
) -> DiskCache:
    """A cache that has been closed after these were put, and opened again."""
    cache = DiskCache(folder, limit, identity)
    for one in snapshots:
        assert cache.put(one)
    cache.close()
    return DiskCache(folder, limit, identity)


def same(a: Snapshot | None, b: Snapshot) -> bool:
    assert a is not None and a.rows is not None and b.rows is not None
    pairs = [(a.in_draft, b.in_draft), *zip(a.rings, b.rings, strict=True)]
    pairs += zip(a.live, b.live, strict=True)
    for mine, other in zip(a.rows, b.rows, strict=True):
        assert mine.n_tokens == other.n_tokens
        pairs += zip(mine.parts, other.parts, strict=True)
    logits = a.logits is None if b.logits is None else np.array_equal(a.logits, b.logits)
    return (
        a.tokens == b.tokens
        and a.types == b.types
        and bool(logits)
        and all(np.array_equal(x, y) for x, y in pairs)
    )


@pytest.mark.parametrize(("logits", "live"), [(True, 2), (False, 0)])
def test_what_comes_back_is_what_was_put(tmp_path: Path, logits: bool, live: int) -> None:
    one = snapshot(9, logits=logits, live=live)
    cache = kept(tmp_path, one)
    assert len(cache) == 1 and cache.longest(range(20), 20) == 9
    assert same(cache.load(range(20), 20), one)
    # only what is a prefix within the limit
    assert cache.load(range(20), 8) is None and cache.load([5, *range(1, 20)], 20) is None


def test_the_longest_prefix_is_taken(tmp_path: Path) -> None:
    cache = kept(tmp_path, snapshot(5), snapshot(12))
    loaded = [cache.load(range(30), limit) for limit in (30, 11, 4)]
    assert [None if found is None else len(found.tokens) for found in loaded] == [12, 5, None]


def test_what_is_not_kept(tmp_path: Path) -> None:
    cache = kept(tmp_path, snapshot(5), limit=4000)
    without_rows = Snapshot((1,) * 9, (), None, np.zeros(9, bool), None)
    for other in (snapshot(3), snapshot(5), snapshot(500), without_rows):
        assert not cache.put(other)


def test_files_are_the_users_own(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = kept(folder, snapshot(9))
    (entry,) = cache._entries.values()
    assert {stat.S_IMODE(p.stat().st_mode) for p in entry.path.parents[:2]} == {0o700}
    assert stat.S_IMODE(entry.path.stat().st_mode) == 0o600
    assert list(entry.path.parent.iterdir()) == [entry.path]


def test_nothing_else_in_the_folder_is_touched(tmp_path: Path) -> None:
    """A folder of models, that others may read, can be named: it keeps its mode and its files."""
    model = tmp_path / "draft" / "model.safetensors"
    model.parent.mkdir()
    model.write_bytes(b"x" * 50_000)
    os.utime(model, (1, 1))
    tmp_path.chmod(0o755)
    kept(tmp_path, snapshot(9), snapshot(9, 1), limit=9000)
    kept(tmp_path, snapshot(9, 2), limit=9000)
    assert model.exists() and stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_what_an_ended_process_left_half_written_goes(tmp_path: Path) -> None:
    (entry,) = kept(tmp_path, snapshot(9))._entries.values()
    left = entry.path.parent / "writing-1" / "a.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"half")
    assert len(kept(tmp_path)) == 1 and not left.parent.exists()


def test_another_model_sees_none_of_them(tmp_path: Path) -> None:
    kept(tmp_path, snapshot(9), identity=("m", "q8_0"))
    assert len(DiskCache(tmp_path, GB, ("m", "f16"))) == 0
    assert len(DiskCache(tmp_path, GB, ("m", "q8_0"))) == 1


def test_the_oldest_go_first_whatever_model_they_belong_to(tmp_path: Path) -> None:
    size = next(
        p.stat().st_size for p in [e.path for e in kept(tmp_path / "a", snapshot(9))._entries.values()]
    )
    kept(tmp_path / "b", snapshot(9, 1), identity=("other",))
    cache = kept(tmp_path / "b", snapshot(9, 2), snapshot(9, 3))
    for age, path in enumerate(
        sorted((tmp_path / "b").rglob("*.safetensors"), key=lambda p: p.stat().st_mtime_ns)
    ):
        os.utime(path, (1000 + age, 1000 + age))
    assert cache.load(range(2, 30), 30) is not None  # used: now the newest
    kept(tmp_path / "b", snapshot(9, 4), limit=int(2.5 * size))
    left = DiskCache(tmp_path / "b", GB, ("m",))
    assert [left.longest(range(seed, 40), 30) for seed in (2, 3, 4)] == [9, 0, 9]
    assert len(DiskCache(tmp_path / "b", GB, ("other",))) == 0


def damage(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "cut":
        raw = raw[: len(raw) - 100]
    elif how == "empty":
        raw = bytearray()
    elif how == "byte":
        raw[-50] ^= 4
    elif how == "header":
        raw[20:40] = b"x" * 20
    path.write_bytes(raw)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["cut", "empty", "byte", "header", "gone"])
def test_a_damaged_file_is_removed_and_the_next_best_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, when: str
) -> None:
    cache = kept(tmp_path, snapshot(5), snapshot(12))
    path = cache._find(np.arange(30, dtype=np.int32)).path  # type: ignore[union-attr]
    path.unlink() if how == "gone" else damage(path, how)
    if when == "before":
        cache = DiskCache(tmp_path, GB, ("m",))
    assert same(cache.load(range(30), 30), snapshot(5))
    assert not path.exists() and len(cache) == 1
    gone_before = how == "gone" and when == "before"
    assert ("is not used and removed" in caplog.text) is not gone_before


def test_a_dead_writer_blocks_neither_put_nor_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path, GB, ("m",))
    monkeypatch.setattr(cache, "_write_all", lambda: None)
    queued: list[bool] = []

    def put_and_close() -> None:
        queued.extend(cache.put(snapshot(9, seed)) for seed in range(4))
        cache.close()

    caller = threading.Thread(target=put_and_close, daemon=True)
    caller.start()
    caller.join(GUARD_S)
    assert not caller.is_alive(), "put or close waits for a writer that has died"
    assert queued == [True, True, False, False] and len(cache) == 0


def test_an_unusable_folder_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--cache-disk: .*file cannot be used"):
        DiskCache(tmp_path / "file", GB, ("m",))


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), SafetensorError("IoError")])
def test_a_full_disk_is_reported_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise failure

    monkeypatch.setattr(disk_cache, "save_file", full)
    cache = DiskCache(tmp_path, GB, ("m",))
    cache.put(snapshot(9))
    cache.close()
    cache.put(snapshot(12))
    cache.close()
    assert caplog.text.count("nothing more is kept") == 1 and len(cache) == 0
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_states_of_prefixes_lie_in_one_file_with_the_rows(tmp_path: Path) -> None:
    whole, *marks = (snapshot(n) for n in (12, 7, 4))
    cache = DiskCache(tmp_path, GB, ("m",))
    assert cache.put(whole, *marks)
    cache.close()
    cache = DiskCache(tmp_path, GB, ("m",))
    assert len(cache) == 1
    assert [cache.longest([*range(shared), 99], 30) for shared in (12, 11, 7, 6, 4, 3)] == [12, 7, 7, 4, 4, 0]
    for mark in marks:
        found = cache.load(range(30), len(mark.tokens))
        assert found is not None and found.rows is not None and whole.rows is not None
        assert found.tokens == mark.tokens and np.array_equal(found.live[1], mark.live[1])
        n = len(mark.tokens)
        assert sum(block.n_tokens for block in found.rows) in range(n, n + 3), (
            "whole blocks, no more than it takes"
        )
        for mine, other in zip(found.rows, whole.rows):
            assert np.array_equal(mine.parts[0], other.parts[0])


def test_a_damaged_state_is_no_reason_to_trust_the_file(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, GB, ("m",))
    cache.put(snapshot(12), snapshot(7))
    cache.close()
    (entry,) = cache._entries.values()
    raw = bytearray(entry.path.read_bytes())
    at = raw.rindex(snapshot(7).live[0].tobytes())
    raw[at] ^= 1
    entry.path.write_bytes(raw)
    assert same(cache.load(range(30), 30), snapshot(12)), "of another state nothing is read"
    assert cache.load(range(30), 11) is None and len(cache) == 0


def test_at_the_end_all_are_written_however_many_wait(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, GB, ("m",))
    assert all(cache.put(snapshot(9, seed), wait=True) for seed in range(12))
    cache.close()
    assert len(DiskCache(tmp_path, GB, ("m",))) == 12
