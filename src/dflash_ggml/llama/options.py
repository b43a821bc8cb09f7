"""Constructor options of `Llama`: all of llama-cpp-python's, grouped by their effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config import ALL_LAYERS, MAX_PARALLEL, CacheType, Calibrate, DraftType, EngineConfig, Mode, SplitMode
from ..errors import ConfigError
from ..session.session import CACHE_BYTES
from .constants import LLAMA_DEFAULT_SEED
from .lenient import warn
from .speculative import LlamaPromptLookupDecoding

DEFAULT_BATCH = 512
# ggml type numbers
_CACHE_TYPES: dict[int | None, CacheType] = {None: "auto", 0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1"}
_CACHE_TYPES |= {6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "q4_0", 30: "bf16"}
_IQ4_NL = 20  # llama.cpp supports it for caches; replaced by q4_0, of the same size
_OVERRIDABLE = ("tokenizer.chat_template",)
_ROPE_AS_IN_FILE = ((0.0, 0.0), (10000.0, 1.0))  # the second is LangChain's default


_OWN_ROPE = "only the model file's own rope settings are supported"
# supported values of a keyword, and the reason for refusing others
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "lora_path": ((None,), "LoRA adapters are not supported; merge the adapter into the model file"),
    "rope_scaling_type": ((-1, None), f"{_OWN_ROPE} (-1)"),
    "yarn_orig_ctx": ((0,), f"{_OWN_ROPE} (0)"),
    "yarn_ext_factor": ((-1.0,), f"{_OWN_ROPE} (-1.0)"),
}
# without effect on a single-context engine
_NO_MEANING = """use_mmap use_mlock attention_type offload_kqv op_offload swa_full no_perf
    lora_base numa"""
# keywords with the same name in the engine's configuration
_SAME = """n_ctx n_gpu_layers main_gpu draft_device candidates chain_seed calibrate reproducible draft_window draft_type
    draft_max prefill_fp8"""


class FoundDraft(str):
    """Path of a draft that was found, not named: if unusable, a warning and plain decoding."""


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """Values of all keywords of Llama(); see there for the effective ones."""

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
    n_batch: int = DEFAULT_BATCH
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
    draft_type: DraftType | None = None
    spec: Sequence[str] | None = None
    draft_max: int = 3
    n_seq_max: int = 1
    device: Sequence[str] | None = None
    draft_device: str | None = None
    cpu_moe: bool = False
    n_cpu_moe: int | None = None
    prefix_cache_bytes: int = CACHE_BYTES
    penalize_prompt: bool = False
    prefill_fp8: bool = False

    def check(self) -> None:
        """Raise ConfigError for unsupported options that would change results; warn once about options without effect."""
        if self.pooling_type not in range(-1, 4):
            raise ConfigError(f"pooling_type: {self.pooling_type} is not between -1 and 3")
        if not isinstance(self.n_seq_max, int) or not 1 <= self.n_seq_max <= MAX_PARALLEL:
            raise ConfigError(f"n_seq_max: {self.n_seq_max!r} is outside 1..{MAX_PARALLEL}")
        if (self.rope_freq_base, self.rope_freq_scale) not in _ROPE_AS_IN_FILE:
            raise ConfigError(
                "rope_freq_base, rope_freq_scale: only the model file's own values are supported (0)"
            )
        for name, (neutral, why) in _REFUSED.items():
            if getattr(self, name) not in neutral:
                raise ConfigError(f"{name}: {why}")
        if self.cpu_moe and self.n_cpu_moe is not None:
            both = f"cpu_moe, n_cpu_moe={self.n_cpu_moe}"
            raise ConfigError(f"{both}: one means all layers and the other so many; take one of them")
        unknown = [k for k in self.kv_overrides or () if k not in _OVERRIDABLE]
        if unknown:
            only = ", ".join(_OVERRIDABLE)
            raise ConfigError(f"kv_overrides: {unknown[0]!r} cannot be overridden, only {only}")
        self.cache_types()
        defaults = {f.name: f.default for f in fields(self)}
        ignored = [name for name in _NO_MEANING.split() if getattr(self, name) != defaults[name]]
        notes = [f"these options have no meaning in dflash-ggml: {', '.join(ignored)}"] if ignored else []
        if self.split_mode not in (0, 1, 3):
            notes.append(
                f"split_mode={self.split_mode}: only 0 (one GPU), 1 (by layers) and 3 (halves) are built, it is as 1"
            )
        if _IQ4_NL in (self.type_k, self.type_v):
            types = f"type_k={self.type_k}, type_v={self.type_v}"
            notes.append(f"{types}: iq4_nl is not supported, q4_0 is as small")
        warn(notes)

    def cache_types(self) -> tuple[CacheType, CacheType]:
        """Types of the K/V cache's keys and values.

        Raises:
            ConfigError: A number is not a cache type.
        """
        for name, number in (("type_k", self.type_k), ("type_v", self.type_v)):
            if number not in _CACHE_TYPES:
                known = ", ".join(f"{n} ({t})" for n, t in _CACHE_TYPES.items() if n not in (None, _IQ4_NL))
                raise ConfigError(f"{name}: {number!r} is not a type of a K/V cache; take one of {known}")
        return _CACHE_TYPES[self.type_k], _CACHE_TYPES[self.type_v]

    @property
    def threads(self) -> int | None:
        """CPU threads; None, 0 and below mean the engine's choice."""
        return self.n_threads if self.n_threads and self.n_threads > 0 else None

    @property
    def _split(self) -> SplitMode | None:
        """llama-cpp-python's default (by layers) only applies if devices or proportions are given: a model that fits one GPU is
        not faster on several."""
        modes: dict[int, SplitMode | None] = {0: "none", 1: None, 3: "tensor"}
        return modes.get(self.split_mode, "layer")

    @property
    def _batch(self) -> int:
        """Tokens per prefill pass; llama-cpp-python's default means the engine's choice."""
        if self.n_batch == DEFAULT_BATCH:
            return 0
        return max(min(self.n_batch, self.n_ctx) if self.n_ctx else self.n_batch, 1)

    def engine_config(self, draft: Path | None, own_draft: bool = False) -> EngineConfig:
        """The engine's configuration with this draft (None: plain decoding, or with `own_draft` the target's prediction head)."""
        type_k, type_v = self.cache_types()
        same: dict[str, Any] = {name: getattr(self, name) for name in _SAME.split()}
        return EngineConfig(
            model=Path(self.model_path),
            draft=draft,
            n_batch=self._batch,
            n_threads=self.threads,
            n_cpu_moe=ALL_LAYERS if self.cpu_moe else self.n_cpu_moe,
            mode="plain" if self.draft_model is False and self.mode == "auto" else self.mode,
            own_draft=own_draft,
            budget=self.lookup.num_pred_tokens if self.lookup else self.budget,
            type_k=type_k,
            type_v=type_v,
            spec=("suffix",) if self.lookup else None if self.spec is None else tuple(self.spec),
            parallel=self.n_seq_max,
            split_mode=self._split,
            tensor_split=None if self.tensor_split is None else tuple(map(float, self.tensor_split)),
            device=None if self.device is None else tuple(self.device),
            **same,
        )

    @property
    def lookup(self) -> LlamaPromptLookupDecoding | None:
        """The given prompt lookup, which enables the engine's own; else None."""
        return self.draft_model if isinstance(self.draft_model, LlamaPromptLookupDecoding) else None

    def as_dict(self) -> dict[str, Any]:
        """Keyword -> value, for pickling."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
