"""A toy engine with the interface of dflash_ggml.engine.Engine and its slots: numpy only, deterministic, multi-token steps.

It keeps what the real one promises: tests/engine/*_contract.py and test_engine_claims.py run on both.
Its language model is a hash of everything committed, so a wrong prefix restored anywhere changes all that follows.
A scripted reply makes it prefer given tokens, as a trained model would; sampling and grammars still decide.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler
from dflash_ggml.decode.tree import Tree
from dflash_ggml.engine.batches import BatchSizes
from dflash_ggml.engine.slot import Claim
from dflash_ggml.engine.step import SourceUse, Step
from dflash_ggml.errors import ConfigError, ContextOverflowError, DeviceError, NoRoomError, as_exception
from dflash_ggml.policy.plan import Plan, plan_of
from dflash_ggml.policy.policy import StepTimes
from dflash_ggml.text.tokenizer import Tokenizer

SPECIALS = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4, "</think>": 4}
CALL_TAGS = {"<tool_call>": 4, "</tool_call>": 4}
HARMONY_TAGS = dict.fromkeys(
    (
        "<|endoftext|>",
        "<|return|>",
        "<|constrain|>",
        "<|channel|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|call|>",
    ),
    3,
)
GEMMA_TAGS = (
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>", "<|turn>",
)  # fmt: skip
# "Ã ©" is the two bytes of é, "ä ¸" the first two of three: half a character in one token
MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "i n",
    "Ġ t",
    "e r",
    "Ġ a",
    "o n",
    "S T",
    "ST O",
    "STO P",
    "Ã ©",
    "ä ¸",
]
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
# the shape of Qwen3.5's template, in short: tools, calls in the parameter form, an open think block
TOOL_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}Write <function=name>."
    "<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{%- else %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)


def byte_vocabulary(
    call_tags: bool = True, template: str = TEMPLATE, harmony: bool = False, gemma: int | None = None
) -> Tokenizer:
    """256 byte tokens, a few merges (some of them halves of characters) and the special tokens, or those of gpt-oss.

    gemma: the type of Gemma's tags, which are there too.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    alphabet = [""] * 256
    for b in printable:
        alphabet[b] = chr(b)
    for i, b in enumerate(others):
        alphabet[b] = chr(0x100 + i)
    tokens = alphabet + [m.replace(" ", "") for m in MERGES]
    types = [1] * len(tokens)
    specials = HARMONY_TAGS if harmony else {**SPECIALS, **(CALL_TAGS if call_tags else {})}
    specials = {**specials, **({} if gemma is None else dict.fromkeys(GEMMA_TAGS, gemma))}
    for text, kind in specials.items():
        tokens.append(text)
        types.append(kind)
    ids = {t: i for i, t in enumerate(tokens)}
    return Tokenizer(
        tokens,
        types,
        MERGES,
        "qwen35",
        special_ids={
            "eos": ids["<|return|>" if harmony else "<|im_end|>"],
            "padding": ids["<|endoftext|>"],
        },
        chat_template=template,
    )


DEPTH = 7  # the longest path that the draft which is not there proposes
TIMES = StepTimes(draft=0.1, tree=0.1, verify=1.0, commit=0.1, host=0.1)


BLOCK = 64
BUFFERS = SimpleNamespace(keep=lambda *_: None, warm=lambda *_: None)  # of a device, for nothing


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Placeholder for the K/V rows of these tokens."""

    tokens: tuple[int, ...]
    nbytes: int

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Snapshot:
    """Without `rows` it lives only as long as the engine's cache holds its tokens."""

    tokens: tuple[int, ...]
    state: int
    rows: tuple[RowBlock, ...] | None = field(compare=False)
    logits: np.ndarray | None = field(default=None, compare=False)
    sizes: tuple[int, int] = (1000, 4)

    @property
    def state_nbytes(self) -> int:
        return self.sizes[0]

    @property
    def nbytes(self) -> int:
        return self.state_nbytes + sum(block.nbytes for block in self.rows or ())


@dataclass(eq=False)
class FakeSequence:
    """A generation that was begun."""

    steps: Any
    slot: FakeSlot
    finish: str | None = None
    forced: list[int] = field(default_factory=list)


class FakeScorer:
    """Masses by the bytes of a line that is looked for; notes its calls in the engine's log."""

    name, tokenizer = "fake", None

    def __init__(self, engine: Any, wanted: str = "\n", limit: int = 20_000) -> None:
        self.engine, self.wanted, self.limit, self.broken = engine, wanted, limit, None
        self.ids, self.window, self.done = list[int](), 0, 0

    def begin(self, ids: Sequence[int], window: int) -> int:
        self.engine.log.append(("begin",))
        self.ids, self.window, self.done = list(ids), window, 0
        return 0

    def advance(self, most: int | None = None) -> int:
        if self.broken:
            raise self.broken
        n = min(most or 1000, len(self.ids) - self.done)
        self.engine.log.append(("score", n))
        self.done += n
        return len(self.ids) - self.done

    def masses(self) -> np.ndarray:
        pieces = self.engine.tokenizer.pieces(self.ids[: len(self.ids) - self.window])
        text = b"".join(pieces).decode()
        at, found = text.find(self.wanted), np.zeros(len(pieces), np.float32)
        ends = np.cumsum([len(piece) for piece in pieces])
        if at >= 0:
            found[(ends > at) & (ends <= at + len(self.wanted))] = 1
        return found


@dataclass
class FakeEngine:
    """Slots with `n_ctx` cache rows in all, counted in tokens, and a step for all of them at once.

    replies: spoken one per generation, from its start, then the toy model is on its own. log: what was done. broken: what
    the next step raises, or what single runs do, by their slot. sizes: bytes of a state, and of a token's K/V rows.
    """

    config: EngineConfig = field(
        default_factory=lambda: EngineConfig(model=Path("toy.gguf"), n_ctx=1024, n_batch=32)
    )
    tokenizer: Tokenizer = field(default_factory=byte_vocabulary)
    has_draft: bool = True
    replies: list[str] = field(default_factory=list)
    parallel: int = 1
    slots: list[FakeSlot] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)
    broken: Any = None
    sizes: tuple[int, int] = (1000, 4)
    scorer: Any = None
    prefill_fp8: bool = False
    can_join: bool = False
    joins: bool = False

    def __post_init__(self) -> None:
        self.n_ctx = self.config.n_ctx or 1024
        self.device = SimpleNamespace(
            n_threads=self.config.n_threads or 2,
            is_gpu=False,
            buffers=BUFFERS,
        )
        self.batches = BatchSizes(self.config.n_batch or 512)
        self.n_vocab = self.tokenizer.n_vocab + 3  # padded, as real models are
        self.params = SimpleNamespace(
            n_embd=64, n_ctx_train=1024, n_vocab=self.n_vocab, name="toy", longest_answer=512
        )
        self.metadata = {
            "general.architecture": "qwen35",
            "general.name": "toy",
            "tokenizer.chat_template": self.tokenizer.chat_template,
            "tokenizer.ggml.tokens": self.tokenizer.tokens,
            "tokenizer.ggml.add_bos_token": False,
            "qwen35.rope.freq_base": 1e7,
            "qwen35.block_count": 4,
        }
        self.n_prefilled = 0  # tokens that went through prefill, in all
        self.n_restored = 0
        self.n_saved = 0  # tokens whose rows were copied to complete snapshots
        self.closed = False
        self.passing = threading.RLock()
        self.in_pass = False

    @property
    def sources(self) -> tuple[str, ...]:
        return ("dflash",) if self.has_draft else ()

    @property
    def tokens(self) -> list[int]:
        """Those of the only slot."""
        return self.slots[0].tokens if self.slots else []

    @contextmanager
    def held(self) -> Iterator[None]:
        with self.passing:
            if self.closed:
                raise DeviceError("the engine is closed")
            yield

    def graph_counts(self) -> dict[str, int]:
        return {"graphs": 1, "kept": 1}

    def run_counts(self) -> dict[str, int]:
        return {**self.graph_counts(), "runs": len(self.log)}

    def expected_ms(self, nodes: int, context: int) -> float | None:
        return None

    @property
    def free(self) -> int:
        """Cache rows that no slot has."""
        return self.n_ctx - sum(slot.rows for slot in self.slots)

    def make_slot(self, rows: int) -> FakeSlot:
        return FakeSlot(self, rows)

    def open(self, room: int | None = None) -> FakeSlot:
        if self.closed:
            raise DeviceError("the engine is closed")
        room = room or self.n_ctx // self.parallel
        if len(self.slots) == self.parallel or room > self.free:
            raise NoRoomError("no slot")
        self.slots.append(slot := self.make_slot(room))
        return slot

    def step(self, sequences: Sequence[FakeSequence]) -> list[Any]:
        if self.closed:
            raise DeviceError("the engine is closed")
        if isinstance(self.broken, Exception):
            error, self.broken = self.broken, None
            raise error
        self.log.append(("step", [sequence.slot for sequence in sequences]))
        return [self._step(sequence) for sequence in sequences]

    def _step(self, sequence: FakeSequence) -> Any:
        slot = sequence.slot
        if self.broken and slot in self.broken:
            return self.broken.pop(slot)
        if not slot.grow(min(self.n_ctx, slot.n_tokens + 1)):
            return NoRoomError("no rows")
        try:
            step = next(sequence.steps)
        except Exception as error:  # noqa: BLE001 - as the real one
            return error
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return as_exception(error)
        sequence.finish = step.finish
        return step

    def close(self) -> None:
        with self.passing:
            if self.in_pass:
                raise ConfigError("close: called from inside a step of this engine; end the generation first")
            self.closed = True

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class FakeSolo(FakeEngine):
    """With a slot of its own: what is no attribute of the engine is one of that slot."""

    @property
    def slot(self) -> FakeSlot:
        return self.slots[0] if self.slots else self.open()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "slots":
            raise AttributeError(name)
        return getattr(self.slot, name)


class FakeSlot:
    """A sequence of a FakeEngine; rows: cache rows that it has."""

    def __init__(self, engine: FakeEngine, rows: int) -> None:
        self.engine, self.rows, self.n_ctx, self.n_vocab = engine, rows, engine.n_ctx, engine.n_vocab
        self.config, self.tokenizer, self.batches = engine.config, engine.tokenizer, engine.batches
        self.has_draft, self.params = engine.has_draft, engine.params
        self.state_index = min(set(range(engine.parallel)) - {slot.state_index for slot in engine.slots})
        self.pending: int | None = None
        self.closed = False
        self._tokens: list[int] = []
        self._state = 0
        self._kept: tuple[int, ...] = ()  # tokens whose rows outlive a reset or restore, until the next write
        self._logits: np.ndarray | None = None
        self._inconsistent = False
        self._script: list[int] = []
        self._origin = 0
        self._claim = Claim()

    def forget(self) -> None:
        pass

    def grow(self, n: int) -> bool:
        if n > self.rows and n - self.rows > self.engine.free:
            return False
        self.rows = max(n, self.rows)
        return True

    # --- claims

    @contextmanager
    def _pass(self) -> Iterator[None]:
        with self.engine.passing:
            self._check_usable()
            self.engine.in_pass = True
            try:
                yield
            finally:
                self.engine.in_pass = False

    def _check_open(self) -> None:
        if self.engine.closed or self.closed:
            raise DeviceError("the engine is closed")

    def _check_usable(self) -> None:
        self._check_open()
        if self._inconsistent:
            raise DeviceError(
                "the state is inconsistent after an interrupt or error inside a pass; call reset() and prefill again"
            )

    # --- the committed prefix

    @property
    def tokens(self) -> list[int]:
        """The committed tokens, a copy."""
        return list(self._tokens)

    @property
    def n_tokens(self) -> int:
        return len(self._tokens)

    @property
    def logits(self) -> np.ndarray:
        """float32 [V] after the last committed token, after prefill only."""
        if self._logits is None:
            raise ConfigError("no logits: call prefill first")
        return self._logits

    def reset(self) -> None:
        with self._claim.by("reset"), self.engine.passing:
            self._check_open()
            self._kept = () if self._inconsistent else max(self._kept, tuple(self._tokens), key=len)
            self._tokens, self._state, self.pending, self._logits = [], 0, None, None
            self._inconsistent = False

    def prefill(self, ids: Sequence[int], progress=None, should_stop=None, take_row=None, join=None) -> None:
        with self._claim.by("prefill"):
            self._check_usable()
            wanted = len(self._tokens) + len(ids)
            if wanted > self.n_ctx:
                raise ContextOverflowError(
                    f"Requested tokens ({wanted}) exceed context window of {self.n_ctx}"
                )
            bad = next((i for i in ids if not 0 <= i < self.n_vocab), None)
            if bad is not None:
                raise ConfigError(f"token id {bad} is outside the vocabulary of {self.n_vocab}")
            if not self.grow(wanted):
                raise NoRoomError("no rows")
            self.engine.log.append(("read", self, len(ids)))
            self._script = []
            if len(ids):
                self.pending = self._logits = None
            done = 0
            while done < len(ids):
                if should_stop is not None and should_stop():
                    return
                part = [int(i) for i in ids[done : done + self.batches.next(len(ids) - done)]]
                done += len(part)
                with self._pass():
                    before, state = self.tokens, self._state
                    row = self._run(part)
                    for n in range(1, len(part) + 1) if take_row else ():
                        take_row(self._row([*before, *part[:n]], _hashed(state, part[:n])))
                    self.engine.n_prefilled += len(part)
                    self._logits = row if done == len(ids) else None
                if progress is not None:
                    progress(done, len(ids))

    def _run(self, ids: Sequence[int]) -> np.ndarray:
        """A pass that commits ids; the row after them. What breaks it off tears the state."""
        self._inconsistent, self._kept = True, ()
        tokens, state = [*self._tokens, *ids], _hashed(self._state, ids)
        row = self._row(tokens, state)
        self._tokens, self._state, self._inconsistent = tokens, state, False
        return row

    def _row(self, tokens: Sequence[int], state: int) -> np.ndarray:
        """The language model: float32 [V] after `tokens`, whose hash is `state`; read-only, as a real engine's may be."""
        row = np.random.default_rng(state).normal(size=self.n_vocab).astype(np.float32)
        row[32:127] += 2.0
        row[self.tokenizer.n_vocab :] -= 9.0
        n_emitted = len(tokens) - self._origin
        if self._script and list(tokens[self._origin :]) == self._script[:n_emitted]:
            eos = self.tokenizer.eos_id
            row[self._script[n_emitted] if n_emitted < len(self._script) else eos] += 30.0
        row.setflags(write=False)
        return row

    def hidden_states(self, ids: Sequence[int], take, should_stop=None) -> None:
        with self._claim.by("hidden_states"):
            self._check_usable()
            if not len(ids):
                raise ConfigError("hidden_states: there are no tokens")
            if len(ids) > self.n_ctx:
                raise ContextOverflowError(
                    f"Requested tokens ({len(ids)}) exceed context window of {self.n_ctx}"
                )
            bad = next((i for i in ids if not 0 <= i < self.n_vocab), None)
            if bad is not None:
                raise ConfigError(f"token id {bad} is outside the vocabulary of {self.n_vocab}")
            if not self.grow(len(ids)):
                raise NoRoomError("no rows")
            for n in range(1, len(ids) + 1):
                if should_stop is not None and should_stop():
                    return
                with self._pass():
                    draws = np.random.default_rng(_hashed(0, ids[:n]))
                    take(draws.normal(size=(1, self.params.n_embd)).astype(np.float32))

    # --- decoding

    def generate(
        self,
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        mode: str | None = None,
        budget: int | None = None,
        stop: Callable[[int], bool] | None = None,
        should_stop: Callable[[], bool] | None = None,
        keep_logits: bool = False,
    ) -> Iterator[Step]:
        with self._claim.by("a generation"):
            yield from self._steps(sampler, max_tokens, mode, budget, stop, should_stop, keep_logits)

    def _steps(
        self,
        sampler,
        max_tokens=None,
        mode=None,
        budget=None,
        stop=None,
        should_stop=None,
        keep_logits=False,
        forced=(),
    ):
        self._check_usable()
        _ = self.logits
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens: {max_tokens} is below 1")
        if budget is not None and not 1 <= budget <= self.config.budget:
            raise ConfigError(
                f"budget: {budget} is outside 1..{self.config.budget}, what the engine was loaded with"
            )
        left = self.n_ctx - len(self._tokens)
        if left < 1:
            raise ContextOverflowError(f"the context window of {self.n_ctx} tokens is full")
        depth = DEPTH if self.has_draft else 0
        mode = mode or self.config.mode
        # time does not pass here: nothing to decide by
        mode = "tree" if mode == "auto" and depth else mode
        plan = plan_of(mode, budget or self.config.budget, depth)  # type: ignore[arg-type]
        assert plan is not None
        self._origin = len(self._tokens)
        self._script = self.tokenizer.encode(self.engine.replies.pop(0)) if self.engine.replies else []
        left = left if max_tokens is None else min(left, max_tokens)
        ends = stop or self.tokenizer.eog_ids.__contains__
        lengths = np.random.default_rng(self._state)
        history, finish = self.tokens, None

        def choose(row: np.ndarray) -> int:
            return forced[0] if forced else int(sampler.sample(row, history))

        def emit(token: int) -> bool:
            nonlocal left, finish
            was_forced = bool(forced)
            history.append(token)
            left -= 1
            finish = "stop" if ends(token) else "length" if left <= 0 else None
            if was_forced:
                del forced[0]
            return finish is not None or was_forced or bool(forced)

        self._kept = ()
        with self._pass():
            row = self._row(self._tokens, self._state)  # once more, now that the script is known
            self.pending = choose(row)
            self._logits = None
            emit(self.pending)
        step = Step((self.pending,), "prefill", logits=(row,) if keep_logits else None, timings=TIMES)
        while True:
            if finish is None and should_stop is not None and should_stop():
                finish = "cancelled"
            step.finish = finish
            yield step
            if finish is not None:
                return
            with self._pass():
                if plan.kind == "plain" or forced:
                    step = self._plain(choose, emit, keep_logits)
                else:
                    n = min(int(lengths.integers(1, 6)), plan.budget + 1)
                    step = self._speculate(plan, n, choose, emit, keep_logits)

    def begin(self, sampler, **how: Any) -> FakeSequence:
        self.sequence = sequence = FakeSequence(None, self, forced=list(how.pop("forced", ())))
        sequence.steps = self._steps(sampler, **how, forced=sequence.forced)
        return sequence

    def first(self) -> Any:
        step = next(self.sequence.steps)
        self.sequence.finish = step.finish
        return step

    def resume(self, sequence: FakeSequence) -> None:
        if sequence.slot._tokens != self._tokens:
            raise ConfigError("resume: the slot holds other tokens than the sequence")
        rows, slot = self.rows, sequence.slot
        self.__dict__ = slot.__dict__  # its generator continues where it was
        self.rows, self.closed = rows, False
        self.engine.slots[self.engine.slots.index(self)] = self

    def _plain(self, choose, emit, keep_logits: bool) -> Step:
        row = self._run([self.pending])
        self.pending, self._logits = None, row
        token = choose(row)
        self.pending, self._logits = token, None
        emit(token)
        return Step((token,), "plain", logits=(row,) if keep_logits else None, timings=TIMES)

    def _speculate(self, plan: Plan, n: int, choose, emit, keep_logits: bool) -> Step:
        """A step of at most n tokens; nothing is committed before all are chosen."""
        root, rows, emitted = self.pending, [], []
        tokens, state, last = self.tokens, self._state, self.pending
        ended = False
        while len(emitted) < n and not ended:
            tokens, state = [*tokens, last], _hashed(state, [last])
            rows.append(self._row(tokens, state))
            last = choose(rows[-1])
            emitted.append(last)
            ended = emit(last)
        self._tokens, self._state, self.pending = tokens, state, last
        tree = _tree([root, *emitted[:-1]], plan, (last + 1) % self.n_vocab)
        path = tuple(range(len(emitted)))
        kept = tuple(rows) if keep_logits else None
        use = SourceUse("dflash", tree.n_nodes, len(path) - 1)
        return Step(
            tuple(emitted), plan.kind, tree, path, tree.n_nodes, len(path) - 1, kept, None, TIMES, (use,)
        )

    # --- snapshots

    def snapshot(self, with_rows: bool = True) -> Snapshot:
        with self._claim.by("snapshot"), self.engine.passing:
            self._check_usable()
            tokens = tuple(self._tokens)
            rows = self._blocks(tokens, 0) if with_rows else None
            return Snapshot(tokens, self._state, rows, self._logits, self.engine.sizes)

    def _blocks(self, tokens: tuple[int, ...], first: int) -> tuple[RowBlock, ...]:
        parts = [tokens[at : at + BLOCK] for at in range(first, len(tokens), BLOCK)]
        return tuple(RowBlock(part, self.engine.sizes[1] * len(part)) for part in parts)

    @property
    def row_nbytes(self) -> int:
        return self.engine.sizes[1]

    def buffers(self, n: int, n_states: int) -> Counter[int]:
        return Counter({self.engine.sizes[0]: n_states, BLOCK * self.engine.sizes[1]: n // BLOCK})

    def completed(self, snapshot: Snapshot, known: Sequence[RowBlock] = ()) -> Snapshot:
        if snapshot.rows is not None:
            return snapshot
        assert self.can_restore(snapshot)
        n = sum(block.n_tokens for block in known)
        self.engine.n_saved += max(len(snapshot.tokens) - n, 0)
        return replace(snapshot, rows=(*known, *self._blocks(snapshot.tokens, n)))

    def can_restore(self, snapshot: Snapshot) -> bool:
        held = self._kept or self._tokens
        return snapshot.rows is not None or tuple(held[: len(snapshot.tokens)]) == snapshot.tokens

    def restore(self, snapshot: Snapshot) -> None:
        with self._claim.by("restore"), self.engine.passing:
            self._check_open()
            if not self.can_restore(snapshot):
                raise ConfigError("the K/V rows of this snapshot are gone; prefill its tokens again")
            if len(snapshot.tokens) > self.n_ctx:
                raise ConfigError("snapshot: taken from a model or context of another shape")
            if snapshot.rows is not None:
                rows = tuple(token for block in snapshot.rows for token in block.tokens)
                assert rows[: len(snapshot.tokens)] == snapshot.tokens, "rows of other tokens"
            held = max(self._kept, tuple(self._tokens), key=len)
            self._kept = snapshot.tokens if snapshot.rows is not None else held
            self._tokens, self._state = list(snapshot.tokens), snapshot.state
            self.pending, self._logits, self._inconsistent = None, snapshot.logits, False
            self.engine.n_restored += 1

    def close(self) -> None:
        self.closed = True
        self.engine.slots.remove(self)


def _hashed(state: int, ids: Sequence[int]) -> int:
    """The model's whole state: a hash of everything committed."""
    for token in ids:
        state = (state * 6364136223846793005 + int(token) + 1442695040888963407) % (1 << 64)
    return state


def _tree(path: Sequence[int], plan: Plan, other: int) -> Tree:
    """A tree of the plan's size: `path` from the root, then `other` below its end (a chain) or below the root."""
    n = plan.budget + 1
    below = [i - 1 if i < len(path) or plan.kind == "chain" else 0 for i in range(n)]
    depths = [0]
    for parent in below[1:]:
        depths.append(depths[parent] + 1)
    tokens = [*path, *[other] * (n - len(path))]
    log_probs = -0.1 * np.arange(n, dtype=np.float32)
    return Tree(np.array(tokens, np.int32), np.array(below, np.int32), np.array(depths, np.int32), log_probs)
