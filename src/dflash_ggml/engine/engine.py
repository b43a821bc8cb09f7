"""The engine: one sequence, decoded by drafting a tree, verifying it in one pass and committing the accepted path.

State between steps: the committed tokens, and one pending token that was emitted but has not been through the target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..config import EngineConfig, Mode
from ..decode.accept import Accepted, greedy, walk
from ..decode.controller import plan
from ..decode.sampling import Sampler
from ..decode.tree import Tree
from ..errors import ConfigError, ContextOverflowError, DeviceError
from ..state.snapshot import Snapshot, make_room, restore_state, save_state
from ..text.tokenizer import Tokenizer
from .loading import Progress, load_passes
from .passes import Passes

Finish = Literal["stop", "length", "cancelled"]


@dataclass(slots=True)
class StepTimes:
    """Wall milliseconds of one step. `host` is what the other four leave: masks, sampling, bookkeeping."""

    draft: float = 0.0
    tree: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    host: float = 0.0


@dataclass(slots=True)
class Step:
    """What one target pass gave.

    tokens: new token ids, at least one. mode: how they were found; "prefill" for the first token of a generation, which the
    prompt's own pass gave. tree, path: the verified tree and its accepted nodes, root first. n_draft, n_accepted: drafted
    nodes offered and kept. rows: the target's logits of each emitted token, when asked for. finish: why it ended, on the
    last step.
    """

    tokens: tuple[int, ...]
    mode: Literal["prefill", "plain", "chain", "tree"]
    tree: Tree | None = None
    path: tuple[int, ...] = ()
    n_draft: int = 0
    n_accepted: int = 0
    rows: tuple[np.ndarray, ...] | None = None
    finish: Finish | None = None
    timings: StepTimes = field(default_factory=StepTimes)


class Engine:
    """One sequence on one target and, if given, one draft. Not for two threads at a time."""

    def __init__(
        self, config: EngineConfig, passes: Passes, tokenizer: Tokenizer, metadata: dict, n_ctx: int
    ) -> None:
        self.config, self.tokenizer, self.metadata, self.n_ctx = config, tokenizer, metadata, n_ctx
        self.passes = passes
        self.params = passes.params
        self.n_vocab = self.params.n_vocab
        self.has_draft = passes.draft_params is not None
        self.pending: int | None = None
        self._tokens: list[int] = []
        # tokens whose K/V rows outlive a reset or restore, until the next write
        self._rows: tuple[int, ...] = ()
        self._path: tuple[int, ...] = ()  # last committed path, not yet in the draft's context
        self._logits: np.ndarray | None = None
        self._torn = False
        self._running = False

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress | None = None) -> Engine:
        """Open the files and bring the weights to the device; `progress(stage, done, total)` in bytes.

        Raises ModelFileError, ConfigError, or DeviceError when something does not fit.
        """
        return cls(config, *load_passes(config, progress))

    # ---- the committed prefix

    @property
    def tokens(self) -> list[int]:
        """The committed tokens, a copy."""
        return list(self._tokens)

    @property
    def n_tokens(self) -> int:
        return len(self._tokens)

    @property
    def logits(self) -> np.ndarray:
        """Logits float32 [n_vocab] after the last committed token; there after `prefill` only."""
        if self._logits is None:
            raise ConfigError("no logits: call prefill first")
        return self._logits

    def reset(self) -> None:
        """Forget the sequence."""
        self._rows = () if self._torn else max(self._rows, tuple(self._tokens), key=len)
        self.passes.state.reset()
        self.passes.in_draft[:] = False
        self._tokens.clear()
        self._path, self.pending, self._logits, self._torn, self._running = (), None, None, False, False

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ConfigError when an id is outside the vocabulary."""
        bad = next((i for i in ids if not 0 <= i < self.n_vocab), None)
        if bad is not None:
            raise ConfigError(f"token id {bad} is outside the vocabulary of {self.n_vocab}")

    def prefill(
        self,
        ids: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Append `ids` to the committed tokens, `n_batch` at a time; `progress(done, total)` in tokens.

        With `should_stop` true between two batches it returns early: `tokens` then tells how far it came.
        Raises ContextOverflowError before any work when they do not fit, ConfigError for an id outside the vocabulary.
        """
        self._usable()
        if len(self._tokens) + len(ids) > self.n_ctx:
            raise ContextOverflowError(
                f"Requested tokens ({len(self._tokens) + len(ids)}) exceed context window of {self.n_ctx}"
            )
        self.check_ids(ids)
        if len(ids):
            self._feed_path()
            self.pending = self._logits = None
        for at in range(0, len(ids), self.config.n_batch):
            if should_stop and should_stop():
                return
            part = ids[at : at + self.config.n_batch]
            self._torn, self._rows = True, ()
            graph = self.passes.linear(part, len(self._tokens), feed_draft=self.config.mode != "plain")
            self._tokens.extend(part)
            self._torn = False
            if progress:
                progress(at + len(part), len(ids))
            if at + len(part) == len(ids):
                self._logits = self.passes.logits_row(graph)

    # ---- decoding

    def generate(
        self,
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        mode: Mode | None = None,
        budget: int | None = None,
        stop: Callable[[int], bool] | None = None,
        should_stop: Callable[[], bool] | None = None,
        keep_rows: bool = False,
    ) -> Generator[Step, None, None]:
        """Decode from `logits` until `stop(token)` (None: an end-of-generation token), `max_tokens` or the context's end.

        `should_stop` is asked between steps. However it ends, also by closing the generator, `tokens` then holds the prompt
        and all emitted tokens but the last, which is `pending`. Raises ConfigError for options that do not fit.
        """
        self._usable()
        row = self.logits
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens: {max_tokens} is below 1")
        if budget is not None and not 1 <= budget <= self.config.budget:
            raise ConfigError(
                f"budget: {budget} is outside 1..{self.config.budget}, what the engine was loaded with"
            )
        if self._running:
            raise ConfigError("a generation is running on this engine; close it first")
        room = self.n_ctx - len(self._tokens)
        if room < 1:
            raise ContextOverflowError(f"the context window of {self.n_ctx} tokens is full")
        step_plan = plan(
            mode or self.config.mode, budget or self.config.budget, self.passes.block, self.config.chain_seed
        )
        limit = room if max_tokens is None else min(max_tokens, room)
        ends = stop or self.tokenizer.eog_ids.__contains__
        history = list(self._tokens)
        finish: Finish | None = None

        def emit(token: int) -> bool:
            nonlocal finish, limit
            history.append(token)
            limit -= 1
            finish = "stop" if ends(token) else "length" if limit <= 0 else None
            return finish is not None

        self._running, self._rows = True, ()
        try:
            began = time.perf_counter()
            self.pending = self._sample(sampler, row, history)
            emit(self.pending)
            self._logits = None
            step = Step((self.pending,), "prefill", rows=(row,) if keep_rows else None)
            step.timings.host = (time.perf_counter() - began) * 1e3
            while True:
                if finish is None and should_stop and should_stop():
                    finish = "cancelled"
                step.finish = finish
                yield step
                if finish:
                    return
                if step_plan.kind == "plain":
                    step = self._plain_step(
                        sampler, history, emit, keep_rows, feed_draft=(mode or self.config.mode) == "auto"
                    )
                else:
                    step = self._tree_step(step_plan, sampler, history, emit, keep_rows)
        finally:
            self._running = False

    def _tree_step(self, step_plan, sampler: Sampler, history: list[int], emit, keep_rows: bool) -> Step:
        """Draft, build the tree, verify it, walk it, commit the accepted path."""
        passes, start, clock = self.passes, len(self._tokens), _Clock()
        ids, log_probs = passes.draft(self.pending, start, self._path)
        self._path = ()
        clock.lap("draft")
        tree = step_plan.build(self.pending, ids, log_probs)
        clock.lap("tree")
        graph = passes.verify(tree, start)
        choice = passes.choices(graph)
        clock.lap("verify")
        rows: list[np.ndarray] = []

        def choose(node: int) -> int:
            row = passes.logits_row(graph, node)
            if keep_rows:
                rows.append(row)
            return self._sample(sampler, row, history)

        if sampler.greedy and not keep_rows:
            accepted = greedy(tree, choice, emit)
        else:
            accepted = walk(tree, choose, emit)
        clock.lap("host")
        self._commit(accepted, start)
        clock.lap("commit")
        return Step(
            accepted.tokens,
            step_plan.kind,
            tree,
            accepted.path,
            tree.n_nodes,
            accepted.n_accepted,
            tuple(rows) if keep_rows else None,
            timings=clock.times,
        )

    def _commit(self, accepted: Accepted, start: int) -> None:
        self._torn = True
        self.passes.commit(accepted.path, start)
        self._tokens += (self.pending, *accepted.tokens[:-1])  # what the path's nodes carry
        self._path, self.pending = accepted.path, accepted.tokens[-1]
        self._torn = False

    def _plain_step(
        self, sampler: Sampler, history: list[int], emit, keep_rows: bool, feed_draft: bool
    ) -> Step:
        """Run the pending token alone."""
        clock = _Clock()
        self._feed_path()
        self._torn = True
        graph = self.passes.linear([self.pending], len(self._tokens), feed_draft)
        self._tokens.append(self.pending)
        row = choice = None
        if sampler.greedy and not keep_rows:
            choice = int(self.passes.choices(graph)[0])
        else:
            row = self.passes.logits_row(graph)
        # from here on the state is whole: a sampler that raises leaves the row to start from again
        self.pending, self._logits, self._torn = choice, row, False
        clock.lap("verify")
        if row is not None:
            self.pending, self._logits = self._sample(sampler, row, history), None
        emit(self.pending)
        clock.lap("host")
        return Step((self.pending,), "plain", rows=(row,) if keep_rows else None, timings=clock.times)

    def _feed_path(self) -> None:
        """Let the draft take in the last accepted path before anything else is committed behind it."""
        if self._path:
            self.passes.feed_path(len(self._tokens), self._path)
            self._path = ()

    def _sample(self, sampler: Sampler, row: np.ndarray, history: list[int]) -> int:
        return int(sampler.sample(row, history))

    # ---- snapshots

    def snapshot(self, with_rows: bool = True) -> Snapshot:
        """A copy of the committed state, for `restore`; the pending token is not part of it.

        Without its K/V rows a snapshot is small and good for as long as the cache still holds the same tokens' rows.
        """
        self._usable()
        self._feed_path()
        return save_state(self.passes, self._tokens, self._logits, with_rows)

    def can_restore(self, snapshot: Snapshot) -> bool:
        """Whether `restore` would work: rows are in the snapshot, or still in the cache."""
        held = self._rows or self._tokens
        return snapshot.rows is not None or tuple(held[: len(snapshot.tokens)]) == snapshot.tokens

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this engine. Raises ConfigError when its K/V rows are gone or its shape differs."""
        if not self.can_restore(snapshot):
            raise ConfigError("the K/V rows of this snapshot are gone; prefill its tokens again")
        make_room(self.passes, snapshot)
        rows = snapshot.tokens if snapshot.rows is not None else max(self._rows, tuple(self._tokens), key=len)
        self._torn, self._rows = True, ()
        restore_state(self.passes, snapshot)
        self._rows, self._tokens = rows, list(snapshot.tokens)
        self._path, self.pending, self._logits = (), None, snapshot.logits
        self._torn = False

    # ---- life

    def _usable(self) -> None:
        if self.passes is None:
            raise DeviceError("the engine is closed")
        if self._torn:
            raise DeviceError(
                "the state was torn by an interrupt or error inside a pass; call reset() and prefill again"
            )

    def close(self) -> None:
        """Free the device memory; the engine is of no use afterwards."""
        if self.passes is not None:
            device = self.passes.device
            self.passes.close()
            device.close()
            self.passes = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class _Clock:
    """Laps of one step, each name once."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        setattr(self.times, name, (now - self._at) * 1e3)
        self._at = now
