"""A toy engine with the interface of dflash_ggml.engine.Engine: numpy only, deterministic, with multi-token steps.

Its language model is a hash of everything committed, so a wrong prefix restored anywhere changes all that follows.
A scripted reply makes it prefer given tokens, as a trained model would; sampling and grammars still decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler
from dflash_ggml.errors import ConfigError, ContextOverflowError
from dflash_ggml.text.tokenizer import Tokenizer

SPECIALS = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4, "</think>": 4}
CALL_TAGS = {"<tool_call>": 4, "</tool_call>": 4}
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


def byte_vocabulary(call_tags: bool = True, template: str = TEMPLATE) -> Tokenizer:
    """256 byte tokens, a few merges (some of them halves of characters) and the special tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    alphabet = [""] * 256
    for b in printable:
        alphabet[b] = chr(b)
    for i, b in enumerate(others):
        alphabet[b] = chr(0x100 + i)
    tokens = alphabet + [m.replace(" ", "") for m in MERGES]
    types = [1] * len(tokens)
    for text, kind in {**SPECIALS, **(CALL_TAGS if call_tags else {})}.items():
        tokens.append(text)
        types.append(kind)
    ids = {t: i for i, t in enumerate(tokens)}
    return Tokenizer(
        tokens,
        types,
        MERGES,
        "qwen35",
        special_ids={"eos": ids["<|im_end|>"], "padding": ids["<|endoftext|>"]},
        chat_template=template,
    )


@dataclass(frozen=True)
class StepTimes:
    draft: float = 0.1
    tree: float = 0.1
    verify: float = 1.0
    commit: float = 0.1
    host: float = 0.1


@dataclass
class Step:
    tokens: tuple[int, ...]
    mode: str
    tree: object | None = None
    path: tuple[int, ...] = ()
    n_draft: int = 0
    n_accepted: int = 0
    rows: object | None = None
    finish: str | None = None
    timings: StepTimes = field(default_factory=StepTimes)


@dataclass(frozen=True)
class Snapshot:
    """`rows` stands for K/V rows: without it the snapshot lives only as long as the engine's cache holds its tokens."""

    tokens: tuple[int, ...]
    state: int
    rows: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        return 1000 + (4 * len(self.tokens) if self.rows is not None else 0)


@dataclass
class FakeEngine:
    """`replies` are spoken one per generate() call, from its start, then the toy model is on its own."""

    config: EngineConfig = field(
        default_factory=lambda: EngineConfig(model=Path("toy.gguf"), n_ctx=1024, n_batch=32)
    )
    tokenizer: Tokenizer = field(default_factory=byte_vocabulary)
    has_draft: bool = True
    replies: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_ctx = self.config.n_ctx or 1024
        self.n_vocab = self.tokenizer.n_vocab + 3  # padded, as real models are
        self.params = SimpleNamespace(n_embd=64, n_ctx_train=1024, n_vocab=self.n_vocab, name="toy")
        self.metadata = {
            "general.architecture": "qwen35",
            "general.name": "toy",
            "tokenizer.chat_template": self.tokenizer.chat_template,
            "tokenizer.ggml.tokens": self.tokenizer.tokens,
            "tokenizer.ggml.add_bos_token": False,
            "qwen35.rope.freq_base": 1e7,
            "qwen35.block_count": 4,
        }
        self.tokens: list[int] = []
        self.pending: int | None = None
        self.n_prefilled = 0  # tokens that went through prefill, in all
        self.n_restored = 0
        self.closed = False
        self._state = 0
        self._held: tuple[int, ...] = ()
        self._logits: np.ndarray | None = None
        self._running = False
        self._script: list[int] = []
        self._origin = 0

    def reset(self) -> None:
        self._held = max(self._held, tuple(self.tokens), key=len)
        self.tokens, self._state, self.pending, self._logits = [], 0, None, None
        self._running = False

    def _commit(self, token: int) -> None:
        assert 0 <= token < self.n_vocab
        self.tokens.append(int(token))
        self._state = (self._state * 6364136223846793005 + int(token) + 1442695040888963407) % (1 << 64)

    def prefill(self, ids: Sequence[int], progress=None, should_stop=None) -> None:
        if len(self.tokens) + len(ids) > self.n_ctx:
            raise ContextOverflowError(
                f"Requested tokens ({len(self.tokens) + len(ids)}) exceed context window of {self.n_ctx}"
            )
        self._script = []
        if len(ids):
            self.pending = self._logits = None
            self._held = ()
        for i, token in enumerate(ids):
            if should_stop is not None and i % self.config.n_batch == 0 and should_stop():
                return
            self._commit(token)
            self.n_prefilled += 1
            if progress is not None:
                progress(i + 1, len(ids))
        self._logits = self._row(self.tokens, self._state)

    @property
    def logits(self) -> np.ndarray:
        """float32 [V] after the last committed token, after prefill only."""
        if self._logits is None:
            raise ConfigError("no logits: call prefill first")
        return self._logits

    def _row(self, tokens: Sequence[int], state: int) -> np.ndarray:
        row = np.random.default_rng(state).normal(size=self.n_vocab).astype(np.float32)
        row[32:127] += 2.0
        row[self.tokenizer.n_vocab :] -= 9.0
        said = len(tokens) - self._origin
        if self._script and tokens[self._origin :] == self._script[:said]:
            eos = self.tokenizer.eos_id
            row[self._script[said] if said < len(self._script) else eos] += 30.0
        return row

    def generate(
        self,
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        mode: str | None = None,
        budget: int | None = None,
        stop: Callable[[int], bool] | None = None,
        should_stop: Callable[[], bool] | None = None,
        keep_rows: bool = False,
    ) -> Iterator[Step]:
        assert self._logits is not None, "prefill first"
        if self._running:
            raise ConfigError("a generation is running on this engine; close it first")
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens: {max_tokens} is below 1")
        self._origin = len(self.tokens)
        self._script = self.tokenizer.encode(self.replies.pop(0)) if self.replies else []
        left = self.n_ctx - len(self.tokens)
        left = left if max_tokens is None else min(left, max_tokens)
        stop = stop or self.tokenizer.eog_ids.__contains__
        lengths = np.random.default_rng(self._state)
        plain = mode == "plain" or not self.has_draft
        first, finish = True, None
        self._running, self._logits, self._held = True, None, ()
        try:
            while finish is None:
                emitted: list[int] = []
                for _ in range(1 if plain or first else int(lengths.integers(1, 6))):
                    if self.pending is not None:
                        self._commit(self.pending)
                    # as a real engine does it, from a row of its own that the sampler may not change
                    row = self._row(self.tokens, self._state)
                    row.setflags(write=False)
                    self.pending = sampler.sample(row, list(self.tokens))
                    emitted.append(self.pending)
                    left -= 1
                    finish = "stop" if stop(self.pending) else "length" if left <= 0 else None
                    if finish:
                        break
                if finish is None and should_stop is not None and should_stop():
                    finish = "cancelled"
                kind = "prefill" if first else "plain" if plain else "tree"
                offered = (budget or self.config.budget) if kind == "tree" else 0
                step = Step(tuple(emitted), kind, None, tuple(range(len(emitted))), offered, len(emitted) - 1)
                step.finish, first = finish, False
                yield step
        finally:
            self._running = False

    def snapshot(self, with_rows: bool = True) -> Snapshot:
        return Snapshot(tuple(self.tokens), self._state, tuple(self.tokens) if with_rows else None)

    def can_restore(self, snapshot: Snapshot) -> bool:
        held = self._held or self.tokens
        return snapshot.rows is not None or tuple(held[: len(snapshot.tokens)]) == snapshot.tokens

    def restore(self, snapshot: Snapshot) -> None:
        assert self.can_restore(snapshot), "its rows are gone"
        self._held = (
            snapshot.tokens if snapshot.rows is not None else max(self._held, tuple(self.tokens), key=len)
        )
        self.tokens, self._state = list(snapshot.tokens), snapshot.state
        self.pending = self._logits = None
        self.n_restored += 1

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
