"""Time of a prefill chunk and a decode step of other sequences: as two passes and as one, alternating.

    python bench/joined_pass.py -m TARGET [--sequences 8] [--chunks 8 56 120 248 504 1016] [--times 9] [--json FILE]

Milliseconds, the least and the median of `--times`: on a GPU of the clock, on a CPU of the thread (one), which other processes
do not slow. Graphs are built before. Plain decoding; tokens are drawn at random.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from common import add_engine_options, cache_types, header, memory_options, save

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine.engine import Engine
from dflash_ggml.engine.slot import Slot
from dflash_ggml.engine.step import Verify

BEFORE = 512  # tokens before what is timed


@dataclass(frozen=True)
class Row:
    """Least and median milliseconds of the parts, and of the pass of both."""

    tokens: int
    chunk: tuple[float, float]
    step: tuple[float, float]
    joined: tuple[float, float]

    def __str__(self) -> str:
        times = {"chunk": self.chunk, "step": self.step, "joined": self.joined}
        parts = (f"{name} {least:8.2f} ({middle:.2f})" for name, (least, middle) in times.items())
        saved = self.chunk[1] + self.step[1] - self.joined[1]
        return f"{self.tokens:5} tokens: {', '.join(parts)}; saved, of medians {saved:.2f}"


def measured(
    engine: Engine, slot: Slot, tokens: int, times: int, step: Callable[..., None], ids: list[int]
) -> Row:
    """The slot's prompt goes back to BEFORE tokens each time."""
    clock = time.perf_counter if engine.device.is_gpu else time.thread_time
    found: dict[str, list[float]] = {"chunk": [], "step": [], "joined": []}
    slot.reset()
    slot.prefill(ids[:BEFORE])
    start, part = slot.snapshot(with_rows=False), ids[BEFORE : BEFORE + tokens]

    def timed(name: str, work: Callable[[], None]) -> None:
        began = clock()
        work()
        engine.device.synchronize()
        found[name].append(1e3 * (clock() - began))

    for _ in range(times + 2):
        slot.restore(start)
        # a batch of the width that it has in a joined pass, alone
        timed("chunk", lambda: slot.prefill(part, join=lambda run: None))
        timed("step", step)
        slot.restore(start)
        timed("joined", lambda: slot.prefill(part, join=step))
    return Row(tokens, *((min(t[2:]), median(t[2:])) for t in found.values()))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", required=True)
    p.add_argument("--sequences", type=int, default=8)
    p.add_argument("--chunks", type=int, nargs="+", default=[8, 56, 120, 248, 504, 1016])
    p.add_argument("--times", type=int, default=9)
    p.add_argument("--context", type=int, default=1000, help="tokens of each sequence")
    add_engine_options(p)
    a = p.parse_args()
    steps = 3 * (a.times + 3) * len(a.chunks)
    rng, rows = np.random.default_rng(1), []
    config = EngineConfig(
        Path(a.model),
        parallel=a.sequences + 1,
        n_ctx=a.sequences * (a.context + steps + 64) + BEFORE + max(a.chunks) + 1024,
        mode="plain",
        spec=(),
        n_threads=a.threads or 1,
        n_gpu_layers=a.gpu_layers,
        **cache_types(a),
        **memory_options(a),
    )
    with Engine.load(config) as engine:
        if not engine.can_join:
            raise SystemExit("this target has no such passes: its rows are gathered")
        facts = header(device=engine.device.info.description, gpu=gpu_facts(), model=Path(a.model).name)
        print(f"{facts['device']}, {facts['model']}, commit {facts['commit']}", flush=True)
        sequences = []
        for _ in range(a.sequences):
            slot = engine.open(a.context + steps)
            slot.prefill(rng.integers(10, engine.n_vocab, a.context).tolist())
            sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
            sequences.append(slot.begin(sampler, stop=lambda token: False))
            slot.first()

        def step(run: Verify | None = None) -> None:
            for found in engine.step(sequences, run):
                if isinstance(found, Exception):
                    raise found

        prompt = engine.open(BEFORE + max(a.chunks))
        ids = rng.integers(10, engine.n_vocab, BEFORE + max(a.chunks)).tolist()
        for tokens in a.chunks:
            rows.append(row := measured(engine, prompt, tokens, a.times, step, ids))
            print(row, flush=True)
    save(a.json, {**facts, "sequences": a.sequences, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
