"""The one typed configuration that is passed down through the engine."""

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
MAX_AHEAD = 16  # tokens that a prediction head drafts, each in a pass of its own
ALL_LAYERS = 1 << 16  # more than any model has
MAX_PARALLEL = 64
FILES = ("dflash", "dflash2", "dspark")  # kinds of draft files
DRAFTS = (*FILES, "mtp")  # kinds of draft models
SOURCES = (*DRAFTS, "suffix")  # what `spec` may name


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to load and how to decode.

    Attributes:
        model: A target GGUF.
        draft: A draft of any kind and dialect (None: without a draft model).
        n_ctx: Context window in tokens (0: the length the target was trained for, with the embedded pair 32,768, as far as it
            fits: on a GPU into `gpu_memory`, on the CPU into half of what is free of the host's memory).
        gpu_memory: What may be taken of a GPU's memory, in bytes or, up to 1.0, as a part of all it has (None: what is free).
        fa_window: Tokens that attention sees while decoding, beside the first 64 of the sequence (0: all). It CHANGES THE
            OUTPUT: what lies between is out of sight. Prompts are prefilled with all in sight.
        parallel: Sequences that are decoded in a batch (0: as many as leave one sequence what it would have alone). They share
            the rows of `n_ctx` tokens, and each may come to have all.
        n_batch: Tokens per prefill pass (0: on the CPU 256, on a GPU up to 4,096 as memory allows, fewer where they would take
            longer than half a second and the clock may decide; see engine/batches.py).
        n_threads: CPU threads (None: physical cores, fewer while other processes want them).
        n_gpu_layers: 0 keeps all on the CPU, anything else takes the GPU `main_gpu` when there is one.
        main_gpu: Number of that GPU, counted among `device`.
        device: Names of the devices that may be used, as ggml calls them (None: all GPUs; ("none",): the CPU).
        split_mode: layer shares the target's layers out among these devices, tensor halves every layer between two, none
            takes one (None: layer where `device` names several or `tensor_split` is given).
        tensor_split: In which proportions (None: by what is free).
        draft_device: The device of the draft (None: that of the target's last layers).
        n_cpu_moe: Layers, from the first, whose experts the host's memory keeps and the CPU computes, beside a GPU for all
            else; more than there are: all (None: none, or where a model does not fit the GPU as few as it takes).
        mode: How to draft.
        budget: Tree nodes without the root.
        candidates: Best tokens per drafted position that the tree may branch over (None: by budget, see `n_candidates`; of
            DFlash2 as many as it was trained to choose from).
        chain_seed: Put the most likely chain into the tree first.
        type_k, type_v: Types of the K/V caches' keys and values; auto: f16 on a GPU, f32 on the CPU, where attention over f16
            takes twice as long. Quantised ones are rotated (see `state/rotation.py`).
        draft_type_k, draft_type_v: Those of the draft's caches; auto: as the target's.
        calibrate: What `auto` knows of costs when it begins. cached: what was measured when these files were first loaded
            here, in at most 1.5 s; always: measured now; never: nothing, it learns while decoding.
        reproducible: No decision looks at the clock: `auto` is a tree of `budget` nodes on a GPU and plain on the CPU.
        reference: CPU matmuls whose results do not depend on the batch width (slow; for exact tests). Other sums may round
            differently, which quantised activations can carry to the next token.
        stock: Compose our operations of ggml's own where there are kernels of them too, as devices without any do (see
            ggml/stock.py; slow, for tests).
        draft_found: The draft was not named but found: if unusable, a warning and plain decoding instead of an error.
        scorer: A small model that picks the prefilled part of a long prompt (None: words do).
        scorer_found: It was not named but found: one that cannot be used, or has no room, is left out with a warning.
        prompt_keep: The least share of a prompt that a request may have prefilled (None: all of it), by which the scorer has
            room for longer prompts than `n_ctx`.
        draft_window: Tokens that the draft's window layers see, in place of the file's word (None: as the file says; see
            `DraftFile.open`).
        own_draft: Draft with the prediction head of the target's file, if it has one, where no draft is given.
        draft_type: What a draft's float matrices become while they are loaded (None: as published, or, on a GPU where they
            then do not fit, q8_0).
        spec: Names of the sources that may draft, of SOURCES (None: all that there are). suffix is prompt lookup in the
            sequence and in earlier outputs, which takes no model; the others are kinds of draft models.
        draft_max: Tokens that the prediction head drafts ahead, each for a pass of its own. Other drafts have a block.

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
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is none of {', '.join(allowed)}")
        if self.split_mode is not None and self.split_mode not in get_args(SplitMode):
            raise ConfigError(f"split_mode: {self.split_mode!r} is none of {', '.join(get_args(SplitMode))}")
        if any(not 0 <= part < float("inf") for part in self.tensor_split or ()):
            raise ConfigError(f"tensor_split: {self.tensor_split} has parts that are none")
        if self.gpu_memory is not None and self.gpu_memory <= 0:
            raise ConfigError(f"gpu_memory: {self.gpu_memory} is not above 0")
        if self.prompt_keep is not None and not 0 < self.prompt_keep <= 1:
            raise ConfigError(f"prompt_keep: expected more than 0 and at most 1, got {self.prompt_keep}")
        if self.draft_type is not None and self.draft_type not in get_args(DraftType):
            raise ConfigError(f"draft_type: {self.draft_type!r} is none of {', '.join(get_args(DraftType))}")
        unknown = [name for name in self.spec or () if name not in SOURCES]
        if unknown:
            raise ConfigError(f"spec: {unknown[0]!r} is none of {', '.join(SOURCES)}")
        if self.n_threads is not None and self.n_threads < 1:
            raise ConfigError(f"n_threads: {self.n_threads} is below 1")

    @property
    def splits_layers(self) -> bool:
        """Whether layers are shared out among several devices."""
        if self.split_mode is not None:
            return self.split_mode == "layer"
        return len(self.device or ()) > 1 or self.tensor_split is not None

    def wants(self, source: str) -> bool:
        """Whether a source of this name may draft."""
        return self.spec is None or source in self.spec

    def names(self, source: str) -> bool:
        """Whether a source was asked for by name."""
        return self.spec is not None and source in self.spec

    @property
    def prompt_lookup(self) -> bool:
        """Whether text that stood before is drafted from. What it is depends on what was written before, and widths on it: where
        results must be reproducible it is left out, like where decoding is plain."""
        return (
            self.wants("suffix")
            and not self.reproducible
            and (self.mode != "plain" or self.draft is not None)
        )

    @property
    def draft_cache_types(self) -> dict[str, CacheType]:
        """The types that the draft's caches were asked to have, by field."""
        return {"draft_type_k": self.draft_type_k, "draft_type_v": self.draft_type_v}

    @property
    def names_prompt_lookup(self) -> bool:
        """Whether prompt lookup was asked for by name: then a mode that drafts needs no model."""
        return self.prompt_lookup and self.spec is not None

    @property
    def n_candidates(self) -> int:
        """Candidates per drafted position: wide trees reach ranks that narrow ones do not (bench/notes-controller.md)."""
        if self.candidates is not None:
            return self.candidates
        return 8 if self.budget <= 15 else 16
