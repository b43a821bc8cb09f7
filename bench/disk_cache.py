"""Disk cache of a long prompt: time to write and to restore against prefilling it again.

    python bench/disk_cache.py -m TARGET [-md DRAFT] [--prompt 60000] [-ctk TYPE] [-ctv TYPE] [--folder DIR] [--json FILE]

Restoring is what a server does after a restart: open the folder, check the file, copy it to the device. The file was written a
moment before, so it is in the page cache; a cold disk adds its own time. Random weights will do.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from common import Solo, add_cache_types, cache_types, header, save

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.config import EngineConfig
from dflash_ggml.session.disk_cache import DiskCache, state_identity


def measure(engine: Solo, prompt: int, folder: Path, times: int = 3) -> dict[str, float | bool]:
    """Seconds and bytes of a prompt's way to the disk and back; whether the same token follows."""
    ids = np.random.default_rng(1).integers(0, engine.n_vocab, prompt).tolist()
    engine.prefill(ids[:512])
    engine.reset()
    began = time.perf_counter()
    engine.prefill(ids)
    read_s = time.perf_counter() - began
    first = int(np.argmax(engine.logits))
    began = time.perf_counter()
    snapshot = engine.snapshot(with_rows=True)
    snapshot_s = time.perf_counter() - began
    identity = state_identity(engine)
    began = time.perf_counter()
    cache = DiskCache(folder, 1 << 40, identity)
    assert cache.put(snapshot), "the snapshot was not taken"
    cache.close()
    write_s = time.perf_counter() - began
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    found: list[float] = []
    same = True
    for _ in range(times):
        engine.reset()
        began = time.perf_counter()
        cache = DiskCache(folder, 1 << 40, identity)
        loaded = cache.load(ids, len(ids))
        assert loaded is not None, "the file was not taken"
        engine.restore(loaded)
        engine.device.synchronize()
        found.append(time.perf_counter() - began)
        same &= int(np.argmax(engine.logits)) == first
        cache.close()
    return {
        "prompt": prompt,
        "bytes": size,
        "read_s": read_s,
        "snapshot_s": snapshot_s,
        "write_s": write_s,
        "restore_s": min(found),
        "restore_first_s": found[0],
        "same_token": same,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", type=Path, required=True)
    p.add_argument("-md", "--model-draft", type=Path)
    p.add_argument("--prompt", type=int, default=60_000)
    p.add_argument("--folder", type=Path, help="where to write; a temporary one by default")
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("-ngl", "--gpu-layers", type=int, default=-1)
    p.add_argument("--json", metavar="FILE")
    add_cache_types(p)
    a = p.parse_args()
    config = EngineConfig(
        a.model,
        a.model_draft,
        n_ctx=a.prompt + 64,
        n_threads=a.threads,
        n_gpu_layers=a.gpu_layers,
        calibrate="never",
        **cache_types(a),
    )
    with Solo.load(config) as engine, tempfile.TemporaryDirectory(dir=a.folder) as folder:
        device, kinds = engine.device.info, str(engine.passes.state.kv.type)
        found = measure(engine, a.prompt, Path(folder))
    gb = found["bytes"] / 1e9
    print(
        f"{device.description}, {a.model.name}, caches {kinds}: {a.prompt} tokens, {gb:.2f} GB: prompt {found['read_s']:.2f} s, "
        f"snapshot {found['snapshot_s']:.2f} s, written in {found['write_s']:.2f} s, restored in {found['restore_s']:.2f} s "
        f"({gb / found['restore_s']:.1f} GB/s; the first time {found['restore_first_s']:.2f} s), "
        f"{'the same token follows' if found['same_token'] else 'ANOTHER TOKEN FOLLOWS'}"
    )
    save(
        a.json,
        {**header(device=device.description, gpu=gpu_facts(), model=a.model.name, kv_cache=kinds), **found},
    )


if __name__ == "__main__":
    main()
