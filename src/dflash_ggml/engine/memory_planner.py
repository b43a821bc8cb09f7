"""Memory planning of a pair on a device: before any memory is taken, and made to fit where possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ..config import EngineConfig
from ..drafts.drafter import DraftSource
from ..errors import DeviceError
from ..files.gguf import GGUFFile
from ..files.pairs import EMBEDDED_CONTEXT, EMBEDDED_TARGET
from ..ggml import stock
from ..ggml.device import F32, NARROW_COLUMNS, Device, list_devices
from ..ggml.host import free_memory
from ..ggml.weights import Source, Weights
from ..models.layers import ring_view_rows
from ..models.reading import Keys
from ..models.target import Target
from ..state.memory import (
    COPIED_EXPERTS,
    GRAPHS,
    MIB,
    HostExperts,
    MemoryPlan,
    Part,
    cache_rows,
    fit,
    padded,
    plan,
)
from ..state.pool import UNIT
from ..state.spec import StateSpec
from ..state.state import state_parts
from ..state.window import DecodeWindow
from .batches import CHOICES, CPU_BATCH
from .cpu_offload import copied_bytes, embeddings, expert_sizes, fewest_layers, host_experts, host_names
from .kernel_tuning import copies_by_heads, wide_bytes
from .kv_types import KvTypes, kv_types
from .passes import most_columns, tree_width
from .placement import LAYER, ONE_SIDE, Placement, draft_side, in_ranks, open_cpu, place_layers
from .scorer import ScorerSource

DRIVER = 256 * MIB  # of a limit, besides the plan's margin: CUDA's context and code, captured graphs
USUAL_CONTEXT = 8192  # context that large batches and wide drafts must leave memory for if no length is given
ON_GPU, SMALL_ON_CPU, ON_CPU = (8, 4, 2), (4, 2), (2,)  # default batch of sequences
SMALL = 6 << 30  # weight bytes of a small model
SHORTER = 1 / 16  # share of a memory-limited context that slots may take
_COPY_BATCH = 2048  # prefill tokens that amortise copied experts: worth more than a layer or two on the GPU


def has_own_memory(device: Device) -> bool:
    """Whether a device has its own memory, so that experts that do not fit can go to the host."""
    return device.is_gpu


def memory_free(device: Device, limit: int | float | None) -> int:
    """Bytes available to the plan.

    Args:
        limit: Of a GPU, see `EngineConfig.gpu_memory`; the driver's own memory of the process counts, as in nvidia-smi.
    """
    info = device.info
    if not device.is_gpu:
        return free_memory()
    if limit is None:
        return info.memory_free
    wanted = int(limit * info.memory_total) if isinstance(limit, float) and limit <= 1 else int(limit)
    return max(min(info.memory_free, wanted - DRIVER), 0)


def free_on_sides(device: Device, limit: int | float | None) -> list[int]:
    """`memory_free` of each side but the host; CPUs share one memory."""
    sides = [side for side in device.sides if side is not device.host]
    alike = 1 if device.is_gpu else len(sides)
    return [memory_free(side, limit) // alike for side in sides]


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened pair and its device: the input of a memory plan.

    Attributes:
        device: The first of the devices.
        config: The engine's options.
        file: The target's open file.
        target: The target in it.
        draft: The open draft, if there is one.
        scorer: The open prompt scorer, if there is one; on the target's first side.
    """

    device: Device
    config: EngineConfig
    file: GGUFFile
    target: Target
    draft: DraftSource | None = None
    scorer: ScorerSource | None = None

    @property
    def free(self) -> list[int]:
        """Bytes of each side available to the plan."""
        return free_on_sides(self.device, self.config.gpu_memory)

    @property
    def usual_context(self) -> int:
        """Tokens of the configured context, else of one that is long enough for most uses."""
        return self.config.n_ctx or min(self.target.n_ctx_train, USUAL_CONTEXT)


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Memory needs of a pair on a device, before any memory is taken.

    Attributes:
        opened: The pair and its device.
        longest: Context if none is requested, if it fits.
        kv: Cache types in order of preference; the first that fit are taken.
        batches: Tokens of a prefill pass, likewise.
        width: Columns of the widest tree.
        over: Cache rows beyond the context, for all sequences; over_each: for one, beyond its tokens.
        notes: Changes made for the device.
        host_experts: Experts that stay in host memory.
        n_states: Sequences decoded in a batch.
        placement: The side of each part.
        where: The same in words, by side; empty for a single side.
    """

    opened: Opened
    weights: Weights
    longest: int
    kv: list[KvTypes]
    batches: tuple[int, ...]
    width: int
    over: int
    over_each: int
    notes: list[str]
    host_experts: HostExperts | None = None
    n_states: int = 1
    placement: Placement = ONE_SIDE
    where: tuple[str, ...] = ()

    def for_sequences(self, n_states: int) -> MemoryNeeds:
        """The same needs for `n_states` sequences."""
        return replace(self, n_states=n_states, over=over_all(self.over_each, n_states))

    def plan(self, n_ctx: int, free: int | Sequence[int], is_gpu: bool) -> tuple[KvTypes, int, MemoryPlan]:
        """Choose cache types and batch size, and plan the memory.

        Args:
            n_ctx: Tokens of context; an explicit one is planned even if it does not fit. 0: as many as fit.
            free: Bytes of each side; of memory shared with other programs, half is used.
            is_gpu: The device has memory of its own.

        Returns:
            Types of caches, tokens of a batch, and the plan.

        Raises:
            DeviceError: No context fits.
        """
        kv, n_batch = self.kv[0], self.batches[-1]
        if is_gpu:
            kv, n_batch = self.choose(n_ctx or min(self.longest, USUAL_CONTEXT), free)
        parts = self.parts(kv, n_batch)
        if n_ctx:
            found = plan(parts, self.over, n_ctx, free)
        else:
            found = fit(parts, self.over, free, self.longest, share=1.0 if is_gpu else 0.5)
        return kv, n_batch, self.located(found)

    def located(self, plan: MemoryPlan) -> MemoryPlan:
        """The plan with the placement of each part."""
        if self.where:
            beside = (replace(one, where=where) for one, where in zip(plan.beside, self.where[1:]))
            plan = replace(plan, where=self.where[0], beside=tuple(beside))
        return replace(plan, host_experts=self.host_experts, read_there=sum(self.weights.read_there.values()))

    def choose(self, n_ctx: int, free: int | Sequence[int]) -> tuple[KvTypes, int]:
        """The first cache types with which `n_ctx` tokens fit into `free` bytes, or the first of all; and the largest batch that
        fits with them with scratch memory a small share of it, or the smallest of all. Where a batch amortises copied experts,
        the share may be larger."""
        fitting = (types for types in self.kv if plan(self.parts(types), self.over, n_ctx, free).fits)
        kv = next(fitting, self.kv[0])
        for n_batch in self.batches[:-1]:
            found = plan(self.parts(kv, n_batch), self.over, n_ctx, free)
            part = 4 if self.host_experts else 16
            small = all(part * one.parts.get(GRAPHS, 0) <= one.free for one in found.devices)
            if found.fits and small and n_batch < 2 * n_ctx:
                return kv, n_batch
        return kv, self.batches[-1]

    def parts(self, kv: KvTypes, n_batch: int = 0) -> list[Part]:
        """All that will be allocated with such caches.

        Args:
            kv: Types of the caches.
            n_batch: Tokens of a prefill pass; 0: the smallest.
        """
        opened, weights, width, placement = self.opened, self.weights, self.width, self.placement
        device, target, draft, scorer = opened.device, opened.target, opened.draft, opened.scorer
        n_states, n_batch, window = self.n_states, n_batch or self.batches[-1], decode_window(opened.config)
        depth, taps = (draft.depth, draft.taps) if draft else (0, ())
        columns, spec = most_columns(width, n_states), replace(target.state_spec(), sides=placement.layers)
        # the widest passes: a prefill batch with its features, and the logits of a tree
        logits = 8 * max(columns, 1) * target.n_vocab
        prompts, trees = (lambda rows: 0), 0
        if not device.has_own_kernels:
            prompts, trees = composed_bytes(spec, n_batch, columns, depth + 1, n_states)
        head = placement.side(target.head_name)
        n_used = Keys(opened.file).count("expert_used_count", default=0, low=0)
        by_heads = copies_by_heads(device, (layer.head_dim for layer in spec.kv))

        def scratch(side: int, rows: int) -> int:
            if not placement.has_layers(side):  # the features of a batch are the largest
                return 8 * (n_batch * len(taps) + columns) * target.n_embd
            copied = spec.f16_copy(rows, kv.target, by_heads) if device.is_gpu else 0
            prompt = target.scratch_bytes(n_batch, rows, len(taps)) + copied + prompts(rows)
            if scorer and side == 0:
                prompt = max(prompt, scorer.scratch_bytes(device, n_batch, rows, kv.scorer))
            most = logits if side == head else 0
            if window is None:
                masked = 0
                if by_heads and columns > NARROW_COLUMNS:  # ggml's kernels unpack all heads
                    masked = target.scratch_bytes(columns, rows, len(taps)) + spec.f16_copy(rows, kv.target)
                return max(prompt, most, trees, masked)
            gathered = window.nbytes(max(columns, 1), spec, kv.target)
            return max(prompt, most + gathered, target.scratch_bytes(columns, rows, len(taps)) + gathered)

        def on(side: Device) -> list[Part]:
            is_drafts, n_weights = (
                draft is not None and side.index == placement.draft,
                weights.wanted_on(side),
            )
            feature_row = len(taps) * target.n_embd if is_drafts else 0
            own = spec.on(side.index)
            parts = [
                Part("target weights", lambda rows: n_weights),
                *state_parts(own, side.alignment, kv.target, columns, feature_row, n_states, n_batch),
            ]
            if side.index < device.n_ranks:
                parts.append(Part("tree mask", lambda rows: 2 * width * rows, "lower the budget (--budget)"))
            if draft and is_drafts:
                parts += draft.parts(side, kv.draft, n_states)
            if scorer and side.index == 0:
                parts += scorer.parts(side, n_batch, kv.scorer)
            here = {name: t for name, t in weights.items() if placement.side(name) == side.index}
            shapes = [
                (t.ne[0], t.ne[1]) for t in here.values() if t.ne[1] > 1 and t.ne[2] == 1 and t.type != F32
            ]
            experts = {(t.ne[0], t.ne[2]) for t in here.values() if t.ne[2] > 1}
            if feature_row:
                shapes.append((feature_row, target.n_embd))  # a draft takes the features in
            if scorer and side.index == 0:
                shapes += [shape for shape in scorer.model.tensors().values() if len(shape) == 2]
            if wide := wide_bytes(side, shapes, n_batch, experts, n_used):
                parts.append(Part("wide matmuls", lambda rows: wide, "lower the batch size (-b)"))
            if copied := copied_bytes(
                {name: n for name, n in weights.host_sizes.items() if name in here}, n_batch
            ):
                parts.append(Part(COPIED_EXPERTS, lambda rows: copied))
            parts.append(Part(GRAPHS, partial(scratch, side.index), "lower the batch size (-b)"))
            return [replace(part, side=side.index) for part in parts]

        return [part for side in device.sides if side is not device.host for part in on(side)]

    def usual(self) -> MemoryPlan:
        """The plan with the preferred cache types, in the smallest batches or, with copied experts, in batches that amortise the
        copies."""
        n_ctx = self.opened.usual_context
        n_batch = (
            _COPY_BATCH if self.host_experts and _COPY_BATCH in self.batches and n_ctx >= _COPY_BATCH else 0
        )
        return plan(self.parts(self.kv[0], n_batch), self.over, n_ctx, self.opened.free)

    @property
    def fits(self) -> bool:
        """Whether a plan fits with some of the cache types, in the smallest batches."""
        n_ctx, free = self.opened.usual_context, self.opened.free
        return any(plan(self.parts(types), self.over, n_ctx, free).fits for types in self.kv)

    def layers_to_keep(self) -> int:
        """The fewest layers whose experts must go to the host for the rest to fit; 0 if that does not help.

        The draft stays prepared, and not yet filled.
        """
        opened = self.opened
        sizes = expert_sizes(opened.file, opened.target.n_layers)
        if not sizes or not has_own_memory(opened.device):
            return 0

        def fits(layers: int) -> bool:
            found = memory_needs(opened, layers, prepare=False, sources=self.weights.sources)
            try:
                return found.usual().fits
            finally:
                found.weights.close()

        if not fits(len(sizes)):
            return 0
        on_host = self.host_experts.layers if self.host_experts else 0
        first = fewest_layers(sizes, sum(sizes[:on_host]) + sum(one.missing for one in self.usual().devices))
        return next(layers for layers in range(max(first, 1), len(sizes) + 1) if fits(layers))

    def checked(self) -> tuple[KvTypes, int, MemoryPlan]:
        """`plan` for the configured context and the free memory.

        Returns:
            Types of caches, tokens of a batch, and the plan.

        Raises:
            DeviceError: The plan does not fit the device's own memory.
        """
        device = self.opened.device
        try:
            kv, n_batch, memory = self.plan(self.opened.config.n_ctx, self.opened.free, device.is_gpu)
            if has_own_memory(device):
                memory.check(self.parts(kv, n_batch))
            return kv, n_batch, memory
        except DeviceError as error:
            if layers := self.layers_to_keep():
                raise DeviceError(
                    f"{error}; it fits with the experts of {layers} layers in the host's memory (--n-cpu-moe {layers})"
                ) from error
            n = sum(info.is_gpu for info in list_devices())
            if device.is_gpu and n > 1 and not self.where:
                more = f"{error}; there are {n} GPUs, and -sm layer shares the layers out among them"
                raise DeviceError(more) from error
            raise


def memory_needs(
    opened: Opened,
    layers: int | None = None,
    prepare: bool = True,
    sources: Mapping[str, Source] | None = None,
    read_there: Iterable[str] = (),
) -> MemoryNeeds:
    """Declare the weights and plan the memory.

    Args:
        opened: The pair and its device.
        layers: How many layers' experts the host keeps (None: as configured).
        prepare: False if the draft is already prepared.
        sources: The target's tensors, if already made: some targets copy tensors to reorder them.
        read_there: Names of tensors that stay in host memory, where the device reads them.

    Raises:
        ModelFileError: A tensor has a type that the device cannot multiply.
    """
    device, config, target, draft = opened.device, opened.config, opened.target, opened.draft
    layers = min((config.n_cpu_moe or 0) if layers is None else layers, target.n_layers)
    on_host = host_names(target.tensors(), layers) if has_own_memory(device) else []
    if on_host and device.host is None:
        device.join(open_cpu(config), is_host=True)
    scorer = opened.scorer.model.trunk.state_spec().kv if opened.scorer else ()
    heads, of_scorer = ([layer.head_dim for layer in layers] for layers in (target.state_spec().kv, scorer))
    kv = kv_types(config, device.is_gpu, heads, draft.head_dims if draft else (), of_scorer)
    depth = draft.depth if draft else 0
    width = tree_width(config.budget, depth) if draft or config.prompt_lookup else 0
    # a tree near the end of the context still needs rows for all its nodes, and the draft for its block
    over = max(width, 1) + depth + bool(draft)
    n_states = max(config.parallel, 1)
    sources = target.sources(opened.file) if sources is None else sources
    notes = draft.prepare(device.sides[draft_side(device, config)]) if draft and prepare else []
    where: tuple[str, ...] = ()
    placement = ONE_SIDE
    if sum(side is not device.host for side in device.sides) > 1:
        if device.n_ranks > 1:
            placement = in_ranks(target.n_layers, device.n_ranks)
        else:
            placement = _place(opened, sources, on_host, kv[0], over_all(over, n_states))
        where = tuple(
            placement.words(device, side.index, draft is not None)
            for side in device.sides
            if side is not device.host
        )
    sides = {name: side for name in sources if (side := placement.side(name))}
    weights = Weights(device, sources, on_host=on_host, read_there=read_there, sides=sides)
    experts = host_experts(weights, layers)
    if experts and experts.note:
        notes.append(experts.note)
    if config.n_cpu_moe and has_own_memory(device) and not on_host:
        notes.append(f"n_cpu_moe: {config.model} has no experts in its first {layers} layers")
    if config.gpu_memory is not None and not device.is_gpu:
        notes.append(
            "gpu_memory: the model is on the CPU, where this limits nothing; name a shorter context (-c)"
        )
    return MemoryNeeds(
        opened,
        weights,
        EMBEDDED_CONTEXT if config.model == EMBEDDED_TARGET else target.n_ctx_train,
        kv,
        (config.n_batch,) if config.n_batch else CHOICES if device.is_gpu else (CPU_BATCH,),
        width,
        over_all(over, n_states),
        over,
        notes,
        experts,
        n_states,
        placement,
        where,
    )


def _place(
    opened: Opened, sources: Mapping[str, Source], on_host: Iterable[str], kv: KvTypes, over: int
) -> Placement:
    """Distribute a target's layers, with their state at a usual context length, over the sides."""
    device, config, target, draft = opened.device, opened.config, opened.target, opened.draft
    n_states, rows = max(config.parallel, 1), cache_rows(opened.usual_context, over)
    spec, first, last = target.state_spec(), 0, draft_side(device, config)
    layers = [0] * target.n_layers
    taken = dict.fromkeys(range(len(device.sides)), 0)
    at = Placement(tuple(range(target.n_layers)))
    for name, s in sources.items():
        if name in on_host:
            continue
        if LAYER.match(name):
            layers[at.side(name)] += s.nbytes
        else:
            taken[first if name.startswith("token_embd") else last] += s.nbytes
    for i in range(target.n_layers):
        own = StateSpec((spec.layers[i],))
        layers[i] += sum(
            part.nbytes(rows) for part in state_parts(own, device.alignment, kv.target, 0, 0, n_states)
        )
    if draft:
        side = device.sides[last]
        taken[last] += sum(part.nbytes(rows) for part in draft.parts(side, kv.draft, n_states))
    if opened.scorer:
        taken[first] += sum(
            part.nbytes(rows) for part in opened.scorer.parts(device, config.n_batch, kv.scorer)
        )
    return place_layers(device, config, layers, taken, opened.free)


def over_all(over: int, n_states: int) -> int:
    """Cache rows beyond the context for several sequences, `over` for each; ranges begin at multiples of UNIT."""
    return over + (n_states - 1) * padded(over + UNIT - 1, UNIT)


def decode_window(config: EngineConfig) -> DecodeWindow | None:
    """The configured attention window while decoding; None if everything is seen."""
    return DecodeWindow(config.fa_window) if config.fa_window else None


def composed_bytes(
    spec: StateSpec, n_batch: int, columns: int, path: int, n_states: int
) -> tuple[Callable[[int], int], int]:
    """Scratch memory of a device without our kernels, where our operations are composed of ggml's.

    Args:
        spec: State of the target.
        n_batch: Tokens of a prefill pass.
        columns: Columns of the widest tree, 0 without one.
        path: Nodes of the longest committed path.
        n_states: Sequences.

    Returns:
        Additional bytes of a prefill batch, by cache rows, and the minimum bytes of a tree.
    """
    # of the layers that see all, and of those that see a window
    gathered = ring_view_rows([layer.window for layer in spec.kv], n_batch)

    def masks(rows: int) -> int:
        return stock.mask_bytes(n_batch, rows + gathered)

    if not spec.recurrent:
        return masks, 0
    conv, delta = spec.recurrent[0].conv, spec.recurrent[0].delta
    joined = 4 * conv.channels * (n_batch + conv.kernel)  # a convolution's window and columns
    sizes = delta.dim, delta.v_heads, delta.factors, path, n_states, len(spec.recurrent)
    tree = stock.conv_bytes(columns, conv.channels, conv.kernel) + stock.delta_bytes(columns, *sizes)
    return lambda rows: masks(rows) + joined, tree if columns else 0


def fitting_needs(opened: Opened) -> MemoryNeeds:
    """`memory_needs`, changed to fit a GPU.

    The draft gets fewer bits first; then, unless their number is given, the experts of the fewest sufficient layers go to
    host memory; last, where no cache types fit, the embeddings. The notes name all. A pair that still does not fit is
    returned anyway.

    Raises:
        ModelFileError: A tensor has a type that the device cannot multiply.
    """
    wanted, config = memory_needs(opened), opened.config
    if not has_own_memory(opened.device) or wanted.usual().fits:
        return wanted
    notes, sources = list(wanted.notes), wanted.weights.sources
    if opened.draft and opened.draft.narrow():
        wanted.weights.close()
        wanted = memory_needs(opened, sources=sources)
        notes = [
            *wanted.notes,
            f"{config.draft}: its weights become q8_0, as they are they do not fit beside the target",
        ]
    if config.n_cpu_moe is None and (layers := wanted.layers_to_keep()):
        wanted.weights.close()
        wanted = memory_needs(opened, layers, prepare=False, sources=sources)
        notes += [
            f"{config.model} does not fit the GPU: the experts of {layers} of its {opened.target.n_layers} layers stay in the "
            "host's memory and the CPU computes them (--n-cpu-moe)",
            *wanted.notes,
        ]
    names = [] if wanted.fits else embeddings(opened.device, opened.target, sources)
    if names:
        on_host = wanted.host_experts.layers if wanted.host_experts else None
        found = memory_needs(opened, on_host, prepare=False, sources=sources, read_there=names)
        wanted, other = (found, wanted) if found.fits else (wanted, found)
        other.weights.close()
        if wanted is found:
            size = sum(found.weights.read_there.values()) / MIB
            notes.append(
                f"{config.model} does not fit the GPU: its embedding ({', '.join(names)}, {size:.0f} MiB) stays in the host's "
                "memory, where the GPU reads the rows of each pass's tokens"
            )
    return replace(wanted, notes=notes)


def default_slots(device: Device, config: EngineConfig, wanted: MemoryNeeds) -> int:
    """Default number of slots: as many as cost a single sequence nothing.

    Cache types, batch size and context length stay as with one slot; a memory-limited context may lose a little. One slot
    where a pass cannot take several sequences (a window while decoding), and with `reproducible`, where output must not
    depend on the batch even by rounding.
    """
    if config.fa_window or config.reproducible:
        return 1
    free = free_on_sides(device, config.gpu_memory)

    def planned(n_states: int) -> tuple[KvTypes, int, MemoryPlan]:
        return wanted.for_sequences(n_states).plan(config.n_ctx, free, device.is_gpu)

    small = wanted.weights.wanted <= SMALL
    with suppress(DeviceError):  # not even one fits: loading reports it
        kv, n_batch, alone = planned(1)
        is_cut = not config.n_ctx and alone.n_ctx < wanted.longest
        least = (1 - SHORTER) * alone.n_ctx if is_cut else alone.n_ctx
        for n_states in ON_GPU if device.is_gpu else SMALL_ON_CPU if small else ON_CPU:
            with suppress(DeviceError):
                found = planned(n_states)
                if found[:2] == (kv, n_batch) and found[2].fits and found[2].n_ctx >= least:
                    return n_states
    return 1
