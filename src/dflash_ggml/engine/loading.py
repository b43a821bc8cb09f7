"""From files to a ready engine: read, check that target and draft fit, choose the device, bring the weights there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..decode.costs import Costs
from ..drafts.drafter import Drafter, DraftSource, Host
from ..drafts.registry import open_draft, open_own
from ..drafts.several import SeveralSource
from ..drafts.suffix import Copies
from ..errors import ConfigError, DeviceError, DflashError
from ..files.gguf import GGUFFile
from ..ggml.device import F32, Device, list_devices
from ..ggml.host import free_memory
from ..ggml.weights import Weights
from ..models.experts import LENT
from ..models.registry import read_target
from ..models.target import Target
from ..state.memory import (
    GRAPHS,
    LENT_EXPERTS,
    MARGIN,
    MIB,
    SCRATCH,
    KeptExperts,
    MemoryPlan,
    Part,
    cache_rows,
    fit,
    padded,
    plan,
)
from ..state.pool import UNIT
from ..state.state import state_parts
from ..state.window import DecodeWindow
from ..text.tokenizer import Tokenizer
from .batches import CHOICES, CPU_BATCH, BatchSizes
from .kept import expert_sizes, fewest_layers, kept_experts, kept_names, lent_bytes
from .known_costs import known_costs
from .kv_types import KvTypes, kv_types
from .passes import TargetPasses, most_columns, tree_width
from .products import wide_bytes, without_kernels

DRIVER = 256 * MIB  # of a limit, beside the plan's margin: CUDA's context and code, captured graphs
Progress = Callable[[str, int, int], None]
log = logging.getLogger("dflash_ggml")
_LENT_BATCH = 2048  # tokens of a prompt that share what is lent to them: room for them is worth more than a layer or two
USUAL_CONTEXT = 8192  # tokens that large batches and wide drafts must leave room for where no length is named


def choose_device(config: EngineConfig) -> Device:
    """The GPU `main_gpu` if layers may go there and one is present, else the CPU, which alone has `reference` kernels.

    Raises ConfigError for a missing GPU."""
    gpus = [d for d in list_devices() if d.is_gpu]
    if config.n_gpu_layers == 0 or config.reference or not gpus:
        if config.n_gpu_layers > 0 and not gpus:
            log.warning(
                "n_gpu_layers=%d: this build or machine has no GPU, decoding on the CPU", config.n_gpu_layers
            )
        return _open_cpu(config)
    if config.main_gpu >= len(gpus):
        raise ConfigError(f"main_gpu: {config.main_gpu}, but there are {len(gpus)} GPUs")
    return Device(gpus[config.main_gpu], config.n_threads)


def _open_cpu(config: EngineConfig) -> Device:
    # a count or a mode by name asks for the same bits whatever else runs
    decides = config.mode == "auto" and not config.reproducible
    yielding = config.n_threads is None and decides and not config.reference
    return Device.cpu(config.n_threads, config.reference, yielding)


def has_own_memory(device: Device) -> bool:
    """Whether a device has memory of its own, beside a host that can keep and compute what there is no room for."""
    return device.is_gpu


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an engine is made of. n_ctx: context length in tokens. memory: the plan by which it was made. costs_file: where
    `costs` are kept, None if nowhere."""

    device: Device
    passes: TargetPasses
    drafter: Drafter | None
    copies: Copies | None
    tokenizer: Tokenizer
    metadata: dict[str, Any]
    n_ctx: int
    memory: MemoryPlan
    costs: Costs
    batches: BatchSizes
    costs_file: Path | None = None
    draft: Path | None = None  # the file of the draft that is used
    over: int = 0  # cache rows of a text beyond its committed tokens


def load(
    config: EngineConfig, progress: Progress | None = None, calibration_seconds: float | None = None
) -> Loaded:
    """Load what `config` names; `progress(stage, done, total)` in bytes; calibration_seconds: see `Engine.load`.

    A draft that was only found is left out, with a warning, if it is what keeps the pair from loading; so is the prediction head
    of the target's file, which drafts where there is nothing else.
    Raises ModelFileError for a bad file or a draft that does not fit, ConfigError, DeviceError.
    """
    try:
        return _load(config, progress, calibration_seconds)
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
    """What keeps a target from loading with its prediction head, which nobody asked for."""


def _load(config: EngineConfig, progress: Progress | None, calibration_seconds: float | None) -> Loaded:
    file = GGUFFile(config.model)
    target = read_target(file)
    tokenizer = read_tokenizer(file, target)
    draft: DraftSource | None = None
    if config.draft is not None:
        draft = open_draft(config.draft, config.draft_window, config.draft_type)
        if not config.wants(draft.name):
            raise ConfigError(
                f"spec: {config.draft} is a {draft.name} draft, which it leaves out; name it there"
            )
        for warning in draft.check(target, str(config.model)):
            log.warning("%s", warning)
        if config.names("mtp") and (head := open_own(file, target, config.draft_max)):
            draft = SeveralSource([draft, head])
    elif config.own_draft and config.mode != "plain" and config.wants("mtp"):
        try:
            draft = open_own(file, target, config.draft_max)
        except DflashError as error:
            raise _OwnDraftError(str(error)) from error
    if config.names("mtp") and target.prediction_head(file) is None:
        missing = f"spec: {config.model} has no prediction head (mtp) to draft with"
        if draft is None and not config.names_copies:
            raise ConfigError(missing)
        log.warning("%s; what else is named drafts", missing)
    if draft is None and config.mode in ("chain", "tree") and not config.names_copies:
        raise ConfigError(f"mode {config.mode} needs a draft model (-md)")
    if config.draft_type is not None and config.draft is None:
        log.warning("draft_type: %s is for a draft file, and there is none", config.draft_type)
    device, costs, costs_file = choose_device(config), Costs(), None
    try:
        passes, drafter, memory, batches, over = _on_device(device, config, file, target, draft, progress)
        copies = Copies(config.budget) if config.copies else None
        if drafter or copies:
            if others := without_kernels(device, passes.weights):
                log.warning(
                    "%s: %s of its bytes have no kernels for several tokens at once on this GPU, so drafting gains less",
                    config.model,
                    ", ".join(f"{kind} ({part:.0%})" for kind, part in others.items()),
                )
            kinds = sorted((name, t.type, t.shape) for name, t in file.tensors.items())
            tensors = [kinds, draft.identity if draft else []]
            points, costs_file = known_costs(config, passes, drafter, tensors, calibration_seconds)
            costs.learn(points)
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
    metadata = dict(file.metadata)
    return Loaded(
        device,
        passes,
        drafter,
        copies,
        tokenizer,
        metadata,
        memory.n_ctx,
        memory,
        costs,
        batches,
        costs_file,
        config.draft,
        over,
    )


def no_host_memory(what: str) -> DeviceError:
    """The error for an allocation of the host's that failed during `what`."""
    return DeviceError(
        f"{what}: this process can get no more memory; lower the context (-c), the batch size (-b) or the budget (--budget)"
    )


def _on_device(
    device: Device,
    config: EngineConfig,
    file: GGUFFile,
    target: Target,
    draft: DraftSource | None,
    progress: Progress | None,
) -> tuple[TargetPasses, Drafter | None, MemoryPlan, BatchSizes, int]:
    """Plan the memory, bring the weights to the device and make the state; also the sizes of batches, and the rows of a text
    beyond its tokens."""
    wanted = declare_fitting(device, config, file, target, draft)
    for note in wanted.notes:
        log.warning("%s", note)
    try:
        kv, n_batch, memory = wanted.plan(config.n_ctx, memory_free(device, config.gpu_memory), device.is_gpu)
        log.info("%s (%s): %s", device.info.name, device.info.description, memory)
        if has_own_memory(device):
            memory.check(wanted.parts(kv, n_batch))
    except DeviceError as error:
        if layers := layers_to_keep(device, config, file, target, draft, wanted):
            raise DeviceError(
                f"{error}; it fits with the experts of {layers} layers in the host's memory (--n-cpu-moe {layers})"
            ) from error
        raise
    n_ctx = memory.n_ctx
    if kv.note:
        log.warning("%s", kv.note)
    if n_ctx > target.n_ctx_train:
        log.warning(
            "n_ctx %d is above the %d that %s was trained for", n_ctx, target.n_ctx_train, config.model
        )
    weights, width = wanted.weights, wanted.width
    depth, taps = (draft.depth, draft.taps) if draft else (0, ())
    rows = cache_rows(n_ctx, wanted.over)
    weights.fill(progress, "target", is_short=wanted.kept is not None and wanted.kept.is_short)
    window = DecodeWindow(config.fa_window) if config.fa_window else None
    if window is not None:
        log.warning(
            "--fa-window %d: what is more than %d tokens back is out of sight while decoding, but for the first %d of the text: "
            "answers are not the model's own",
            *(window.tokens, window.tokens, window.sinks),
        )
    lanes = config.parallel
    passes = TargetPasses(
        device, target, weights, kv.target, rows, width, depth, taps, window, lanes, n_batch
    )
    drafter = None
    if draft:
        host = Host(device, passes.graphs, target, weights, passes.state, kv.draft, lanes)
        drafter = draft.start(host, config.n_candidates, rows, progress)
    paced = not config.n_batch and config.mode == "auto" and not config.reproducible
    passes.reserve(n_batch, drafter.append if drafter else None)
    taken = {**passes.nbytes, **(drafter.nbytes if drafter else {}), SCRATCH: passes.workspace.nbytes}
    log.info("%s", memory.against(taken))
    # what is lent takes the longest, for few tokens as for many
    flat = LENT if wanted.kept else None
    return passes, drafter, memory, BatchSizes(n_batch, paced, device.is_gpu, flat), wanted.over_each


def memory_free(device: Device, limit: int | float | None) -> int:
    """Bytes that may be planned with. limit: of a GPU, see `EngineConfig.gpu_memory`; what its driver keeps for a process counts,
    as it does in nvidia-smi."""
    info = device.info
    if not device.is_gpu:
        return free_memory()
    if limit is None:
        return info.memory_free
    wanted = int(limit * info.memory_total) if isinstance(limit, float) and limit <= 1 else int(limit)
    return max(min(info.memory_free, wanted - DRIVER), 0)


def _usual(wanted: Declared, target: Target, config: EngineConfig, device: Device) -> MemoryPlan:
    """The plan with the caches that are wanted most, in the smallest batches, or, where a prompt is lent what the host keeps,
    in some that are worth it."""
    n_ctx = config.n_ctx or min(target.n_ctx_train, USUAL_CONTEXT)
    n_batch = _LENT_BATCH if wanted.kept and _LENT_BATCH in wanted.batches and n_ctx >= _LENT_BATCH else 0
    return plan(
        wanted.parts(wanted.kv[0], n_batch), wanted.over, n_ctx, memory_free(device, config.gpu_memory)
    )


def declare_fitting(
    device: Device, config: EngineConfig, file: GGUFFile, target: Target, draft: DraftSource | None
) -> Declared:
    """`declare`, with what makes a pair fit on a GPU: a draft of fewer bits, then the experts of as few layers as it takes with
    the host, where nobody said of how many. The notes tell of both. What does not fit so either is declared all the same."""
    wanted = declare(device, config, file, target, draft)
    if not has_own_memory(device) or _usual(wanted, target, config, device).fits:
        return wanted
    notes = list(wanted.notes)
    if draft and draft.narrow():
        wanted.weights.close()
        wanted = declare(device, config, file, target, draft)
        notes = [
            *wanted.notes,
            f"{config.draft}: its weights become q8_0, as they are they do not fit beside the target",
        ]
    if config.n_cpu_moe is None and (layers := layers_to_keep(device, config, file, target, draft, wanted)):
        wanted.weights.close()
        wanted = declare(device, config, file, target, draft, layers, prepare=False)
        notes += [
            f"{config.model} does not fit the GPU: the experts of {layers} of its {target.n_layers} layers stay in the host's "
            "memory and the CPU computes them (--n-cpu-moe)",
            *wanted.notes,
        ]
    return replace(wanted, notes=notes)


def layers_to_keep(
    device: Device,
    config: EngineConfig,
    file: GGUFFile,
    target: Target,
    draft: DraftSource | None,
    wanted: Declared,
) -> int:
    """The fewest layers whose experts the host would have to keep for all else to fit; 0 where that does not help. `wanted`: as
    declared now, after which the draft stays prepared."""
    sizes = expert_sizes(file, target.n_layers)
    if not sizes or not has_own_memory(device):
        return 0

    def fits(layers: int) -> bool:
        found = declare(device, config, file, target, draft, layers, prepare=False)
        try:
            return _usual(found, target, config, device).fits
        finally:
            found.weights.close()

    if not fits(len(sizes)):
        return 0
    now = _usual(wanted, target, config, device)
    kept = wanted.kept.layers if wanted.kept else 0
    first = fewest_layers(sizes, sum(sizes[:kept]) + now.total + MARGIN - now.free)
    return next(layers for layers in range(max(first, 1), len(sizes) + 1) if fits(layers))


def read_tokenizer(file: GGUFFile, target: Target) -> Tokenizer:
    """The vocabulary of a target's file. Raises ModelFileError when it has more tokens than the model has logits."""
    tokenizer = Tokenizer.from_gguf(file)
    if tokenizer.n_vocab > target.n_vocab:
        raise file.error(f"{tokenizer.n_vocab} tokens but an output of {target.n_vocab} rows")
    return tokenizer


@dataclass(frozen=True, slots=True)
class Declared:
    """What a pair will take on a device, before any of its memory is taken.

    longest: context that the target was trained for. kv: types of the caches to plan with, the first that fit are taken.
    batches: tokens of a prefill pass to plan with, likewise. width: columns of the widest tree. over: cache rows beyond the
    context, for all texts; over_each: of one text beyond its tokens. notes: what had to be changed for the device. planned: the
    memory that it all takes with such caches and batches. kept: experts that stay with the host.
    """

    weights: Weights
    longest: int
    kv: list[KvTypes]
    batches: tuple[int, ...]
    width: int
    over: int
    over_each: int
    notes: list[str]
    planned: Callable[[KvTypes, int], list[Part]]
    kept: KeptExperts | None = None

    def parts(self, kv: KvTypes, n_batch: int = 0) -> list[Part]:
        """The memory with such caches; without `n_batch`, with the smallest batches."""
        return self.planned(kv, n_batch or self.batches[-1])

    def plan(self, n_ctx: int, free: int, is_gpu: bool) -> tuple[KvTypes, int, MemoryPlan]:
        """Types of caches, tokens of a batch and the plan for `n_ctx` tokens; with 0, for as many as fit into `free` bytes, or
        half of them where other programs live there too. Raises DeviceError when none fits; a context that was asked for is only
        planned."""
        kv, n_batch = self.kv[0], self.batches[-1]
        if is_gpu:
            kv, n_batch = self.choose(n_ctx or min(self.longest, USUAL_CONTEXT), free)
        parts = self.parts(kv, n_batch)
        if n_ctx:
            found = plan(parts, self.over, n_ctx, free)
        else:
            found = fit(parts, self.over, free, self.longest, share=1.0 if is_gpu else 0.5)
        return kv, n_batch, replace(found, kept=self.kept)

    def choose(self, n_ctx: int, free: int) -> tuple[KvTypes, int]:
        """The first types of caches with which `n_ctx` tokens fit into `free` bytes, or the first of all; and the largest batches
        that fit with them and whose scratch memory is a small part of it, or the smallest of all. Where a batch shares what is
        lent to it, the part may be larger."""
        fitting = (types for types in self.kv if plan(self.parts(types), self.over, n_ctx, free).fits)
        kv = next(fitting, self.kv[0])
        for n_batch in self.batches[:-1]:
            found = plan(self.parts(kv, n_batch), self.over, n_ctx, free)
            small = (4 if self.kept else 16) * found.parts[GRAPHS] <= free
            if found.fits and small and n_batch < 2 * n_ctx:
                return kv, n_batch
        return kv, self.batches[-1]


def declare(
    device: Device,
    config: EngineConfig,
    file: GGUFFile,
    target: Target,
    draft: DraftSource | None,
    layers: int | None = None,
    prepare: bool = True,
) -> Declared:
    """Declare the weights and plan the memory. layers: whose experts the host keeps (None: as the configuration has it);
    prepare: False where the draft already is. Raises ModelFileError for a type that the device cannot multiply."""
    layers = min((config.n_cpu_moe or 0) if layers is None else layers, target.n_layers)
    kept = kept_names(target.tensors(), layers) if has_own_memory(device) else []
    if kept and device.host is None:
        device.host = _open_cpu(config)
    heads = [layer.head_dim for layer in target.state_spec().kv]
    kv = kv_types(config, device.is_gpu, heads, draft.head_dims if draft else ())
    weights = Weights(device, target.sources(file), kept=kept)
    depth = draft.depth if draft else 0
    width = tree_width(config.budget, depth) if draft or config.copies else 0
    # a tree near the end of the context still needs rows for all its nodes, and the draft for its block
    over = max(width, 1) + depth + bool(draft)
    # ranges begin at multiples of their unit
    over_all = over + (config.parallel - 1) * padded(over + UNIT - 1, UNIT)
    notes = draft.prepare(device) if draft and prepare else []
    experts = kept_experts(weights, layers)
    if experts and experts.note:
        notes.append(experts.note)
    if config.n_cpu_moe and has_own_memory(device) and not kept:
        notes.append(f"n_cpu_moe: {config.model} has no experts in its first {layers} layers")
    return Declared(
        weights,
        target.n_ctx_train,
        kv,
        (config.n_batch,) if config.n_batch else CHOICES if device.is_gpu else (CPU_BATCH,),
        width,
        over_all,
        over,
        notes,
        partial(memory_parts, device, target, weights, draft, width, config.parallel),
        experts,
    )


def memory_parts(
    device: Device,
    target: Target,
    weights: Weights,
    draft: DraftSource | None,
    width: int,
    lanes: int,
    kv: KvTypes,
    n_batch: int,
) -> list[Part]:
    """All that will be allocated, for the memory plan; `width`: columns of the widest tree, 0 where nothing is drafted; `lanes`:
    texts side by side."""
    taps = draft.taps if draft else ()
    n_weights, columns = weights.wanted, most_columns(width, lanes)
    parts = [
        Part("target weights", lambda rows: n_weights),
        *state_parts(
            target.state_spec(),
            device.alignment,
            kv.target,
            columns,
            len(taps) * target.n_embd,
            lanes,
            n_batch,
        ),
        Part("tree mask", lambda rows: 2 * width * rows, "lower the budget (--budget)"),
    ]
    if draft:
        parts += draft.parts(device, kv.draft, lanes)
    # not those of several matrices: their products are others
    shapes = [(t.ne[0], t.ne[1]) for t in weights.values() if t.ne[1] > 1 and t.ne[2] == 1 and t.type != F32]
    if taps:
        shapes.append((len(taps) * target.n_embd, target.n_embd))  # a draft takes the features in
    if wide := wide_bytes(device, shapes, n_batch):
        parts.append(Part("wide products", lambda rows: wide, "lower the batch size (-b)"))
    if lent := lent_bytes(weights.kept, n_batch):
        parts.append(Part(LENT_EXPERTS, lambda rows: lent))
    # the widest passes: a prefill batch with its features, and the logits of a tree
    logits = 8 * max(columns, 1) * target.n_vocab

    def scratch(rows: int) -> int:
        copied = target.state_spec().f16_copy(rows, kv.target) if device.is_gpu else 0
        return max(target.scratch_bytes(n_batch, rows, len(taps)) + copied, logits)

    return [*parts, Part(GRAPHS, scratch, "lower the batch size (-b)")]
