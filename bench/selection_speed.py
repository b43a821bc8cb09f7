"""Time to the first token of long prompts, prefilled whole and in part, and the memory of a scorer beside a target.

    python bench/selection_speed.py -m TARGET [-md DRAFT] -mp SCORER [-c 139264] [--prompt 131072] [--keep 0.1] [--rounds 3]
        [--no-exact] [--gpu-memory 22.5GiB] [--json FILE]

Files of random weights (shapes.py: a 27b and a 0.8b) will do: times and sizes are those of a model, WHAT IS SELECTED IS NOISE.
Each iteration has a prompt of its own, a question after it, and a turn that follows it, whose prefix is then known. With
`--no-exact` the context need only hold the selected part: a smaller -c shows the peak of memory.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import add_cache_types, add_memory_options, cache_types, header, memory_options, save
from long_context import MIB, Peak

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.config import EngineConfig
from dflash_ggml.engine.engine import Engine
from dflash_ggml.session.events import TextDelta, Usage
from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import Session, run_chat

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
LETTERS = "abcdefgjklmopqrstuvwxyz"  # each a token, and no two of them another


def text(rng: random.Random, n: int) -> str:
    """About n tokens of lines."""
    words = ["".join(rng.choice(LETTERS) for _ in range(6)) for _ in range(500)]
    lines = [" ".join(rng.choice(words) for _ in range(10)) for _ in range(n // 70)]
    return "\n".join(lines)


def answered(session: Session, messages: list[dict[str, str]], **how: Any) -> tuple[float, Usage]:
    """Milliseconds until the first token, or the end, of an answer of one; and what it counted."""
    request = ChatRequest(messages=messages, max_tokens=1, ignore_eos=True, **how)
    began, first, usage = time.perf_counter(), 0.0, None
    for event in run_chat(session, request):
        if isinstance(event, TextDelta):
            first = first or time.perf_counter() - began
        elif isinstance(event, Usage):
            first, usage = first or time.perf_counter() - began, event
    assert usage is not None
    return first * 1e3, usage


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", type=Path, required=True)
    p.add_argument("-md", "--model-draft", type=Path)
    p.add_argument("-mp", "--scorer", type=Path, required=True)
    p.add_argument("-c", "--ctx-size", type=int, default=139_264)
    p.add_argument("--prompt", type=int, default=131_072)
    p.add_argument("--keep", type=float, default=0.1)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--no-exact", action="store_true")
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("--json")
    add_cache_types(p)
    add_memory_options(p)
    a = p.parse_args()
    config = EngineConfig(
        *(a.model, a.model_draft),
        n_ctx=a.ctx_size,
        parallel=1,
        n_threads=a.threads,
        calibrate="never",
        scorer=a.scorer,
        prompt_keep=a.keep,
        **cache_types(a),
        **memory_options(a),
    )
    ways: dict[str, dict[str, Any]] = {
        "lexical": {"prompt_keep": a.keep, "prompt_scorer": "lexical"},
        "model": {"prompt_keep": a.keep},
    }
    if not a.no_exact:
        ways = {"exact": {}} | ways
    found: dict[str, Any] = {"prompt": a.prompt, "keep": a.keep, "settings": {}}
    with Peak() as peak:
        before = peak.first
        with Engine.load(config) as engine:
            print(f"{engine.device.info.description}; {gpu_facts()}\n{engine.memory}")
            print(engine.memory.against(engine.nbytes))
            session = Session(engine, template=TEMPLATE, prompt_keep=a.keep)
            for name, how in ways.items():
                rows = []
                for round_ in range(a.rounds + 1):  # the first builds graphs
                    rng = random.Random(f"{name} {round_}")
                    messages = [
                        {"role": "user", "content": text(rng, a.prompt)},
                        {"role": "assistant", "content": "Read."},
                        {"role": "user", "content": "What is said of " + text(rng, 70)},
                    ]
                    first, usage = answered(session, messages, **how)
                    messages += [
                        {"role": "assistant", "content": "x"},
                        {"role": "user", "content": text(rng, 2000)},
                    ]
                    then, following = answered(session, messages, **how)
                    kept = usage.prompt_kept_n or usage.prompt_n
                    counts = usage.prompt_n, kept, following.cached_n, following.score_ms
                    rows.append((first, usage.score_ms, then, *counts))
                middle = [median(column) for column in zip(*rows[1:])]
                names = ("first_ms", "score_ms", "next_ms", "sent", "read", "next_cached", "next_score_ms")
                found["settings"][name] = dict(zip(names, middle))
                print(
                    f"{name:8} first token {middle[0]:8.0f} ms, choosing {middle[1]:6.0f}; {middle[4]:.0f} of {middle[3]:.0f} "
                    f"tokens read; next turn {middle[2]:6.0f} ms, choosing {middle[6]:6.0f}, {middle[5]:.0f} tokens known",
                    flush=True,
                )
            found |= {"planned_mib": engine.memory.total / MIB, "allocated": engine.nbytes}
            session.slots.close()
        found["peak_mib"] = peak.most - before
    print(
        f"most memory in use: {found['peak_mib']} MiB beyond the {before} before, {found['planned_mib']:.0f} planned"
    )
    save(a.json, header() | found)


if __name__ == "__main__":
    main()
