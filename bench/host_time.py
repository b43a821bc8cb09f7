"""What the host takes of a step of one text, by part, with passes that compute nothing.

    python bench/host_time.py [-n 400] [--context 8] [--rounds 5] [--parts] [--only SETTING...] [--json FILE]

The embedded pair is loaded for its shapes. Its device answers at once, MADE-UP words stand for what target and draft say, and
MADE-UP milliseconds of a machine for what passes take. What is timed is the engine's own code between two passes: planning,
inputs and masks, trees, acceptance, bookkeeping. Figures are the least of `--rounds` means over a text's later half, the whole
step in process time, so that a busy machine adds little. What a GPU would compute beside is done where its results are read,
and not counted in the step but as `beside`. --parts: functions too, one at a time, so that no clock is in another's time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from common import ROOT, header, save

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode import adaptive, calibration, costs, plan, sequence
from dflash_ggml.decode.candidates import Rows
from dflash_ggml.decode.costs import Costs, Pass, Point
from dflash_ggml.decode.experience import Experience
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.drafts.suffix import Copies
from dflash_ggml.engine import step
from dflash_ggml.engine.engine import Engine
from dflash_ggml.engine.place import Place
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET
from dflash_ggml.ggml.bindings import lib
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.state.mask import SlotMask

sys.path.insert(0, str(ROOT / "tests"))
from reference.virtual_clock import CPU, H100, RANKS, Machine, Placed

PERIOD = 60  # tokens after which a text that repeats itself begins anew


@dataclass(frozen=True)
class Setting:
    """A mode on a text. hits: of the draft's best candidate; repeats: whether copies foretell it; machine: whose costs."""

    name: str
    mode: str
    hits: float
    machine: Machine
    budget: int = 31
    repeats: bool = False
    copies: bool = False
    context: int = 8  # tokens before the text


SETTINGS = [
    Setting("plain", "plain", 0.1, CPU),
    Setting("auto that stays plain", "auto", 0.1, CPU, copies=True),
    Setting("auto, copies alone", "auto", 0.1, CPU, copies=True, repeats=True),
    Setting("tree 15, length 4", "tree", 0.744, H100, 15),
    Setting("auto, length 4", "auto", 0.744, H100),
    Setting("auto, length 4, copies", "auto", 0.744, H100, copies=True, repeats=True),
    Setting("tree 15, length 8", "tree", 0.908, H100, 15),
    Setting("auto, length 8", "auto", 0.908, H100),
]


class Told(Costs):
    """Costs of a made-up machine: what is measured here is forgotten, but takes the time that it takes."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine, self._rng = machine, np.random.default_rng(0)
        self._noise = (1 + 0.01 * self._rng.standard_normal(997)).tolist()
        verify = [Point("verify", w, 64, machine.verify_ms(w)) for w in machine.verify]
        draft = [Point("draft", w, 64, ms) for w, ms in machine.draft.items()]
        self.learn([Point("plain", 1, 64, machine.plain), *verify, *draft])

    def measured(self, kind: Pass, ms: float, width: int = 1, context: int = 0) -> None:
        machine = self.machine
        if kind == "plain":
            ms = machine.plain
        elif kind == "verify":
            ms = machine.verify_ms(width)
        elif kind == "draft":
            ms = machine.draft[16 if width > 8 else 8]
        else:
            ms = machine.rest / 2
        super().measured(kind, ms * self._noise[self._n % 997], width, context)


class MadeUp:
    """Words in place of what target and draft say."""

    def __init__(self, engine: Engine, setting: Setting, n: int) -> None:
        text, depth = Placed(setting.hits, 1, spread=1.0, others=0.4, length=4096), engine.drafter.depth
        self.engine, self.depth, self.n_vocab = engine, depth, engine.n_vocab
        self._tree: Any = None
        self._work: Callable[[], None] | None = None
        self.beside = 0.0  # seconds of what a GPU would compute beside
        self.is_gpu = setting.machine is H100
        self._rows, self._right = [], []
        for place in range(n + 64):
            of = place % PERIOD if setting.repeats else place
            rows, _ = text.at(of, depth)
            words = self._words(np.arange(place + 1, place + 1 + depth), setting.repeats)
            self._rows.append((words[:, None] + rows.ids % RANKS, rows.log_probs))
            right = int(text.right(of, 1)[0])
            # a word that no candidate has is its place's own too
            self._right.append(int(words[0]) + min(right, RANKS))
        self.first = 0

    def _words(self, at: np.ndarray, repeats: bool) -> np.ndarray:
        place = at % PERIOD if repeats else at
        return 1 + (place * (RANKS + 1)) % (self.n_vocab - RANKS - 1)

    def draft(self, graph: Any, block: int, n: int = 1, places: int = 1) -> list[Rows]:
        self._waited()
        ids, log_probs = self._rows[self.engine.sequence.n_tokens - self.first]
        depths = block - self.engine.drafter.params.first_row
        return [Rows(ids[:depths], log_probs[:depths])]

    def choices(self, graph: Any) -> np.ndarray:
        """After each column of a pass the word that is right at its depth, whatever its path."""
        self._waited()
        at = self.engine.sequence.n_tokens - self.first
        if self._tree is None:
            return np.array([self._right[at - 1]], np.int32)
        tree, self._tree = self._tree, None
        right = np.array(self._right[at : at + 64], np.int32)
        return right[np.minimum(tree.depths, 63)]

    def meanwhile(self, run: Any) -> None:
        """What the engine leaves for a time when a GPU computes."""

        def work() -> None:
            run.controller.catch_up()
            self.engine.costs.catch_up()

        self._work = work if self.is_gpu else None

    def _waited(self) -> None:
        if self._work is not None:
            began = time.process_time()
            self._work()
            self._work, self.beside = None, self.beside + time.process_time() - began

    def verify(self, sequence: Any, tree: Any, *more: Any) -> Any:
        self._tree = tree
        return self._verify(sequence, tree, *more)

    @contextmanager
    def speaking(self) -> Any:
        engine = self.engine
        self._verify = engine.passes.verify
        engine.passes.verify, engine.passes.choices = self.verify, self.choices
        engine.drafter._read = self.draft
        engine.device.compute = lambda cgraph: lib.GGML_STATUS_SUCCESS
        engine.stepper._meanwhile = self.meanwhile
        try:
            yield
        finally:
            del engine.passes.verify, engine.passes.choices, engine.drafter._read
            del engine.device.compute, engine.stepper._meanwhile


@dataclass
class Timed:
    """Calls of one function, their time, while it is wrapped."""

    calls: int = 0
    seconds: float = 0.0


@contextmanager
def timed(owner: Any, name: str) -> Any:
    """Time all calls of owner.name."""
    found, plain, clock = Timed(), getattr(owner, name), time.perf_counter

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


def text(engine: Engine, setting: Setting, n: int, on_half: Callable[[], None]) -> tuple[list[Any], float]:
    """The steps of a text's later half, and the seconds that were spent beside them."""
    engine.reset()
    engine.forget()
    engine.experience = Experience()
    copies = engine.copies
    if not setting.copies:
        engine.copies = None
    engine.costs = engine.stepper.costs = Told(setting.machine)
    engine.prefill(np.random.default_rng(0).integers(0, engine.n_vocab, setting.context).tolist())
    made_up = MadeUp(engine, setting, n + 8)
    made_up.first = setting.context
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
    how = {"max_tokens": n, "mode": setting.mode, "budget": setting.budget, "stop": lambda token: False}
    steps: list[Any] = []
    emitted, is_late = 0, False
    try:
        with made_up.speaking():
            for step in engine.generate(sampler, **how):
                emitted += len(step.tokens)
                steps.append(step)
                if not is_late and emitted >= n // 2:
                    is_late, made_up.beside = True, 0.0
                    steps.clear()
                    on_half()
    finally:
        engine.copies = copies
    return steps, made_up.beside


STAGES = ("draft", "tree", "verify", "commit", "host")


def whole(engine: Engine, setting: Setting, n: int) -> dict[str, float]:
    """Microseconds of a step, and of its stages, in the later half of a text."""
    began = [0.0]

    def half() -> None:
        began[0] = time.process_time()

    steps, beside = text(engine, setting, n, half)
    us = (time.process_time() - began[0] - beside) / len(steps) * 1e6
    stages = {name: sum(getattr(s.timings, name) for s in steps) / len(steps) * 1e3 for name in STAGES}
    length = sum(len(s.tokens) for s in steps) / len(steps)
    return {
        "step": us,
        "beside": beside / len(steps) * 1e6,
        **stages,
        "length": length,
        "nodes": sum(s.n_draft for s in steps) / len(steps),
    }


def parts_of(engine: Engine) -> list[tuple[str, Any, str]]:
    """What is timed by itself: label, owner, method."""
    return [
        ("ready", Place, "ready"),
        ("plan", adaptive.Adaptive, "next"),
        (" look-up of copies", Copies, "look_up"),
        ("propose", engine.drafter, "propose"),
        ("build tree", plan.Plan, "build"),
        (" probabilities", calibration.Calibration, "path_probabilities"),
        (" cut", adaptive.Adaptive, "best_cut"),
        ("linear pass", engine.passes, "linear"),
        ("verify pass", type(engine.passes), "verify"),
        ("commit pass", engine.passes, "commit"),
        (" masks", SlotMask, "fill"),
        (" graph.run", Graph, "run"),
        ("accept", step.Stepper, "_accept"),
        ("observe", adaptive.Adaptive, "observe"),
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
    with Engine.load(config) as engine:
        for setting in SETTINGS:
            setting = replace(setting, context=a.context)
            if a.only and not any(setting.name.startswith(name) for name in a.only):
                continue
            n = 8 * a.n if setting.repeats else a.n  # of which a step gives many
            whole(engine, setting, n)
            rounds = [whole(engine, setting, n) for _ in range(a.rounds)]
            row = {name: min(r[name] for r in rounds) for name in rounds[0]}
            parts = {}
            for label, owner, name in parts_of(engine) if a.parts else ():
                best = None
                for _ in range(max(a.rounds // 2, 1)):
                    with timed(owner, name) as times:

                        def half(times: Timed = times) -> None:
                            times.calls, times.seconds = 0, 0.0

                        steps = len(text(engine, setting, n, half)[0])
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
