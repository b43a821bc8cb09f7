"""Kernels of a step on a GPU, counted and timed through PyTorch's profiler (which sees every kernel of the process).

    python bench/kernels.py -m TARGET [-md DRAFT] [--widths 1 24] [--users 4 8] [--prompt 4096] [--context 2048] [--top 25]
        [--timeline]

Times are the profiler's own: gaps between kernels are not in them, and a kernel that starts while the one before it still runs
has its waiting in them. `wall` is the same call without a profiler, its host work included. With --users also passes over that
many sequences of that context: plain, drafts and trees of 64 columns in all, and their commit. --timeline adds each pass in the
order of its kernels, cut at the kernels that norm a matmul's input: `added` is from the end of all kernels before to the end of
this one, `gap` how long nothing ran before it, negative where it started early.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
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

JOINT = 64  # columns over all sequences
DEPTH = 15  # of trees where no draft says one


def short(name: str) -> str:
    """A kernel's name without its parameter list and the types of its template arguments."""
    name = re.sub(r"\(\w+\)(?=-?\d)", "", name.replace("(anonymous namespace)::", ""))
    name = re.sub(r"\(.*", "", name)
    return re.sub(r"^void ", "", name)[:90]


def of_one(
    engine: Solo, widths: list[int], prompt: int, context: int, rng: np.random.Generator
) -> dict[str, Callable]:
    """The passes of one sequence."""
    passes, sequence = engine.passes, engine.sequence
    ids = rng.integers(0, engine.n_vocab, prompt).tolist()
    engine.reset()
    engine.prefill(rng.integers(0, engine.n_vocab, context).tolist())

    def draft():
        sequence.pending, sequence.unseen = 5, (0, 1, 2)
        return engine.drafter.propose([sequence], 31)

    def read():
        engine.reset()
        engine.prefill(ids)

    calls: dict[str, Callable] = {"plain": lambda: passes.choices(passes.linear(sequence, [5]))}
    if engine.drafter is not None:
        calls["draft"] = draft
    depth = DEPTH if engine.drafter is None else engine.drafter.depth
    for width in widths:
        tree = random_tree(rng, width, engine.n_vocab, depth)
        forest = Forest([sequence], [tree])
        calls[f"verify {width}"] = lambda forest=forest: passes.choices(passes.verify(forest))
    if prompt:
        calls[f"prompt of {prompt}"] = read
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
    engine: Solo, widths: list[int], users: list[int], prompt: int, context: int
) -> Iterator[tuple[str, Callable]]:
    """Every pass with its name, warm; slots of several sequences are open while theirs run."""
    rng = np.random.default_rng(0)
    for n in (0, *users):
        calls = of_several(engine, n, context, rng) if n else of_one(engine, widths, prompt, context, rng)
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


def timeline(engine: Solo, call: Callable, repeat: int) -> None:
    """Print the kernels of a call in their order, those of layers of one kind in one line each: means in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeat):
            call()
        engine.device.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    for names, runs in sections(events):
        total = sum(added for run in runs for _, added, _ in run) / len(runs)
        print(f"  {len(runs) / repeat:.1f} a call, {total:.2f} us each: run, added, gap")
        for name, times in zip(names, zip(*runs, strict=True), strict=True):
            run, added, gap = np.mean(times, axis=0)
            print(f"    {run:8.2f} {added:8.2f} {gap:8.2f}  {name}")


Times = tuple[float, float, float]  # a kernel's run, what it adds to the pass, the gap before it


def sections(events: list[dict]) -> list[tuple[tuple[str, ...], list[list[Times]]]]:
    """Kernels of a trace, cut before each conversion with a norm; those of the same kernels and grids together, longest first."""
    found: dict[tuple[str, ...], list[list[Times]]] = defaultdict(list)
    names: list[str] = []
    times: list[Times] = []
    end: float | None = None
    for event in sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"]):
        if "convert_norm" in event["name"] and names:
            found[tuple(names)].append(times)
            names, times = [], []
        start, run = float(event["ts"]), float(event["dur"])
        end = start if end is None else end
        names.append(f"{short(event['name'])} {event['args']['grid']}")
        times.append((run, max(0.0, start + run - end), start - end))
        end = max(end, start + run)
    if names:
        found[tuple(names)].append(times)
    return sorted(found.items(), key=lambda item: -sum(added for run in item[1] for _, added, _ in run))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-md", "--model-draft", type=Path, help="needed with --users")
    p.add_argument("--widths", type=int, nargs="*", default=[24])
    p.add_argument("--users", type=int, nargs="*", default=[])
    p.add_argument("--prompt", type=int, default=0, help="also a prompt of so many tokens")
    p.add_argument("--context", type=int, default=2048, help="tokens of each text")
    p.add_argument("--top", type=int, default=25)
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--timeline", action="store_true", help="also each pass in the order of its kernels")
    add_cache_types(p)
    a = p.parse_args()
    most = max(a.users, default=1)
    with Solo.load(
        EngineConfig(
            Path(a.model),
            a.model_draft,
            n_ctx=max(8192, most * (a.context + 1024), a.prompt + 1024),
            budget=max(31, *a.widths),
            chain_seed=True,
            spec=DRAFTS if a.model_draft else None,
            parallel=most,
            **cache_types(a),
        )
    ) as engine:
        # once a profiler was there, launches take longer
        walls = {
            name: wall(engine, call, 4 * a.repeat)
            for name, call in all_calls(engine, a.widths, a.users, a.prompt, a.context)
        }
        for name, call in all_calls(engine, a.widths, a.users, a.prompt, a.context):
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
            if a.timeline:
                timeline(engine, call, a.repeat)


if __name__ == "__main__":
    main()
