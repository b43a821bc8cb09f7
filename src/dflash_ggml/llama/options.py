"""The constructor options of `Llama`: all that llama-cpp-python has, told apart by what they mean here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config import Calibrate, EngineConfig, KvType, Mode
from ..errors import ConfigError
from ..session.session import CACHE_BYTES
from .constants import LLAMA_DEFAULT_SEED

_KV_TYPES: dict[int | None, KvType] = {None: "auto", 0: "f32", 1: "f16"}  # ggml type numbers
_OTHER_KV_TYPES = (
    2,
    3,
    6,
    7,
    8,
    20,
    30,
)  # Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, BF16: what else llama.cpp caches in
_OVERRIDABLE = ("tokenizer.chat_template",)
_ROPE_AS_IN_FILE = ((0.0, 0.0), (10000.0, 1.0))  # the second is what LangChain always sends


class FoundDraft(str):
    """The path of a draft that nobody named: whatever is wrong with it is a warning, and decoding is plain."""


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """One value per keyword of Llama(); see there for those that have an effect."""

    model_path: str
    n_gpu_layers: int = 0
    split_mode: int = 1
    main_gpu: int = 0
    tensor_split: Sequence[float] | None = None
    vocab_only: bool = False
    use_mmap: bool = True
    use_mlock: bool = False
    kv_overrides: Mapping[str, bool | int | float | str] | None = None
    seed: int = LLAMA_DEFAULT_SEED
    n_ctx: int = 512
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int | None = None
    n_threads_batch: int | None = None
    rope_scaling_type: int | None = -1
    pooling_type: int = -1
    attention_type: int = -1
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_orig_ctx: int = 0
    logits_all: bool = False
    embedding: bool = False
    offload_kqv: bool = True
    flash_attn: bool = False
    op_offload: bool | None = None
    swa_full: bool | None = None
    no_perf: bool = False
    last_n_tokens_size: int = 64
    lora_base: str | None = None
    lora_scale: float = 1.0
    lora_path: str | None = None
    numa: bool | int = False
    chat_format: str | None = None
    chat_handler: Any = None
    draft_model: Any = None
    tokenizer: Any = None
    type_k: int | None = None
    type_v: int | None = None
    spm_infill: bool = False
    verbose: bool = True
    mode: Mode = "auto"
    budget: int = 31
    candidates: int | None = None
    chain_seed: bool = False
    calibrate: Calibrate = "cached"
    reproducible: bool = False
    draft_window: int | None = None
    prefix_cache_bytes: int = CACHE_BYTES
    penalize_prompt: bool = False

    def check(self) -> None:
        """Raise ConfigError for what would change the results but cannot be done; warn once of what has no meaning here."""
        if self.pooling_type not in range(-1, 4):
            raise ConfigError(f"pooling_type: {self.pooling_type} is not between -1 and 3")
        if self.lora_path is not None:
            raise ConfigError(
                "lora_path: LoRA adapters are not supported; merge the adapter into the model file"
            )
        if (self.rope_freq_base, self.rope_freq_scale) not in _ROPE_AS_IN_FILE:
            raise ConfigError(
                "rope_freq_base, rope_freq_scale: only the model file's own values are supported (0)"
            )
        for name, neutral in (
            ("rope_scaling_type", (-1, None)),
            ("yarn_orig_ctx", (0,)),
            ("yarn_ext_factor", (-1.0,)),
        ):
            if getattr(self, name) not in neutral:
                raise ConfigError(
                    f"{name}: only the model file's own rope settings are supported ({neutral[0]})"
                )
        unknown = [k for k in self.kv_overrides or () if k not in _OVERRIDABLE]
        if unknown:
            raise ConfigError(
                f"kv_overrides: {unknown[0]!r} cannot be overridden, only {', '.join(_OVERRIDABLE)}"
            )
        kv_type = self.kv_type()
        ignored = [name for name, neutral in _no_meaning() if getattr(self, name) != neutral]
        told = [f"these options have no meaning in dflash-ggml: {', '.join(ignored)}"] if ignored else []
        if self.type_k != self.type_v or self.type_k not in _KV_TYPES:
            told.append(f"type_k={self.type_k}, type_v={self.type_v}: the K/V cache is all {kv_type}")
        if told:
            warnings.warn("; ".join(told), stacklevel=4)

    def kv_type(self) -> KvType:
        """The K/V cache's element type: f16 where llama.cpp would take a smaller one. Raises ConfigError for unknown numbers."""
        both = (self.type_k, self.type_v)
        unknown = [t for t in both if t not in _KV_TYPES and t not in _OTHER_KV_TYPES]
        if unknown:
            raise ConfigError(
                f"type_k, type_v: {unknown[0]!r} is no type of a K/V cache; take 1 (f16) or 0 (f32)"
            )
        if both[0] == both[1]:
            return _KV_TYPES.get(both[0], "f16")
        return "f32" if 0 in both else "f16"

    @property
    def threads(self) -> int | None:
        """CPU threads; None, as 0 and less, leaves the number to the engine."""
        return self.n_threads if self.n_threads and self.n_threads > 0 else None

    def engine_config(self, draft: Path | None) -> EngineConfig:
        """The engine's configuration with this draft (None: plain decoding)."""
        return EngineConfig(
            model=Path(self.model_path),
            draft=draft,
            n_ctx=self.n_ctx,
            n_batch=max(min(self.n_batch, self.n_ctx) if self.n_ctx else self.n_batch, 1),
            n_threads=self.threads,
            n_gpu_layers=self.n_gpu_layers,
            main_gpu=self.main_gpu,
            mode="plain" if draft is None and self.mode == "auto" else self.mode,
            budget=self.budget,
            candidates=self.candidates,
            chain_seed=self.chain_seed,
            kv_type=self.kv_type(),
            calibrate=self.calibrate,
            reproducible=self.reproducible,
            draft_window=self.draft_window,
        )

    def as_dict(self) -> dict[str, Any]:
        """Keyword -> value, for pickling."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _no_meaning() -> list[tuple[str, Any]]:
    """Options without effect on a single-device, single-context engine, with the value that is not worth a word."""
    names = (
        "split_mode",
        "tensor_split",
        "use_mmap",
        "use_mlock",
        "attention_type",
        "offload_kqv",
        "op_offload",
        "swa_full",
        "no_perf",
        "lora_base",
        "numa",
    )
    defaults = {f.name: f.default for f in fields(LlamaOptions)}
    return [(name, defaults[name]) for name in names]
