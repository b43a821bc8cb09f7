"""The mode `auto` against every fixed mode at synthetic acceptance, alternating in one run: it must never be slower.

    python bench/synthetic_acceptance.py -m TARGET -md DRAFT [-n 400] [--texts 4] [--near] [--json FILE]

Files of any shape with RANDOM WEIGHTS (see shapes.py) and SYNTHETIC ACCEPTANCE: every pass runs and takes its time, but which
node is right is drawn from hit rates that give the named acceptance lengths for a tree of 31 nodes; NOT MODEL TEXT. The last
sequence changes between two of them every 150 tokens. For real output of a real pair: `dflash-bench --suite never-slower`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import Solo, header, save
from made_up import MadeUp, reset_policy

from dflash_ggml.bench import measure
from dflash_ggml.bench.comparison import BUDGETS, COLUMNS, compared, verdict
from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.bench.measure import Job, Run, Setting, go_on
from dflash_ggml.bench.prompts import Prompt
from dflash_ggml.bench.rows import chosen_widths
from dflash_ggml.bench.runner import WARM_UP
from dflash_ggml.bench.sections import Column, Section, plain
from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.state.snapshot import Snapshot
from reference.virtual_clock import Parts, Source, SyntheticSequence  # behind made_up, which finds it

# acceptance length of a tree of 31 nodes -> hit rate of the best candidate, share of the second in the rest
LENGTHS = {
    1.2: (0.098, 0.02),
    2.0: (0.396, 0.1),
    4.0: (0.744, 0.2),
    6.0: (0.839, 0.4),
    8.0: (0.908, 0.4),
    10.0: (0.943, 0.4),
}
# fixed modes of which one is the best on a virtual clock with an H100's pass times
NEAR = {
    1.2: ("plain", "tree 7"),
    2.0: ("tree 7", "tree 15"),
    4.0: ("tree 7", "tree 15"),
    6.0: ("tree 15", "chain"),
    8.0: ("tree 15", "chain"),
    10.0: ("tree 15", "chain"),
}
CHANGE = 150  # tokens between two changes of acceptance
BUDGET = 31  # of auto
FORCED = "drawn from hit rates per length, for a tree of 31 nodes"


def modes() -> list[Setting]:
    """Plain, chain, trees and auto."""
    trees = [Setting(f"tree {budget}", "tree", budget) for budget in BUDGETS]
    return [Setting("plain", "plain"), Setting("chain", "chain"), *trees, Setting("auto", "auto", BUDGET)]


def decoded(
    engine: Solo,
    made_up: MadeUp,
    before: Snapshot,
    source_of: Callable[[int], Source],
    n_sources: int,
    n: int,
    name: str,
    fixed: tuple[str, ...] = (),
) -> list[Run]:
    """Run all modes, or those of `fixed` and auto, on `n_sources` synthetic sequences behind `before`, alternating, after a
    warm-up."""
    settings = [mode for mode in modes() if not fixed or mode.label in (*fixed, "auto")]

    def run(job: Job, i_source: int) -> Run:
        engine.restore(before)
        made_up.sources[0] = source_of(i_source)
        return go_on(engine, job, lambda: False)

    jobs = [
        Job(
            Prompt(f"{name}, {i_source + 1}", "made up", ""),
            before.tokens,
            "",
            settings[(i_source + j) % len(settings)],
            n,
            endless=True,
        )
        for i_source in range(n_sources)
        for j in range(len(settings))
    ]
    for job in jobs[: len(settings)]:
        run(replace(job, n=WARM_UP), 0)
    reset_policy(engine)
    return [run(job, i // len(settings)) for i, job in enumerate(jobs)]


def report(engine: Solo, n: int, context: int, lengths: list[float], n_sources: int, near: bool) -> Section:
    """Report on sequences of synthetic acceptance and, after all lengths, one that changes. near: only the modes of NEAR."""
    engine.prefill(np.random.default_rng(0).integers(0, engine.n_vocab, context).tolist())
    before, made_up = engine.snapshot(), MadeUp(engine)
    measure.time = made_up  # type: ignore[assignment]

    def steady(length: float) -> Callable[[int], Source]:
        hits, others = LENGTHS[length]
        return lambda i: SyntheticSequence(hits, i, spread=1.0, others=others)

    def changing(i: int) -> Parts:
        parts = [steady(length)(i) for length in (2.0, 8.0)]
        return Parts(parts, lambda at: (at - context) // CHANGE % 2)

    section = Section(
        "synthetic",
        "Is auto ever slower?",
        [Column("made_up", "made-up length"), Column("setting", "mode"), *COLUMNS],
        [],
    )
    section.forced, runs, auto = FORCED, [], {}
    settings = [(f"{length:g}", steady(length), NEAR[length] if near else ()) for length in lengths]
    if len(lengths) == len(LENGTHS):
        settings.append(("2 and 8 by turns", changing, ("tree 7", "tree 15", "chain") if near else ()))
    for name, source_of, fixed in settings:
        found = decoded(engine, made_up, before, source_of, n_sources, n, name, fixed)
        rows = compared(found, made_up=name)
        section.rows += rows
        section.notes.append(f"Length {name}: {verdict(found, rows[-1])}")
        print(section.notes[-1], flush=True)
        auto[f"length {name}"] = [text for text in found if text.setting == "auto"]
        runs += found
    section.runs, section.details = runs, chosen_widths(auto)
    return section


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", type=Path, required=True)
    p.add_argument("-md", "--model-draft", type=Path, required=True)
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("-n", type=int, default=400, help="tokens per text")
    p.add_argument("--context", type=int, default=512, help="tokens before the made-up text")
    p.add_argument("--lengths", type=float, nargs="+", choices=LENGTHS, default=list(LENGTHS), metavar="L")
    p.add_argument("--texts", type=int, default=2, help="of each length")
    p.add_argument("--near", action="store_true", help="only the fixed modes that come near the best")
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    config = EngineConfig(a.model, a.model_draft, n_threads=a.threads, calibrate="always", spec=DRAFTS)
    with Solo.load(config) as engine:
        device = engine.device.info.description
        costs = [list(point) for point in engine.costs.points()]
        section = report(engine, a.n, a.context, a.lengths, a.texts, a.near)
    print(plain(section))
    facts = header(
        device=device, gpu=gpu_facts(), model=a.model.name, draft=a.model_draft.name, context=a.context
    )
    save(a.json, {**facts, "calibrated": costs, **section.as_dict()})


if __name__ == "__main__":
    main()
