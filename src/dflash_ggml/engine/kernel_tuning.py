"""Kernel tuning: matmuls of few columns on a GPU for which our kernels were not tuned, measured against ggml's own.

The kernels (`patches/`, mmn) were chosen on compute capability 9.0. Elsewhere they are timed against ggml's own per weight type
and width, over a sample of the model's own weights.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeviceError
from ..ggml.bindings import Tensor, ffi, lib
from ..ggml.device import F32, NARROW_COLUMNS, Device
from ..ggml.graph import Graph
from ..ggml.store import Store, Workspace
from ..state.memory import padded

TUNED = (9, 0)  # compute capability
NEEDED = (8, 0)  # below this there are no kernels of ours
WIDE = {(8, 0), (9, 0), (10, 0), (10, 3)}  # where matmuls of more than 64 columns are ours (`patches/`, mmw)
_WIDE_SCRATCH = 192 << 20  # MMW_SCRATCH
_CUBLAS = 32 << 20  # that ggml gives it to work in
_SORTED = (9, 0)  # where matmuls of many columns with experts sort them (`patches/`, mmw-product)
_RANGE_HEADS = (64, 128, 256, 512)  # that attention over ranges has on CUDA
_PARTS = 17 << 20  # unfinished tiles of that, one a multiprocessor
TYPES = {
    ffi.string(lib.ggml_type_name(t)).decode(): t
    for t in (
        lib.GGML_TYPE_Q4_0,
        lib.GGML_TYPE_Q8_0,
        lib.GGML_TYPE_Q4_K,
        lib.GGML_TYPE_Q5_K,
        lib.GGML_TYPE_Q6_K,
        lib.GGML_TYPE_IQ4_XS,
        lib.GGML_TYPE_F16,
        lib.GGML_TYPE_BF16,
        lib.GGML_TYPE_Q4_1,
        lib.GGML_TYPE_Q5_0,
        lib.GGML_TYPE_IQ4_NL,
        lib.GGML_TYPE_NVFP4,
        lib.GGML_TYPE_MXFP4,
        lib.GGML_TYPE_Q2_K,
        lib.GGML_TYPE_Q3_K,
        lib.GGML_TYPE_IQ3_XXS,
    )
}
# where matmuls of prompts can run with 8-bit floats (`patches/`, mmw-e4m3): types of the weights, and columns from which they do
FP8_TYPES = frozenset(
    TYPES[name]
    for name in ("q4_0", "q5_0", "q8_0", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4")
)
FP8_COLUMNS = 384
_LAYER = re.compile(r"\bblk\.\d+\.")
WIDTHS = (8, 4, 16, 32, 24, 1, 2, 6, 3, 64, 48)  # ends of steps, those of the usual trees first
STOCK_STEP = 8  # columns up to which ggml multiplies column by column
NOISE = 0.03  # minimum margin by which ggml's own must win
SAMPLE_BYTES = 256 << 20  # more than any GPU's L2 cache: a pass reads its weights from memory
SAMPLE_MATMULS = 16
GRAIN = 64  # our kernels take rows of a multiple of so many values
_CLEAR = 0.8  # share of ggml's time: where ours are that much faster, one repetition is enough
_ROUNDS, _WARM_UP, _RUNS = 5, 3, 4  # CUDA captures a graph at its second run
_MEASURED = ("narrow_ms", "stock_ms", "spread")
log = logging.getLogger("dflash_ggml")


class StockRange(NamedTuple):
    """Widths, both ends included, at which weights of a type are left to ggml's own kernels."""

    type: str
    min_width: int
    max_width: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of sampled matmuls of one weight type (ggml's name): medians with our kernels and with ggml's own, and the relative
    spread of the repetitions."""

    type: str
    width: int
    narrow_ms: float
    stock_ms: float
    spread: float = 0.0

    @classmethod
    def of(cls, kind: str, width: int, narrow: Sequence[float], stock: Sequence[float]) -> Timing:
        """From the milliseconds of some repetitions; the slowest of each kind is left out of the spread as disturbed."""
        spread = max(sorted(ms)[max(0, len(ms) - 2)] / min(ms) - 1 for ms in (narrow, stock))
        return cls(kind, width, median(narrow), median(stock), spread)

    @property
    def stock_wins(self) -> bool:
        """Whether ggml's own kernels are faster by more than the noise."""
        return self.stock_ms < (1 - max(NOISE, self.spread)) * self.narrow_ms


@dataclass(frozen=True, slots=True)
class MatmulTable:
    """Measured times; without any, our kernels are used everywhere, as on the GPU they were tuned on."""

    timings: tuple[Timing, ...] = ()

    def stock(self) -> list[StockRange]:
        """Where ggml's own kernels are used.

        A measured width decides for the widths down to the next smaller measured one: up to the end of a tile ours cost the
        same, and ggml's no less for more columns. ggml switches kernels beyond 8 columns, so no width decides across that;
        above it the widest decides for all wider ones too.
        """
        found: list[StockRange] = []
        for kind in dict.fromkeys(t.type for t in self.timings):
            rows = {t.width: t for t in self.timings if t.type == kind}
            end = 0
            for width in sorted(rows):
                begin = end + 1 if width <= STOCK_STEP else max(end, STOCK_STEP) + 1
                end = NARROW_COLUMNS if width == max(rows) > STOCK_STEP else width
                if not rows[width].stock_wins:
                    continue
                if found and found[-1].type == kind and found[-1].max_width == begin - 1:
                    begin = found.pop().min_width
                found.append(StockRange(kind, begin, end))
        return found

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data for `json.dumps`."""
        return [asdict(t) for t in self.timings]

    @classmethod
    def from_json(cls, rows: Any) -> MatmulTable:
        """What `to_json` gave.

        Raises:
            ValueError: For anything else.
        """
        try:
            timings = tuple(
                Timing(str(r["type"]), int(r["width"]), *(float(r[name]) for name in _MEASURED)) for r in rows
            )
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"table of matmuls: {error!r}; measure again") from error
        for t in timings:
            if t.type not in TYPES or not 1 <= t.width <= NARROW_COLUMNS:
                raise ValueError(f"table of matmuls: type {t.type}, width {t.width}; measure again")
        return cls(timings)


def wide_bytes(
    device: Device,
    shapes: Iterable[tuple[int, int]],
    n_batch: int,
    experts: Iterable[tuple[int, int]] = (),
    n_used: int = 0,
) -> int:
    """Memory that matmuls of a prefill batch take beside the graphs.

    A matrix as float16 (or an equal part of a larger one in whole 128 rows), the widest input as float16, and cuBLAS's
    workspace; or the widest input of experts, sorted, in float16, if that is more.

    Args:
        shapes: Columns (k) and rows of the matrices.
        experts: Columns (k) and number of the matrices that are stacked.
        n_used: Experts of a token.
    """
    if n_batch <= NARROW_COLUMNS or device.capability not in WIDE:
        return 0
    scratch = widest = 0
    for k, rows in shapes:
        parts = -(-2 * k * rows // _WIDE_SCRATCH)
        scratch = max(scratch, 2 * k * min(rows, padded(-(-rows // parts), 128)))
        widest = max(widest, k)
    most = scratch + 2 * widest * n_batch
    if device.capability == _SORTED:
        pairs = n_batch * n_used
        for k, n in experts:
            most = max(most, 2 * padded(k, 256) * (padded(pairs, 8) + 8 * min(n, pairs)) + _PARTS)
    return most + _CUBLAS if most else 0


def copies_by_heads(device: Device, head_dims: Iterable[int]) -> bool:
    """Whether a GPU unpacks quantised caches for prompts alone, some heads at a time. Without kernels of ours ggml's unpack them
    for trees too, and whole."""
    return (device.capability or (0, 0)) >= NEEDED and all(d in _RANGE_HEADS for d in head_dims)


def fp8_matrices(device: Device, weights: Mapping[str, Tensor], n_batch: int) -> tuple[list[Tensor], str]:
    """The matrices of layers whose matmuls can run with 8-bit floats, and if there are none why.

    Args:
        weights: By tensor name. The output matrix and stacks of experts are left out.
        n_batch: Tokens of the longest prefill pass.
    """
    if not any(side.has_fp8_matmuls for side in device.sides):
        return [], "it takes a Hopper GPU and a build with CUDA 12.9 or later"
    if n_batch < FP8_COLUMNS:
        return [], f"it takes batches of {FP8_COLUMNS} tokens and more, these have {n_batch} (-b)"
    found = [
        w
        for name, w in weights.items()
        if w.type in FP8_TYPES
        and w.ne[2] == 1
        and w.ne[0] % 64 == 0
        and w.ne[1] % 16 == 0
        and _LAYER.search(name)
    ]
    return found, "" if found else "no matrix has a type and a shape with such kernels"


def worth_measuring(device: Device) -> bool:
    """Whether this GPU runs our kernels but is not the one they were tuned on."""
    capability = device.capability
    return capability is not None and capability >= NEEDED and capability != TUNED


def without_kernels(device: Device, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Share of a pass's weight bytes whose types have no kernels of ours, by ggml's name of the type, largest first.

    Empty on a device that has no kernels of ours at all.

    Args:
        weights: By tensor name.
    """
    if (device.capability or (0, 0)) < NEEDED:
        return {}
    sizes: Counter[int] = Counter()
    for name, t in weights.items():
        is_lookup = name == "token_embd.weight" and "output.weight" in weights
        if t.ne[1] > 1 and t.type != F32 and not is_lookup and device.owner(t) is not device.host:
            sizes[t.type] += lib.ggml_nbytes(t)
    others = [(kind, size) for kind, size in sizes.most_common() if kind not in TYPES.values()]
    return {ffi.string(lib.ggml_type_name(kind)).decode(): size / sizes.total() for kind, size in others}


def apply(device: Device, table: MatmulTable) -> None:
    """Let the device choose its kernels by `table`, for all graphs from now on. Captured CUDA graphs are dropped."""
    device.use_narrow_matmuls(True)
    for kind, min_width, max_width in table.stock():
        device.use_narrow_matmuls(False, TYPES[kind], min_width, max_width)


def measure_matmuls(
    device: Device,
    tensors: Iterable[Tensor],
    seconds: float,
    widths: Sequence[int] = WIDTHS,
    clock: Callable[[], float] = time.perf_counter,
) -> MatmulTable:
    """Time both kinds of kernels over samples of the weights.

    The most useful widths come first, at each the type with most bytes; the rest stays unmeasured when time or memory runs
    out. Our kernels are on everywhere afterwards: `apply` puts the result into effect.

    Args:
        device: Where they are timed.
        tensors: The weights on it.
        seconds: About how long to measure.
    """
    began, dearest, timings = clock(), 0.0, []
    samples = sample(tensors)
    if not samples:
        return MatmulTable()
    bench = Bench(device, [w for chosen in samples.values() for w in chosen], max(widths), clock)
    try:
        bench.allocate()
        for width, kind in ((width, kind) for width in widths for kind in samples):
            start = clock()
            if start - began + dearest >= seconds:
                break
            timings.append(Timing.of(kind, width, *bench.compare(samples[kind], width)))
            dearest = max(dearest, clock() - start)
    except DeviceError as error:
        log.info("narrow matmuls: measured %d, then %s", len(timings), error)
    finally:
        bench.close()
        device.use_narrow_matmuls(True)
    return MatmulTable(tuple(timings))


def sample(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """The first matrices (whole layers) of each type that we have kernels for, most bytes first.

    A matrix larger than the whole sample, such as an output head, is taken only if there is nothing else.
    """
    names = {code: name for name, code in TYPES.items()}
    found: dict[str, list[Tensor]] = {}
    for t in tensors:
        if t.type in names and t.ne[1] > 1 and t.ne[2] * t.ne[3] == 1 and t.ne[0] % GRAIN == 0:
            found.setdefault(names[t.type], []).append(t)
    found = dict(sorted(found.items(), key=lambda item: -sum(map(lib.ggml_nbytes, item[1]))))
    return {kind: list(_within(matrices)) for kind, matrices in found.items()}


def _within(matrices: list[Tensor]) -> Iterator[Tensor]:
    fitting = [m for m in matrices if lib.ggml_nbytes(m) <= SAMPLE_BYTES]
    left = SAMPLE_BYTES
    for m in fitting[:SAMPLE_MATMULS] or matrices[:1]:
        if left <= 0:
            return
        left -= lib.ggml_nbytes(m)
        yield m


class Bench:
    """Matmuls on a device with inputs of its own, timed with our kernels and with ggml's.

    Args:
        matrices: All that will be multiplied.
    """

    def __init__(
        self, device: Device, matrices: list[Tensor], max_width: int, clock: Callable[[], float]
    ) -> None:
        self._device, self._clock = device, clock
        self._is_warm = False  # an idle GPU's clocks rise with the first matmuls
        self._workspace = Workspace(device)
        self._store = Store(device, 1)
        self._x = self._store.tensor(F32, max(m.ne[0] for m in matrices) * max_width)

    def allocate(self) -> None:
        """Bring an input for all to the device.

        Raises:
            DeviceError: It does not fit.
        """
        self._store.allocate(clear=False)
        self._device.write(self._x, np.random.default_rng(0).standard_normal(self._x.ne[0], np.float32))

    def compare(self, matrices: list[Tensor], width: int) -> tuple[list[float], list[float]]:
        """Milliseconds of `matrices`, of one type, times `width` columns: repetitions with our kernels, and with ggml's own.

        Raises:
            DeviceError: The results do not fit.
        """
        graph = Graph(self._device, 4 * len(matrices))
        x = None
        for i, w in enumerate(matrices):
            # neighbours share an input, as gate and up do
            if x is None or i % 2 == 0 or x.ne[0] != w.ne[0]:
                x = graph.view(self._x, (w.ne[0], width))
            graph.expand(graph.mul_mat(w, x))
        try:
            graph.place(self._workspace)
            for _ in range(0 if self._is_warm else _ROUNDS):
                self._run(graph)
            self._is_warm = True
            times: dict[bool, list[float]] = {True: [], False: []}
            for round_ in range(_ROUNDS):
                for narrow in (True, False) if round_ % 2 == 0 else (False, True):
                    self._device.use_narrow_matmuls(narrow, matrices[0].type)
                    times[narrow].append(self._run(graph))
                if times[True][0] < _CLEAR * times[False][0]:
                    break
        finally:
            graph.close()
        return times[True], times[False]

    def _run(self, graph: Graph) -> float:
        for _ in range(_WARM_UP):
            graph.run()
        self._device.synchronize()
        began = self._clock()
        for _ in range(_RUNS):
            graph.run()
        self._device.synchronize()
        return (self._clock() - began) / _RUNS * 1e3

    def close(self) -> None:
        """Free inputs and results."""
        self._workspace.close()
        self._store.close()
