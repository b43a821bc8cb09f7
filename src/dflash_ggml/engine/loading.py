"""Loading: files are read, target and draft checked, the device chosen, the weights uploaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..drafts.drafter import Drafter, Host
from ..drafts.prompt_lookup import PromptLookup
from ..drafts.registry import open_chosen
from ..errors import ConfigError, DeviceError, DflashError, ModelFileError
from ..files.gguf import GGUFFile
from ..ggml.bindings import Tensor
from ..ggml.device import Device
from ..ggml.weights import Weights
from ..models.experts import COPY_COLUMNS
from ..models.registry import read_target
from ..models.target import Target
from ..policy.costs import Costs
from ..state.memory import MemoryPlan, cache_rows
from ..text.tokenizer import Tokenizer
from .batches import BatchSizes
from .kernel_tuning import fp8_matrices, without_kernels
from .known_costs import known_costs
from .memory_planner import Opened, decode_window, default_slots, fitting_needs
from .passes import TargetPasses, allocated
from .placement import as_computed, choose_device
from .scorer import Scorer, ScorerSource

Progress = Callable[[str, int, int], None]
log = logging.getLogger("dflash_ggml")


@dataclass(slots=True)
class Loaded:
    """The parts of a loaded engine.

    Attributes:
        memory: The plan that was allocated.
        draft: The file of the draft in use.
        over: Cache rows of a sequence beyond its committed tokens.
        scorer: Of prompts.
        costs_file: The file that caches `costs`, None if none does.
    """

    device: Device
    passes: TargetPasses
    drafter: Drafter | None
    tokenizer: Tokenizer
    metadata: dict[str, Any]
    memory: MemoryPlan
    batches: BatchSizes
    over: int
    draft: Path | None = None
    scorer: Scorer | None = None
    prompt_lookup: PromptLookup | None = None
    costs: Costs = field(default_factory=Costs)
    costs_file: Path | None = None


def load(
    config: EngineConfig, progress: Progress | None = None, calibration_seconds: float | None = None
) -> Loaded:
    """Load what `config` names.

    Parts that were found rather than named are left out, with a warning, if they keep the pair from loading: the draft, the
    prediction head of the target's file (used if there is no other draft), and the prompt scorer.

    Args:
        config: The engine's options.
        progress: Called with a stage, bytes done and bytes in all.
        calibration_seconds: As in `Engine.load`.

    Raises:
        ModelFileError: A file is bad, or the draft does not fit.
        ConfigError: Options exclude each other.
        DeviceError: Something does not fit the device.
    """
    try:
        return _load_scored(config, progress, calibration_seconds)
    except _OwnDraftError as error:
        reason, without = str(error), replace(config, own_draft=False)
    except (DflashError, OSError) as error:
        if config.draft is None or not config.draft_found:
            raise
        reason, without = str(error), replace(config, draft=None)
    try:
        loaded = load(without, progress, calibration_seconds)
    except ConfigError as error:
        if config.mode in ("chain", "tree"):
            raise ConfigError(
                f"mode {config.mode} needs a draft, and the one that was found cannot be used: {reason}"
            ) from error
        raise
    how = "drafting with the target's prediction head" if loaded.drafter else "decoding without a draft model"
    log.warning("the draft that was found is not used, %s: %s", how, reason)
    return loaded


class _OwnDraftError(Exception):
    """The target's prediction head, found rather than named, cannot be used."""


def _load_scored(
    config: EngineConfig, progress: Progress | None, calibration_seconds: float | None
) -> Loaded:
    """`_load`; a scorer that was found and does not fit is left out."""
    try:
        return _load(config, progress, calibration_seconds)
    except (DeviceError, _OwnDraftError) as error:
        if config.scorer is None or not config.scorer_found:
            raise
        reason = str(error)
    loaded = _load(replace(config, scorer=None), progress, calibration_seconds)
    log.warning("%s was found and is not used, prompts are scored lexically: %s", config.scorer, reason)
    return loaded


def _load(config: EngineConfig, progress: Progress | None, calibration_seconds: float | None) -> Loaded:
    file = GGUFFile(config.model)
    target = read_target(file)
    tokenizer = read_tokenizer(file, target)
    try:
        draft, notes = open_chosen(config, file, target)
    except (ModelFileError, DeviceError) as error:
        if config.draft is None:
            raise _OwnDraftError(str(error)) from error
        raise
    for note in [*(draft.check(target, str(config.model)) if draft else ()), *notes]:
        log.warning("%s", note)
    source = open_scorer(config, tokenizer.tokens)
    device = choose_device(config)
    try:
        opened = Opened(device, config, file, as_computed(target, file, device), draft, source)
        loaded = _on_device(opened, tokenizer, progress)
        if loaded.drafter or loaded.prompt_lookup:
            if others := without_kernels(device, loaded.passes.weights):
                log.warning(
                    "%s: %s of its bytes have no kernels for several tokens at once on this GPU, so drafting gains less",
                    config.model,
                    ", ".join(f"{kind} ({part:.0%})" for kind, part in others.items()),
                )
            kinds = sorted((name, t.type, t.shape) for name, t in file.tensors.items())
            tensors = [kinds, draft.identity if draft else []]
            measured = config, loaded.passes, loaded.drafter, tensors, calibration_seconds
            points, loaded.costs_file = known_costs(*measured)
            loaded.costs.learn(points)
    except MemoryError as error:
        device.close()
        raise no_host_memory("loading") from error
    except DflashError as error:
        device.close()
        if draft and config.draft is None and not config.names("mtp"):
            raise _OwnDraftError(str(error)) from error
        raise
    except BaseException:
        device.close()
        raise
    return loaded


def open_scorer(config: EngineConfig, target_tokens: Sequence[str]) -> ScorerSource | None:
    """The configured scorer; None if there is none, and with a warning if the file that was found is not one.

    Raises:
        ModelFileError: The file was named and is not one.
    """
    if config.scorer is None or config.prompt_keep is None:
        return None
    try:
        return ScorerSource(config.scorer, config.prompt_keep, target_tokens)
    except (ModelFileError, OSError) as error:
        if not config.scorer_found:
            raise
        log.warning("the scorer that was found is not used, prompts are scored lexically: %s", error)
        return None


def no_host_memory(what: str) -> DeviceError:
    """The error for a failed host allocation during `what`."""
    return DeviceError(
        f"{what}: this process can get no more memory; lower the context (-c), the batch size (-b) or the budget (--budget)"
    )


def _on_device(opened: Opened, tokenizer: Tokenizer, progress: Progress | None) -> Loaded:
    """Plan the memory, bring the weights to the device and make the state."""
    device, config = opened.device, opened.config
    target, draft, source = opened.target, opened.draft, opened.scorer
    wanted = fitting_needs(opened)
    for note in wanted.notes:
        log.warning("%s", note)
    n_states = config.parallel or default_slots(device, config, wanted)
    wanted = wanted.for_sequences(n_states)
    kv, n_batch, memory = wanted.checked()
    log.info("%s (%s): %s", device.info.name, device.info.description, memory)
    n_ctx = memory.n_ctx
    if kv.note:
        log.warning("%s", kv.note)
    if config.n_ctx and n_ctx > target.n_ctx_train:
        log.warning(
            "n_ctx %d is above the %d that %s was trained for", n_ctx, target.n_ctx_train, config.model
        )
    weights, width = wanted.weights, wanted.width
    depth, taps = (draft.depth, draft.taps) if draft else (0, ())
    rows = cache_rows(n_ctx, wanted.over)
    weights.fill(
        progress, "target", is_short=wanted.host_experts is not None and wanted.host_experts.is_short
    )
    window = decode_window(config)
    if window is not None:
        log.warning(
            "--fa-window %d: what is more than %d tokens back is out of sight while decoding, but for the first %d of the text: "
            "answers are not the model's own",
            *(window.tokens, window.tokens, window.sinks),
        )
    fp8 = _fp8(config, device, weights, n_batch)
    passes = TargetPasses(
        device,
        target,
        weights,
        kv.target,
        rows,
        width,
        depth,
        taps,
        window,
        n_states,
        n_batch,
        wanted.placement,
        fp8=fp8,
    )
    drafter = None
    if draft:
        by = device.sides[wanted.placement.draft]
        host = Host(by, passes.graphs, target, weights, passes.state.features.tensor, kv.draft, n_states)
        drafter = draft.start(host, config.n_candidates, rows, progress)
    paced = not config.n_batch and config.mode == "auto" and not config.reproducible
    passes.reserve(n_batch, drafter.append if drafter else None)
    scorer = None
    if source:
        own = BatchSizes(n_batch, paced, device.is_gpu)
        scorer = source.start(device, passes.workspace, rows, kv.scorer, own, progress)
        trained = source.model.trunk.n_ctx_train
        log.info("prompts are scored by %s, up to %d tokens, trained for %d", source, scorer.limit, trained)
    of_draft, of_scorer = drafter.nbytes if drafter else {}, scorer.nbytes if scorer else {}
    log.info("%s", memory.against(allocated(passes, of_draft, of_scorer)))
    # copying experts dominates the time, for few tokens as for many
    flat = COPY_COLUMNS if wanted.host_experts else None
    batches = BatchSizes(n_batch, paced, device.is_gpu, flat)
    metadata, lookup = (
        dict(opened.file.metadata),
        PromptLookup(config.budget) if config.prompt_lookup else None,
    )
    loaded = Loaded(device, passes, drafter, tokenizer, metadata, memory, batches, wanted.over_each)
    loaded.draft, loaded.scorer, loaded.prompt_lookup = config.draft, scorer, lookup
    return loaded


def _fp8(config: EngineConfig, device: Device, weights: Weights, n_batch: int) -> list[Tensor]:
    """The matrices whose matmuls with prompts run with 8-bit floats, reported once."""
    if not config.prefill_fp8:
        return []
    found, why = fp8_matrices(device, weights, n_batch)
    if why:
        log.warning("--prefill-fp8 has no effect: %s", why)
    else:
        log.warning(
            "--prefill-fp8: matmuls of prompts round weights and activations to 8-bit floats: K/V rows and states of prompts, "
            "and so answers, are not the model's own"
        )
    return found


def read_tokenizer(file: GGUFFile, target: Target) -> Tokenizer:
    """The vocabulary of a target's file.

    Raises:
        ModelFileError: It has more tokens than the model has logits.
    """
    tokenizer = Tokenizer.from_gguf(file)
    if tokenizer.n_vocab > target.n_vocab:
        raise file.error(f"{tokenizer.n_vocab} tokens but an output of {target.n_vocab} rows")
    return tokenizer
