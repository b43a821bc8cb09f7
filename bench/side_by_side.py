"""Batched decoding on files of any shape: total tokens per second, plain, with equal shares, and as the policy decides.

    python bench/side_by_side.py -m TARGET -md DRAFT [--users 1 4 8 16] [--texts easy half hard] [--steps 200] [--json FILE]

RANDOM WEIGHTS (see shapes.py) and SYNTHETIC ACCEPTANCE: every pass runs and takes its time, but which node is right is drawn
from the hit rates of several_sim.py, whose predictions this is compared with; NOT MODEL TEXT.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
from common import add_engine_options, cache_types, header, memory_options, save
from made_up import MadeUp, equal_shares
from several_sim import synthetic

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.engine.engine import Engine

WARM_UP = 50  # steps, in which graphs are captured and costs learned
CALM = 30  # of them, the last, in which no graph was captured
MOST_WARM_UP = 150
STAGES = ("draft", "tree", "verify", "commit", "host")


@dataclass(frozen=True)
class Row:
    """One setting: total tokens per second, of the slowest and the fastest sequence; per step milliseconds and columns.

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


@dataclass(frozen=True)
class Timed:
    """A step: seconds and milliseconds by stage without the synthetic choices, tokens of each sequence, columns of all."""

    seconds: float
    stages: dict[str, float]
    made_up: float
    emitted: np.ndarray
    columns: int
    cold: bool

    @classmethod
    def of(cls, engine: Engine, sequences: list[Sequence], made_up: MadeUp) -> Timed:
        """Make one."""
        cold, before, began = engine.passes.graphs.cold, made_up.seconds, made_up.perf_counter()
        found = engine.step(sequences)
        seconds = made_up.perf_counter() - began
        failed = [step for step in found if isinstance(step, Exception)]
        if failed:
            raise failed[0]
        return cls(
            seconds,
            {stage: getattr(found[0].timings, stage) for stage in STAGES},
            made_up.seconds - before,
            np.array([len(step.tokens) for step in found]),
            sum(1 + step.n_draft for step in found),
            engine.passes.graphs.cold > cold,
        )


def measured(
    engine: Engine, made_up: MadeUp, kind: str, users: int, setting: str, prompt: int, steps: int
) -> Row:
    """Decode a batch of that many sequences of a kind."""
    rng, mode = np.random.default_rng(users), "plain" if setting == "plain batching" else "auto"
    slots, sequences, graphs = [], [], engine.passes.graphs
    for source in synthetic(kind, users, 1):
        slot = engine.open(prompt + 20 * (steps + MOST_WARM_UP))
        made_up.sources[slot.state_index] = source
        slot.prefill(rng.integers(0, engine.n_vocab, prompt).tolist())
        sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
        sequences.append(slot.begin(sampler, mode=mode, stop=lambda token: False))
        slot.first()
        slots.append(slot)
    with equal_shares(engine, int(setting.split()[1]) if setting.startswith("equal") else 0):
        done = calm = 0
        while done < WARM_UP or (calm < CALM and done < MOST_WARM_UP):
            before = graphs.cold
            engine.step(sequences)
            done, calm = done + 1, calm + 1 if graphs.cold == before else 0
        engine.device.synchronize()
        timed = list[Timed]()
        for _ in range(steps):
            timed.append(Timed.of(engine, sequences, made_up))
    for slot in slots:
        slot.close()
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
        graphs.kinds,
    )


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
