"""Kernels of a step on a GPU, counted and timed through PyTorch's profiler (which sees every kernel of the process).

    python bench/kernels.py -m TARGET -md DRAFT [--widths 1 24] [--users 4 8] [--context 2048] [--top 25]

Times are the profiler's own: gaps between kernels are not in them, and a kernel that starts while the one before it still runs
has its waiting in them. `wall` is the same call without a profiler, its host work included. With --users also passes over so many
texts of that context: plain, drafts and trees of 64 columns in all, and their commit.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from common import Solo, add_cache_types, cache_types
from step_time import random_tree

from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.decode.forest import Forest
from dflash_ggml.decode.tree import root_only

JOINT = 64  # columns of all texts together


def short(name: str) -> str:
    """A kernel's name without its parameter list."""
    name = re.sub(r"\(.*", "", name.replace("(anonymous namespace)::", ""))
    return re.sub(r"^void ", "", name)[:90]


def of_one(engine: Solo, widths: list[int], context: int, rng: np.random.Generator) -> dict[str, Callable]:
    """The passes of one sequence."""
    passes, sequence = engine.passes, engine.sequence
    engine.prefill(rng.integers(0, engine.n_vocab, context).tolist())

    def draft():
        sequence.pending, sequence.unseen = 5, (0, 1, 2)
        return engine.drafter.propose([sequence], 31)

    calls: dict[str, Callable] = {
        "plain": lambda: passes.choices(passes.linear(sequence, [5])),
        "draft": draft,
    }
    for width in widths:
        tree = random_tree(rng, width, engine.n_vocab, engine.drafter.depth)
        forest = Forest([sequence], [tree])
        calls[f"verify {width}"] = lambda forest=forest: passes.choices(passes.verify(forest))
    return calls


def of_several(engine: Solo, users: int, context: int, rng: np.random.Generator) -> dict[str, Callable]:
    """The passes of several sequences, for which slots are opened."""
    passes, drafter, each = engine.passes, engine.drafter, JOINT // users
    slots = [engine.open(context + JOINT) for _ in range(users)]
    for slot in slots:
        slot.prefill(rng.integers(0, engine.n_vocab, context).tolist())
    sequences = [slot.sequence for slot in slots]
    for sequence in sequences:
        sequence.pending = 5
    trees = [random_tree(rng, each, engine.n_vocab, drafter.depth) for _ in slots]
    plain, wide = Forest(sequences, [root_only(5)] * users), Forest(sequences, trees)
    depth, none = min(max(each - 1, 3), drafter.depth), [None] * users

    def verify(forest: Forest):
        return passes.choices(passes.verify(forest, none, range(forest.width)))

    def draft():
        for i, sequence in enumerate(sequences):
            sequence.unseen = (3 * i, 3 * i + 1, 3 * i + 2)
        return drafter.propose(sequences, 31, depth)

    def commit():
        passes.commit(wide, [(0, 1)] * users)
        engine.device.synchronize()

    return {
        f"{users} plain": lambda: verify(plain),
        f"{users} drafts of {depth}": draft,
        f"{users} trees of {each}": lambda: verify(wide),
        f"{users} commits": commit,
    }


def all_calls(
    engine: Solo, widths: list[int], users: list[int], context: int
) -> Iterator[tuple[str, Callable]]:
    """Every pass with its name, warm; slots of several sequences are open while theirs run."""
    rng = np.random.default_rng(0)
    for n in (0, *users):
        calls = of_several(engine, n, context, rng) if n else of_one(engine, widths, context, rng)
        for name, call in calls.items():
            for _ in range(4):
                call()
            engine.device.synchronize()
            yield name, call
        for slot in engine.slots:
            slot.close()


def wall(engine: Solo, call: Callable, repeat: int) -> float:
    """Median milliseconds of a call."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        call()
        engine.device.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return float(np.median(times))


def profile(engine: Solo, call: Callable, repeat: int) -> dict[str, list[float]]:
    """Microseconds of each run of every kernel of so many calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeat):
            call()
        engine.device.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiled.events():
        found[short(event.name)].append(event.time_range.elapsed_us())
    return {k: v for k, v in found.items() if not k.startswith(("Memcpy", "Memset", "cuda", "Activity"))}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-md", "--model-draft", required=True)
    p.add_argument("--widths", type=int, nargs="*", default=[24])
    p.add_argument("--users", type=int, nargs="*", default=[])
    p.add_argument("--context", type=int, default=2048, help="tokens of each text")
    p.add_argument("--top", type=int, default=25)
    p.add_argument("--repeat", type=int, default=5)
    add_cache_types(p)
    a = p.parse_args()
    most = max(a.users, default=1)
    with Solo.load(
        EngineConfig(
            Path(a.model),
            Path(a.model_draft),
            n_ctx=max(8192, most * (a.context + 1024)),
            budget=max(31, *a.widths),
            chain_seed=True,
            spec=DRAFTS,
            parallel=most,
            **cache_types(a),
        )
    ) as engine:
        # once a profiler was there, launches take longer
        walls = {
            name: wall(engine, call, 4 * a.repeat)
            for name, call in all_calls(engine, a.widths, a.users, a.context)
        }
        for name, call in all_calls(engine, a.widths, a.users, a.context):
            kernels = profile(engine, call, a.repeat)
            total = sum(map(sum, kernels.values())) / a.repeat
            print(
                f"{name}: wall {walls[name]:.3f} ms; {sum(map(len, kernels.values())) / a.repeat:.0f} kernels, "
                f"{total / 1e3:.3f} ms in kernels"
            )
            for kernel, times in sorted(kernels.items(), key=lambda kv: -sum(kv[1]))[: a.top]:
                print(
                    f"  {sum(times) / a.repeat / 1e3:8.3f} ms {len(times) / a.repeat:7.1f} x {np.median(times):8.2f} us  "
                    f"{kernel}"
                )


if __name__ == "__main__":
    main()
