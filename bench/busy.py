"""Decoding speed on the CPU with and without other busy processes, alternating with llama.cpp at the same pin.

    python bench/busy.py [--busy 2] [--rival PYTHON] [--rounds 5] [--json FILE]

Each iteration runs every contender once with the busy processes and once without; the medians are compared. Ours runs with
default settings (threads by default, which yield), and with a fixed count; llama.cpp with each of `--rival-threads`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from common import Solo, header, save
from cpu_speed import rival

from dflash_ggml.bench.prompts import own
from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET
from dflash_ggml.ggml.device import physical_cores


@contextmanager
def busy(n: int) -> Iterator[None]:
    """`n` processes that do nothing but count."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def speed(engine: Solo, ids: list[int], mode: str, limit: float) -> float:
    """Greedy tokens per second over about `limit` seconds, after a third of that to warm up."""
    engine.reset()
    engine.prefill(ids)
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
    tokens, first, began = 0, time.perf_counter(), 0.0
    with closing(engine.generate(sampler, mode=mode, stop=lambda t: False)) as steps:
        for step in steps:
            now = time.perf_counter()
            if began:
                tokens += len(step.tokens)
                if now - began > limit:
                    break
            elif now - first > limit / 3:
                began = now
    return tokens / (time.perf_counter() - began) if began else 0.0


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", default=str(EMBEDDED_TARGET))
    p.add_argument("-md", "--model-draft", default=str(EMBEDDED_DRAFT))
    p.add_argument("--busy", type=int, default=2, metavar="N", help="busy processes (default 2)")
    p.add_argument("-t", "--threads", type=int, default=physical_cores(), help="the fixed count")
    p.add_argument("--seconds", type=float, default=0.8, help="of each measurement (default 0.8)")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--rival", metavar="PYTHON", help="interpreter with llama-cpp-python 0.3.36")
    p.add_argument("--rival-threads", type=int, nargs="+", default=[1, physical_cores()])
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    model = EngineConfig(Path(a.model), Path(a.model_draft), spec=DRAFTS)
    fixed = EngineConfig(Path(a.model), Path(a.model_draft), n_threads=a.threads, spec=DRAFTS)
    load = os.getloadavg()[0]
    for _ in range(a.rounds):
        for n in (0, a.busy):
            into = found.setdefault(f"{n} busy", {})
            with busy(n):
                for name, config in (("default threads", model), (f"-t {a.threads}", fixed)):
                    with Solo.load(config) as engine:
                        ids = engine.tokenizer.encode(own("python")[0].text)
                        for mode in ("plain", "auto"):
                            into.setdefault(f"{mode}, {name}", []).append(speed(engine, ids, mode, a.seconds))
                for threads in a.rival_threads if a.rival else []:
                    got = rival(a.rival, a.model, ids, 10_000, threads, False, a.seconds)
                    if got is not None:
                        into.setdefault(f"llama.cpp, {threads} threads", []).append(got)
    facts = header(cores=physical_cores(), load_average_before=load, model=Path(a.model).name, busy=a.busy)
    print(f"{facts['cpu']}, {facts['cores']} cores, commit {facts['commit']}, load average before {load:.1f}")
    for setting, speeds in found.items():
        print(f"{setting}: median (min .. max) of {a.rounds}")
        for name, values in speeds.items():
            print(
                f"  {name:<28} {statistics.median(values):8.1f} tokens/s ({min(values):.1f} .. {max(values):.1f})"
            )
    save(a.json, {**facts, "tokens_per_second": found})


if __name__ == "__main__":
    main()
