"""Distinct experts that the columns of a verify pass use: a chain, the children of one token, and unrelated tokens.

    python bench/experts_touched.py -m MODEL [--text FILE] [--widths 2 4 8 16 32] [--positions 64] [--json FILE]

At positions spread over a text, the text's next tokens are verified as a chain, then the target's best tokens after the first
of these as its children. Unrelated columns are first tokens of as many different positions. The mean over positions and layers
is what a pass reads of the experts; "independent" is E (1 - (1 - k/E)^n), the expectation for uniformly random routers. Without
a text the tokens are random, which measures the router's weights only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from common import Solo, header, save

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.forest import Forest
from dflash_ggml.decode.tree import Tree
from dflash_ggml.models import experts as experts_module

_NAME = "experts of "


@contextmanager
def routers_recorded() -> Iterator[None]:
    """Graphs built meanwhile have the choice of each layer's router as an output."""
    original = experts_module._route

    def route(g, w, name, y, experts):
        ids, weights = original(g, w, name, y, experts)
        g.output(g.cont(ids), _NAME + name)
        return ids, weights

    experts_module._route = route
    try:
        yield
    finally:
        experts_module._route = original


def chosen(engine: Solo, graph, columns: int) -> np.ndarray:
    """Experts of the first `columns` columns of a pass that has run, [layers, columns, k]."""
    names = sorted(name for name in graph.outputs if name.startswith(_NAME))
    rows = [engine.device.read(graph.outputs[name]) for name in names]
    k = graph.outputs[names[0]].ne[0]
    return np.stack([np.asarray(row).view(np.int32).reshape(-1, k)[:columns] for row in rows])


def distinct(ids: np.ndarray) -> float:
    """Mean over layers of the number of different experts in [layers, ...]."""
    return float(np.mean([len(np.unique(layer)) for layer in ids]))


def tree_of(tokens: list[int], parents: list[int]) -> Tree:
    depths = np.zeros(len(tokens), np.int32)
    for i, parent in enumerate(parents):
        depths[i] = depths[parent] + 1 if parent >= 0 else 0
    n = len(tokens)
    return Tree(np.array(tokens, np.int32), np.array(parents, np.int32), depths, np.zeros(n, np.float32))


def measure(engine: Solo, ids: list[int], widths: list[int], positions: int) -> dict[int, dict[str, float]]:
    """Width -> means by kind of columns."""
    widest = max(widths)
    first, last = min(64, len(ids) // 4), len(ids) - widest
    if last <= first:
        raise SystemExit(f"{len(ids)} tokens of text are too few for chains of {widest}")
    found: dict[int, dict[str, list[float]]] = {n: {"chain": [], "children": []} for n in widths}
    roots = []
    for p in np.unique(np.linspace(first, last, positions).astype(int)).tolist():
        engine.reset()
        engine.prefill(ids[:p])
        for n in sorted(widths, reverse=True):  # a single column would be committed
            chain = tree_of(ids[p : p + n], [-1, *range(n - 1)])
            graph = engine.passes.verify(Forest([engine.sequence], [chain]))
            picked = chosen(engine, graph, n)
            found[n]["chain"].append(distinct(picked))
            best = np.argsort(engine.passes.logits_row(graph, 0))[::-1][: n - 1].tolist()
            children = tree_of([ids[p], *best], [-1] + [0] * (n - 1))
            graph = engine.passes.verify(Forest([engine.sequence], [children]))
            found[n]["children"].append(distinct(chosen(engine, graph, n)))
        roots.append(picked[:, :1])
    rng = np.random.default_rng(0)
    means = {
        n: {kind: float(np.mean(counts)) for kind, counts in kinds.items()} for n, kinds in found.items()
    }
    for n in widths:
        if n <= len(roots):
            draws = [rng.choice(len(roots), n, replace=False) for _ in range(32)]
            means[n]["unrelated"] = float(
                np.mean([distinct(np.concatenate([roots[i] for i in draw], axis=1)) for draw in draws])
            )
    return means


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", required=True)
    p.add_argument("--text", type=Path)
    p.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    p.add_argument("--positions", type=int, default=64)
    p.add_argument("--tokens", type=int, default=1024, help="of the text, from its beginning")
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("--gpu-layers", type=int)
    p.add_argument("--json")
    a = p.parse_args()
    options = {} if a.gpu_layers is None else {"n_gpu_layers": a.gpu_layers}
    config = EngineConfig(
        Path(a.model),
        None,
        spec=("suffix",),
        n_ctx=a.tokens + max(a.widths) + 64,
        budget=max(max(a.widths) - 1, 1),
        n_threads=a.threads,
        **options,
    )
    with routers_recorded(), Solo.load(config) as engine:
        experts = getattr(engine.passes.target, "experts", None)
        if experts is None:
            raise SystemExit(f"{a.model}: has no experts")
        if a.text:
            ids = engine.tokenizer.encode(a.text.read_text(encoding="utf-8"))[: a.tokens]
        else:
            ids = np.random.default_rng(1).integers(0, engine.n_vocab, a.tokens).tolist()
        means = measure(engine, ids, a.widths, a.positions)
        n_experts, k = experts.n_experts, experts.n_used
        print(f"{Path(a.model).name}: {n_experts} experts, {k} used; distinct ones per layer, mean")
        print(f"  {'columns':>7} {'chain':>8} {'children':>8} {'unrelated':>9} {'independent':>11}")
        for n, row in means.items():
            row["independent"] = n_experts * (1 - (1 - k / n_experts) ** n)
            print(
                f"  {n:7} {row['chain']:8.1f} {row['children']:8.1f} {row.get('unrelated', float('nan')):9.1f} "
                f"{row['independent']:11.1f}"
            )
        facts = header(model=Path(a.model).name, text=a.text.name if a.text else None, tokens=len(ids))
        save(a.json, {**facts, "experts": n_experts, "used": k, "widths": means})


if __name__ == "__main__":
    main()
