"""What matmuls in 8-bit floats (`--prefill-fp8`) do to a trained model: its logits in float64 with and without that rounding.

    python bench/fp8_quality.py [-m TARGET] [--tokens 448] [--json FILE] [TEXT ...]

TARGET is a small dense qwen35 file, by default the embedded one; texts are files, by default three modules of Python's
library. In numpy, every matrix of a layer and its input are rounded to E4M3 as the kernels round them (a scale per row and
per token). Sums are float64: what tensor cores lose is not in it.
"""

from __future__ import annotations

import argparse
import heapq
import textwrap
from pathlib import Path

import numpy as np
from common import Solo, header, save
from numpy.typing import NDArray

from dflash_ggml.config import EngineConfig
from dflash_ggml.files.pairs import EMBEDDED_TARGET
from reference.e4m3 import nmse, rounded
from reference.numpy_scorer import Model, norm

Array = NDArray[np.float64]


class Rounded:
    """A matrix that multiplies as the kernels do: it and its input in E4M3."""

    __array_ufunc__ = None  # an array leaves `x @ self` to this class

    def __init__(self, matrix: Array) -> None:
        self.T, self.matrix = self, rounded(matrix)

    def __rmatmul__(self, x: Array) -> Array:
        return rounded(x) @ self.matrix.T


def log_probabilities(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("texts", nargs="*", metavar="TEXT", type=Path)
    p.add_argument("-m", "--model", type=Path, default=EMBEDDED_TARGET)
    p.add_argument("--tokens", type=int, default=448, help="of each text")
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    texts = a.texts or [Path(m.__file__) for m in (heapq, textwrap, argparse)]
    with Solo.load(EngineConfig(a.model, spec=(), calibrate="never", n_ctx=512)) as engine:
        ids = [engine.tokenizer.encode(text.read_text())[: a.tokens] for text in texts]

    model = Model(a.model)
    exact = dict(model.w)
    layers = {n for n, w in exact.items() if w.ndim == 2 and n.startswith("blk.") and "conv1d" not in n}
    low = {n: Rounded(w) if n in layers else w for n, w in exact.items()}
    head = exact.get("output.weight", exact["token_embd.weight"])
    eps = model.key("attention.layer_norm_rms_epsilon")

    def logits(weights: dict[str, Array], one: list[int]) -> Array:
        model.w = weights
        return norm(model.hidden(one, model.key("block_count")), exact["output_norm.weight"], eps) @ head.T

    rows = []
    print(
        f"{'text':<16} {'tokens':>6} {'perplexity':>10} {'8 bits':>8} {'KL':>8} {'same top token':>14} {'NMSE':>8}"
    )
    for text, one in zip(texts, ids, strict=True):
        was, now = logits(exact, one), logits(low, one)
        p_was, p_now, at = log_probabilities(was), log_probabilities(now), (np.arange(len(one) - 1), one[1:])
        row = {
            "text": text.name,
            "tokens": len(one),
            "perplexity": float(np.exp(-p_was[at].mean())),
            "perplexity_fp8": float(np.exp(-p_now[at].mean())),
            "kl": float((np.exp(p_was) * (p_was - p_now)).sum(-1).mean()),
            "same_top": float((was.argmax(-1) == now.argmax(-1)).mean()),
            "nmse": nmse(now, was),
        }
        rows.append(row)
        print(
            f"{row['text']:<16} {row['tokens']:>6} {row['perplexity']:>10.2f} {row['perplexity_fp8']:>8.2f} "
            f"{row['kl']:>8.4f} {row['same_top']:>14.3f} {row['nmse']:>8.1e}"
        )
    save(a.json, {**header(model=a.model.name), "rows": rows})


if __name__ == "__main__":
    main()
