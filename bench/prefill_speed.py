"""Speed of prefill by batch size and length, on files of any shape (see shapes.py); random weights give times, not text.

    python bench/prefill_speed.py -m TARGET [-md DRAFT] [--batches 512 2048 4096] [--lengths 4096] [--stock] [--prefill-fp8]
        [--json FILE]

A length is prefilled from an empty context, a warm-up first; the best of `--repeat` runs counts. --stock: also with ggml's own
matmuls of more than 64 columns (CUDA). --prefill-fp8: also in 8-bit floats (LOSSY, Hopper), and how far the last token's logits
are from the exact ones (NMSE).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from common import Solo, add_memory_options, header, memory_options, save

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.config import EngineConfig
from dflash_ggml.engine.batches import BatchSizes

LOSSY = "8-bit floats (LOSSY)"


def speed(engine: Solo, ids: list[int], batch: int, repeat: int) -> float:
    """Tokens per second of a prefill of `ids` in batches of `batch`."""
    engine.batches = BatchSizes(batch)
    best = 0.0
    for _ in range(repeat + 1):
        engine.reset()
        engine.device.synchronize()
        began = time.perf_counter()
        engine.prefill(ids)
        engine.device.synchronize()
        best = max(best, len(ids) / (time.perf_counter() - began))
    return best


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-md", "--model-draft")
    p.add_argument("--batches", type=int, nargs="*", default=[512, 2048, 4096])
    p.add_argument("--lengths", type=int, nargs="*", default=[4096])
    p.add_argument("--stock", action="store_true", help="also with ggml's own products (CUDA)")
    p.add_argument("--prefill-fp8", action="store_true", help="also in 8-bit floats (LOSSY)")
    p.add_argument("--repeat", type=int, default=2)
    p.add_argument("--json", metavar="FILE")
    add_memory_options(p)
    a = p.parse_args()
    config = EngineConfig(
        Path(a.model),
        Path(a.model_draft) if a.model_draft else None,
        n_ctx=max(a.lengths) + 256,
        n_batch=max(a.batches),
        prefill_fp8=a.prefill_fp8,
        **memory_options(a),
    )
    found = []
    with Solo.load(config) as engine:
        device = engine.device
        facts = header(device=device.info.description, gpu=gpu_facts(), model=Path(a.model).name)
        print(f"{device.info.description}, {Path(a.model).name}, commit {facts['commit']}; {facts['gpu']}")
        ids = np.random.default_rng(1).integers(0, engine.n_vocab, max(a.lengths)).tolist()
        fp8, exact = engine.passes.fp8, {}
        kinds = ["", *(["stock products"] if a.stock else []), *([LOSSY] if fp8 else [])]
        for kind in kinds:
            device.use_wide_matmuls(kind != "stock products")
            engine.passes.fp8 = fp8 if kind == LOSSY else ()
            engine.passes.graphs.clear()
            for length in a.lengths:
                for batch in a.batches:
                    tokens = speed(engine, ids[:length], batch, a.repeat)
                    logits = engine.logits.copy()
                    reference = exact.setdefault((length, batch), logits)
                    nmse = float(np.square(logits - reference).sum() / np.square(reference).sum())
                    found.append(
                        {
                            "ours": kind != "stock products",
                            "prefill_fp8": kind == LOSSY,
                            "length": length,
                            "batch": batch,
                            "tokens_per_second": tokens,
                            "nmse": nmse,
                        }
                    )
                    print(
                        f"  {length:7} tokens, batches of {batch:5}: {tokens:8.0f} tokens/s, {1e6 / tokens:6.1f} us a token"
                        f"{f', {kind}, NMSE of the last logits {nmse:.1e}' if kind else ''}",
                        flush=True,
                    )
    save(a.json, {**facts, "runs": found})


if __name__ == "__main__":
    main()
