"""Training recipe as plain data: the draft's shape, the run, and the published config.json. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from ..errors import ConfigError, ModelFileError

Kind = Literal["dflash", "dflash2", "dspark", "mtp"]
KINDS: tuple[str, ...] = get_args(Kind)
CONV_KERNEL = 2  # as published
NARROW = 1024  # width below which 32 heads of 128 would make a draft larger than its target
MAX_HEADS, MAX_WIDTH, MAX_WINDOW, MAX_RANK, MAX_CANDIDATES = (
    1 << 12,
    1 << 20,
    1 << 30,
    1 << 16,
    64,
)  # limit of readers
HEAD_TARGETS = ("qwen3_5", "qwen3_5_text")  # model types whose GGUF can contain a prediction head
_PLAIN: dict[str, Any] = {  # fields with fixed values in `config_json`
    "is_causal": False,
    "causal": False,
    "use_swa": False,
    "rope_is_neox_style": True,
    "partial_rotary_factor": 1.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_value_scale": 1.0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "conv_kernel_size": CONV_KERNEL,
}
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """The target's sizes needed by a draft."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_vocab: int  # rows of its embedding
    rope_theta: float
    rms_eps: float
    eos: int
    n_ctx: int = 32768


@dataclass(frozen=True, slots=True)
class Shape:
    """A block draft's sizes, named as in `DraftParams`.

    Attributes:
        rank, candidates, group, gated, from_anchor: For the kinds with them.
    """

    kind: Kind
    n_layers: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    block_size: int
    taps: tuple[int, ...]
    mask_id: int
    window: int = 0  # window of all layers but the last, 0: none
    causal_windows: bool = False  # whether a block's columns are causal in those layers
    rank: int = 256
    candidates: int = 16
    group: int = 16
    gated: bool = False
    from_anchor: bool = True
    n_steps: int = 4  # for a prediction head: number of serial drafted tokens in training

    @property
    def first_row(self) -> int:
        """The first drafting column of a block."""
        return 0 if self.kind == "dspark" and self.from_anchor else 1

    @property
    def depth(self) -> int:
        """Tokens drafted at once."""
        return self.n_steps if self.kind == "mtp" else self.block_size - self.first_row


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters of a training run, limited by steps or minutes, whichever comes first (0: no limit).

    Attributes:
        gamma: Depth over which a token's loss weight falls to 1/e, 0: by the block size.
    """

    steps: int = 0
    minutes: float = 0.0
    batch: int = 8
    length: int = 2048  # tokens of a row
    anchors: int = 64  # blocks in a row
    lr: float = 6e-4
    warm_up: int = 100  # steps
    weight_decay: float = 0.05
    gamma: float = 0.0
    seed: int = 1
    save_minutes: float = 10.0
    checked: int = 16  # rows that are held out

    def progress(self, step: int, seconds: float) -> float:
        """Progress of the run, from 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def rate(self, step: int, progress: float) -> float:
        """The learning rate: linear warm-up, constant until 0.6 of the run, then cosine decay to 0.02 of it."""
        start = min(1.0, (step + 1) / max(1, self.warm_up))
        end = 1.0 if progress < 0.6 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - 0.6) / 0.4))
        return self.lr * start * end


def spread(n_layers: int, n_taps: int) -> tuple[int, ...]:
    """Tapped layers, evenly spaced from the second to the last but two; fewer if the target has fewer."""
    low, high = min(1, n_layers - 1), max(n_layers - 3, min(1, n_layers - 1))
    n = max(1, min(n_taps, high - low + 1))
    return tuple(sorted({round(low + i * (high - low) / max(1, n - 1)) for i in range(n)}))


def default_shape(kind: Kind, target: TargetSizes, mask_id: int) -> Shape:
    """A draft's sizes by the target's: those of published drafts, for narrow targets those of the package's draft of SmolLM2."""
    taps = spread(target.n_layers, 5)
    if target.n_embd >= NARROW:
        return Shape(kind, 5, target.n_ff, 32, 8, 128, 16, taps, mask_id)
    n_kv = max(1, target.n_embd // 192)
    return Shape(kind, 3, target.n_embd * 5 // 3, 3 * n_kv, n_kv, 64, 8, taps, mask_id, rank=32)


def depth_weights(depth: int, gamma: float) -> list[float]:
    """The loss weight of each drafted token, exp(-i / gamma), with sum 1: one counts only if all before it are right."""
    gamma = gamma or 0.44 * (depth + 1)
    weights = [math.exp(-i / gamma) for i in range(depth)]
    return [w / sum(weights) for w in weights]


def check_head(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a target, by its config.json, that cannot have a trained prediction head.

    Raises:
        ConfigError: It says why.
    """
    found = str(config.get("model_type"))
    if found not in HEAD_TARGETS:
        raise ConfigError(
            f"{path}: --kind mtp is for dense Qwen3.5 targets ({' or '.join(HEAD_TARGETS)}), and model_type is {found!r}; "
            "take another --kind"
        )


def check(shape: Shape, run: Run, target: TargetSizes) -> None:
    """Refuse what cannot be trained.

    Raises:
        ConfigError: It says why.
    """
    if run.steps <= 0 and run.minutes <= 0:
        raise ConfigError("--steps or --minutes must say how long to train")
    for name, value, low in (
        ("--batch", run.batch, 1),
        ("--anchors", run.anchors, 1),
        ("--held", run.checked, 1),
        ("--seed", run.seed, 0),
        ("--gamma", run.gamma, 0),
        ("--layers", shape.n_layers, 1),
    ):
        if value < low:
            raise ConfigError(f"{name} is {value:g}, it must be {low} or more")
    if not 0 < run.lr < 1:
        raise ConfigError(f"--lr is {run.lr:g}, it must be between 0 and 1")
    if shape.kind == "mtp":
        if not 1 <= shape.n_steps <= 16:
            raise ConfigError(f"--draft-steps is {shape.n_steps}, it must be from 1 to 16")
        if run.length < 2 * (shape.n_steps + 1):
            raise ConfigError(f"--length {run.length} is too short for {shape.n_steps} tokens in a row")
        return
    for name, value, low, high in (
        ("--ffn", shape.n_ff, 1, MAX_WIDTH),
        ("--heads", shape.n_heads, 1, MAX_HEADS),
        ("--kv-heads", shape.n_kv_heads, 1, MAX_HEADS),
        ("--head-dim", shape.head_dim, 2, MAX_WIDTH),
        ("--window", shape.window, 0, MAX_WINDOW),
        ("--rank", shape.rank, 1, MAX_RANK),
        ("--group", shape.group, 1, MAX_WIDTH),
        ("--candidates", shape.candidates, 1, min(MAX_CANDIDATES, target.n_vocab)),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}, it must be from {low} to {high}")
    if not 2 <= shape.block_size <= 256:
        raise ConfigError(f"--block is {shape.block_size}, it must be from 2 to 256")
    if run.length < 2 * shape.block_size:
        raise ConfigError(f"--length {run.length} is too short for blocks of {shape.block_size}")
    if not shape.taps or list(shape.taps) != sorted(set(shape.taps)):
        raise ConfigError(f"--taps {list(shape.taps)} should ascend")
    if shape.taps[0] < 0 or shape.taps[-1] >= target.n_layers:
        raise ConfigError(f"--taps {list(shape.taps)}: the target's layers are 0 to {target.n_layers - 1}")
    if not 0 <= shape.mask_id < target.n_vocab:
        raise ConfigError(f"--mask-id {shape.mask_id}: the target has {target.n_vocab} tokens")
    if shape.n_heads % shape.n_kv_heads or shape.head_dim % 2:
        raise ConfigError(
            f"{shape.n_heads} heads of {shape.head_dim} do not divide over {shape.n_kv_heads} key/value heads"
        )
    if shape.kind == "dflash2" and target.n_embd % shape.group:
        raise ConfigError(f"--group {shape.group} does not divide the hidden size {target.n_embd}")


def _layer_types(shape: Shape) -> list[str]:
    last = shape.n_layers - 1
    return ["sliding_attention" if shape.window and i < last else "full_attention" for i in range(last + 1)]


def config_json(shape: Shape, target: TargetSizes) -> dict[str, Any]:
    """The config.json of a block draft, in the form that its kind is published in."""
    drafting: dict[str, Any] = {"mask_token_id": shape.mask_id, "target_layer_ids": list(shape.taps)}
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[shape.kind]],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "is_causal": False,
        "hidden_size": target.n_embd,
        "intermediate_size": shape.n_ff,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": target.n_ctx,
        "rms_norm_eps": target.rms_eps,
        "rope_theta": target.rope_theta,
        "layer_types": _layer_types(shape),
        "use_sliding_window": bool(shape.window),
        "sliding_window": shape.window or None,
        "num_target_layers": target.n_layers,
        "vocab_size": target.n_vocab,
        "eos_token_id": target.eos,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if shape.causal_windows:  # how layers with a window run by default
        del config["is_causal"]
    if shape.kind == "dspark":
        config |= drafting | {"markov_rank": shape.rank, "sample_from_anchor": shape.from_anchor}
        return config | {"markov_head_type": "gated" if shape.gated else "vanilla"}
    if shape.kind == "dflash2":
        drafting |= {"conv_kernel_size": CONV_KERNEL, "conv_group_size": shape.group}
        drafting |= {"selector_rank": shape.rank, "selector_top_k": shape.candidates}
    return config | {"dflash_config": drafting}


def shape_of(config: Mapping[str, Any], path: Path, target: TargetSizes | None = None) -> Shape:
    """The shape that a published block draft of this package's own or z-lab's schema has.

    Args:
        config: The draft's config.json.
        path: Where it is, for errors.
        target: Check vocabulary, rope base and epsilon against this one too.

    Raises:
        ModelFileError: A field is missing, or `config_json` would not write it again; it names it.
    """
    kinds = {name: kind for kind, name in _ARCHITECTURES.items()}
    arch = (config.get("architectures") or [""])[0]
    if arch not in kinds:
        raise ModelFileError(f"{path}: {arch or 'no architecture'} is not a draft to start from")
    kind, drafting = kinds[arch], config.get("dflash_config") or config
    window = (config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    is_declared = config.get("is_causal") is not None or drafting.get("causal") is not None
    try:
        shape = Shape(
            kind,  # type: ignore[arg-type]
            n_layers=config["num_hidden_layers"],
            n_ff=config["intermediate_size"],
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            block_size=drafting.get("block_size", config.get("block_size", 16)),
            taps=tuple(drafting["target_layer_ids"]),
            mask_id=drafting["mask_token_id"],
            window=window,
            causal_windows=bool(window) and not is_declared,
        )
        if kind == "dflash2":
            rank, candidates = drafting["selector_rank"], drafting["selector_top_k"]
            shape = replace(shape, rank=rank, candidates=candidates, group=drafting["conv_group_size"])
        if kind == "dspark":
            gated = config.get("markov_head_type") == "gated"
            anchor = config.get("sample_from_anchor", True)
            shape = replace(shape, rank=config["markov_rank"], gated=gated, from_anchor=anchor)
    except KeyError as key:
        raise ModelFileError(f"{path}: key {key} is missing") from None
    _refuse_others(config, drafting, shape, path, target)
    return shape


def _refuse_others(
    config: Mapping[str, Any],
    drafting: Mapping[str, Any],
    shape: Shape,
    path: Path,
    target: TargetSizes | None,
) -> None:
    """Raises ModelFileError for a field that training would drop without a word."""

    def refuse(field: str, found: Any, wanted: str) -> NoReturn:
        raise ModelFileError(
            f"{path}: {field} is {found!r}, and a draft that is trained from it would have {wanted}; begin without --start-from"
        )

    for field, plain in _PLAIN.items():
        for found in (config.get(field), drafting.get(field)):
            if found is not None and found != plain:
                refuse(field, found, repr(plain))
    if shape.window and (size := drafting.get("swa_window_size", shape.window)) != shape.window:
        refuse("swa_window_size", size, str(shape.window))
    theta = config.get("rope_theta")
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            refuse(f"{name}.rope_type", kind, "'default'")
        if any(isinstance(value, dict) for value in rope.values()):
            refuse(name, rope, "one rotation for all layers")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            refuse(f"{name}.partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
        theta = rope.get("rope_theta", theta)
    if shape.window:
        kinds, wanted = config.get("layer_types"), _layer_types(shape)
        if kinds is not None and list(kinds) != wanted:
            refuse("layer_types", kinds, str(wanted))
    if target is None:
        return
    for field, found, own in (
        ("rope_theta", theta, target.rope_theta),
        ("rms_norm_eps", config.get("rms_norm_eps"), target.rms_eps),
        ("vocab_size", config.get("vocab_size"), target.n_vocab),
        ("draft_vocab_size", config.get("draft_vocab_size"), target.n_vocab),
    ):
        if found is not None and not math.isclose(found, own, rel_tol=1e-6):
            refuse(field, found, f"the target's {own:g}")


def settings(shape: Shape, run: Run) -> dict[str, Any]:
    """All of it as JSON, as a checkpoint keeps it."""
    return json.loads(json.dumps({"shape": asdict(shape), "run": asdict(run)}))
