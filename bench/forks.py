"""Forks of greedy output: where drafting leaves plain decoding, and K/V types leave f16, and how close the choice was.

    python bench/forks.py [-m smollm2] [--sets humaneval,gsm8k,chat] [--prompts 24] [--tokens 96] [--kv f16,q8_0/q4_0]
        [--exact] [-t 1] [-ngl 0] [--json FILE]

A fork is the first token that differs; its gap is by how much the first of the two preferred its own token there, in logits. What
follows a fork is another text and is not compared, so forks are counted per token that was. Chains and trees are compared with
plain decoding of the same types, plain decoding with that of the first types. --exact: plain kernels and float32 K/V, whose
results do not depend on the width of a pass.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from common import Solo, header, save
from trained_drafts import prompt_ids

from dflash_ggml.bench.perplexity import kv_pairs
from dflash_ggml.bench.prompts import choose, spread
from dflash_ggml.config import FILES, EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.files.named import find_named, model_path
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET

BUDGET = 15
Written = tuple[list[int], list[np.ndarray]]  # tokens, and the logits that each was chosen by


def greedy(engine: Solo, prompt: list[int], n: int, mode: str) -> Written:
    """n greedy tokens, past an end of text."""
    rows: list[np.ndarray] = []

    def keep(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        rows.append(scores.astype(np.float32))
        return scores

    engine.reset()
    engine.prefill(prompt)
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab, [keep] if mode == "plain" else [])
    steps = engine.generate(sampler, max_tokens=n, mode=mode, stop=lambda token: False)
    return [token for step in steps for token in step.tokens], rows


def compared(names: dict[str, str], texts: list[Written], others: list[Written]) -> dict[str, object]:
    """The row for others beside texts."""
    gaps, n = [], 0
    for (tokens, rows), (other, _) in zip(texts, others):
        at = next((i for i, (a, b) in enumerate(zip(tokens, other)) if a != b), None)
        n += len(tokens) if at is None else at + 1
        if at is not None:
            gaps.append(float(rows[at][tokens[at]] - rows[at][other[at]]))
    median, largest = (round(float(f(gaps)), 3) if gaps else None for f in (np.median, np.max))
    row = {
        **names,
        "forks": len(gaps),
        "texts": len(texts),
        "tokens": n,
        "median_gap": median,
        "largest_gap": largest,
    }
    print("| " + " | ".join("" if x is None else str(x) for x in row.values()) + " |", flush=True)
    return row


def main() -> None:
    """Entry point."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", default="smollm2")
    p.add_argument("-md", "--model-draft", type=Path, help="default: the one that comes with the package")
    p.add_argument("--sets", default="humaneval,gsm8k,chat", help="as dflash-bench --prompts")
    p.add_argument("--prompts", type=int, default=24, help="of all sets together")
    p.add_argument("--tokens", type=int, default=96)
    p.add_argument("--kv", default="f16,f32,q8_0,q8_0/q4_0,q4_0", help="as dflash-bench perplexity --kv")
    p.add_argument("--exact", action="store_true")
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("-ngl", "--gpu-layers", type=int, default=-1)
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    named, target = find_named(a.model), Path(model_path(a.model))
    draft = a.model_draft or (named.draft if named else EMBEDDED_DRAFT)
    prompts, rows, first, device = spread(choose(a.sets.split(",")), a.prompts), [], None, ""
    print("| K/V | mode | beside | forks | texts | compared tokens | median gap | largest |\n|" + "---|" * 8)
    for k, v in kv_pairs("f32" if a.exact else a.kv):
        pair = f"{k}/{v}"
        config = EngineConfig(
            target, draft, n_ctx=4096, n_threads=a.threads, n_gpu_layers=a.gpu_layers, type_k=k, type_v=v,
            reference=a.exact, mode="plain", budget=BUDGET, calibrate="never", spec=FILES,
        )  # fmt: skip
        with Solo.load(config) as engine:
            device = engine.device.info.description
            # the embedded target is a model of code alone
            form = engine.tokenizer.chat_template if target != EMBEDDED_TARGET else None
            ids = [prompt_ids(engine, prompt, form) for prompt in prompts]
            plain = [greedy(engine, prompt, a.tokens, "plain") for prompt in ids]
            if first is not None:
                rows.append(
                    compared({"kv": pair, "mode": "plain", "beside": "plain, the first"}, first, plain)
                )
            first = first or plain
            for mode in ("plain", "chain", "tree"):
                again = [greedy(engine, prompt, a.tokens, mode) for prompt in ids]
                rows.append(compared({"kv": pair, "mode": mode, "beside": "plain"}, plain, again))
    facts = header(device=device, model=target.name, draft=draft.name, budget=BUDGET)
    save(a.json, {**facts, "exact": a.exact, "forks": rows})


if __name__ == "__main__":
    main()
