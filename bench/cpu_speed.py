"""Decoding speed on the CPU, alternating with llama.cpp at the same pin where llama-cpp-python 0.3.36 can be run.

    python bench/cpu_speed.py [--rival PYTHON] [-t 2] [--json FILE]

`--rival` names a Python interpreter that has llama-cpp-python 0.3.36 (built on this machine); it decodes the same file in its
own process, alternating with ours, each `--rounds` times, and the medians are compared. After the comparison the plain step is
broken down: graph, read-back and Python.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import Solo, header, save

from dflash_ggml.bench.prompts import own
from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET
from dflash_ggml.ggml.graph import Graph

RIVAL = r"""
import sys, time, ctypes, llama_cpp as L, numpy as np
path, n, threads, extra = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1"
limit = float(sys.argv[6])
quiet = L.llama_log_callback(lambda *a: None); L.llama_log_set(quiet, None)
L.llama_backend_init()
mp = L.llama_model_default_params(); mp.use_extra_bufts = extra
model = L.llama_model_load_from_file(path.encode(), mp)
cp = L.llama_context_default_params()
cp.n_ctx, cp.n_threads, cp.n_threads_batch = 4096, threads, threads
ctx = L.llama_init_from_model(model, cp)
n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
def decode(ids):
    array = (ctypes.c_int32 * len(ids))(*ids)
    assert L.llama_decode(ctx, L.llama_batch_get_one(array, len(ids))) == 0
    return int(np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, -1), (n_vocab,)).argmax())
token = decode(eval(sys.argv[5]))
t = time.perf_counter()
for _ in range(16):
    if time.perf_counter() - t < limit: token = decode([token])
t, done = time.perf_counter(), 0
while done < n and (done == 0 or time.perf_counter() - t < limit): token, done = decode([token]), done + 1
print(done / (time.perf_counter() - t))
"""


def ours(engine: Solo, ids: list[int], mode: str, n: int) -> tuple[float, list]:
    """Greedy tokens per second, and the steps, of `n` tokens after 16 warm-up tokens."""
    engine.reset()
    engine.prefill(ids)
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
    steps, emitted, began = [], 0, 0.0
    for step in engine.generate(sampler, max_tokens=n + 16, mode=mode, stop=lambda t: False):
        emitted += len(step.tokens)
        if began:
            steps.append(step)
        elif emitted >= 16:
            began, warm = time.perf_counter(), emitted
    return (emitted - warm) / (time.perf_counter() - began), steps


def graph_time(engine: Solo, ids: list[int], n: int) -> float:
    """Median milliseconds that a plain step spends inside ggml."""
    times, run = [], Graph.run

    def timed(graph: Graph) -> None:
        began = time.perf_counter()
        run(graph)
        times.append(time.perf_counter() - began)

    Graph.run = timed
    try:
        ours(engine, ids, "plain", n)
    finally:
        Graph.run = run
    return statistics.median(times) * 1e3


def rival(
    python: str, model: str, ids: list[int], n: int, threads: int, extra: bool, limit: float = float("inf")
) -> float | None:
    """llama.cpp's tokens per second, for `n` tokens or about `limit` seconds; None when it fails (its AMX path crashes when
    built with GCC 12)."""
    command = [python, "-c", RIVAL, model, str(n), str(threads), "1" if extra else "0", repr(ids), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", default=str(EMBEDDED_TARGET))
    p.add_argument("-md", "--model-draft", default=str(EMBEDDED_DRAFT))
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("-n", type=int, default=400)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--rival", metavar="PYTHON", help="interpreter with llama-cpp-python 0.3.36")
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    speeds: dict[str, list[float]] = {}
    config = EngineConfig(Path(a.model), Path(a.model_draft), n_threads=a.threads, spec=DRAFTS)
    with Solo.load(config) as engine:
        ids = engine.tokenizer.encode(own("python")[0].text)
        for _ in range(a.rounds):
            for mode in ("plain", "chain", "tree"):
                speed, steps = ours(engine, ids, mode, a.n)
                speeds.setdefault(mode, []).append(speed)
                if mode == "plain":
                    plain_steps = steps
            for name, extra in (("llama.cpp", True), ("llama.cpp, weights not repacked", False)):
                if a.rival and (speed := rival(a.rival, a.model, ids, a.n, a.threads, extra)) is not None:
                    speeds.setdefault(name, []).append(speed)
        graph_ms = graph_time(engine, ids, a.n)
    print(
        f"{Path(a.model).name}, {a.threads} threads, {a.n} tokens greedy, median (min .. max) of {a.rounds}"
    )
    for name, found in speeds.items():
        print(f"  {name:<34} {statistics.median(found):8.1f} tokens/s ({min(found):.1f} .. {max(found):.1f})")
    step_ms = 1e3 / statistics.median(speeds["plain"])
    verify = statistics.median(s.timings.verify for s in plain_steps)
    print(
        f"plain step {step_ms:.3f} ms: graph {graph_ms:.3f}, "
        f"inputs and read-back {verify - graph_ms:.3f}, Python {step_ms - verify:.3f}"
    )
    rivals = [statistics.median(v) for k, v in speeds.items() if k.startswith("llama.cpp")]
    if rivals:
        best = max(rivals)
        print(f"plain / llama.cpp's better one: {statistics.median(speeds['plain']) / best:.2f}")
    elif a.rival:
        print("llama.cpp did not run", file=sys.stderr)
    save(
        a.json,
        {
            **header(threads=a.threads, model=Path(a.model).name),
            "tokens_per_second": speeds,
            "graph_ms": graph_ms,
        },
    )


if __name__ == "__main__":
    main()
