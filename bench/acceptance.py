"""Acceptance length of chain and tree drafting: tokens per target pass, the target's own included, greedy.

    python bench/acceptance.py [-m TARGET -md DRAFT] [--budget 31] [--json FILE]

Per prompt and in the mean, with a flag on texts that fall into repetition (which flatters acceptance).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import header, prompts, repeats, save

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine.engine import Engine
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET


def measure(engine: Engine, ids: list[int], mode: str, n: int, temperature: float) -> dict:
    """Decode `n` tokens after `ids`; acceptance length, steps and the text's ids."""
    engine.reset()
    engine.prefill(ids)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1), engine.n_vocab)
    tokens: list[int] = []
    steps = 0
    for step in engine.generate(sampler, max_tokens=n, mode=mode):
        tokens += step.tokens
        steps += step.mode != "prefill"
    return {"length": (len(tokens) - 1) / max(steps, 1), "steps": steps, "tokens": tokens}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", default=str(EMBEDDED_TARGET))
    p.add_argument("-md", "--model-draft", default=str(EMBEDDED_DRAFT))
    p.add_argument("-n", type=int, default=200, help="tokens per prompt")
    p.add_argument("--budget", type=int, default=31)
    p.add_argument("--temp", type=float, default=0.0)
    p.add_argument("--chain-seed", action="store_true")
    p.add_argument("--limit", type=int, help="only the first prompts")
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    config = EngineConfig(Path(a.model), Path(a.model_draft), budget=a.budget, chain_seed=a.chain_seed)
    rows = []
    with Engine.load(config) as engine:
        device = engine.device.info.description
        print(
            f"{Path(a.model).name} + {Path(a.model_draft).name}, {a.n} tokens, temperature {a.temp}, {device}"
        )
        print(f"{'prompt':<28} {'chain':>6} {'tree ' + str(a.budget):>8} {'gain':>6}  loops")
        for entry in prompts(a.limit):
            ids = engine.tokenizer.encode(entry["prompt"])
            found = {mode: measure(engine, ids, mode, a.n, a.temp) for mode in ("chain", "tree")}
            chain, tree = found["chain"]["length"], found["tree"]["length"]
            loops = repeats(found["tree"]["tokens"])
            rows.append(
                {
                    "id": entry["id"],
                    "chain": chain,
                    "tree": tree,
                    "loops": loops,
                    "steps": {m: f["steps"] for m, f in found.items()},
                }
            )
            print(
                f"{entry['id']:<28} {chain:6.2f} {tree:8.2f} {tree / chain - 1:6.0%}  {'yes' if loops else ''}"
            )

    def mean(mode: str, pick) -> float:
        chosen = [r[mode] for r in rows if pick(r)]
        return sum(chosen) / len(chosen) if chosen else float("nan")

    for label, pick in (("all", lambda r: True), ("without loops", lambda r: not r["loops"])):
        n = sum(map(pick, rows))
        chain, tree = mean("chain", pick), mean("tree", pick)
        print(f"mean of {n:3} {label:<16} {chain:6.2f} {tree:8.2f} {tree / chain - 1:6.0%}")
    save(
        a.json,
        {
            **header(
                device=device,
                model=Path(a.model).name,
                draft=Path(a.model_draft).name,
                budget=a.budget,
                temperature=a.temp,
                n=a.n,
            ),
            "prompts": rows,
        },
    )


if __name__ == "__main__":
    main()
