"""Is `auto` ever slower than the best fixed mode? Side by side, alternating, in one run.

    python bench/never_slower.py [-t 2] [--temp 0 0.8 1.2] [--limit 12] [-n 200] [--json FILE]
    python bench/never_slower.py --synthetic -m TARGET -md DRAFT [-n 400] [--json FILE]

Without --synthetic: real texts of a real pair, the embedded one by default. With it: files of any shape with RANDOM WEIGHTS (see
shapes.py) and MADE-UP ACCEPTANCE: every pass runs and takes its time, but which node is right is drawn from hit rates that give
the named acceptance lengths for a tree of 31 nodes; NOT MODEL TEXT. The last text changes between two of them every 150 tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import ROOT, header, prompts, save
from step_time import gpu_facts

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.adaptive import Experience
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine.engine import Engine
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET

sys.path.insert(0, str(ROOT / "tests"))
from reference.virtual_clock import RANKS, Text

MODES: dict[str, dict] = {
    "plain": {"mode": "plain"},
    "chain": {"mode": "chain"},
    **{f"tree {budget}": {"mode": "tree", "budget": budget} for budget in (3, 7, 15, 31)},
    "auto": {"mode": "auto"},
}
# acceptance length of a tree of 31 nodes -> hit rate of the best candidate, share of the second in the rest
LENGTHS = {
    1.2: (0.098, 0.02),
    2.0: (0.396, 0.1),
    4.0: (0.744, 0.2),
    6.0: (0.839, 0.4),
    8.0: (0.908, 0.4),
    10.0: (0.943, 0.4),
}
CHANGE = 150  # tokens between two changes of a text


def timed(engine: Engine, sampler: Sampler, n: int, options: dict) -> dict:
    """Decode n tokens behind what is committed: tokens, seconds, and steps by drafted nodes."""
    widths: Counter[int] = Counter()
    tokens, began = 0, time.perf_counter()
    for step in engine.generate(sampler, max_tokens=n, stop=lambda t: False, **options):
        tokens += len(step.tokens)
        widths[step.n_draft] += step.mode != "prefill"
    return {"tokens": tokens, "seconds": time.perf_counter() - began, "widths": dict(widths)}


def compare(run: Callable[[str, int], dict], n_texts: int, name: str) -> dict:
    """All modes on all texts, in turns; the last table row says how `auto` did."""
    found: dict[str, list[dict]] = {mode: [] for mode in MODES}
    order = list(MODES)
    for text in range(n_texts):
        for mode in order:
            found[mode].append(run(mode, text))
        order = order[1:] + order[:1]  # who comes first changes: a machine that warms up favours nobody
    speed = {m: sum(r["tokens"] for r in rs) / sum(r["seconds"] for r in rs) for m, rs in found.items()}
    best = max((m for m in speed if m != "auto"), key=speed.__getitem__)
    worst = min(
        (a["tokens"] / a["seconds"]) / (p["tokens"] / p["seconds"])
        for a, p in zip(found["auto"], found["plain"])
    )
    widths = sum((Counter(r["widths"]) for r in found["auto"]), Counter())
    print(f"{name:<26}" + "".join(f"{speed[m]:9.1f}" for m in MODES), end="")
    print(
        f"   {speed['auto'] / speed[best]:6.3f} x {best:<8} worst {worst:5.3f} x plain  {dict(sorted(widths.items()))}",
        flush=True,
    )
    return {
        "setting": name,
        "tokens_per_second": {m: round(s, 2) for m, s in speed.items()},
        "best_fixed": best,
        "auto_to_best": round(speed["auto"] / speed[best], 4),
        "worst_text_to_plain": round(worst, 4),
        "auto_widths": {str(k): v for k, v in sorted(widths.items())},
        "texts": {m: [round(r["tokens"] / r["seconds"], 2) for r in rs] for m, rs in found.items()},
    }


def real(engine: Engine, temperature: float, n: int, limit: int, name: str) -> dict:
    """Texts of the pair itself."""
    texts = [engine.tokenizer.encode(entry["prompt"]) for entry in prompts(limit)]

    def run(mode: str, text: int) -> dict:
        engine.reset()
        engine.prefill(texts[text])
        sampler = Sampler(SamplingParams(temperature=temperature, seed=text), engine.n_vocab)
        return timed(engine, sampler, n, MODES[mode])

    for mode in MODES:  # graphs are built once, however long the comparison
        run(mode, 0)
    engine.experience = Experience()
    return compare(run, len(texts), name)


class Synthetic:
    """Stands before an engine's draft and target: what they say is replaced, what they cost is not."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.text = engine, Text(0.5)
        self._propose, self._verify, self._choices = (
            engine.drafter.propose,
            engine.passes.verify,
            engine.passes.choices,
        )
        self._tree = self._truth = None
        engine.drafter.propose = self.propose
        engine.passes.verify, engine.passes.choices = self.verify, self.choices

    def propose(self, sequence, budget, depth=None):
        self._propose(sequence, budget, depth)
        rows, self._truth = self.text_at(len(sequence.tokens)).draft(self.engine.drafter.depth)
        n = depth or self.engine.drafter.depth
        return type(rows)(rows.ids[:n], rows.log_probs[:n])

    def text_at(self, at: int) -> Text:
        return self.text if isinstance(self.text, Text) else self.text(at)

    def verify(self, sequence, tree, *more):
        self._tree = tree
        return self._verify(sequence, tree, *more)

    def choices(self, graph):
        said = self._choices(graph)
        tree, self._tree = self._tree, None
        if tree is None:
            return said
        right = [RANKS * d + r if r < RANKS else RANKS * 100 for d, r in enumerate(self._truth)]
        return np.array([*right, RANKS * 100])[tree.depths]


def synthetic(engine: Engine, n: int, context: int) -> list[dict]:
    """Texts of made-up acceptance, and one that changes."""
    stand_in = Synthetic(engine)
    rng = np.random.default_rng(0)
    engine.prefill(rng.integers(0, engine.n_vocab, context).tolist())
    before = engine.snapshot()

    def runs(texts: Callable[[int], object]) -> Callable[[str, int], dict]:
        def run(mode: str, text: int) -> dict:
            engine.restore(before)
            stand_in.text = texts(text)
            return timed(engine, Sampler(SamplingParams(temperature=0), engine.n_vocab), n, MODES[mode])

        return run

    rows = []
    for mode in MODES:
        runs(lambda i: Text(0.7, i))(mode, 0)
    for length, (hits, others) in LENGTHS.items():
        engine.experience = Experience()
        text = lambda i, h=hits, o=others: Text(h, i, spread=1.0, others=o)  # noqa: E731
        rows.append(compare(runs(text), 2, f"length {length}"))

    def changing(i: int) -> Callable[[int], Text]:
        parts = [Text(LENGTHS[x][0], i, spread=1.0, others=LENGTHS[x][1]) for x in (2.0, 8.0)]
        return lambda at: parts[(at - context) // CHANGE % 2]

    engine.experience = Experience()
    rows.append(compare(runs(changing), 3, "length 2 and 8 by turns"))
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", type=Path, default=EMBEDDED_TARGET)
    p.add_argument("-md", "--model-draft", type=Path, default=EMBEDDED_DRAFT)
    p.add_argument("-t", "--threads", type=int, nargs="+", default=[2])
    p.add_argument("--temp", type=float, nargs="+", default=[0.0, 0.8, 1.2])
    p.add_argument("-n", type=int, default=200, help="tokens per text")
    p.add_argument("--limit", type=int, default=12, help="texts")
    p.add_argument(
        "--synthetic", action="store_true", help="made-up acceptance, for files with random weights"
    )
    p.add_argument("--context", type=int, default=512, help="tokens before the made-up text")
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    rows = []
    print(f"{'tokens/s':<26}" + "".join(f"{mode:>9}" for mode in MODES))
    for threads in a.threads:
        config = EngineConfig(a.model, a.model_draft, n_threads=threads, calibrate="always")
        with Engine.load(config) as engine:
            device = engine.device.info.description
            costs = [list(point) for point in engine.costs.points()]
            if a.synthetic:
                rows += synthetic(engine, a.n, a.context)
            else:
                rows += [real(engine, t, a.n, a.limit, f"{threads} threads, T {t:g}") for t in a.temp]
    facts = header(
        device=device, gpu=gpu_facts(), model=a.model.name, draft=a.model_draft.name, synthetic=a.synthetic
    )
    save(a.json, {**facts, "calibrated": costs, "rows": rows})


if __name__ == "__main__":
    main()
