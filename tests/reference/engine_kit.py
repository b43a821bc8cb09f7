"""Helpers to run an engine, for tests that hold several kinds of engine to one contract."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.forest import Forest
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.tree import Tree
from dflash_ggml.engine.engine import Engine
from dflash_ggml.engine.slot import Slot
from dflash_ggml.policy.plan import Plan

PROMPT = [3, 1, 4, 1, 5]


class Solo(Engine):
    """An engine with a slot of its own, opened when first used: what is no attribute of the engine is one of that slot.

    `open` gives other slots, once that one is closed."""

    _own: Slot | None = None

    @property
    def slot(self) -> Slot:
        if self._own is None or (self._own.kv.allocated is None and not self._closed):
            self._own = super().open(self.n_ctx)
        return self._own

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.slot, name)

    def open(self, room: int | None = None) -> Slot:
        if self._own is not None and self._own.kv.allocated is not None:
            self._own.close()
        return super().open(room)


# an engine whose passes of any width come to the same choices, and whose decisions rest on no clock when it begins
EXACT: dict[str, Any] = {
    "type_k": "f32",
    "type_v": "f32",
    "reference": True,
    "n_threads": 1,
    "calibrate": "never",
}


def sampler(engine: Any, processors: Any = (), **options: Any) -> Sampler:
    return Sampler(SamplingParams(**{"temperature": 0, **options}), engine.n_vocab, processors)


def steps(engine: Any, **options: Any) -> Any:
    """A generation that no token ends; `sampling`: options of the sampler, `processors` its processors."""
    chosen = sampler(engine, options.pop("processors", ()), **options.pop("sampling", {}))
    return engine.generate(chosen, **{"stop": lambda token: False, **options})


def generate(engine: Any, **options: Any) -> list[int]:
    return [token for step in steps(engine, **options) for token in step.tokens]


def fresh(engine: Any, ids: list[int] = PROMPT) -> Any:
    engine.reset()
    engine.prefill(ids)
    return engine


def force_draft(engine: Any, tokens: list[int], first: int, seed: int = 0) -> None:
    """Let the engine's draft propose the `tokens` that follow `first` committed tokens: of every depth the right token and
    another, either of them first, so that accepted paths run through all of a tree and rows must move."""
    rng = np.random.default_rng(seed)
    drafter = engine.drafter

    def propose(sequences: Any, budget: int, depth: int | None = None) -> list[CandidateBlock]:
        drafter.take_in([s for s in sequences if s.unseen])
        return [one(sequence) for sequence in sequences]

    def one(sequence: Any) -> CandidateBlock:
        at = sequence.n_tokens - first + 1
        right = np.array(tokens[at : at + drafter.depth] or [0])
        ids = np.stack([right, (right + 1) % 50], axis=1)
        swapped = rng.random(len(ids)) < 0.5
        ids[swapped] = ids[swapped, ::-1]
        return CandidateBlock(
            ids.astype(np.int32), np.tile(np.log([0.55, 0.45]).astype(np.float32), (len(ids), 1))
        )

    drafter.propose = propose


def verify(engine: Any, tree: Tree, watch: Any = None, sequence: Any = None) -> Any:
    """Run one tree behind the tokens of a sequence (None: of the engine's own slot); its graph."""
    passes, forest = engine.passes, Forest([sequence or engine.sequence], [tree])
    return passes.verify(forest, [watch], range(forest.width))


def commit(engine: Any, tree: Tree, path: tuple[int, ...], sequence: Any = None) -> None:
    """Commit a path of the tree that `verify` ran last, on the device."""
    engine.passes.commit(Forest([sequence or engine.sequence], [tree]), [path])


def logits_batched(
    engine: Any, prompts: list[list[int]], modes: tuple[str, ...], max_tokens: int
) -> list[tuple[list[int], np.ndarray]]:
    """Sequences decoded in one batch: the tokens of each, and the logits behind those that were emitted."""
    sequences, rows = [], []
    for ids, mode in zip(prompts, modes, strict=True):
        slot = engine.open()
        slot.prefill(ids)
        sequences.append(
            slot.begin(
                sampler(engine), max_tokens=max_tokens, mode=mode, stop=lambda t: False, keep_logits=True
            )
        )
        rows.append([*slot.first().logits])
    while going := [i for i, sequence in enumerate(sequences) if sequence.finish is None]:
        for i, step in zip(going, engine.step([sequences[i] for i in going]), strict=True):
            if isinstance(step, Exception):
                raise step
            rows[i] += step.logits
    return [(list(s.history), np.stack(found)) for s, found in zip(sequences, rows, strict=True)]


class AnyPlan:
    """A policy that changes its mind every step, for every sequence."""

    def __init__(self, engine: Any, seed: int, budget: int = 20, depth: int = 7) -> None:
        self.rng, self.most = np.random.default_rng(seed), engine.passes.most_columns
        self.budget, self.depth, self.drafts = budget, depth, engine.drafter is not None
        self.asked = self.recorded = 0

    def plan(self, sequences: Any) -> list[Plan]:
        self.asked += 1
        assert all(sequence.pending is not None for sequence in sequences)
        return [self._one() for _ in sequences]

    def _one(self) -> Plan:
        rng, kind = self.rng, ("plain", "chain", "tree")[int(self.rng.integers(3))]
        return Plan(
            kind,  # type: ignore[arg-type]
            0 if kind == "plain" else int(rng.integers(1, self.budget + 1)),
            chain_seed=bool(rng.integers(2)),
            depth=int(rng.integers(1, self.depth + 1)) if rng.integers(2) else None,
            drafts=self.drafts and bool(rng.integers(4)),
        )

    def cut(self, trees: Any) -> list[Tree]:
        return [tree.first(max(self.most // len(trees) - 1, 0)) for tree in trees]

    def catch_up(self) -> None:
        pass

    def record(self, result: Any) -> None:
        self.recorded += 1
        for tree, accepted in zip(result.trees, result.accepted, strict=True):
            assert accepted is None or tree.n_nodes >= accepted.n_accepted
