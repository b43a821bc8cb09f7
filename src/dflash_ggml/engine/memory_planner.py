"""Memory planning of a pair on a device: before any memory is taken, and made to fit where possible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ..config import EngineConfig
from ..drafts.drafter import DraftSource
from ..errors import ConfigError, DeviceError
from ..files.gguf import GGUFFile
from ..files.pairs import EMBEDDED_CONTEXT, EMBEDDED_TARGET
from ..ggml import stock
from ..ggml.device import F32, Device, list_devices
from ..ggml.host import free_memory
from ..ggml.weights import Source, Weights
from ..models.target import Target
from ..state.memory import (
    GRAPHS,
    LENT_EXPERTS,
    MARGIN,
    MIB,
    KeptExperts,
    MemoryPlan,
    Part,
    fit,
    padded,
    plan,
)
from ..state.pool import UNIT
from ..state.spec import StateSpec
from ..state.state import state_parts
from ..state.window import DecodeWindow
from .batches import CHOICES, CPU_BATCH
from .cpu_offload import expert_sizes, fewest_layers, kept_experts, kept_names, lent_bytes
from .kernel_tuning import wide_bytes
from .kv_types import KvTypes, kv_types
from .passes import most_columns, tree_width

DRIVER = 256 * MIB  # of a limit, beside the plan's margin: CUDA's context and code, captured graphs
USUAL_CONTEXT = 8192  # tokens that large batches and wide drafts must leave room for where no length is named
ON_GPU, SMALL_ON_CPU, ON_CPU = (8, 4, 2), (4, 2), (2,)  # sequences of a batch, by default
SMALL = 6 << 30  # bytes of the weights of a small model
SHORTER = 1 / 16  # of a context that memory cuts short anyway, which places may take
_LENT_BATCH = 2048  # tokens of a prompt that share what is lent to them: room for them is worth more than a layer or two
log = logging.getLogger("dflash_ggml")


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
    return Device(gpus[config.main_gpu], config.n_threads, stock=config.stock)


def _open_cpu(config: EngineConfig) -> Device:
    # a count asks for the same bits whatever else runs: attention of one column is summed per thread
    yielding = config.n_threads is None and not config.reproducible and not config.reference
    return Device.cpu(config.n_threads, config.reference, yielding, config.stock)


def has_own_memory(device: Device) -> bool:
    """Whether a device has memory of its own, beside a host that can keep and compute what there is no room for."""
    return device.is_gpu


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


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Memory needs of a pair on a device, before any memory is taken.

    Attributes:
        longest: Context where none is asked for, if it fits.
        kv: Types of the caches to plan with; the first that fit are taken.
        batches: Tokens of a prefill pass to plan with, likewise.
        width: Columns of the widest tree.
        over: Cache rows beyond the context, for all sequences; over_each: for one, beyond its tokens.
        notes: What had to be changed for the device.
        planned: Memory of all parts for so many sequences with such caches and batches.
        kept: Experts that stay in host memory.
        n_states: Sequences decoded in a batch.
    """

    weights: Weights
    longest: int
    kv: list[KvTypes]
    batches: tuple[int, ...]
    width: int
    over: int
    over_each: int
    notes: list[str]
    planned: Callable[[int, KvTypes, int], list[Part]]
    kept: KeptExperts | None = None
    n_states: int = 1

    def parts(self, kv: KvTypes, n_batch: int = 0) -> list[Part]:
        """The memory with such caches; without `n_batch`, with the smallest batches."""
        return self.planned(self.n_states, kv, n_batch or self.batches[-1])

    def for_sequences(self, n_states: int) -> MemoryNeeds:
        """The same for so many sequences."""
        return replace(self, n_states=n_states, over=over_all(self.over_each, n_states))

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


def memory_needs(
    device: Device,
    config: EngineConfig,
    file: GGUFFile,
    target: Target,
    draft: DraftSource | None,
    layers: int | None = None,
    prepare: bool = True,
    sources: Mapping[str, Source] | None = None,
) -> MemoryNeeds:
    """Declare the weights and plan the memory. layers: whose experts the host keeps (None: as the configuration has it);
    prepare: False where the draft already is; sources: the target's, where they were made before: some targets copy tensors to
    reorder them. Raises ModelFileError for a type that the device cannot multiply."""
    layers = min((config.n_cpu_moe or 0) if layers is None else layers, target.n_layers)
    kept = kept_names(target.tensors(), layers) if has_own_memory(device) else []
    if kept and device.host is None:
        device.join(_open_cpu(config), is_host=True)
    heads = [layer.head_dim for layer in target.state_spec().kv]
    kv = kv_types(config, device.is_gpu, heads, draft.head_dims if draft else ())
    weights = Weights(device, target.sources(file) if sources is None else sources, kept=kept)
    depth = draft.depth if draft else 0
    width = tree_width(config.budget, depth) if draft or config.prompt_lookup else 0
    # a tree near the end of the context still needs rows for all its nodes, and the draft for its block
    over = max(width, 1) + depth + bool(draft)
    n_states = max(config.parallel, 1)
    notes = draft.prepare(device) if draft and prepare else []
    experts = kept_experts(weights, layers)
    if experts and experts.note:
        notes.append(experts.note)
    if config.n_cpu_moe and has_own_memory(device) and not kept:
        notes.append(f"n_cpu_moe: {config.model} has no experts in its first {layers} layers")
    if config.gpu_memory is not None and not device.is_gpu:
        notes.append(
            "gpu_memory: the model is on the CPU, where this limits nothing; name a shorter context (-c)"
        )
    return MemoryNeeds(
        weights,
        EMBEDDED_CONTEXT if config.model == EMBEDDED_TARGET else target.n_ctx_train,
        kv,
        (config.n_batch,) if config.n_batch else CHOICES if device.is_gpu else (CPU_BATCH,),
        width,
        over_all(over, n_states),
        over,
        notes,
        partial(memory_parts, device, target, weights, draft, width, decode_window(config)),
        experts,
        n_states,
    )


def over_all(over: int, n_states: int) -> int:
    """Cache rows beyond the context for several sequences, each with `over` of its own; ranges begin at multiples of UNIT."""
    return over + (n_states - 1) * padded(over + UNIT - 1, UNIT)


def decode_window(config: EngineConfig) -> DecodeWindow | None:
    """All that is seen while decoding, where that is not all."""
    return DecodeWindow(config.fa_window) if config.fa_window else None


def memory_parts(
    device: Device,
    target: Target,
    weights: Weights,
    draft: DraftSource | None,
    width: int,
    window: DecodeWindow | None,
    n_states: int,
    kv: KvTypes,
    n_batch: int,
) -> list[Part]:
    """All that will be allocated, for the memory plan; `width`: columns of the widest tree, 0 where nothing is drafted; `window`:
    all that is seen while decoding; `n_states`: sequences."""
    taps = draft.taps if draft else ()
    n_weights, columns = weights.wanted, most_columns(width, n_states)
    parts = [
        Part("target weights", lambda rows: n_weights),
        *state_parts(
            target.state_spec(),
            device.alignment,
            kv.target,
            columns,
            len(taps) * target.n_embd,
            n_states,
            n_batch,
        ),
        Part("tree mask", lambda rows: 2 * width * rows, "lower the budget (--budget)"),
    ]
    if draft:
        parts += draft.parts(device, kv.draft, n_states)
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

    depth = draft.depth if draft else 0
    prompts, trees = (lambda rows: 0), 0
    if not device.has_own_kernels:
        prompts, trees = composed_bytes(target.state_spec(), n_batch, columns, depth + 1, n_states)

    def scratch(rows: int) -> int:
        copied = target.state_spec().f16_copy(rows, kv.target) if device.is_gpu else 0
        prompt = target.scratch_bytes(n_batch, rows, len(taps)) + copied + prompts(rows)
        if window is None:
            return max(prompt, logits, trees)
        gathered = window.nbytes(max(columns, 1), target.state_spec(), kv.target)
        return max(prompt, logits + gathered, target.scratch_bytes(columns, rows, len(taps)) + gathered)

    return [*parts, Part(GRAPHS, scratch, "lower the batch size (-b)")]


def composed_bytes(
    spec: StateSpec, n_batch: int, columns: int, path: int, n_states: int
) -> tuple[Callable[[int], int], int]:
    """Scratch bytes of a device without kernels of ours: what a prompt's batch takes more, by cache rows, and what a tree of
    `columns` columns takes at least."""
    if not spec.recurrent:
        return partial(stock.mask_bytes, n_batch), 0
    conv, delta = spec.recurrent[0].conv, spec.recurrent[0].delta
    gathered = stock.conv_bytes(n_batch, conv.channels, conv.kernel)
    sizes = delta.dim, delta.v_heads, delta.factors, path, n_states, len(spec.recurrent)
    return (
        lambda rows: stock.mask_bytes(n_batch, rows) + gathered,
        stock.delta_bytes(columns, *sizes) if columns else 0,
    )


def _usual(wanted: MemoryNeeds, target: Target, config: EngineConfig, device: Device) -> MemoryPlan:
    """The plan with the caches that are wanted most, in the smallest batches, or, where a prompt is lent what the host keeps,
    in some that are worth it."""
    n_ctx = config.n_ctx or min(target.n_ctx_train, USUAL_CONTEXT)
    n_batch = _LENT_BATCH if wanted.kept and _LENT_BATCH in wanted.batches and n_ctx >= _LENT_BATCH else 0
    return plan(
        wanted.parts(wanted.kv[0], n_batch), wanted.over, n_ctx, memory_free(device, config.gpu_memory)
    )


def fitting_needs(
    device: Device, config: EngineConfig, file: GGUFFile, target: Target, draft: DraftSource | None
) -> MemoryNeeds:
    """`memory_needs`, changed to fit a GPU: a draft of fewer bits, then the experts of as few layers as it takes in host
    memory, where their number is not given. The notes name both. A pair that still does not fit is returned all the same."""
    wanted = memory_needs(device, config, file, target, draft)
    if not has_own_memory(device) or _usual(wanted, target, config, device).fits:
        return wanted
    notes, sources = list(wanted.notes), wanted.weights.sources
    if draft and draft.narrow():
        wanted.weights.close()
        wanted = memory_needs(device, config, file, target, draft, sources=sources)
        notes = [
            *wanted.notes,
            f"{config.draft}: its weights become q8_0, as they are they do not fit beside the target",
        ]
    if config.n_cpu_moe is None and (layers := layers_to_keep(device, config, file, target, draft, wanted)):
        wanted.weights.close()
        wanted = memory_needs(device, config, file, target, draft, layers, prepare=False, sources=sources)
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
    wanted: MemoryNeeds,
) -> int:
    """The fewest layers whose experts the host would have to keep for all else to fit; 0 where that does not help. `wanted`: as
    planned now, after which the draft stays prepared, and not filled yet."""
    sizes = expert_sizes(file, target.n_layers)
    if not sizes or not has_own_memory(device):
        return 0

    def fits(layers: int) -> bool:
        found = memory_needs(
            device, config, file, target, draft, layers, prepare=False, sources=wanted.weights.sources
        )
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


def default_slots(device: Device, config: EngineConfig, wanted: MemoryNeeds) -> int:
    """Slots where their number is not given: as many as leave one sequence what it would have alone.

    That is caches of the same types, batches as large, and a context as long; one that memory cuts short may lose a little. One
    where passes take no several, with a window while decoding, and where a text may not depend on who else is there by as much as
    the rounding of a kernel.
    """
    if config.fa_window or config.reproducible:
        return 1
    free = memory_free(device, config.gpu_memory)

    def planned(n_states: int) -> tuple[KvTypes, int, MemoryPlan]:
        return wanted.for_sequences(n_states).plan(config.n_ctx, free, device.is_gpu)

    small = wanted.weights.wanted <= SMALL
    with suppress(DeviceError):  # there is not enough for one: loading reports it
        kv, n_batch, alone = planned(1)
        is_cut = not config.n_ctx and alone.n_ctx < wanted.longest
        least = (1 - SHORTER) * alone.n_ctx if is_cut else alone.n_ctx
        for n_states in ON_GPU if device.is_gpu else SMALL_ON_CPU if small else ON_CPU:
            with suppress(DeviceError):
                found = planned(n_states)
                if found[:2] == (kv, n_batch) and found[2].fits and found[2].n_ctx >= least:
                    return n_states
    return 1


def plan_needs(
    device: Device,
    config: EngineConfig,
    file: GGUFFile,
    target: Target,
    draft: DraftSource | None,
    wanted: MemoryNeeds,
) -> tuple[KvTypes, int, MemoryPlan]:
    """`MemoryNeeds.plan` with what is free. Raises DeviceError for what does not fit memory of a device's own."""
    try:
        kv, n_batch, memory = wanted.plan(config.n_ctx, memory_free(device, config.gpu_memory), device.is_gpu)
        if has_own_memory(device):
            memory.check(wanted.parts(kv, n_batch))
        return kv, n_batch, memory
    except DeviceError as error:
        if layers := layers_to_keep(device, config, file, target, draft, wanted):
            raise DeviceError(
                f"{error}; it fits with the experts of {layers} layers in the host's memory (--n-cpu-moe {layers})"
            ) from error
        raise
