"""Several texts in one pass on files of any shape: tokens per second in sum, plainly batched, with equal shares, with one heap.

    python bench/side_by_side.py -m TARGET -md DRAFT [--users 1 4 8 16] [--texts easy half hard] [--steps 200] [--json FILE]

RANDOM WEIGHTS (see shapes.py) and MADE-UP ACCEPTANCE: every pass runs and takes its time, but which node is right is drawn from
the hit rates of several_sim.py, whose predictions this is to be compared with; NOT MODEL TEXT.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from common import ROOT, add_engine_options, cache_types, header, memory_options, save
from several_sim import texts

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.decode.candidates import Rows
from dflash_ggml.decode.forest import Forest
from dflash_ggml.decode.plan import Plan
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine import clock
from dflash_ggml.engine.engine import Engine
from dflash_ggml.ggml.graph import Graph

sys.path.insert(0, str(ROOT / "tests"))
from reference.virtual_clock import Placed

WARM_UP = 50  # steps, in which graphs are captured and costs learned
CALM = 30  # of them, the last, in which no graph was captured
MOST_WARM_UP = 150
STAGES = ("draft", "tree", "verify", "commit", "host")


@dataclass(frozen=True)
class Row:
    """One setting: tokens per second in sum, of the slowest and the fastest text; per step milliseconds and columns.

    What the made-up numbers cost is in none of the times. stages: medians. Steps in which a graph is new are left out: they build
    it, run it first, or capture it, which takes 10 to 25 ms and happens once. cold: how many of those that were timed;
    with_cold: the rate with them.
    """

    texts: str
    users: int
    setting: str
    rate: float
    slowest: float
    fastest: float
    step_ms: float
    columns: float
    stages: dict[str, float]
    cold: int
    with_cold: float
    made_up_ms: float
    graphs: dict[str, int]


class MadeUp:
    """Stands before an engine's draft and target: what they say is replaced, what they cost is not."""

    def __init__(self, engine: Engine) -> None:
        self.drafter, self.passes, self.of_lane = engine.drafter, engine.passes, dict[int, Placed]()
        self.seconds = 0.0  # that making it up has taken, which the engine's own clock is not to see either
        clock.time = self  # type: ignore[assignment]
        self._propose, self._propose_each = self.drafter.propose, self.drafter.propose_each
        self._verify, self._verify_each = self.passes.verify, self.passes.verify_each
        self._choices, self._forest = self.passes.choices, None
        self.cold = 0  # runs of graphs that were new
        run = Graph.run

        def counted(graph: Graph) -> None:
            run(graph)
            self.cold += not graph.is_warm

        Graph.run = counted  # type: ignore[method-assign]
        self.drafter.propose, self.drafter.propose_each = self.propose, self.propose_each
        self.passes.verify, self.passes.verify_each = self.verify, self.verify_each
        self.passes.choices = self.choices

    def perf_counter(self) -> float:
        """The time without that."""
        return time.perf_counter() - self.seconds

    def propose_each(self, sequences: Any, budget: int, depth: int | None = None) -> list:
        self._propose_each(sequences, budget, depth)
        return self._rows(sequences, depth)

    def propose(self, sequence: Any, budget: int, depth: int | None = None) -> Any:
        self._propose(sequence, budget, depth)
        return self._rows([sequence], depth)[0]

    def _rows(self, sequences: Any, depth: int | None) -> list:
        began, n = time.perf_counter(), depth or self.drafter.depth
        found = [self.of_lane[s.lane].at(s.n_tokens, n)[0] for s in sequences]
        rows = [
            Rows(1 + of.ids, of.log_probs) for of in found
        ]  # 0 is what a GPU picks where there are no numbers
        self.seconds += time.perf_counter() - began
        return rows

    def verify(self, sequence: Any, tree: Any, *more: Any) -> Any:
        self._forest = Forest.of([sequence], [tree])
        return self._verify(sequence, tree, *more)

    def verify_each(self, forest: Forest, *more: Any) -> Any:
        self._forest = forest
        return self._verify_each(forest, *more)

    def choices(self, graph: Any) -> np.ndarray:
        said, forest, self._forest = self._choices(graph), self._forest, None
        if forest is None:
            return said
        began = time.perf_counter()
        for sequence, tree, block in forest.blocks:
            at = sequence.n_tokens - (sequence.pending is None)  # a text of one column is committed by now
            said[block] = 1 + self.of_lane[sequence.lane].right(at, self.drafter.depth)[tree.depths]
        self.seconds += time.perf_counter() - began
        return said


@dataclass(frozen=True)
class Timed:
    """A step: seconds and milliseconds by stage without what making it up took, tokens of each text, columns of all."""

    seconds: float
    stages: dict[str, float]
    made_up: float
    emitted: np.ndarray
    columns: int
    cold: bool

    @classmethod
    def of(cls, engine: Engine, runs: list, made_up: MadeUp) -> Timed:
        """Make one."""
        cold, before, began = made_up.cold, made_up.seconds, time.perf_counter()
        found = engine.step(runs)
        seconds = time.perf_counter() - began
        failed = [step for step in found if isinstance(step, Exception)]
        if failed:
            raise failed[0]
        made = made_up.seconds - before
        return cls(
            seconds - made,
            {stage: getattr(found[0].timings, stage) for stage in STAGES},
            made,
            np.array([len(step.tokens) for step in found]),
            sum(1 + step.n_draft for step in found),
            made_up.cold > cold,
        )


def measured(
    engine: Engine, made_up: MadeUp, kind: str, users: int, setting: str, prompt: int, steps: int
) -> Row:
    """Run so many texts of a kind side by side."""
    rng, mode = np.random.default_rng(users), "plain" if setting == "plain batching" else "auto"
    places, runs = [], []
    for text in texts(kind, users, 1):
        place = engine.open(prompt + 20 * (steps + MOST_WARM_UP))
        made_up.of_lane[place.sequence.lane] = text
        place.prefill(rng.integers(0, engine.n_vocab, prompt).tolist())
        sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
        runs.append(place.begin(sampler, mode=mode, stop=lambda token: False))
        place.first(runs[-1])
        places.append(place)
    with equal_shares(engine, int(setting.split()[1]) if setting.startswith("equal") else 0):
        done = calm = 0
        while done < WARM_UP or (calm < CALM and done < MOST_WARM_UP):
            before = made_up.cold
            engine.step(runs)
            done, calm = done + 1, calm + 1 if made_up.cold == before else 0
        engine.device.synchronize()
        timed = list[Timed]()
        for _ in range(steps):
            timed.append(Timed.of(engine, runs, made_up))
    for place in places:
        place.close()
    calm_steps = [one for one in timed if not one.cold] or timed
    each = sum(one.emitted for one in calm_steps) / sum(one.seconds for one in calm_steps)
    all_tokens = sum(int(one.emitted.sum()) for one in timed)
    return Row(
        kind,
        users,
        setting,
        float(each.sum()),
        float(each.min()),
        float(each.max()),
        mean(one.seconds for one in calm_steps) * 1e3,
        mean(one.columns for one in calm_steps),
        {s: median(one.stages[s] for one in calm_steps) for s in STAGES},
        len(timed) - len(calm_steps),
        all_tokens / sum(one.seconds for one in timed),
        mean(one.made_up for one in calm_steps) * 1e3,
        engine.passes.graphs.kinds,
    )


@contextmanager
def equal_shares(engine: Engine, columns: int) -> Iterator[None]:
    """Every text is drafted and gets so many columns, its root's among them; 0: as the engine decides."""
    together = engine.stepper.together
    if columns:
        plan = Plan("tree", columns - 1, depth=min(max(columns - 1, 3), engine.drafter.depth))
        together.next = lambda members, costs: [plan] * len(members)
        together.share = lambda trees: [tree.first(columns - 1) for tree in trees]
        together.observe = lambda *came: None
        together.meanwhile = lambda: None
    try:
        yield
    finally:
        for name in ("next", "share", "observe", "meanwhile") if columns else ():
            delattr(together, name)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-md", "--model-draft", required=True)
    p.add_argument("--users", type=int, nargs="+", default=[1, 4, 8, 16])
    p.add_argument("--texts", nargs="+", choices=["easy", "half", "hard"], default=["easy", "half"])
    p.add_argument("--prompt", type=int, default=500, help="tokens of each text's prompt")
    p.add_argument("--steps", type=int, default=200)
    add_engine_options(p)
    a = p.parse_args()
    most = max(a.users)
    config = EngineConfig(
        Path(a.model),
        Path(a.model_draft),
        spec=DRAFTS,
        parallel=most,
        n_ctx=most * (a.prompt + 20 * (a.steps + MOST_WARM_UP)),
        n_threads=a.threads,
        n_gpu_layers=a.gpu_layers,
        **cache_types(a),
        **memory_options(a),
    )
    print("RANDOM WEIGHTS and MADE-UP acceptance: not model text", file=sys.stderr)
    with Engine.load(config) as engine:
        facts = header(device=engine.device.info.description, gpu=gpu_facts(), model=Path(a.model).name)
        print(f"{facts['device']}, {facts['model']}, commit {facts['commit']}; {engine.memory}")
        made_up, rows = MadeUp(engine), []
        for kind in a.texts:
            for users in a.users:
                equal = [f"equal {64 // users} columns"] if users > 1 else []
                for setting in ["plain batching", *equal, "as decided"]:
                    row = measured(engine, made_up, kind, users, setting, a.prompt, a.steps)
                    rows.append(row)
                    stages = " ".join(f"{name} {ms:.2f}" for name, ms in row.stages.items())
                    print(
                        f"{kind:5} {users:3} users  {setting:17} {row.rate:7.0f} tokens/s  each {row.slowest:5.0f} to "
                        f"{row.fastest:5.0f}  {row.columns:5.1f} columns in {row.step_ms:6.2f} ms: {stages}; "
                        f"{row.cold} steps with new graphs, {row.with_cold:.0f} tokens/s with them",
                        flush=True,
                    )
        print(f"graphs {engine.run_counts()}: {rows[-1].graphs}")
        save(a.json, {**facts, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
