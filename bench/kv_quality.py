"""Quality cost of K/V cache types: logits against f16, and acceptance of a draft with such caches.

    python bench/kv_quality.py [-t 1] [--positions 2048] [--pairs q8_0/q4_0 ...] [--json FILE]
    python bench/kv_quality.py -m TARGET --random --pairs q8_0/q4_0      # any weights: logits alone, over random tokens

Plain decoding with f16 caches generates an output for each of the package's prompts; joined, they are one sequence of
`--positions` tokens, so that most positions have a long context. Each pair of types prefills it in batches and its logits are
compared, position by position. Tokens per pass are counted on the single outputs, which every pair follows token by token: only
the drafts differ. Some pairs are measured without the rotation as well.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
from candidates import length, written
from common import Solo, header, save

from dflash_ggml.bench.prompts import own, spread
from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET
from dflash_ggml.state.kv_type import KV_TYPES

BATCH = 256
BUDGET = 15
WRITTEN = 160  # tokens of an output
ALL = list(product(KV_TYPES, KV_TYPES))
# measured without the rotation too, unless others are named
BARE = [
    ("q8_0", "q8_0"),
    ("q5_1", "q5_1"),
    ("q5_0", "q5_0"),
    ("q4_1", "q4_1"),
    ("q4_0", "q4_0"),
    ("q8_0", "q4_0"),
    ("q4_0", "q8_0"),
]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


class Distance:
    """Running comparison of logits rows with those of f16."""

    def __init__(self) -> None:
        self.largest = self.kl = 0.0
        self.same = self.n = 0

    def add(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        p, q = log_softmax(theirs), log_softmax(ours)
        self.largest = max(self.largest, float(np.abs(ours - theirs).max()))
        self.kl += float((np.exp(p) * (p - q)).sum())
        self.same += int((ours.argmax(1) == theirs.argmax(1)).sum())
        self.n += len(ours)

    def result(self) -> dict[str, float]:
        return {
            "largest": round(self.largest, 4),
            "mean_kl": float(f"{self.kl / self.n:.3g}"),
            "top1": round(self.same / self.n, 5),
        }


def rows_of(engine: Solo, ids: list[int]) -> list[np.ndarray]:
    """Logits after every token, a batch each."""
    engine.reset()
    sequence, found = engine.sequence, []
    for at in range(0, len(ids), BATCH):
        part = ids[at : at + BATCH]
        graph = engine.passes.linear(sequence, part, outputs="every")
        found.append(engine.device.read(graph.outputs["logits"]).reshape(len(part), -1))
        sequence.tokens.extend(part)
    return found


def rotated(on: bool):
    """Caches as they are, or with nothing rotated."""
    return nullcontext() if on else mock.patch("dflash_ggml.state.rotation._pair", lambda *_: (0, 0))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", type=Path, default=EMBEDDED_TARGET)
    p.add_argument("-md", "--model-draft", type=Path, default=EMBEDDED_DRAFT)
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("-ngl", "--gpu-layers", type=int, default=-1)
    p.add_argument("--positions", type=int, default=2048)
    p.add_argument("--limit", type=int, default=24, help="texts to count tokens per pass on")
    p.add_argument("--random", action="store_true", help="random tokens and no draft, for random weights")
    p.add_argument("--pairs", nargs="+", metavar="K/V", help="pairs of types (default: all)")
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    pairs = [tuple(pair.split("/")) for pair in a.pairs] if a.pairs else ALL
    for pair in pairs:
        if len(pair) != 2 or not set(pair) <= set(KV_TYPES):
            p.error(f"--pairs: {'/'.join(pair)} is not K/V of {', '.join(KV_TYPES)}")
    draft = None if a.random else a.model_draft

    def opened(k: str, v: str) -> Solo:
        return Solo.load(
            EngineConfig(
                a.model, draft, n_ctx=a.positions + 512, n_threads=a.threads, n_gpu_layers=a.gpu_layers, type_k=k,
                type_v=v, mode="tree" if draft else "plain", budget=BUDGET, calibrate="never",
                spec=DRAFTS if draft else None,
            )
        )  # fmt: skip

    with opened("f16", "f16") as engine:
        device = engine.device.info.description
        prompts, outputs = [], []
        if a.random:
            ids = np.random.default_rng(0).integers(0, engine.n_vocab, a.positions).tolist()
        else:
            count = max(a.limit, -(-a.positions // WRITTEN))
            prompts = [engine.tokenizer.encode(x.text) for x in spread(own("python"), count)]
            outputs = [written(engine, prompt, 0.0, i, WRITTEN) for i, prompt in enumerate(prompts)]
            ids = [t for prompt, text in zip(prompts, outputs) for t in (*prompt, *text)][: a.positions]
            prompts, outputs = prompts[: a.limit], outputs[: a.limit]
        exact = rows_of(engine, ids)
        counts = [length(engine, x, text, BUDGET, 8) for x, text in zip(prompts, outputs)]
    usual = sum(t for t, _ in counts) / max(1, sum(n for _, n in counts))
    print(f"{len(ids)} positions" + (f"; f16/f16: {usual:.3f} tokens a pass" if prompts else ""), flush=True)
    rows = []
    for k, v in pairs:
        quantised = "q" in k + v
        bare = quantised and (a.pairs or (k, v) in BARE)
        for rotation in (True, False) if bare else (True,):
            with rotated(rotation), opened(k, v) as engine:
                distance = Distance()
                for ours, theirs in zip(rows_of(engine, ids), exact):
                    distance.add(ours, theirs)
                counts = [length(engine, x, text, BUDGET, 8) for x, text in zip(prompts, outputs)]
                per_pass = sum(t for t, _ in counts) / max(1, sum(n for _, n in counts))
            row = {"k": k, "v": v, "rotation": rotation and quantised, **distance.result()}
            if prompts:
                row["tokens_per_pass"] = round(per_pass, 4)
            print("  ".join(f"{name} {x}" for name, x in row.items()), flush=True)
            rows.append(row)
    facts = header(device=device, model=a.model.name, draft=draft and draft.name, positions=len(ids))
    save(a.json, {**facts, "f16_tokens_per_pass": round(usual, 4) or None, "pairs": rows})


if __name__ == "__main__":
    main()
