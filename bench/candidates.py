"""Number of candidates per drafted depth: what they cost in the heap and in the draft's pass, and what they gain.

    python bench/candidates.py [-t 1] [--limit 12] [-n 200] [--json FILE]
    python bench/candidates.py -m TARGET -md DRAFT --context 2048 --no-texts [--json FILE]      # costs alone, any weights

Gains are tokens per pass along sequences that plain decoding generated first, greedily and at temperatures: every setting
follows the same tokens, so that only the trees differ. Costs are the best of `--repeat` runs, the settings alternating.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence as Items
from pathlib import Path

import numpy as np
from common import Solo, header, save
from made_up import MadeUp
from step_time import call_ms, newest, pass_ms

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.bench.prompts import own, spread
from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.decode.tree import Tree, expand
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET

COUNTS = [8, 16, 64]
BUDGETS = [15, 31, 63]
DEPTH = 15
ROUNDS = 7


def blocks(n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Made-up drafts with the most candidates: ids and log-probabilities that fall, less sure with the depth."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(n):
        logits = rng.standard_normal((DEPTH, 1000)) * np.linspace(4, 2.5, DEPTH)[:, None]
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        best = -np.sort(-logits, 1)[:, : max(COUNTS)].astype(np.float32)
        found.append((np.argsort(-logits, 1)[:, : max(COUNTS)].astype(np.int32), best))
    return found


def heap_us(repeat: int) -> dict[str, dict[int, float]]:
    """Microseconds from a draft's rows to its tree, by budget and candidates."""
    drafts, found = blocks(16), {}
    for budget in BUDGETS:
        times: dict[int, list[float]] = {k: [] for k in COUNTS}
        for _ in range(repeat):
            for k in COUNTS:
                rows = [(ids[:, :k].copy(), probs[:, :k].copy()) for ids, probs in drafts]
                began = time.perf_counter()
                for ids, probs in rows:
                    expand(0, CandidateBlock(ids, probs), budget)
                times[k].append((time.perf_counter() - began) / len(rows) * 1e6)
        found[f"budget {budget}"] = {k: round(min(t), 2) for k, t in times.items()}
    return found


def draft_ms(engine: Solo, context: int, repeat: int) -> dict[str, dict[int, float]]:
    """Milliseconds of a draft pass by candidates: whole calls, and on a GPU also the queued pass."""
    engine.reset()
    engine.prefill(np.random.default_rng(1).integers(0, engine.n_vocab, context).tolist())
    sequence, drafter = engine.sequence, engine.drafter
    found: dict[str, dict[int, list[float]]] = {
        "call": {k: [] for k in COUNTS},
        "pass": {k: [] for k in COUNTS},
    }

    def draft() -> None:
        sequence.pending, sequence.unseen = 5, ()
        drafter.propose([sequence], 31)

    for _ in range(ROUNDS):
        for k in COUNTS:
            drafter.candidates = k
            drafter.graphs.clear()
            found["call"][k].append(call_ms(draft, repeat))
            if engine.device.is_gpu:
                found["pass"][k].append(pass_ms(engine, newest(drafter.graphs), repeat))
    return {name: {k: round(min(t), 4) for k, t in ms.items() if t} for name, ms in found.items()}


def written(engine: Solo, ids: list[int], temperature: float, seed: int, n: int) -> list[int]:
    """Tokens that plain decoding generates after a prompt."""
    engine.reset()
    engine.prefill(ids)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), engine.n_vocab)
    steps = engine.generate(sampler, max_tokens=n, mode="plain", stop=lambda t: False)
    return [token for step in steps for token in step.tokens]


class Following(MadeUp):
    """Force the target's choices to `ids`; propose only the draft's best `count` candidates."""

    def __init__(self, engine: Solo, ids: list[int], count: int) -> None:
        super().__init__(engine)
        self.ids, self.count = np.array(ids, np.int32), count

    def propose(
        self, sequences: Items[Sequence], budget: int, depth: int | None = None
    ) -> list[CandidateBlock]:
        found = self._propose(sequences, budget, depth)
        return [CandidateBlock(rows.ids[:, : self.count], rows.log_probs[:, : self.count]) for rows in found]

    def right(self, sequence: Sequence, tree: Tree, chosen: np.ndarray) -> np.ndarray:
        at = sequence.n_tokens + 1 + tree.depths
        return self.ids[np.minimum(at, len(self.ids) - 1)]


def length(engine: Solo, ids: list[int], text: list[int], budget: int, count: int) -> tuple[int, int]:
    """Tokens and passes of tree decoding forced along given tokens."""
    tokens = passes = 0
    engine.reset()
    engine.prefill(ids)
    engine.logits[text[0]] = 1e9  # start with the sequence's first token
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
    with Following(engine, [*ids, *text], count):
        for step in engine.generate(
            sampler, max_tokens=len(text), mode="tree", budget=budget, stop=lambda t: False
        ):
            tokens += len(step.tokens) if step.mode != "prefill" else 0
            passes += step.mode != "prefill"
    return tokens, passes


def gains(engine: Solo, temperature: float, limit: int, n: int) -> list[dict]:
    """Tokens per pass by budget and candidates, averaged over the sequences."""
    prompts = [engine.tokenizer.encode(p.text) for p in spread(own("python"), limit)]
    outputs = [written(engine, ids, temperature, seed, n) for seed, ids in enumerate(prompts)]
    rows = []
    for budget in BUDGETS:
        lengths = {}
        for k in COUNTS:
            counts = [length(engine, ids, text, budget, k) for ids, text in zip(prompts, outputs)]
            lengths[k] = np.array([t / p for t, p in counts])
        mean = {k: round(float(x.mean()), 4) for k, x in lengths.items()}
        first, *others = COUNTS
        # in pairs: sequences differ far more than settings
        error = {
            k: float((lengths[k] - lengths[first]).std(ddof=1) / len(prompts) ** 0.5 / mean[first])
            for k in others
        }
        tokens = [
            f"{k}: {mean[k]:.4f} ({100 * (mean[k] / mean[first] - 1):+.2f} % +- {100 * error[k]:.2f})"
            for k in others
        ]
        print(
            f"  T {temperature:g}, budget {budget:<3}  {first}: {mean[first]:.4f}  {'  '.join(tokens)}",
            flush=True,
        )
        rows.append({"temperature": temperature, "budget": budget, "length": mean, "error": error})
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", type=Path, default=EMBEDDED_TARGET)
    p.add_argument("-md", "--model-draft", type=Path, default=EMBEDDED_DRAFT)
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("-ngl", "--gpu-layers", type=int, default=-1)
    p.add_argument("--context", type=int, default=512, help="tokens before a timed draft")
    p.add_argument("--repeat", type=int, default=50)
    p.add_argument("--temp", type=float, nargs="+", default=[0.0, 0.8])
    p.add_argument("-n", type=int, default=200, help="tokens per text")
    p.add_argument("--limit", type=int, default=12, help="sequences")
    p.add_argument(
        "--counts",
        type=int,
        nargs="+",
        default=COUNTS,
        help="candidates per depth, the first to compare with",
    )
    p.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    p.add_argument("--no-texts", action="store_true", help="costs alone, for files with random weights")
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    COUNTS[:], BUDGETS[:] = a.counts, a.budgets
    config = EngineConfig(
        a.model, a.model_draft, n_threads=a.threads, n_gpu_layers=a.gpu_layers, budget=max(BUDGETS), mode="tree",
        candidates=max(COUNTS), spec=DRAFTS,
    )  # fmt: skip
    heap = heap_us(a.repeat)
    for name, us in heap.items():
        print(f"  heap, {name:<10}" + "".join(f"  {k}: {x:.1f} us" for k, x in us.items()), flush=True)
    with Solo.load(config) as engine:
        device = engine.device.info.description
        draft = draft_ms(engine, a.context, a.repeat)
        for name, ms in draft.items():
            print(f"  draft {name}" + "".join(f"  {k}: {x:.4f} ms" for k, x in ms.items()), flush=True)
        engine.drafter.candidates = max(COUNTS)
        engine.drafter.graphs.clear()
        outputs = [] if a.no_texts else [row for t in a.temp for row in gains(engine, t, a.limit, a.n)]
    facts = header(
        device=device, gpu=gpu_facts(), model=a.model.name, draft=a.model_draft.name, context=a.context
    )
    save(a.json, {**facts, "heap_us": heap, "draft_ms": draft, "texts": outputs})


if __name__ == "__main__":
    main()
