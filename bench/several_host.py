"""Host time of a batched step, by part, with passes that compute nothing: microseconds of processor time.

    python bench/several_host.py [--users 4 8 16] [--texts easy half] [--steps 200] [--json FILE]

The embedded pair, its passes left out once each graph has run; their results are SYNTHETIC as in side_by_side.py, and their
times are those that one H100 took for the 27B shape (tests/reference/virtual_clock.py), so that widths and shares are those of
such a step. Time is the thread's own: other load on the machine disturbs it less. Medians over steps; a part does not count
those inside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from common import header, save
from made_up import MadeUp, equal_shares
from several_sim import synthetic

from dflash_ggml.config import DRAFTS, EngineConfig
from dflash_ggml.decode.forest import Forest
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine import step
from dflash_ggml.engine.accept import Acceptance
from dflash_ggml.engine.engine import Engine
from dflash_ggml.engine.slot import Slot
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET
from dflash_ggml.ggml.bindings import ffi
from dflash_ggml.policy.policy import Policy
from reference.virtual_clock import SEVERAL_H100, JointMachine  # behind made_up, which finds it

WARM_UP = 60  # steps
PROMPT = 40  # tokens
BUSY = "catch up"  # a part that a GPU does not wait for


@dataclass(frozen=True)
class Row:
    """One setting. parts: medians of microseconds a step; columns, tokens: means of a step."""

    texts: str
    users: int
    setting: str
    columns: float
    tokens: float
    parts: dict[str, float]

    @property
    def waited_for(self) -> float:
        """Microseconds of a step for which a device has nothing to do."""
        return sum(us for part, us in self.parts.items() if part != BUSY)


class Parts:
    """Times of methods, those inside them taken out."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self._inner = [0]

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the time of this method of an object (or class) under `part`."""
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`call`, with its time counted under `part`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            began = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.thread_time_ns() - began
                self.now[part] = self.now.get(part, 0) + took - self._inner.pop()
                self._inner[-1] += took

        return timed


def without_device(engine: Engine, parts: Parts, machine: JointMachine) -> None:
    """Let graphs run once each, under `passes`, and passes be measured as the machine's."""
    seen = set[int]()

    def run(cgraph: Any) -> None:
        if (key := int(ffi.cast("intptr_t", cgraph))) not in seen:
            seen.add(key)
            compute(cgraph)

    compute = engine.device.run
    engine.device.run = parts.timed(run, "passes")  # type: ignore[method-assign]
    costs = engine.policy.costs = machine.costs()
    known = {
        "verify": machine.verify_ms,
        "plain": lambda columns, n: machine.plain_ms(n),
        "draft": lambda columns, n: machine.draft_ms(columns) + machine.commit * n,
        "append": lambda columns, n: machine.draft_ms(columns),
        "host": lambda columns, n: machine.host_ms(n),
        "commit": lambda columns, n: 0.05,
        "after": lambda columns, n: 0.0,
    }
    measured = costs.measured

    def as_on(kind: Any, ms: float, columns: int, context: int, sequences: int) -> None:
        measured(kind, known[kind](columns, sequences), columns, context, sequences)

    costs.measured = as_on  # type: ignore[method-assign]


def watched(engine: Engine, made_up: MadeUp, parts: Parts) -> None:
    """Count what a step is made of."""
    stepper, passes = engine.stepper, engine.passes
    for owner, name, part in (
        (engine.drafter, "propose", "made up"),
        (made_up, "_propose", "propose"),
        (passes, "_verify_forest", "fill verify"),
        (passes, "choices", "made up"),
        (made_up, "_choices", "read"),
        (passes, "commit", "fill commit"),
        (stepper, "_trees", "grow"),
        (stepper, "_columns", "columns"),
        (Acceptance, "walk", "walk"),
        (stepper, "_commit", "commit"),
        (stepper, "_step_of", "report"),
        (Policy, "plan", "plan"),  # of the class: equal shares stand before the object's own
        (Policy, "cut", "cut"),
        (Policy, "record", "record"),
        (Policy, "catch_up", BUSY),
        (Slot, "prepare", "ready"),
    ):
        parts.wrap(owner, name, part)
    step.Forest = parts.timed(Forest, "forest")  # type: ignore[misc, assignment]
    engine.step = parts.timed(engine.step, "rest")  # type: ignore[method-assign]


def measured(
    engine: Engine, made_up: MadeUp, parts: Parts, kind: str, users: int, setting: str, steps: int
) -> Row:
    """Steps of that many sequences of a kind."""
    rng, slots, sequences = np.random.default_rng(users), [], []
    for source in synthetic(kind, users, 1):
        slot = engine.open(PROMPT + 20 * (steps + WARM_UP))
        made_up.sources[slot.state_index] = source
        slot.prefill(rng.integers(0, engine.n_vocab, PROMPT).tolist())
        sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
        sequences.append(slot.begin(sampler, stop=lambda _: False))
        slot.first()
        slots.append(slot)
    found, columns, tokens = list[dict[str, int]](), list[int](), list[int]()
    with equal_shares(engine, int(setting.split()[1]) if setting.startswith("equal") else 0):
        for step in range(WARM_UP + steps):
            parts.now = {}
            done = engine.step(sequences)
            if step >= WARM_UP:
                found.append(parts.now)
                columns.append(sum(1 + one.n_draft for one in done))
                tokens.append(sum(len(one.tokens) for one in done))
    for slot in slots:
        slot.close()
    names = sorted({name for one in found for name in one} - {"made up", "passes"})
    of = {name: median(one.get(name, 0) for one in found) / 1e3 for name in names}
    return Row(kind, users, setting, mean(columns), mean(tokens), of)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--users", type=int, nargs="+", default=[4, 8, 16])
    p.add_argument("--texts", nargs="+", choices=["easy", "half", "hard"], default=["easy", "half"])
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    most = max(a.users)
    config = EngineConfig(
        Path(EMBEDDED_TARGET),
        Path(EMBEDDED_DRAFT),
        spec=DRAFTS,
        parallel=most,
        n_ctx=most * (PROMPT + 20 * (a.steps + WARM_UP)),
        n_threads=1,
        calibrate="never",
    )
    print("MADE-UP acceptance and no device: what the host does, in microseconds of a step", file=sys.stderr)
    rows = []
    with Engine.load(config) as engine:
        parts, made_up = Parts(), MadeUp(engine)
        without_device(engine, parts, SEVERAL_H100)
        watched(engine, made_up, parts)
        for kind in a.texts:
            for users in a.users:
                for setting in (f"equal {64 // users} columns", "as decided"):
                    row = measured(engine, made_up, parts, kind, users, setting, a.steps)
                    rows.append(row)
                    each = " ".join(f"{name} {us:.0f}" for name, us in row.parts.items())
                    print(
                        f"{kind:5} {users:3} users  {setting:17} {row.columns:5.1f} columns, {row.tokens:5.1f} tokens, "
                        f"{row.waited_for:6.0f} us waited for: {each}",
                        flush=True,
                    )
    save(a.json, {**header(), "made_up": True, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
