"""A long sequence under a memory limit: what was planned, allocated and seen by nvidia-smi, and that it decodes at the end.

    python bench/long_context.py -m TARGET -md DRAFT --gpu-memory 23GiB -ctk q8_0 -ctv q4_0 [-c 131072] [--prompt 120000]
        [-n 200] [--budget 23] [--draft-window 2048] [--synthetic-acceptance 8.31] [--json FILE]

Files of random weights (see shapes.py) will do: their times and sizes are those of a model, THEIR OUTPUT IS NOISE. With
`--synthetic-acceptance L` the accepted length is FORCED to L on average (see step_time.py). On a CPU the peak is that of this
process's resident memory.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from common import Solo, add_cache_types, cache_types, header, save
from step_time import Forced

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.cli.arguments import memory_size
from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams

MIB = 1 << 20


class Peak:
    """The most MiB that nvidia-smi saw in use on the first GPU while this is open, ten looks a second; 0 without one."""

    def __init__(self) -> None:
        self.first = self.most = 0
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Peak:
        command = [
            "nvidia-smi",
            "-i",
            "0",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
            "-lms",
            "100",
        ]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:
            return self
        self._look()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> bool:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line.isdigit():
            self.first = self.first or int(line)
            self.most = max(self.most, int(line))
        return bool(line)

    def _follow(self) -> None:
        while self._look():
            pass

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._thread.join(5)


def decode(engine: Solo, n: int, length: float | None) -> tuple[float, float]:
    """Tokens per second and tokens per step of `n` tokens in trees, once graphs are captured."""
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
    began, steps, emitted, warm = 0.0, 0, 0, 0
    with Forced(engine, length) if length else nullcontext():
        for step in engine.generate(sampler, max_tokens=n, mode="tree", stop=lambda token: False):
            if began:
                steps, emitted = steps + 1, emitted + len(step.tokens)
            elif step.mode != "prefill":
                warm += 1
                if warm == 5:
                    began = time.perf_counter()
        seconds = time.perf_counter() - began
    return emitted / seconds, emitted / max(steps, 1)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-md", "--model-draft", required=True)
    p.add_argument("-c", "--ctx-size", type=int, default=131072)
    p.add_argument("--gpu-memory", type=memory_size)
    p.add_argument("--prompt", type=int, default=120_000)
    p.add_argument("-n", type=int, default=200)
    p.add_argument("--budget", type=int, default=23)
    p.add_argument("--draft-window", type=int)
    p.add_argument("--synthetic-acceptance", type=float, metavar="L")
    p.add_argument("-b", "--batch-size", type=int, default=0)
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("-ngl", "--gpu-layers", type=int, default=-1)
    p.add_argument("--json", metavar="FILE")
    add_cache_types(p)
    a = p.parse_args()
    config = EngineConfig(
        Path(a.model),
        Path(a.model_draft),
        n_ctx=a.ctx_size,
        gpu_memory=a.gpu_memory,
        n_batch=a.batch_size,
        budget=a.budget,
        n_threads=a.threads,
        n_gpu_layers=a.gpu_layers,
        draft_window=a.draft_window,
        chain_seed=True,
        calibrate="never",
        **cache_types(a),
    )
    with Peak() as peak:
        before = peak.first
        engine = Solo.load(config)
        loaded = peak.most
        with engine:
            print(f"{engine.device.info.description}; {gpu_facts()}")
            print(f"  plan: {engine.memory}")
            print(f"  caches {engine.passes.state.kv.type}, {engine.memory.against(engine.nbytes)}")
            ids = (
                np.random.default_rng(1)
                .integers(0, engine.n_vocab, min(a.prompt, engine.n_ctx - a.n - 1))
                .tolist()
            )
            began = time.perf_counter()
            engine.prefill(ids)
            prefill = len(ids) / (time.perf_counter() - began)
            filled = peak.most
            print(f"  prefill of {len(ids)} tokens: {prefill:.0f} tokens/s", flush=True)
            speed, length = decode(engine, a.n, a.synthetic_acceptance)
            how = f"FORCED to {a.synthetic_acceptance}" if a.synthetic_acceptance else "random weights"
            print(
                f"  {a.n} tokens decoded: {speed:.1f} tokens/s, {length:.2f} per step ({how}; not model text)"
            )
            print(f"  at the end: {engine.memory.against(engine.nbytes)}")
            plan, taken, n_ctx = dict(engine.memory.parts), engine.nbytes, engine.n_ctx
            time.sleep(0.3)  # a last look
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if peak.most:
        print(f"  nvidia-smi, MiB: {before} before, {loaded} loaded, {filled} prefilled, {peak.most} at most")
        beside = peak.most - sum(taken.values()) / MIB
        print(f"  of these {beside:.0f} are not in the plan: CUDA's context, code, cuBLAS, captured graphs")
    else:
        print(f"  resident at most: {resident:.0f} MiB")
    if isinstance(a.gpu_memory, int) and peak.most:
        verdict = "within" if peak.most * MIB <= a.gpu_memory else "ABOVE"
        print(f"  {peak.most / 1024:.2f} GiB are {verdict} the limit of {a.gpu_memory / (1 << 30):.2f}")
    save(
        a.json,
        {
            "facts": header(gpu=gpu_facts(), model=Path(a.model).name, draft=Path(a.model_draft).name),
            "n_ctx": n_ctx,
            "prompt": len(ids),
            "prefill_tokens_per_second": prefill,
            "decode_tokens_per_second": speed,
            "tokens_per_step": length,
            "planned": plan,
            "allocated": taken,
            "nvidia_smi_mib": {"before": before, "loaded": loaded, "prefilled": filled, "most": peak.most},
            "resident_mib": resident,
        },
    )


if __name__ == "__main__":
    main()
