"""The mode `auto` on real output in virtual time: what the policy gains, independent of the machine's load.

    python bench/policy_on_texts.py [--limit 18] [--temps 0 0.8 1.2] [--seeds 1] [-n 200] [--json FILE]

The embedded pair runs, so output, drafts and loops are its own; passes are assumed to take what they took on two idle cores of
a Xeon with AMX (the tables below), with four per cent of noise. The host takes no time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from common import header, save

from dflash_ggml.bench import measure
from dflash_ggml.bench.comparison import rate
from dflash_ggml.bench.measure import Job, Run, Setting
from dflash_ggml.bench.prompts import EMBEDDED_STYLES, own, spread
from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.forest import Forest
from dflash_ggml.drafts.dflash.drafter import DFlashDrafter
from dflash_ggml.engine.engine import Engine
from dflash_ggml.engine.passes import TargetPasses
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET

PLAIN, AFTER, COMMIT, APPEND, PROMPT = (
    1.02,
    0.3,
    0.18,
    0.35,
    0.1,
)  # AFTER: more behind a wide pass; PROMPT: a token
VERIFY = {2: 1.4, 3: 1.65, 4: 1.9, 6: 2.3, 8: 2.65, 16: 4.0, 24: 5.35, 32: 6.75}  # by columns
DRAFT = {4: 0.85, 8: 1.05, 16: 1.5}
MODES = [("plain", None), ("chain", None), ("tree", 7), ("tree", 15), ("tree", 31), ("auto", 31)]


def at(table: Mapping[int, float], columns: int) -> float:
    """What a pass of so many columns takes."""
    return table[min((w for w in table if w >= columns), default=max(table))]


class VirtualTime:
    """Stands for the performance counter; what passes take is added to it."""

    def __init__(self, seed: int) -> None:
        self.seconds, self.behind_wide, self.noise = 1000.0, False, np.random.default_rng(seed)

    def perf_counter(self) -> float:
        return self.seconds

    def spend(self, ms: float) -> None:
        self.seconds += ms * max(1 + 0.04 * self.noise.standard_normal(), 0.5) / 1e3


@contextmanager
def virtual_time(seed: int) -> Iterator[None]:
    """Every clock of the process shows virtual time."""
    clock, real = VirtualTime(seed), time.perf_counter
    kept: list[tuple[type, str, Callable[..., Any]]] = []
    is_within = False

    def replaced(owner: type, name: str, spend: Callable[..., object]) -> None:
        was = getattr(owner, name)
        kept.append((owner, name, was))

        def call(self: Any, *args: Any, **named: Any) -> Any:
            nonlocal is_within
            outer, is_within = is_within, True
            try:
                found = was(self, *args, **named)
            finally:
                is_within = outer
            if not outer:
                spend(self, *args, **named)
            return found

        setattr(owner, name, call)

    def linear(passes: TargetPasses, sequence: object, ids: list[int], *more: Any, **named: Any) -> None:
        clock.spend(PLAIN + AFTER * clock.behind_wide if len(ids) == 1 else PROMPT * len(ids))
        clock.behind_wide = False

    def verify(passes: TargetPasses, forest: Forest, *more: Any, **named: Any) -> None:
        if forest.width == 1:
            linear(passes, None, [0])
        else:
            clock.spend(at(VERIFY, forest.width))
            clock.behind_wide = True

    def propose(drafter: DFlashDrafter, sequences: object, budget: int, depth: int | None = None) -> None:
        clock.spend(at(DRAFT, (depth or drafter.depth) + 1))
        clock.behind_wide = True

    replaced(TargetPasses, "linear", linear)
    replaced(TargetPasses, "verify", verify)
    replaced(TargetPasses, "commit", lambda passes, forest, paths: any(paths) and clock.spend(COMMIT))
    replaced(DFlashDrafter, "propose", propose)
    replaced(DFlashDrafter, "take_in", lambda drafter, sequences: clock.spend(APPEND))
    time.perf_counter = clock.perf_counter
    try:
        yield
    finally:
        time.perf_counter = real
        for owner, name, was in kept:
            setattr(owner, name, was)


def decoded(limit: int, temperature: float, n: int, seed: int) -> dict[str, list[Run]]:
    """The runs of each mode, on one engine that has seen nothing before."""
    prompts = spread([prompt for style in EMBEDDED_STYLES for prompt in own(style)], limit)
    found: dict[str, list[Run]] = {}
    with virtual_time(seed):
        config = EngineConfig(
            model=EMBEDDED_TARGET,
            draft=EMBEDDED_DRAFT,
            n_ctx=4096,
            budget=31,
            n_threads=1,
            calibrate="always",
        )
        with Engine.load(config) as engine:
            slot = engine.open()
            for mode, budget in MODES:
                label = f"tree {budget}" if mode == "tree" else mode
                setting = Setting(label, mode, budget, temperature)  # type: ignore[arg-type]
                for prompt in prompts:
                    ids = [*engine.tokenizer.bos_ids, *engine.tokenizer.encode(prompt.text, special=False)]
                    job = Job(prompt, ids, prompt.text, setting, n, seed, endless=True)
                    found.setdefault(label, []).append(measure.decode(slot, job, lambda: False))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=18)
    parser.add_argument("--temps", type=float, nargs="+", default=[0.0, 0.8, 1.2])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("-n", type=int, default=200)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    print("| temperature | best fixed mode | auto, tokens/s | to the best | to plain | worst text to plain |")
    print("|---|---|---|---|---|---|")
    for temperature in args.temps:
        for seed in range(1, args.seeds + 1):
            outputs = decoded(args.limit, temperature, args.n, seed)
            rates = {label: rate(found) or 0.0 for label, found in outputs.items()}
            auto = rates.pop("auto")
            best = max(rates, key=lambda label: rates[label])
            worst = min(a.per_second / p.per_second for a, p in zip(outputs["auto"], outputs["plain"]))  # type: ignore[operator]
            row = {
                "temperature": temperature, "best": best, "auto": auto, "to_best": auto / rates[best],
                "to_plain": auto / rates["plain"], "worst": worst,
            }  # fmt: skip
            rows.append(row)
            print(
                f"| {temperature:g} | {best} | {auto:,.0f} | {row['to_best']:.3f} | {row['to_plain']:.3f} | {worst:.3f} |"
            )
    if args.json:
        save(args.json, {**header(), "virtual_time": True, "rows": rows})


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
