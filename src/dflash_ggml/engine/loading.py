"""From files to a ready sequence: read, check that target and draft fit, choose the device, bring the weights there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..config import EngineConfig
from ..drafts.dflash.params import DraftFile, check_pair
from ..errors import ConfigError, ModelFileError
from ..files.gguf import GGUFFile
from ..ggml.device import BF16, Device, list_devices
from ..ggml.weights import Source, Weights, bf16_as_f16
from ..models.qwen35_params import TargetParams
from ..state.memory import Sizes
from ..text.tokenizer import Tokenizer
from .passes import Passes, tree_width

Progress = Callable[[str, int, int], None]
log = logging.getLogger("dflash_ggml")

DATA = Path(__file__).parents[1] / "data"
EMBEDDED_TARGET = DATA / "demo-target-q8_0.gguf"
EMBEDDED_DRAFT = DATA / "demo-draft-q8_0.gguf"


def draft_beside(model: Path) -> Path | None:
    """The draft that lies in the target's folder: the one sibling GGUF with `dflash` in its name, or the embedded draft for
    the embedded target; None when there is none. Raises ConfigError when there are several."""
    if model == EMBEDDED_TARGET:
        return EMBEDDED_DRAFT
    found = [f for f in model.parent.glob("*.gguf") if "dflash" in f.name.lower() and f.name != model.name]
    if len(found) > 1:
        raise ConfigError(
            f"several drafts beside {model}: {', '.join(sorted(f.name for f in found))}; name one with -md"
        )
    return found[0] if found else None


def choose_device(config: EngineConfig) -> Device:
    """The GPU `main_gpu` if layers may go there and one is present, else the CPU, which alone has `reference` kernels.

    Raises ConfigError for a missing GPU."""
    gpus = [d for d in list_devices() if d.is_gpu]
    if config.n_gpu_layers == 0 or config.reference or not gpus:
        if config.n_gpu_layers > 0 and not gpus:
            log.warning(
                "n_gpu_layers=%d: this build or machine has no GPU, decoding on the CPU", config.n_gpu_layers
            )
        return Device.cpu(config.n_threads, config.reference)
    if config.main_gpu >= len(gpus):
        raise ConfigError(f"main_gpu: {config.main_gpu}, but there are {len(gpus)} GPUs")
    return Device(gpus[config.main_gpu], config.n_threads)


def load_passes(
    config: EngineConfig, progress: Progress | None = None
) -> tuple[Passes, Tokenizer, dict, int]:
    """Load what `config` names: passes, tokenizer, the target's metadata and the context length in tokens.

    Raises ModelFileError for a bad file or a draft that does not fit, ConfigError, DeviceError.
    """
    target_file = GGUFFile(config.model)
    params = TargetParams.from_gguf(target_file)
    tokenizer = Tokenizer.from_gguf(target_file)
    if tokenizer.n_vocab > params.n_vocab:
        raise ModelFileError(
            f"{config.model}: {tokenizer.n_vocab} tokens but an output of {params.n_vocab} rows"
        )
    draft_file = None
    if config.draft is not None:
        draft_file = DraftFile.open(config.draft)
        for warning in check_pair(params, draft_file.params, str(config.model), str(config.draft)):
            log.warning("%s", warning)
    elif config.mode in ("chain", "tree"):
        raise ConfigError(f"mode {config.mode} needs a draft model (-md)")
    device = choose_device(config)
    try:
        passes = _on_device(device, config, target_file, params, draft_file, progress)
    except BaseException:
        device.close()
        raise
    return passes, tokenizer, dict(target_file.metadata), passes.n_ctx


def _on_device(
    device: Device,
    config: EngineConfig,
    target_file: GGUFFile,
    params: TargetParams,
    draft_file: DraftFile | None,
    progress: Progress | None,
) -> Passes:
    """Plan the memory, bring the weights to the device and make the state."""
    if config.kv_type == "auto":
        config = replace(config, kv_type="f16" if device.is_gpu else "f32")
    shapes = params.tensor_shapes()
    sources = {
        name: Source(info.type, info.shape, target_file.data(name))
        for name, info in target_file.tensors.items()
        if name in shapes
    }
    draft_params = draft_file.params if draft_file else None
    parts = {name: Source(*draft_file.tensor(name)) for name in draft_file.names} if draft_file else {}
    n_ctx = config.n_ctx or params.n_ctx_train
    if device.is_gpu:
        width = tree_width(config.budget, draft_params.block_size) if draft_params else 0
        sizes = Sizes(
            params, _nbytes(sources), draft_params, _nbytes(parts), width, config.n_batch, config.kv_type
        )
        memory = sizes.fit(config.n_ctx, device.info.memory_free, params.n_ctx_train)
        log.info("%s (%s): %s", device.info.name, device.info.description, memory)
        n_ctx = memory.n_ctx
    if n_ctx > params.n_ctx_train:
        log.warning(
            "n_ctx %d is above the %d that %s was trained for", n_ctx, params.n_ctx_train, config.model
        )
    weights = Weights.load(device, sources, progress=progress, stage="target")
    draft = None
    if draft_params is not None:
        if device.lacks_bf16 and any(part.type == BF16 for part in parts.values()):
            log.warning(
                "%s has no BF16 tensor cores: the draft's BF16 weights become float16", device.info.name
            )
            parts = {name: bf16_as_f16(name, part) for name, part in parts.items()}
        draft = draft_params, Weights.load(device, parts, gathered=(), progress=progress, stage="draft")
    return Passes(device, config, n_ctx, (params, weights), draft)


def _nbytes(sources: dict[str, Source]) -> int:
    return sum(memoryview(s.data).nbytes for s in sources.values())
