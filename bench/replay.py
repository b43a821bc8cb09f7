"""Tokens per target pass by source, by replay: a given answer stands in for the target's choices.

usage: python bench/replay.py [--json FILE] [--budget B] [--threads N] [--time RUNS]

The prompts and answers are those of replay.txt. The embedded target is fed the answer, one token a pass, and the embedded draft
proposes at every position of it, from real features; trees are then grown and walked as a step does, with the answer's next
token as the target's choice. So acceptance is counted on output that so small a model would not produce. It measures what
sources find, not speed. Earlier answers are forgotten before each.

--time measures the host time of a step: for each step the minimum over that many runs, then the mean over the steps of a set.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from common import Solo

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.accept import walk
from dflash_ggml.decode.calibration import count_votes
from dflash_ggml.decode.candidates import Candidates
from dflash_ggml.decode.lookup import Merged
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.drafts.prompt_lookup import PromptLookup
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET
from dflash_ggml.policy.plan import Plan

TEXTS = Path(__file__).with_name("replay.txt")
SOURCES = ("dflash", "suffix", "merged")
STAGES = ("look-up", "tree", "learning")  # of a step, on the host
COPYING = ("edit", "json", "quote")  # sets whose answers repeat much of the prompt


class Written(Sampler):
    """Chooses the next token of a given answer, whatever the logits are."""

    def __init__(self, ids: list[int], n_vocab: int) -> None:
        super().__init__(SamplingParams(temperature=1.0), n_vocab)
        self._ids = ids

    def sample(self, row: np.ndarray, history: Any = ()) -> int:
        return self._ids[len(history)]


def texts() -> list[tuple[str, str, str, str]]:
    """(set, name, prompt, answer) of each."""
    found = []
    for part in TEXTS.read_text(encoding="utf-8").split("=== ")[1:]:
        title, _, body = part.partition("\n")
        prompt, _, answer = body.partition("--- answer\n")
        kind, _, name = title.partition(" ")
        found.append((kind, name, prompt, answer))
    return found


def proposals(engine: Solo, ids: list[int], n_prompt: int, budget: int) -> list[Candidates]:
    """The draft's candidates with each token of `ids` pending, from the first behind the prompt to the last but one."""
    engine.reset()
    engine.prefill(ids[:n_prompt])
    assert engine.drafter is not None
    found = []
    sampler, n = Written(ids, engine.n_vocab), len(ids) - n_prompt
    for _ in engine.generate(sampler, max_tokens=n, mode="plain", stop=lambda token: False, keep_logits=True):
        found += engine.drafter.propose([engine.sequence], budget)
    return found[:-1]


def replay(
    source: str,
    ids: list[int],
    n_prompt: int,
    drafted: list[Candidates],
    lookup: PromptLookup,
    budget: int,
    times: list[tuple[int, ...]] | None = None,
) -> dict[str, int]:
    """Write ids behind the prompt with this source: tokens, passes, and nodes drafted and accepted. times: takes nanoseconds of
    each step, see STAGES."""
    plan, sequence = Plan("tree", budget), Sequence(tokens=ids[:n_prompt], pending=ids[n_prompt])
    lookup.forget()
    lookup.begin(sequence)
    passes = nodes = accepted_n = 0
    while (at := sequence.n_tokens + 1) < len(ids):
        found: Any = None if source == "suffix" else drafted[at - 1 - n_prompt]
        began = perf_counter_ns()
        matched = None if source == "dflash" else lookup.look_up(sequence)
        looked = perf_counter_ns()
        if matched is not None:
            found = Merged(found, matched, lookup.rates)
        tree = None if found is None else plan.build(ids[at - 1], found)
        built = walked = learned = perf_counter_ns()
        n = 1
        if tree is not None:
            following = iter([*ids[at:], *[-1] * budget])
            accepted = walk(tree, lambda node, following=following: next(following))
            walked = perf_counter_ns()
            if tree.evidence is not None:
                count_votes(tree, accepted, lookup.rates)
            learned = perf_counter_ns()
            n, nodes = len(accepted.tokens), nodes + tree.n_nodes
            accepted_n += accepted.n_accepted
        if times is not None:
            times.append((looked - began, built - looked, learned - walked))
        sequence.tokens += ids[at - 1 : at - 1 + n]
        sequence.pending = ids[min(at - 1 + n, len(ids) - 1)]
        passes += 1
    return {"tokens": len(ids) - n_prompt - 1, "passes": passes, "drafted": nodes, "accepted": accepted_n}


def host_times(every: list[tuple[Any, ...]], budget: int, runs: int) -> dict[str, dict[str, list[float]]]:
    """Set -> source -> microseconds of each of STAGES in a step."""
    found: dict[str, dict[str, list[float]]] = {}
    for source in SOURCES:
        best: dict[str, np.ndarray] = {}
        for _ in range(runs):
            lookup, run = PromptLookup(budget), {}
            for kind, _, ids, n_prompt, drafted in every:
                replay(source, ids, n_prompt, drafted, lookup, budget, run.setdefault(kind, []))
            best = {kind: np.minimum(best.get(kind, np.inf), steps) for kind, steps in run.items()}
        best["copying"] = np.concatenate([best[kind] for kind in COPYING])
        for kind, steps in best.items():
            found.setdefault(kind, {})[source] = (steps.mean(0) / 1e3).tolist()
    return found


def rate(rows: list[dict[str, Any]]) -> float:
    """Tokens per pass over several answers."""
    return sum(row["tokens"] for row in rows) / sum(row["passes"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--time", type=int, metavar="RUNS", help="also time the steps on the host")
    args = parser.parse_args()
    rows, every = [], []
    config = EngineConfig(
        EMBEDDED_TARGET, EMBEDDED_DRAFT, n_threads=args.threads, budget=args.budget, calibrate="never"
    )
    with Solo.load(config) as engine:
        for kind, name, prompt, answer in texts():
            prompt_ids = engine.tokenizer.encode(prompt)
            ids = [*prompt_ids, *engine.tokenizer.encode(answer)]
            every.append(
                (kind, name, ids, len(prompt_ids), proposals(engine, ids, len(prompt_ids), args.budget))
            )
    for source in SOURCES:
        lookup = PromptLookup(args.budget)  # rates are learned across answers, as in a session
        for kind, name, ids, n_prompt, drafted in every:
            row = replay(source, ids, n_prompt, drafted, lookup, args.budget)
            rows.append({"set": kind, "name": name, "source": source, **row})
    print(f"replay of written answers, trees of {args.budget} nodes, tokens per pass")
    print(f"{'set':8} {'n':>3} " + " ".join(f"{label:>8}" for label in SOURCES) + "  merged/best")
    for kind in (*dict.fromkeys(row["set"] for row in rows), "copying"):
        of = [row for row in rows if row["set"] == kind or (kind == "copying" and row["set"] in COPYING)]
        found = {label: rate([row for row in of if row["source"] == label]) for label in SOURCES}
        best = max(found["dflash"], found["suffix"])
        cells = " ".join(f"{value:8.2f}" for value in found.values())
        print(f"{kind:8} {len(of) // len(SOURCES):3} {cells}  {found['merged'] / best:.3f}")
    times = host_times(every, args.budget, args.time) if args.time else None
    for kind, sources in (times or {}).items():
        alone = sum(sources["dflash"])
        for label, stages in sources.items():
            parts = ", ".join(f"{name} {us:.1f}" for name, us in zip(STAGES, stages))
            print(f"{kind:8} {label:8} {sum(stages):6.1f} us a step ({parts}), {sum(stages) - alone:+.1f}")
    if args.json:
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        timed = (
            "" if times is None else f', "stages": {json.dumps(STAGES)}, "microseconds": {json.dumps(times)}'
        )
        head = f'"what": "replay", "budget": {args.budget}{timed}'
        args.json.write_text(f'{{{head}, "rows": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    main()
