"""Kernels of a step on a GPU, counted and timed through PyTorch's profiler (which sees every kernel of the process).

    python bench/kernels.py -m TARGET -md DRAFT [--widths 1 24] [--context 2048] [--top 25]

Times are the profiler's own and add up to less than a step: gaps between kernels are not in them.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from common import add_cache_types, cache_types
from step_time import random_tree

from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.engine.engine import Engine


def short(name: str) -> str:
    """A kernel's name without its parameter list."""
    name = re.sub(r"\(.*", "", name.replace("(anonymous namespace)::", ""))
    return re.sub(r"^void ", "", name)[:90]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-md", "--model-draft", required=True)
    p.add_argument("--widths", type=int, nargs="*", default=[24])
    p.add_argument("--context", type=int, default=2048)
    p.add_argument("--top", type=int, default=25)
    p.add_argument("--repeat", type=int, default=5)
    add_cache_types(p)
    a = p.parse_args()
    rng = np.random.default_rng(0)
    with Engine.load(
        EngineConfig(
            Path(a.model),
            Path(a.model_draft),
            n_ctx=max(8192, a.context + 1024),
            budget=max(31, *a.widths),
            chain_seed=True,
            spec=DRAFTS,
            **cache_types(a),
        )
    ) as engine:
        passes, sequence = engine.passes, engine.sequence
        engine.prefill(rng.integers(0, engine.n_vocab, a.context).tolist())

        def draft():
            sequence.pending, sequence.unseen = 5, (0, 1, 2)
            return engine.drafter.propose(sequence, 31)

        calls = {
            "plain": lambda: passes.choices(passes.linear(sequence, [5])),
            "draft": draft,
        }
        for width in a.widths:
            tree = random_tree(rng, width, engine.n_vocab, engine.drafter.depth)
            calls[f"verify {width}"] = lambda tree=tree: passes.choices(passes.verify(sequence, tree))
        for name, call in calls.items():
            for _ in range(4):
                call()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(a.repeat):
                    call()
                engine.device.synchronize()
            found: dict[str, list[float]] = defaultdict(list)
            for event in profile.events():
                found[short(event.name)].append(event.time_range.elapsed_us())
            kernels = {k: v for k, v in found.items() if not k.startswith(("Memcpy", "Memset", "cuda"))}
            total = sum(map(sum, kernels.values())) / a.repeat
            print(
                f"{name}: {sum(map(len, kernels.values())) / a.repeat:.0f} kernels, {total / 1e3:.3f} ms in kernels"
            )
            for kernel, times in sorted(kernels.items(), key=lambda kv: -sum(kv[1]))[: a.top]:
                print(
                    f"  {sum(times) / a.repeat / 1e3:8.3f} ms {len(times) / a.repeat:7.1f} x {np.median(times):8.2f} us  {kernel}"
                )


if __name__ == "__main__":
    main()
