"""How long a prompt waits while the K/V rows of the one before it are saved to host memory.

    python bench/saving_time.py -m TARGET [-md DRAFT] [--prompt 124000] [-n 4] [--cache-mb 16384] [--cold] [--json FILE]

Unrelated prompts take turns in one slot, and the first one comes again at the end. Random weights will do (shapes.py). With
`--cold` no memory is touched ahead. With 1024 (a server's default) the rows of long prompts have no room and are not saved.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from common import add_engine_options, cache_types, header, memory_options, save

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.engine.engine import Engine
from dflash_ggml.ggml.device import Buffers, Device
from dflash_ggml.session.events import Begin, Usage
from dflash_ggml.session.requests import CompletionRequest
from dflash_ggml.session.session import Session, run_completion
from dflash_ggml.session.slots import CachedSlot

GB = 1e9
SAVE, READ = CachedSlot._save, Device.read_pieces


class Clock:
    """Seconds in the saving of rows, in its reads and in all others; bytes of the former and how many arrays they filled."""

    def __init__(self) -> None:
        self.depth = 0
        self.clear()
        CachedSlot._save = lambda *args, **how: self._saved(*args, **how)  # type: ignore[method-assign]
        Device.read_pieces = lambda *args: self._read(*args)  # type: ignore[method-assign]

    def clear(self) -> None:
        """Begin anew."""
        self.saving = self.reading = self.other_reads = 0.0
        self.n_arrays = self.nbytes = 0

    def _saved(self, *args: Any, **how: Any) -> None:
        began = time.perf_counter()
        self.depth += 1
        SAVE(*args, **how)
        self.depth -= 1
        self.saving += time.perf_counter() - began

    def _read(self, device: Device, reads: Iterable[Any]) -> None:
        began = time.perf_counter()
        READ(device, map(self._counted, reads))
        took = time.perf_counter() - began
        if self.depth:
            self.reading += took
        else:
            self.other_reads += took

    def _counted(self, read: tuple[Any, np.ndarray]) -> tuple[Any, np.ndarray]:
        if self.depth:
            self.n_arrays, self.nbytes = self.n_arrays + 1, self.nbytes + read[1].nbytes
        return read


def resident() -> float:
    """GB of this process in memory, without mapped files; 0 where Linux does not say it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) * 1024 / GB for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", type=Path, required=True)
    p.add_argument("-md", "--model-draft", type=Path)
    p.add_argument("--prompt", type=int, default=124_000)
    p.add_argument("-n", type=int, default=4, help="prompts, the first one again at the end")
    p.add_argument("--cache-mb", type=int, default=16_384)
    p.add_argument("--cold", action="store_true")
    add_engine_options(p)
    a = p.parse_args()
    config = EngineConfig(
        *(a.model, a.model_draft),
        n_ctx=a.prompt + 64,
        parallel=1,
        n_threads=a.threads,
        n_gpu_layers=a.gpu_layers,
        calibrate="never",
        **cache_types(a),
        **memory_options(a),
    )
    if a.cold:
        Buffers.warm = lambda *_: None  # type: ignore[method-assign]
    rng, rows = np.random.default_rng(1), []
    with Engine.load(config) as engine:
        session, clock = Session(engine, cache_bytes=a.cache_mb << 20), Clock()
        kinds = str(engine.passes.state.kv.type)
        print(
            f"{engine.device.info.description}, {a.model.name}, caches {kinds}, {a.cache_mb} MiB, cold: {a.cold}"
        )
        prompts = [rng.integers(0, engine.n_vocab, a.prompt).tolist() for _ in range(a.n - 1)]
        for i, prompt in enumerate([*prompts, prompts[0]]):
            clock.clear()
            began = time.perf_counter()
            request = CompletionRequest(
                prompt=prompt, sampling=SamplingParams(temperature=0), max_tokens=1, ignore_eos=True
            )
            events = list(run_completion(session, request))
            took = time.perf_counter() - began
            (begin,) = (event for event in events if isinstance(event, Begin))
            (usage,) = (event for event in events if isinstance(event, Usage))
            rows.append(
                {
                    "seconds": took,
                    "cached": begin.cached_n,
                    "prefill_ms": usage.prompt_ms,
                    "saving_s": clock.saving,
                    "reading_s": clock.reading,
                    "arrays": clock.n_arrays,
                    "saved_gb": clock.nbytes / GB,
                    "other_reads_s": clock.other_reads,
                    "cache_gb": session.slots.cache.nbytes / GB,
                    "free_buffers_gb": getattr(engine.device.buffers, "free_nbytes", 0) / GB,
                    "resident_gb": resident(),
                }
            )
            row = rows[-1]
            print(
                f"prompt {i + 1}: {took:6.2f} s, {begin.cached_n} tokens known; saving {row['saving_s']:.2f} s, of which reading "
                f"{row['saved_gb']:.2f} GB ({row['arrays']} arrays) {row['reading_s']:.2f}; other reads "
                f"{row['other_reads_s']:.2f} s; GB: cache {row['cache_gb']:.2f}, free buffers {row['free_buffers_gb']:.2f}, "
                f"resident {row['resident_gb']:.2f}",
                flush=True,
            )
        session.slots.close()
    facts = header(gpu=gpu_facts(), model=a.model.name, kv_cache=kinds)
    save(a.json, facts | {"prompt": a.prompt, "cache_mb": a.cache_mb, "cold": a.cold, "prompts": rows})


if __name__ == "__main__":
    main()
