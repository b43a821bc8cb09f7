"""New prompts beside running sequences: time to first token, and how much and how long the running ones are slowed down.

    python bench/prompts_beside.py -m TARGET [-md DRAFT] [--writers 4] [--prompts 500 8000] [--times 3] [--json FILE]

A session as a server has it, without HTTP; tokens are drawn at random, nothing of a prompt is cached. With random weights (see
shapes.py) drafts are never right, so running sequences are decoded as `auto` decides then: plainly.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, variance

import numpy as np
from common import add_engine_options, cache_types, header, memory_options, save

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.engine.engine import Engine
from dflash_ggml.session.events import Begin, Progress, StepReport
from dflash_ggml.session.requests import CompletionRequest
from dflash_ggml.session.session import Session, run_completion

ALONE = 1.5  # seconds of writing before and after each prompt; what was borrowed is there again by then


@dataclass(frozen=True)
class Row:
    """Prompts of one length. Seconds to the first token; how many times slower writers were meanwhile than in the calm before
    and after: the ratio of the means of `times` prompts, and its standard error by leaving out one after the other; the longest
    time in which one of them had no token, the worst of all. rate, alone: tokens per second of all writers, means. calm: by how
    much that after differed from that before, in the mean."""

    prompt: int
    first: float
    slower: float
    slower_error: float
    gap: float
    usual_gap: float
    rate: float
    alone: float
    calm: float


class Writer(threading.Thread):
    """A generation that runs until it is stopped. steps: when each came, and its tokens."""

    def __init__(self, session: Session, prompt: list[int], most: int) -> None:
        super().__init__(daemon=True)
        self.session, self.steps, self.stopped = session, list[tuple[float, int]](), False
        self.request = completion(prompt, most)

    def run(self) -> None:
        for event in run_completion(self.session, self.request, should_stop=lambda: self.stopped):
            if isinstance(event, StepReport):
                self.steps.append((time.perf_counter(), len(event.emitted)))

    def between(self, began: float, ended: float) -> int:
        """Tokens that came in that time."""
        return sum(n for at, n in list(self.steps) if began < at <= ended)

    def gap(self, began: float, ended: float) -> float:
        """The longest time between two steps, of which one came in that time."""
        times = [at for at, _ in list(self.steps)]
        return max((b - a for a, b in pairwise(times) if began < b and a < ended), default=0.0)


def completion(prompt: list[int], most: int) -> CompletionRequest:
    greedy = SamplingParams(temperature=0)
    return CompletionRequest(
        prompt=prompt, max_tokens=most, sampling=greedy, ignore_eos=True, return_steps=True
    )


def first_token(session: Session, prompt: list[int]) -> float:
    """Seconds from a request to its first token."""
    began = time.perf_counter()
    for event in run_completion(session, completion(prompt, 1)):
        if not isinstance(event, (Begin, Progress)):
            return time.perf_counter() - began
    raise RuntimeError("a prompt had no answer")


def rate(writers: list[Writer], began: float, ended: float) -> float:
    return sum(w.between(began, ended) for w in writers) / (ended - began)


def slower(found: list[tuple[float, ...]]) -> float:
    """How many times slower the writers were, of all these prompts together; inf where they had no token at all."""
    alone, beside = (mean(row[i] for row in found) for i in (1, 2))
    return alone / beside if beside else float("inf")


def measured(session: Session, writers: list[Writer], n: int, times: int, rng: np.random.Generator) -> Row:
    """Prompts of n tokens, one after the other, a calm between any two; the first is not counted: graphs are built for it."""

    def calm() -> tuple[float, float]:
        """The writers' rate, and the longest gap."""
        began = time.perf_counter()
        time.sleep(ALONE)
        ended = time.perf_counter()
        return rate(writers, began, ended), max(w.gap(began, ended) for w in writers)

    found, before = [], calm()
    for i in range(times + 1):
        sent = time.perf_counter()
        first = first_token(session, rng.integers(10, session.engine.n_vocab, n).tolist())
        came = sent + first
        beside, gap = rate(writers, sent, came), max(w.gap(sent, came) for w in writers)
        after = calm()
        if i:
            alone = (before[0] + after[0]) / 2
            found.append((first, alone, beside, gap, after[1], abs(after[0] - before[0]) / alone))
        before = after
    first, alone, beside, _, _, differs = (mean(column) for column in zip(*found))
    n_found = len(found)
    without = (
        [slower([row for j, row in enumerate(found) if j != i]) for i in range(n_found)]
        if n_found > 1
        else []
    )
    error = ((n_found - 1) ** 2 / n_found * variance(without)) ** 0.5 if without else 0.0
    gap, usual = (max(row[i] for row in found) for i in (3, 4))
    return Row(n, first, slower(found), error, gap, usual, beside, alone, differs)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-md", "--model-draft")
    p.add_argument("--writers", type=int, default=4)
    p.add_argument("--written", type=int, default=500, help="tokens of each writer's prompt")
    p.add_argument("--prompts", type=int, nargs="+", default=[500, 8000])
    p.add_argument("--times", type=int, default=3)
    p.add_argument("--tokens", type=int, default=6000, help="tokens that each writer may come to write")
    add_engine_options(p)
    a = p.parse_args()
    config = EngineConfig(
        Path(a.model),
        Path(a.model_draft) if a.model_draft else None,
        parallel=a.writers + 1,
        n_ctx=a.writers * (a.written + a.tokens) + max(a.prompts) + 64,
        n_threads=a.threads,
        n_gpu_layers=a.gpu_layers,
        **cache_types(a),
        **memory_options(a),
    )
    rng, rows = np.random.default_rng(1), []
    with Engine.load(config) as engine:
        facts = header(device=engine.device.info.description, gpu=gpu_facts(), model=Path(a.model).name)
        print(f"{facts['device']}, {facts['model']}, commit {facts['commit']}; {engine.memory}", flush=True)
        session = Session(engine, cache_bytes=0)
        session.scheduler.start()
        writers = [
            Writer(session, rng.integers(10, engine.n_vocab, a.written).tolist(), a.tokens)
            for _ in range(a.writers)
        ]
        for writer in writers:
            writer.start()
        while not all(len(w.steps) > 50 for w in writers):
            time.sleep(0.05)
        for n in a.prompts:
            rows.append(row := measured(session, writers, n, a.times, rng))
            print(
                f"{n:6} tokens beside {a.writers} writers: first token {row.first:.3f} s; writers {row.alone:.0f} -> "
                f"{row.rate:.0f} tokens/s ({row.slower:.3f} +- {row.slower_error:.3f} times slower), longest gap "
                f"{row.gap * 1e3:.0f} ms (without {row.usual_gap * 1e3:.0f}); calm before and after differ by {row.calm:.1%}",
                flush=True,
            )
        if not all(w.is_alive() for w in writers):
            print("a writer had ended: give more --tokens", file=sys.stderr)
        for writer in writers:
            writer.stopped = True
        for writer in writers:
            writer.join()
        session.scheduler.close()
    save(a.json, {**facts, "writers": a.writers, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
