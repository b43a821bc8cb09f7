"""Breakdown of a step's time, on files of any shape (see shapes.py); random weights are valid for timing, not for text.

    python bench/step_time.py -m TARGET [-md DRAFT] [--context 2048] [--draft-window 2048] [--synthetic-acceptance 8.31]
        [--json FILE]

Without -md the target's prediction head drafts, --draft-max tokens deep.

Pass times: `--repeat` runs are queued, the device is waited for once, the mean is taken, after a warm-up that lets CUDA graphs
be captured: launch overhead is in, Python around it is not. "with Python" is the median of whole calls, inputs and read-back
included. Whole-loop speed with `--synthetic-acceptance L` forces the accepted length to L on average (the spine of the tree is
accepted, whatever the target chooses): NOT MODEL TEXT, but the true cost of steps with that length.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from common import Solo, add_engine_options, cache_types, header, memory_options, save
from made_up import MadeUp

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.config import FILES, EngineConfig
from dflash_ggml.decode.forest import Forest
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.decode.tree import Tree
from dflash_ggml.engine import step as step_module
from dflash_ggml.engine.engine import Engine
from dflash_ggml.state.snapshot import Snapshot

WIDTHS = (2, 4, 8, 9, 16, 17, 24, 32, 48, 64, 128)


def random_tree(rng: np.random.Generator, width: int, n_vocab: int, depth: int) -> Tree:
    """A spine of `depth` (or less) with random branches, `width` nodes in all."""
    spine = min(depth, width - 1)
    parents, depths = [-1, *range(spine)], list(range(spine + 1))
    while len(parents) < width:
        p = int(rng.integers(0, max(1, len(parents) - 1)))
        if depths[p] < depth:
            parents.append(p)
            depths.append(depths[p] + 1)
    tokens = rng.integers(0, n_vocab, width).astype(np.int32)
    return Tree(tokens, np.array(parents, np.int32), np.array(depths, np.int32), np.zeros(width, np.float32))


def pass_ms(engine: Engine, graph, repeat: int) -> float:
    """Milliseconds of one run of a graph, device time and launches."""
    for _ in range(3):
        graph.run()
    engine.device.synchronize()
    began = time.perf_counter()
    for _ in range(repeat):
        graph.run()
    engine.device.synchronize()
    return (time.perf_counter() - began) / repeat * 1e3


def call_ms(call, repeat: int) -> float:
    """Median milliseconds of a whole call."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def measure_stock(engine: Solo, widths: list[int], repeat: int, ours: dict) -> dict[str, float]:
    """Times of the target's passes with ggml's own matmuls, beside ours."""
    rng, passes, sequence = np.random.default_rng(0), engine.passes, engine.sequence
    passes.device.use_narrow_matmuls(False)
    found = {}
    for width in [0, *(w for w in widths if w <= 64)]:
        if width:
            tree = random_tree(rng, width, engine.n_vocab, engine.drafter.depth)
            graph = passes.verify(Forest([sequence], [tree]))
        else:
            graph = passes.linear(sequence, [5])
        name = f"verify {width}" if width else "plain"
        found[name] = pass_ms(engine, graph, max(3, repeat // 2))
        print(
            f"  {name:<14} {found[name]:9.3f} ms with stock products, {found[name] / ours[name]['pass_ms']:.2f} times ours",
            flush=True,
        )
    passes.device.use_narrow_matmuls(True)
    return found


def measure_passes(engine: Solo, widths: list[int], repeat: int) -> dict[str, dict[str, float]]:
    """Times of every pass behind the committed tokens."""
    rng, passes, sequence, drafter = np.random.default_rng(0), engine.passes, engine.sequence, engine.drafter
    n_vocab = engine.n_vocab
    rows: dict[str, dict[str, float]] = {}

    def row(name: str, graph, call) -> None:
        # on the CPU a graph's inputs are its own scratch memory: it cannot run again without being filled
        queued = pass_ms(engine, graph, repeat) if engine.device.is_gpu else float("nan")
        rows[name] = {"pass_ms": queued, "call_ms": call_ms(call, repeat)}
        print(f"  {name:<14} {rows[name]['pass_ms']:9.3f} {rows[name]['call_ms']:9.3f}", flush=True)

    def plain(column=None):
        return passes.choices(passes.linear(sequence, [5], column=column))

    row("plain", passes.linear(sequence, [5]), plain)
    row("plain, feeding", passes.linear(sequence, [5], column=0), lambda: plain(0))
    for width in widths:
        tree = random_tree(rng, width, n_vocab, drafter.depth)
        row(
            f"verify {width}",
            passes.verify(Forest([sequence], [tree])),
            lambda tree=tree: passes.choices(passes.verify(Forest([sequence], [tree]))),
        )

    seen = tuple(range(min(9, drafter.depth + 1)))  # a path that one draft pass takes in

    def draft():
        sequence.pending, sequence.unseen = 5, seen
        return drafter.propose([sequence], 31)

    draft()
    row("draft", newest(drafter.graphs), draft)
    forest = Forest([sequence], [random_tree(rng, 2, n_vocab, drafter.depth)])
    moved = (*range(0, 2 * len(seen) - 2, 2), 2 * len(seen) - 3)
    for name, path in (("commit", seen), ("commit, moved", moved)):
        passes.commit(forest, [path])

        def commit(path=path):
            passes.commit(forest, [path])
            engine.device.synchronize()

        row(name, newest(passes.graphs), commit)
    return rows


def newest(graphs):
    """The graph that was used last."""
    return list(graphs)[-1][1]


class Forced(MadeUp):
    """Accepts the deepest path of each tree as far as a mean of `length` emitted tokens asks for."""

    def __init__(self, engine: Engine, length: float) -> None:
        super().__init__(engine, drafts=False)
        self.length, self._owed = length, 0.0
        self._tree: Tree | None = None
        self._path: list[int] = []

    def right(self, sequence: Sequence, tree: Tree, chosen: np.ndarray) -> np.ndarray:
        if tree.width == 1:
            return chosen
        path = self.path(tree)
        right = np.full(tree.width, np.setdiff1d(np.arange(1, tree.width + 2), tree.tokens)[0], np.int32)
        right[path[:-1]] = tree.tokens[path[1:]]
        return right

    def path(self, tree: Tree) -> list[int]:
        """The nodes of a tree that are accepted, root first; the same at every call."""
        if tree is self._tree:
            return self._path
        self._owed += self.length
        n = max(1, int(self._owed))
        self._owed -= n
        node, path = int(np.argmax(tree.depths)), []
        while node >= 0:
            path.append(node)
            node = int(tree.parents[node])
        self._tree, self._path = tree, path[::-1][:n]
        return self._path


def whole_loop(engine: Solo, prompt: Snapshot, mode: str, budget: int | None, n: int) -> dict:
    """Tokens per second and mean stage times of `n` tokens in a mode, behind a prompt whose rows are in the cache."""
    perf_counter = step_module.time.perf_counter  # which knows nothing of what making acceptance up takes
    engine.restore(prompt)
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
    steps, emitted, warm, began = [], 0, 0, None
    for step in engine.generate(sampler, max_tokens=n + 64, mode=mode, budget=budget, stop=lambda t: False):
        if began is not None:
            steps.append(step)
            emitted += len(step.tokens)
        elif step.mode != "prefill":
            warm += 1
            if warm == 5:  # graphs are captured by then
                began = perf_counter()
    seconds = perf_counter() - began
    stages = {
        s: statistics.mean(getattr(x.timings, s) for x in steps)
        for s in ("draft", "tree", "verify", "commit", "host")
    }
    return {
        "tokens_per_second": emitted / seconds,
        "length": emitted / len(steps),
        "step_ms": seconds / len(steps) * 1e3,
        **stages,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-md", "--model-draft", help="by default the target's prediction head")
    p.add_argument("--draft-max", type=int, default=3, help="tokens that a prediction head looks ahead")
    p.add_argument("--context", type=int, default=2048)
    p.add_argument("-c", "--ctx-size", type=int, help="by default the context and some room, at least 8192")
    p.add_argument("--widths", type=int, nargs="*", default=list(WIDTHS))
    p.add_argument("--budgets", type=int, nargs="*", default=[15, 23, 31])
    p.add_argument("--synthetic-acceptance", type=float, metavar="L")
    p.add_argument(
        "--stock", action="store_true", help="also time the passes with ggml's own matrix products (CUDA)"
    )
    p.add_argument("--repeat", type=int, default=20)
    p.add_argument("-n", type=int, default=256)
    p.add_argument("--fa-window", type=int, default=0, help="of the engine: not the model's own text")
    p.add_argument("--draft-window", type=int, help="replaces the window of the draft's file")
    add_engine_options(p)
    a = p.parse_args()
    config = EngineConfig(
        Path(a.model),
        None if a.model_draft is None else Path(a.model_draft),
        spec=("mtp",) if a.model_draft is None else FILES,
        draft_max=a.draft_max,
        n_ctx=a.ctx_size or max(a.context + 2048, 8192),
        budget=max(max(a.widths) - 1, *a.budgets),
        n_threads=a.threads,
        n_gpu_layers=a.gpu_layers,
        chain_seed=True,
        fa_window=a.fa_window,
        draft_window=a.draft_window,
        **cache_types(a),
        **memory_options(a),
    )
    began = time.perf_counter()
    with Solo.load(config) as engine:
        device = engine.device.info
        facts = header(
            device=device.description,
            gpu=gpu_facts(),
            model=Path(a.model).name,
            draft=f"prediction head, {engine.drafter.depth} deep"
            if a.model_draft is None
            else Path(a.model_draft).name,
            context=a.context,
            fa_window=a.fa_window,
            draft_window=a.draft_window,
            kv_cache=str(engine.passes.state.kv.type),
            memory=str(engine.memory),
            load_s=time.perf_counter() - began,
        )
        print(
            f"{device.description}, {Path(a.model).name}, {a.context} tokens of context, "
            f"caches {facts['kv_cache']}, commit {facts['commit']}; {facts['gpu']}"
        )
        print(f"  {engine.memory}")
        rng = np.random.default_rng(1)
        ids = rng.integers(0, engine.n_vocab, a.context).tolist()
        prefill = []
        for _ in range(3 if a.context <= 16384 else 1):
            engine.reset()
            engine.device.synchronize()
            began = time.perf_counter()
            engine.prefill(ids)
            prefill.append(a.context / (time.perf_counter() - began))
        prompt = engine.snapshot(with_rows=False)
        print(f"  prefill {max(prefill):.0f} tokens/s")
        print(f"  {'pass':<14} {'pass ms':>9} {'with Python':>9}")
        rows = measure_passes(engine, a.widths, a.repeat)
        stock = measure_stock(engine, a.widths, a.repeat, rows) if a.stock else None
        for part, size in engine.nbytes.items():
            print(f"  {part:<16} {size / 2**20:10.1f} MiB")
        loops = {}
        length = a.synthetic_acceptance
        if length:
            Forced(engine, length)
            print(f"whole loop, accepted length FORCED to {length} in the mean (not model text)")
        for mode, budget in [("plain", None), ("chain", None), *(("tree", b) for b in a.budgets)]:
            if mode != "plain" and not length:
                continue
            name = mode if mode != "tree" else f"tree {budget}"
            loops[name] = whole_loop(engine, prompt, mode, budget, a.n)
            stages = " ".join(
                f"{k} {v:.2f}"
                for k, v in loops[name].items()
                if k not in ("tokens_per_second", "length", "step_ms")
            )
            print(
                f"  {name:<8} {loops[name]['tokens_per_second']:8.1f} tokens/s, "
                f"{loops[name]['length']:.2f} per step of {loops[name]['step_ms']:.2f} ms: {stages}"
            )
        graphs = {f"{key}": g.runs for key, g in [*engine.passes.graphs, *engine.drafter.graphs]}
        print(f"graphs built {engine.run_counts()['graphs']}; runs per graph: {graphs}")
        save(
            a.json,
            {
                **facts,
                "prefill_tokens_per_second": prefill,
                "passes": rows,
                "stock_products_ms": stock,
                "memory": engine.nbytes,
                "synthetic_acceptance": length,
                "loops": loops,
                "graph_runs": graphs,
            },
        )


if __name__ == "__main__":
    main()
