"""Memory plan: device memory that a configuration needs, before loading, and the longest context that fits.

A plan is a list of parts, each with its size for so many cache rows; every allocation is declared here. All
but the graphs' scratch memory is exact to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import DeviceError

MIB = 1 << 20
GRAPHS = "graphs (estimate)"  # part name in the plan, allocated as SCRATCH
SCRATCH = "scratch"
COPIED_EXPERTS = "lent experts"  # a part allocated with it; the name is a key in `dflash-doctor --json`
_ESTIMATED = (GRAPHS, COPIED_EXPERTS)
HOST_MARGIN = 1024 * MIB  # share of host memory left to other programs
MARGIN = 512 * MIB  # left free for the driver, cuBLAS, fragmentation, a desktop
ADVICE = "take a smaller quantisation of the model, or stay on the CPU (-ngl 0)"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the device memory: its bytes by cache rows, advice for when it is the largest, and its side."""

    name: str
    nbytes: Callable[[int], int]
    advice: str = ADVICE
    side: int = 0


@dataclass(frozen=True, slots=True)
class HostExperts:
    """Experts of the first `layers` layers in host memory: their bytes, and the host's free bytes."""

    layers: int
    nbytes: int
    free: int

    @property
    def is_short(self) -> bool:
        """Whether they exceed host memory, so that their pages are evicted and read again."""
        return self.nbytes + HOST_MARGIN > self.free

    @property
    def note(self) -> str:
        """A warning if they exceed host memory, else empty."""
        if not self.is_short:
            return ""
        return (
            f"the experts of {self.layers} layers take {self.nbytes / MIB:.0f} MiB and the host has {self.free / MIB:.0f} free: "
            "they are read from the file as they are needed, which is slower"
        )

    def __str__(self) -> str:
        return f"experts of {self.layers} layers on the host, {self.nbytes / MIB:.0f} of {self.free / MIB:.0f} MiB free"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part for `n_ctx` tokens of context, on a device with `free` bytes.

    Of several devices this is the first one's plan.

    Attributes:
        host_experts: Experts in host memory.
        read_there: Bytes of embeddings in host memory, which the device reads there.
        beside: The plans of the other devices.
        where: Description of each device and its parts.
    """

    n_ctx: int
    parts: dict[str, int]
    free: int
    host_experts: HostExperts | None = None
    read_there: int = 0
    beside: tuple[MemoryPlan, ...] = ()
    where: str = ""

    @property
    def total(self) -> int:
        """Bytes of all parts on this device."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the parts fit on every device."""
        return all(one.missing <= 0 for one in self.devices)

    @property
    def missing(self) -> int:
        """Bytes missing on this device (negative: to spare); 0 for a device without parts."""
        return self.total + MARGIN - self.free if self.total else 0

    @property
    def devices(self) -> tuple[MemoryPlan, ...]:
        """This plan and those of further devices."""
        return (self, *self.beside)

    @property
    def all_parts(self) -> dict[str, int]:
        """Bytes by part on all devices; names of parts on further devices include the device."""
        found = dict(self.parts)
        for plan in self.beside:
            found |= {part_on(name, plan.where): size for name, size in plan.parts.items() if size}
        return found

    def check(self, parts: Sequence[Part]) -> None:
        """Refuse a plan that does not fit.

        Raises:
            DeviceError: It names the largest part and what to lower.
        """
        side, short = max(enumerate(self.devices), key=lambda one: one[1].missing)
        if short.missing <= 0:
            return
        biggest = max((p for p in parts if p.side == side), key=lambda part: short.parts[part.name])
        raise DeviceError(
            f"not enough device memory for {self} (and {MARGIN // MIB} MiB of margin); the largest part is "
            f"{part_on(biggest.name, short.where) if side else biggest.name}: {biggest.advice}"
        )

    def against(self, allocated: Mapping[str, int]) -> str:
        """Comparison of allocated and planned memory, for messages. Scratch memory is only an estimate; parts missing in
        `allocated` are the device's own."""
        parts = self.all_parts
        same = sum(size for name, size in allocated.items() if size == parts.get(name))
        planned = dict(parts)
        for name in [name for name in planned if name.startswith(_ESTIMATED)]:
            where = name.removeprefix(GRAPHS).removeprefix(COPIED_EXPERTS)
            planned[SCRATCH + where] = planned.get(SCRATCH + where, 0) + planned[name]
        others = [
            f"{name} {size / MIB:.1f} MiB, planned {planned.get(name, 0) / MIB:.1f}"
            for name, size in allocated.items()
            if size != parts.get(name)
        ]
        elsewhere = [
            f"{name} {size / MIB:.1f} MiB planned, not counted"
            for name, size in parts.items()
            if size and not name.startswith(_ESTIMATED) and name not in allocated
        ]
        return "; ".join([f"{same / MIB:.0f} MiB allocated as planned", *others, *elsewhere])

    def __str__(self) -> str:
        devices = "; on ".join(plan._sizes for plan in self.devices if plan.total or plan is self)
        kept = f"; {self.host_experts}" if self.host_experts else ""
        if self.read_there:
            kept += f"; embedding on the host, {self.read_there / MIB:.0f} MiB"
        return f"{self.n_ctx} tokens of context: {'on ' if self.where else ''}{devices}{kept}"

    @property
    def _sizes(self) -> str:
        parts = ", ".join(f"{name} {size / MIB:.0f}" for name, size in self.parts.items() if size)
        where = f"{self.where.replace(': ', ' (', 1)}): " if self.where else ""
        return f"{where}{parts}; {self.total / MIB:.0f} of {self.free / MIB:.0f} MiB free"


def part_on(name: str, where: str) -> str:
    """The name of a part on a further device.

    Args:
        where: Description of the device and its parts.
    """
    return f"{name} on {where.split(':')[0]}"


def padded(size: int, unit: int) -> int:
    """Bytes that a tensor of `size` bytes takes in a buffer whose tensors begin at multiples of `unit`."""
    return -(-size // unit) * unit


def cache_rows(n_ctx: int, over: int) -> int:
    """Cache rows for `n_ctx` tokens with `over` rows beyond the committed ones, in steps of 256."""
    return padded(n_ctx + over, 256)


def plan(parts: Sequence[Part], over: int, n_ctx: int, free: int | Sequence[int]) -> MemoryPlan:
    """The plan for `n_ctx` tokens.

    Args:
        free: Bytes of the device, or of each of several.
    """
    rows = cache_rows(n_ctx, over)
    sizes = [free] if isinstance(free, int) else free
    first, *others = (
        MemoryPlan(n_ctx, {part.name: part.nbytes(rows) for part in parts if part.side == side}, size)
        for side, size in enumerate(sizes)
    )
    return replace(first, beside=tuple(others))


def fit(
    parts: Sequence[Part], over: int, free: int | Sequence[int], longest: int, share: float = 1.0
) -> MemoryPlan:
    """The plan for the longest context up to `longest` that fits into `free` bytes, or into each of several devices.

    Args:
        share: Share of the remaining memory for the context, if other programs use the same memory; 4,096 tokens are then
            always allowed, since unused rows take no memory.

    Raises:
        DeviceError: Nothing fits.
    """
    least = min(256, longest)
    if share < 1:
        least = min(4096, longest)
        fixed = [one.total + MARGIN for one in plan(parts, over, 0, free).devices]
        sizes = [free] if isinstance(free, int) else free
        room: Sequence[int] = [
            of + int(share * max(size - of, 0)) for of, size in zip(fixed, sizes, strict=True)
        ]
    else:
        room = [free] if isinstance(free, int) else free

    def fits(n_ctx: int) -> bool:
        return plan(parts, over, n_ctx, room).fits

    if fits(longest):
        return plan(parts, over, longest, free)
    low, high = 0, longest // 256
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * 256) else (low, middle - 1)
    found = plan(parts, over, max(low * 256, least), free)
    if share == 1:
        found.check(parts)
    return found
