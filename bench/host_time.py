"""Host time of a single-sequence step, by part, with passes that compute nothing.

    python bench/host_time.py [-n 400] [--context 8] [--rounds 5] [--parts] [--only SETTING...] [--json FILE]

The embedded pair is loaded for its shapes. Its device returns at once; SYNTHETIC tokens stand in for what target and draft
choose, and SYNTHETIC milliseconds of a machine for the time of passes. What is timed is the engine's own code between two
passes: planning, inputs and masks, trees, acceptance, bookkeeping. Figures are the minimum over `--rounds` of means over a
sequence's later half, the whole step in process time, so that a busy machine adds little. What overlaps with a GPU's
computation runs where its results are read, and counts as `beside`, not as part of the step. --parts: times functions too, one
at a time, so that timers do not nest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from common import Solo, header, save
from made_up import MadeUp, reset_policy

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode import calibration, sequence
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.drafts.prompt_lookup import PromptLookup
from dflash_ggml.engine import step
from dflash_ggml.engine.accept import Acceptance
from dflash_ggml.engine.slot import Slot
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET
from dflash_ggml.ggml.bindings import lib
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.policy import costs, plan, policy
from dflash_ggml.policy.costs import Costs, Pass, Point
from dflash_ggml.policy.policy import Policy
from dflash_ggml.state.mask import ResidentMask
from reference.virtual_clock import CPU, H100, Machine, SyntheticSequence  # behind made_up, which finds it

PERIOD = 60  # period of a repeating sequence in tokens


@dataclass(frozen=True)
class Setting:
    """A mode and a sequence. hits: of the draft's best candidate; repeats: whether prompt lookup predicts it; machine: whose
    costs."""

    name: str
    mode: str
    hits: float
    machine: Machine
    budget: int = 31
    repeats: bool = False
    lookup: bool = False
    context: int = 8  # tokens of the prompt


SETTINGS = [
    Setting("plain", "plain", 0.1, CPU),
    Setting("auto that stays plain", "auto", 0.1, CPU, lookup=True),
    Setting("auto, lookup alone", "auto", 0.1, CPU, lookup=True, repeats=True),
    Setting("tree 15, length 4", "tree", 0.744, H100, 15),
    Setting("auto, length 4", "auto", 0.744, H100),
    Setting("auto, length 4, lookup", "auto", 0.744, H100, lookup=True, repeats=True),
    Setting("tree 15, length 8", "tree", 0.908, H100, 15),
    Setting("auto, length 8", "auto", 0.908, H100),
]


class FixedCosts(Costs):
    """Costs of a made-up machine: what is measured here is forgotten, but takes the time that it takes."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine, self._rng = machine, np.random.default_rng(0)
        self._noise = (1 + 0.01 * self._rng.standard_normal(997)).tolist()
        self._n_measured = 0
        verify = [Point("verify", w, 64, machine.verify_ms(w)) for w in machine.verify]
        draft = [Point("draft", w, 64, ms) for w, ms in machine.draft.items()]
        self.learn([Point("plain", 1, 64, machine.plain), *verify, *draft])

    def measured(self, kind: Pass, ms: float, columns: int = 1, context: int = 0, sequences: int = 1) -> None:
        machine = self.machine
        if kind == "plain":
            ms = machine.plain
        elif kind == "verify":
            ms = machine.verify_ms(columns)
        elif kind == "draft":
            ms = machine.draft_ms(columns)
        else:
            ms = machine.rest / 2
        self._n_measured += 1
        super().measured(kind, ms * self._noise[self._n_measured % 997], columns, context, sequences)


@contextmanager
def without_device(engine: Solo) -> Iterator[None]:
    """Let passes compute nothing, and what they give be read from nowhere."""
    engine.device.compute = lambda cgraph: lib.GGML_STATUS_SUCCESS
    engine.drafter._read = lambda graph, block, n=1, places=1: [None] * n
    try:
        yield
    finally:
        del engine.device.compute, engine.drafter._read


@dataclass
class Timed:
    """Calls of one function, their time, while it is wrapped."""

    calls: int = 0
    seconds: float = 0.0


@contextmanager
def timed(made_up: MadeUp, owner: Any, name: str) -> Iterator[Timed]:
    """Time all calls of owner.name."""
    found, plain, clock = Timed(), getattr(owner, name), made_up.perf_counter

    def call(*args: Any, **more: Any) -> Any:
        began = clock()
        result = plain(*args, **more)
        found.seconds += clock() - began
        found.calls += 1
        return result

    had = name in vars(owner)
    setattr(owner, name, call)
    try:
        yield found
    finally:
        if had or isinstance(owner, type):
            setattr(owner, name, plain)
        else:
            delattr(owner, name)


def decoded(
    engine: Solo, made_up: MadeUp, setting: Setting, n: int, on_half: Callable[[], None]
) -> tuple[list[Any], float]:
    """The steps of a sequence's later half, and the seconds spent beside them."""
    engine.reset()
    engine.forget()
    reset_policy(engine)
    policy, slot, lookup = engine.policy, engine.slot, engine.slot.lookup
    policy.costs = FixedCosts(setting.machine)
    engine.prefill(np.random.default_rng(0).integers(0, engine.n_vocab, setting.context).tolist())
    made_up.period = PERIOD if setting.repeats else 4096
    made_up.sources[0] = SyntheticSequence(setting.hits, 1, spread=1.0, others=0.4, length=made_up.period)
    beside = [0.0]

    def think() -> None:
        began = time.process_time()
        with made_up.unseen():
            Policy.catch_up(policy)
        beside[0] += time.process_time() - began

    if setting.machine is H100:
        policy.catch_up = think  # type: ignore[method-assign]
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
    how = {"max_tokens": n, "mode": setting.mode, "budget": setting.budget, "stop": lambda token: False}
    steps: list[Any] = []
    emitted, is_late = 0, False
    try:
        slot.lookup = lookup if setting.lookup else None
        with without_device(engine):
            for step in engine.generate(sampler, **how):
                emitted += len(step.tokens)
                steps.append(step)
                if not is_late and emitted >= n // 2:
                    is_late, beside[0] = True, 0.0
                    steps.clear()
                    on_half()
    finally:
        slot.lookup = lookup
    return steps, beside[0]


STAGES = ("draft", "tree", "verify", "commit", "host")


def whole(engine: Solo, made_up: MadeUp, setting: Setting, n: int) -> dict[str, float]:
    """Microseconds of a step, and of its stages, in the later half of a sequence."""
    began = [0.0]

    def half() -> None:
        began[0] = made_up.process_time()

    steps, beside = decoded(engine, made_up, setting, n, half)
    us = (made_up.process_time() - began[0]) / len(steps) * 1e6
    stages = {name: sum(getattr(s.timings, name) for s in steps) / len(steps) * 1e3 for name in STAGES}
    length = sum(len(s.tokens) for s in steps) / len(steps)
    return {
        "step": us,
        "beside": beside / len(steps) * 1e6,
        **stages,
        "length": length,
        "nodes": sum(s.n_draft for s in steps) / len(steps),
    }


def parts_of(engine: Solo) -> list[tuple[str, Any, str]]:
    """What is timed by itself: label, owner, method."""
    return [
        ("prepare", Slot, "prepare"),
        ("plan", Policy, "plan"),
        (" prompt lookup", PromptLookup, "look_up"),
        ("propose", engine.drafter, "propose"),
        ("build tree", plan.Plan, "build"),
        ("cut", Policy, "cut"),
        (" probabilities", policy, "path_probabilities"),
        ("forest", step, "Forest"),
        ("columns", step.Stepper, "_columns"),
        (" take in", engine.drafter, "take_in"),
        ("verify pass", engine.passes, "verify"),
        (" linear pass", engine.passes, "linear"),
        ("catch up", Policy, "catch_up"),
        ("accept", Acceptance, "walk"),
        ("commit pass", engine.passes, "commit"),
        (" masks", ResidentMask, "fill"),
        (" graph.run", Graph, "run"),
        ("record", Policy, "record"),
        (" calibration", calibration.Calibration, "observe"),
        ("costs measured", costs.Costs, "measured"),
        ("sequence.commit", sequence.Sequence, "commit"),
        ("uses", step.Stepper, "_uses"),
        ("statistics", sequence.Statistics, "took"),
    ]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-n", type=int, default=400, help="tokens per text")
    p.add_argument("--context", type=int, default=8, help="tokens before the text")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--only", nargs="+", help="settings whose names begin so")
    p.add_argument("--parts", action="store_true", help="parts of a step too")
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    config = EngineConfig(
        EMBEDDED_TARGET, EMBEDDED_DRAFT, n_ctx=4096, n_threads=1, calibrate="never", n_gpu_layers=0
    )
    found = {}
    with Solo.load(config) as engine:
        made_up = MadeUp(engine)
        for setting in SETTINGS:
            setting = replace(setting, context=a.context)
            if a.only and not any(setting.name.startswith(name) for name in a.only):
                continue
            n = 8 * a.n if setting.repeats else a.n  # of which a step gives many
            whole(engine, made_up, setting, n)
            rounds = [whole(engine, made_up, setting, n) for _ in range(a.rounds)]
            row = {name: min(r[name] for r in rounds) for name in rounds[0]}
            parts = {}
            for label, owner, name in parts_of(engine) if a.parts else ():
                best = None
                for _ in range(max(a.rounds // 2, 1)):
                    with timed(made_up, owner, name) as times:

                        def half(times: Timed = times) -> None:
                            times.calls, times.seconds = 0, 0.0

                        steps = len(decoded(engine, made_up, setting, n, half)[0])
                    us = times.seconds / steps * 1e6
                    if best is None or us < best[0]:
                        best = us, times.calls / steps
                parts[label] = best
            found[setting.name] = {**row, "parts": parts}
            made = f"{row['length']:.2f} tokens, {row['nodes']:.1f} nodes"
            stages = ", ".join(f"{name} {row[name]:.1f}" for name in STAGES)
            print(
                f"{setting.name:24} {row['step']:6.1f} us, beside {row['beside']:5.1f}; {made}: {stages}",
                flush=True,
            )
            for label, (us, calls) in parts.items():
                if calls:
                    print(f"    {label:22} {us:7.1f} us, {calls:.2f} calls")
    save(a.json, {**header(), "settings": found})


if __name__ == "__main__":
    main()
