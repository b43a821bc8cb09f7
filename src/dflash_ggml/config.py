"""The typed configuration of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from .errors import ConfigError

Mode = Literal["auto", "plain", "chain", "tree"]
CacheType = Literal["auto", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
Calibrate = Literal["cached", "always", "never"]
SplitMode = Literal["none", "layer", "tensor"]
DraftType = Literal["f16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0"]

MAX_BUDGET = 256
MAX_AHEAD = 16  # most tokens that a prediction head drafts, one pass each
ALL_LAYERS = 1 << 16  # above any model's number of layers
MAX_PARALLEL = 64
FILES = ("dflash", "dflash2", "dspark")  # kinds of draft files
DRAFTS = (*FILES, "mtp")  # kinds of draft models
SOURCES = (*DRAFTS, "suffix")  # valid names in `spec`


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to load and how to decode.

    Attributes:
        model: A target GGUF.
        draft: A draft of any kind and dialect (None: without a draft model).
        n_ctx: Context window in tokens (0: the target's trained length, with the embedded pair 32,768, as far as it fits: on a
            GPU into `gpu_memory`, on the CPU into half of the free host memory).
        gpu_memory: Limit of GPU memory, in bytes or, up to 1.0, as a share of the total (None: what is free).
        fa_window: Tokens that attention sees while decoding, besides the first 64 of the sequence (0: all). It CHANGES THE
            OUTPUT: tokens in between are hidden. Prefill sees everything.
        parallel: Sequences decoded in a batch (0: as many as cost a single sequence nothing). They share the rows of `n_ctx`
            tokens, of which each may use all.
        n_batch: Tokens per prefill pass (0: on the CPU 256, on a GPU up to 4,096 as memory allows, fewer where they would take
            longer than half a second, unless `reproducible`; see engine/batches.py).
        n_threads: CPU threads (None: physical cores, fewer while other processes need them).
        n_gpu_layers: 0: CPU only, anything else: the GPU `main_gpu`, if there is one.
        main_gpu: Index of that GPU in `device`.
        device: ggml's names of the devices to use (None: all GPUs; ("none",): the CPU).
        split_mode: layer distributes the target's layers over these devices, tensor halves every layer between two, none
            uses one (None: layer if `device` names several or `tensor_split` is given).
        tensor_split: Proportions (None: by free memory).
        draft_device: The device of the draft (None: that of the target's last layers).
        n_cpu_moe: Number of first layers whose experts stay in host memory and are computed by the CPU, beside a GPU; more
            than there are: all (None: none, or the fewest for a model to fit the GPU).
        mode: How to draft.
        budget: Tree nodes without the root.
        candidates: Best tokens per drafted position that the tree may branch over (None: by budget, see `n_candidates`; for
            DFlash2 the trained number).
        chain_seed: Put the most probable chain into the tree first.
        type_k, type_v: Types of the K/V caches' keys and values; auto: f16 on a GPU, f32 on the CPU, where attention over f16
            takes twice as long. Quantised ones are rotated (see `state/rotation.py`).
        draft_type_k, draft_type_v: Types of the draft's caches; auto: the target's.
        calibrate: Initial costs of `auto`. cached: as measured when these files were first loaded on this machine, in at most
            1.5 s; always: measured now; never: none, learned while decoding.
        reproducible: Decisions do not depend on time: `auto` is a tree of `budget` nodes on a GPU and plain on the CPU.
        reference: CPU matmuls whose results do not depend on the batch width (slow; for exact tests). Other sums may still
            round differently, which quantised activations can propagate to the next token.
        stock: Compose our operations of ggml's own even if there are kernels (see ggml/stock.py; slow, for tests).
        draft_found: The draft was found, not named: if unusable, a warning and plain decoding instead of an error.
        scorer: A small model that selects the prefilled part of a long prompt (None: lexical scoring).
        scorer_found: The scorer was found, not named: if unusable or too large, it is left out with a warning.
        prompt_keep: Smallest share of a prompt that a request may keep (None: all of it); the scorer's limit is `n_ctx`
            divided by it.
        draft_window: Window in tokens of the draft's window layers (None: the file's; see `DraftFile.open`).
        own_draft: Without a draft, use the prediction head of the target's file, if it has one.
        draft_type: Type to convert a draft's float matrices to while loading (None: unchanged, or q8_0 if they do not fit a
            GPU otherwise).
        spec: Names of the allowed sources, of SOURCES (None: all). suffix is prompt lookup in the sequence and in earlier
            outputs, without a model; the others are kinds of draft models.
        draft_max: Tokens that the prediction head drafts, one pass each. Other drafts have a block.
        prefill_fp8: Prefill with 8-bit floats: the matmuls of passes of many prompt tokens round weights and activations to
            E4M3, where a GPU has kernels for it (Hopper, CUDA 12.9 and later; see docs/promise.md). It CHANGES THE OUTPUT: K/V
            rows and state of the prompt are not exactly the target's own, nor are the logits of its last token, from which the
            first one is drawn. What follows is exact, given these.

    Raises:
        ConfigError: A value is out of range; it names the field.
    """

    model: Path
    draft: Path | None = None
    n_ctx: int = 4096
    gpu_memory: int | float | None = None
    fa_window: int = 0
    parallel: int = 1
    n_batch: int = 0
    n_threads: int | None = None
    n_gpu_layers: int = -1
    main_gpu: int = 0
    device: tuple[str, ...] | None = None
    split_mode: SplitMode | None = None
    tensor_split: tuple[float, ...] | None = None
    draft_device: str | None = None
    n_cpu_moe: int | None = None
    mode: Mode = "auto"
    budget: int = 31
    candidates: int | None = None
    chain_seed: bool = False
    type_k: CacheType = "auto"
    type_v: CacheType = "auto"
    draft_type_k: CacheType = "auto"
    draft_type_v: CacheType = "auto"
    calibrate: Calibrate = "cached"
    reproducible: bool = False
    reference: bool = False
    stock: bool = False
    draft_found: bool = False
    scorer: Path | None = None
    scorer_found: bool = False
    prompt_keep: float | None = None
    draft_window: int | None = None
    own_draft: bool = True
    draft_type: DraftType | None = None
    spec: tuple[str, ...] | None = None
    draft_max: int = 3
    prefill_fp8: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("n_ctx", 0, 1 << 24),
            ("parallel", 0, MAX_PARALLEL),
            ("n_batch", 0, 1 << 16),
            ("budget", 1, MAX_BUDGET),
            ("candidates", 1, 64),
            ("main_gpu", 0, 63),
            ("n_cpu_moe", 0, ALL_LAYERS),
            ("draft_window", 0, 1 << 30),
            ("draft_max", 1, MAX_AHEAD),
            ("fa_window", 0, 1 << 24),
        ):
            value = getattr(self, name)
            if name in ("candidates", "draft_window", "n_cpu_moe") and value is None:
                continue
            if not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name}: {value!r} is outside {low}..{high}")
        for name, allowed in (
            ("mode", get_args(Mode)),
            *((name, get_args(CacheType)) for name in ("type_k", "type_v", "draft_type_k", "draft_type_v")),
            ("calibrate", get_args(Calibrate)),
            ("split_mode", get_args(SplitMode)),
            ("draft_type", get_args(DraftType)),
        ):
            value = getattr(self, name)
            if name in ("split_mode", "draft_type") and value is None:
                continue
            if value not in allowed:
                raise ConfigError(f"{name}: {value!r} is none of {', '.join(allowed)}")
        if any(not 0 <= part < float("inf") for part in self.tensor_split or ()):
            raise ConfigError(f"tensor_split: {self.tensor_split} has parts that are none")
        if self.gpu_memory is not None and self.gpu_memory <= 0:
            raise ConfigError(f"gpu_memory: {self.gpu_memory} is not above 0")
        if self.prompt_keep is not None and not 0 < self.prompt_keep <= 1:
            raise ConfigError(f"prompt_keep: expected more than 0 and at most 1, got {self.prompt_keep}")
        unknown = [name for name in self.spec or () if name not in SOURCES]
        if unknown:
            raise ConfigError(f"spec: {unknown[0]!r} is none of {', '.join(SOURCES)}")
        if self.n_threads is not None and self.n_threads < 1:
            raise ConfigError(f"n_threads: {self.n_threads} is below 1")

    @property
    def splits_layers(self) -> bool:
        """Whether layers are distributed over several devices."""
        if self.split_mode is not None:
            return self.split_mode == "layer"
        return len(self.device or ()) > 1 or self.tensor_split is not None

    def wants(self, source: str) -> bool:
        """Whether a source of this name may draft."""
        return self.spec is None or source in self.spec

    def names(self, source: str) -> bool:
        """Whether `spec` names a source."""
        return self.spec is not None and source in self.spec

    @property
    def prompt_lookup(self) -> bool:
        """Whether prompt lookup drafts. Its candidates, and so the widths, depend on earlier outputs: it is off with
        `reproducible`, and in plain decoding."""
        return (
            self.wants("suffix")
            and not self.reproducible
            and (self.mode != "plain" or self.draft is not None)
        )

    @property
    def draft_cache_types(self) -> dict[str, CacheType]:
        """The configured types of the draft's caches, by field."""
        return {"draft_type_k": self.draft_type_k, "draft_type_v": self.draft_type_v}

    @property
    def names_prompt_lookup(self) -> bool:
        """Whether `spec` names prompt lookup: then a mode that drafts needs no model."""
        return self.prompt_lookup and self.spec is not None

    @property
    def n_candidates(self) -> int:
        """Candidates per drafted position: wide trees reach ranks that narrow ones do not (bench/notes-controller.md)."""
        if self.candidates is not None:
            return self.candidates
        return 8 if self.budget <= 15 else 16
