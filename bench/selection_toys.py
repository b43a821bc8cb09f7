"""Prompt selection on toy prompts: what scorers find, and what the toy then answers, through the selection, the device and the
prefix of a session.

    python bench/selection_toys.py TOY.gguf [--scorer OTHER.gguf] [--lengths 4096,16384] [--texts 20] [--json FILE]

TOY.gguf comes from `tools/train_toy_scorer.py`, and is its own scorer unless another one is named. A prompt has 12 facts, and
one question at its end. Settings: the whole prompt, and a tenth of it selected lexically, by the model, and by chance. What is
protected of a real prompt would be most of a prompt as short as these, so it is scaled down with the length (see `scaled`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dflash_ggml.bench.needles import finished
from dflash_ggml.config import EngineConfig
from dflash_ggml.engine.engine import Engine
from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import Session
from dflash_ggml.text import prompt_selection as selection

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import train_toy_scorer as toy


class ByChance:
    """Scores that know nothing."""

    name = "chance"

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def score(self, ids: Sequence[int], units: Sequence[selection.Range], question: selection.Range):
        return self._rng.random(len(units))


def scaled(length: int) -> None:
    """Scale the protected regions to the share that they are of a prompt of 65,536 tokens."""
    selection.END, selection.TAIL = max(length // 64, 16), max(length // 128, 8)
    selection.HEAD, selection.LEAST = max(length // 256, 4), length // 4
    selection.UNIT = (min(max(length // 256, 16), 64), min(max(length // 32, 64), 512))


def cases(
    kind: int, length: int, n: int, seed: int
) -> Iterator[tuple[list[int], list[int], list[int], list[int]]]:
    """Prompt, question and answer as tokens, and the positions of the facts that it takes."""
    rng, filler = np.random.default_rng((seed, kind, length)), toy.tape(1 << 18, 99)
    for _ in range(n):
        found = toy.texts(1, length, filler, rng, np.array([kind]))
        ids, body = found["ids"][0], length - toy.QUESTIONS * toy.QUESTION
        question_ids = ids[body : body + toy.QUESTION]
        positions = [int(found["places"][0, slot]) for slot in found["asked"][0, 0] if slot >= 0]
        answer = question_ids[2:3] if kind == 3 else question_ids[2:4]
        yield ids[:body].tolist(), question_ids[:2].tolist(), answer.tolist(), positions


def examine(
    engine: Engine, kind: int, length: int, n: int, keep: float, seed: int
) -> dict[str, dict[str, float]]:
    """By setting: questions all of whose facts are kept, right answers, tokens read, milliseconds of choosing."""
    session, sums = Session(engine, cache_bytes=0, prompt_keep=keep), defaultdict[str, list](list)
    spelt, slot = toy.spelt(), engine.open()
    chance, by_itself = ByChance(seed), selection.PromptSelector(engine.tokenizer)
    for text, question, answer, positions in cases(kind, length, n, seed):
        contents = ["".join(spelt[i] for i in ids) for ids in (text, [toy.DOT, *question])]
        messages = [{"role": "user", "content": content} for content in contents]
        request = ChatRequest(messages=messages, prompt_keep=keep)
        whole = session.prompts.make(replace(request, prompt_keep=None))
        first = (
            next(i for i in range(4) if list(whole.ids[i : i + 64]) == text[1:65]) - 1
        )  # a space is cut off
        kept = {
            "exact": replace(whole, selection=None),
            "lexical": session.prompts.make(replace(request, prompt_scorer="lexical")),
            "model": finished(session, session.prompts.make(request)),
        }
        by_chance = by_itself.select(chance, whole.text, whole.ids, keep, messages)
        kept["chance"] = replace(whole, ids=by_chance.ids, selection=by_chance)
        for name, prepared in kept.items():
            chosen = prepared.selection
            ranges = ((0, len(whole.ids)),) if chosen is None else chosen.ranges
            assert chosen is None or not chosen.whole, chosen.whole
            inside = [
                any(a <= first + p and first + p + toy.NEEDLE <= b for a, b in ranges) for p in positions
            ]
            slot.reset()
            slot.prefill(prepared.ids)
            n_right = 0
            for token in answer:
                if int(slot.logits.argmax()) != token:
                    break
                n_right += 1
                slot.prefill([token])
            score_ms = 0.0 if chosen is None else chosen.score_ms
            sums[name].append((all(inside), n_right == len(answer), len(prepared.ids), score_ms))
    slot.close()
    session.slots.close()
    names = ("recall", "right", "read", "score_ms")
    return {name: dict(zip(names, np.mean(rows, axis=0).tolist())) for name, rows in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--scorer", type=Path)
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--texts", type=int, default=20, help="texts of each kind and length")
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lengths, rows = [int(n) for n in args.lengths.split(",")], []
    options = {"n_threads": args.threads, "calibrate": "never", "mode": "plain", "parallel": 2}
    config = EngineConfig(
        args.model, n_ctx=2 * max(lengths), scorer=args.scorer or args.model, prompt_keep=args.keep, **options
    )
    began = time.monotonic()
    with Engine.load(config) as engine:
        print(f"{engine.device.info.description}; {engine.memory.against(engine.nbytes)}")
        for length in lengths:
            scaled(length)
            for kind, name in enumerate(toy.KINDS):
                for setting, found in examine(engine, kind, length, args.texts, args.keep, args.seed).items():
                    rows.append({"length": length, "kind": name, "setting": setting, **found})
                    print(
                        f"{length:6} {name:8} {setting:8} recall {found['recall']:.2f}  right {found['right']:.2f}  "
                        f"{found['read']:7.0f} tokens read, chosen in {found['score_ms']:6.0f} ms",
                        flush=True,
                    )
    print(f"{time.monotonic() - began:.0f} s")
    if args.json:
        found = {"keep": args.keep, "texts": args.texts, "seed": args.seed, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
