"""Short ways to run an engine, for tests that hold several kinds of it to one contract."""

from __future__ import annotations

from typing import Any

from dflash_ggml.decode.sampling import Sampler, SamplingParams

PROMPT = [3, 1, 4, 1, 5]


def sampler(engine: Any, processors: Any = (), **options: Any) -> Sampler:
    return Sampler(SamplingParams(**{"temperature": 0, **options}), engine.n_vocab, processors)


def steps(engine: Any, **options: Any) -> Any:
    """A generation that no token ends; `sampling`: options of the sampler, `processors` its processors."""
    chosen = sampler(engine, options.pop("processors", ()), **options.pop("sampling", {}))
    return engine.generate(chosen, **{"stop": lambda token: False, **options})


def text(engine: Any, **options: Any) -> list[int]:
    return [token for step in steps(engine, **options) for token in step.tokens]


def fresh(engine: Any, ids: list[int] = PROMPT) -> Any:
    engine.reset()
    engine.prefill(ids)
    return engine
