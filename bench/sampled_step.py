"""Cost of sampling in a step: greedy against sampled, rows reduced on the device against whole rows on the host.

    python bench/sampled_step.py -m TARGET -md DRAFT [--context 2048] [--length 5] [--entropy 1.0] [--json FILE]

On files of any shape with RANDOM WEIGHTS (see shapes.py). Random logits are far too flat, and every nucleus would reach beyond
what is kept: the last norm is scaled until the mean entropy of a row is that of a real model. Acceptance is FORCED to
`--length` tokens per step, whatever the target chooses, so that every setting visits as many nodes: NOT MODEL TEXT. The sampler
draws at every visited node all the same. The grammar stays inside a JSON string, because forced tokens would break it. Settings
alternate; the figure is the median step.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
from common import Solo, header, save
from step_time import Forced

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.decode.accept import Accepted
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.tree import Tree
from dflash_ggml.engine import accept
from dflash_ggml.errors import ConfigError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml.device import F32
from dflash_ggml.text.grammar import GrammarCompiler, GrammarProcessor
from dflash_ggml.text.grammar_spec import GrammarSpec

NORM = "output_norm.weight"
OPEN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
SETTINGS: dict[str, dict] = {
    "greedy": {"temperature": 0.0},
    "T 0.7, top-k 20, top-p 0.95": {**OPEN, "temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "the defaults": {"seed": 1},
    "T 1, all tokens": OPEN,
    "T 0.7, top-k 20, repeat penalty 1.1": {
        **OPEN,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
        "repeat_penalty": 1.1,
    },
    "T 1, all tokens, repeat penalty 1.1": {**OPEN, "repeat_penalty": 1.1},
    "greedy, repeat penalty 1.1": {"temperature": 0.0, "repeat_penalty": 1.1},
    "JSON, T 0.7, top-k 20, top-p 0.95": {**OPEN, "temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "JSON, greedy": {"temperature": 0.0},
}


class InString:
    """A JSON grammar that stays inside a string, whatever the text."""

    def __init__(self, grammar: GrammarProcessor, ids: list[int]) -> None:
        self.grammar, self.ids = grammar, np.array(ids, np.int32)

    def __call__(self, history: np.ndarray, scores: np.ndarray) -> np.ndarray:
        return self.grammar(self.ids, scores)

    def allows(self, history: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return self.grammar.allows(self.ids, ids)


@dataclass
class Walk:
    """A walk along a forced path that asks the sampler at every node and then goes on as it must."""

    forced: Forced
    visited: int = 0

    def __call__(self, tree: Tree, choose: Callable[[int], int], emit: Callable[[int], bool]) -> Accepted:
        spine, path, tokens = self.forced.path(tree), [], []
        for at, node in enumerate(spine):
            drawn = choose(node)
            self.visited += 1
            path.append(node)
            tokens.append(int(tree.tokens[spine[at + 1]]) if at + 1 < len(spine) else drawn)
            if emit(tokens[-1]):
                return Accepted(tuple(path), tuple(tokens), stopped=True)
        return Accepted(tuple(path), tuple(tokens))


@contextmanager
def forcing(engine: Solo, length: float) -> Iterator[Walk]:
    """Acceptance is forced meanwhile, of greedy steps by the target's choices."""
    with Forced(engine, length) as forced, mock.patch.object(accept, "walk", Walk(forced)) as walk:
        yield walk


def entropy(rows: np.ndarray, factor: float = 1.0) -> float:
    """Mean entropy of rows of logits times a factor, in nats."""
    scaled = factor * (rows.astype(np.float64) - rows.max(axis=1, keepdims=True))
    weights = np.exp(scaled)
    totals = weights.sum(axis=1)
    return float(np.mean(np.log(totals) - (weights * scaled).sum(axis=1) / totals))


def with_writable_norm(config: EngineConfig) -> Solo:
    """The engine, its last norm in memory of its own: a CPU's weights are the mapped file, which is read-only."""
    mapped = GGUFFile.data

    def data(file: GGUFFile, name: str) -> np.ndarray:
        found = mapped(file, name)
        return found.copy() if name == NORM else found

    GGUFFile.data = data  # type: ignore[method-assign]
    try:
        return Solo.load(config)
    finally:
        GGUFFile.data = mapped  # type: ignore[method-assign]


def sharpen(engine: Solo, wanted: float, rng: np.random.Generator) -> tuple[float, float]:
    """Scale the target's last norm until rows have this mean entropy; the factor, and the entropy found afterwards."""

    def rows() -> np.ndarray:
        found = []
        for _ in range(8):
            engine.reset()
            engine.prefill(rng.integers(0, engine.n_vocab, 32).tolist())
            found.append(engine.logits.copy())
        return np.stack(found)

    before, low, high = rows(), 1e-3, 1e3
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if entropy(before, middle) > wanted else (low, middle)
    norm = engine.passes.weights[NORM]
    assert norm.type == F32
    engine.device.write(norm, (np.float32(low) * engine.device.read(norm)).astype(np.float32))
    return low, entropy(rows())


def measure(
    engine: Solo, ids: list[int], options: dict, processors: list, budget: int, length: float, n: int
) -> dict[str, float]:
    """Median times of `n` steps, after ten that capture graphs."""
    engine.reset()
    engine.prefill(ids)
    fetched, row = 0, engine.passes.logits_row

    def counted(*args, **named):
        nonlocal fetched
        fetched += 1
        return row(*args, **named)

    engine.passes.logits_row = counted
    sampler = Sampler(SamplingParams(**options), engine.n_vocab, processors)
    walls, steps, warm = [], [], 10
    try:
        with forcing(engine, length) as walk:
            generation = engine.generate(sampler, mode="tree", budget=budget, stop=lambda t: False)
            next(generation)
            for _ in range(warm):
                next(generation)
            fetched = walk.visited = 0
            for _ in range(n):
                began = time.perf_counter()
                steps.append(next(generation))
                walls.append((time.perf_counter() - began) * 1e3)
            generation.close()
    finally:
        del engine.passes.logits_row
    stages = {s: statistics.median(getattr(x.timings, s) for x in steps) for s in ("verify", "host")}
    return {
        "step_ms": statistics.median(walls),
        **{f"{name}_ms": value for name, value in stages.items()},
        "visited": (walk.visited or sum(len(s.path) for s in steps)) / n,
        "fetched": fetched / n,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-md", "--model-draft", required=True)
    p.add_argument("--context", type=int, default=2048)
    p.add_argument("--budget", type=int, default=23)
    p.add_argument("--length", type=float, default=5.0, help="forced tokens per step, so many nodes visited")
    p.add_argument("--entropy", type=float, default=1.0, help="mean entropy of a row in nats")
    p.add_argument("-n", type=int, default=60, help="steps of a measurement")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("-ngl", "--gpu-layers", type=int, default=-1)
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    config = EngineConfig(
        Path(a.model),
        Path(a.model_draft),
        spec=DRAFTS,
        n_ctx=a.context + 4096,
        budget=a.budget,
        chain_seed=True,  # so that the tree is deep enough to visit so many nodes
        n_threads=a.threads,
        n_gpu_layers=a.gpu_layers,
    )
    with with_writable_norm(config) as engine:
        rng = np.random.default_rng(1)
        factor, found = sharpen(engine, a.entropy, rng)
        facts = header(
            device=engine.device.info.description,
            gpu=gpu_facts(),
            model=Path(a.model).name,
            draft=Path(a.model_draft).name,
            context=a.context,
            budget=a.budget,
            forced_length=a.length,
            head_scaled_by=factor,
            mean_entropy=found,
        )
        print(
            f"{facts['device']}, {facts['model']} (RANDOM WEIGHTS, head scaled by {factor:.2f}, entropy {found:.2f} nats), "
            f"{a.context} tokens of context, tree of {a.budget}, acceptance FORCED to {a.length}, commit {facts['commit']}"
        )
        ids = rng.integers(0, engine.n_vocab, a.context).tolist()
        string = engine.tokenizer.encode('{"a', special=False)
        try:
            compiler: GrammarCompiler | None = GrammarCompiler(engine.tokenizer, engine.n_vocab)
        except ConfigError as error:
            compiler = None
            print(f"  no JSON: {error}")
        cases = [
            (name, reduce)
            for name in SETTINGS
            for reduce in (True, False)
            if (compiler or "JSON" not in name) and (reduce or name != "greedy")
        ]
        runs: dict[tuple[str, bool], list[dict[str, float]]] = {case: [] for case in cases}
        for _ in range(a.rounds):
            for name, reduce in cases:
                rules = []
                if compiler and "JSON" in name:
                    rules = [InString(compiler.processor(GrammarSpec("json_object", ""), 0), string)]
                engine.passes.reduces = reduce
                runs[name, reduce].append(
                    measure(engine, ids, SETTINGS[name], rules, a.budget, a.length, a.n)
                )
        table = []
        greedy = statistics.median(r["step_ms"] for r in runs["greedy", True])
        columns = ("step ms", 8), ("- greedy", 9), ("verify", 8), ("host", 7), ("visited", 8), ("fetched", 8)
        print(f"  {'setting':<38} {'rows':<8} " + " ".join(f"{title:>{width}}" for title, width in columns))
        for (name, reduce), found_runs in runs.items():
            mean = {key: statistics.median(r[key] for r in found_runs) for key in found_runs[0]}
            rows = "none" if name == "greedy" else "reduced" if reduce else "whole"
            more = mean["step_ms"] - greedy
            table.append({"setting": name, "rows": rows, "more_than_greedy_ms": more, **mean})
            print(
                f"  {name:<38} {rows:<8} {mean['step_ms']:8.3f} {more:+9.3f} {mean['verify_ms']:8.3f} "
                f"{mean['host_ms']:7.3f} {mean['visited']:8.2f} {mean['fetched']:8.2f}"
            )
        save(a.json, {**facts, "settings": SETTINGS, "rounds": a.rounds, "steps": a.n, "results": table})


if __name__ == "__main__":
    main()
