"""Thin layer over ggml graphs: inputs filled by numpy, memory, one call to run. Operations are in operations.py."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import DeviceError
from .bindings import Tensor, ffi, lib
from .device import I32, NUMPY_TYPES, Device, key
from .operations import Operations
from .split import Division, Split
from .store import Store, Workspace, is_host

_GATHERED = 1 << 16  # bytes up to which inputs are uploaded in one copy; prompt masks are larger


class Input:
    """An input tensor and its numpy array (reverse dimension order), which exists once the graph is placed."""

    def __init__(self, tensor) -> None:
        self.tensor = tensor
        self.array: np.ndarray = np.empty(0)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return lib.ggml_nbytes(self.tensor)

    def use(self, memory: np.ndarray) -> None:
        """Use these bytes as the array."""
        self.array = memory.view(NUMPY_TYPES[self.tensor.type]).reshape(_dims(self.tensor))


class Graph(Operations):
    """One computation of fixed shape, built once and run many times.

    Everything that changes between runs goes through `input` tensors; results are read from `outputs`, declared by `output`.
    """

    def __init__(self, device: Device, max_nodes: int = 8192) -> None:
        self.device = device = device.main
        # a composed operation has up to 40 nodes, for each layer of a commit
        if not device.has_own_kernels:
            max_nodes = 4 * max_nodes + 4096
        graphs = min(len(device.sides), 2)  # as built, and as divided among sides
        size = 2 * max_nodes * lib.ggml_tensor_overhead() + graphs * lib.ggml_graph_overhead_custom(
            max_nodes, False
        )
        self._arena = ffi.from_buffer("char[]", _pages(size), require_writable=True)
        self.ctx = lib.ggml_init({"mem_size": size, "mem_buffer": self._arena, "no_alloc": True})
        self._max_nodes = max_nodes
        self.cgraph = lib.ggml_new_graph_custom(self.ctx, max_nodes, False)
        self.inputs: dict[str, Input] = {}
        self.outputs: dict[str, Tensor] = {}
        # functions that set inputs added by others (the draft), called with the sequence
        self.fillers: list[Callable[[Any], None]] = []
        self.runs = 0
        self._derived: dict[tuple, list] = {}  # derived tensors by kind and sources, see `derive`
        self._placings: list[Callable[[], None]] = []  # functions to call once there is memory:
        self._derivations: list[Callable[[], object]] = []
        self._crossings: dict[int, int] = {}  # crossing nodes, see `to_host`
        self._split: Split | None = None
        self._own_stores: list[Store] = []
        self._replicas: dict[int, dict[int, Tensor]] = {}  # replicated inputs by side
        self._uploads: list[tuple] = []  # backend, tensor, its bytes on the host, size
        self._workspace: Workspace | None = None
        self._generation = -1

    # ---- life of a graph

    def input(self, name: str, type_: int, *ne: int) -> Tensor:
        """An input tensor, filled from `inputs[name].array` before each run; ranks share one by name."""
        if (known := self.inputs.get(name)) is not None:
            assert known.tensor.type == type_ and tuple(known.tensor.ne) == (*ne, 1, 1, 1)[:4], name
            return known.tensor
        t = lib.ggml_new_tensor(self.ctx, type_, len(ne), ffi.new("int64_t[]", ne))
        lib.ggml_set_input(t)
        lib.ggml_set_name(t, name.encode())
        self.inputs[name] = Input(t)
        return t

    def derive(
        self,
        kind: str,
        shapes: Sequence[tuple[int, tuple[int, ...]]],
        fill: Callable[..., object],
        *sources: Tensor | None,
    ) -> list[Tensor]:
        """Inputs that the host computes from others before each run.

        Args:
            kind: Their kind; derived once per kind and sources.
            shapes: Type and shape of each.
            fill: Called with their arrays, zeros at first, and one for each source, all in reverse dimension order.
            sources: Inputs, views of such, or None.
        """
        at = (kind, *shapes, *(t if t is None else (key(_root(t)), t.view_offs, *t.ne) for t in sources))
        if at not in self._derived:
            names = [f"derived {len(self._derived)}.{i} {kind}" for i in range(len(shapes))]
            self._derived[at] = [self.input(name, type_, *ne) for name, (type_, ne) in zip(names, shapes)]
            roots = [None if t is None else self._input_of(t) for t in sources]

            def values() -> None:
                outs = [self.inputs[name].array.reshape(ne[::-1]) for name, (_, ne) in zip(names, shapes)]
                found = [None if i is None else _values(i, t) for i, t in zip(roots, sources)]
                self._derivations.append(partial(fill, outs, *found))

            self._placings.append(values)
        return self._derived[at]

    def aligned(self, t: Tensor) -> Tensor:
        """`t`, a view of an input, or a copy made by the host if the device's kernels do not support the view's offset."""
        if t.view_src == ffi.NULL or t.view_offs % self.device.view_alignment == 0:
            return t
        return self.derive("copy", [(t.type, tuple(t.ne))], _copy, t)[0]

    def _input_of(self, t) -> Input:
        root = key(_root(t))
        for i in self.inputs.values():
            if key(i.tensor) == root:
                return i
        raise ValueError(f"'{ffi.string(t.name).decode()}' is not an input: nothing can be derived from it")

    def output(self, t: Tensor, name: str = "") -> Tensor:
        """Add `t` to the graph as an output: its memory is kept until the graph has run; read it from `outputs[name]`."""
        lib.ggml_set_output(t)
        if name:
            lib.ggml_set_name(t, name.encode())
            self.outputs[name] = t
        return self.expand(t)

    def expand(self, t: Tensor) -> Tensor:
        """Add `t` and all it depends on to the graph, in this order."""
        lib.ggml_build_forward_expand(self.cgraph, t)
        return t

    def allow_fp8(self, weights: Iterable[Tensor]) -> int:
        """Allow matmuls with these matrices to round both operands to 8 bits; call it before `place`.

        Returns:
            The number of matmuls.
        """
        matrices, found = {key(w) for w in weights}, 0
        for i in range(lib.ggml_graph_n_nodes(self.cgraph)):
            node = lib.ggml_graph_node(self.cgraph, i)
            if key(node.src[0]) in matrices:  # other operations have no such setting
                found += all(lib.ggml_prec_set_src(node, lib.GGML_PREC_Q8, source) for source in (0, 1))
        return found

    def place(self, workspace: Workspace) -> Graph:
        """Give the graph its memory, once.

        Raises:
            DeviceError: There is not enough, or the device lacks an operation.
        """
        if self._workspace is not None:
            raise ValueError("a graph is placed once; build another")
        if len(self.device.sides) > 1 and self._split is None:
            self._divide()
        elif not self.device.has_own_kernels:
            # graphs are built in the order of CUDA's kernels
            lib.dflash_graph_optimize(self.device.backend, self.cgraph)
        for i in range(lib.ggml_graph_n_nodes(self.cgraph)):
            node = lib.ggml_graph_node(self.cgraph, i)
            owner = self._split.owner(i) if self._split else self.device
            if owner is not None and not lib.ggml_backend_dev_supports_op(owner.info.handle, node):
                op = ffi.string(lib.ggml_op_desc(node)).decode()
                raise DeviceError(
                    f"{owner.info.name}: operation {op} of '{ffi.string(node.name).decode()}' is not supported there"
                )
        small = [i for i in self.inputs.values() if self._is_small(i)]
        self._gather(small)
        self._generation = workspace.place(self.cgraph, self._split.sides if self._split else None)
        # with an identity a CUDA graph is replayed without comparing every node
        lib.dflash_graph_set_uid(self.cgraph)
        if self._split:
            self._split.cut()
        self._workspace = workspace
        for large in self.inputs.values():
            if large not in small:
                large.use(self._host_memory(large.tensor))
        for values in self._placings:
            values()
        return self

    def _is_small(self, i: Input) -> bool:
        """Whether an input is uploaded together with others. For ranks all are: a crossing would wait for the other rank."""
        return i.nbytes <= _GATHERED or self.device.n_ranks > 1

    def _divide(self) -> None:
        """Divide the graph among the device's sides."""
        large = {key(i.tensor) for i in self.inputs.values() if not self._is_small(i)}

        def replica(t, side: int):
            if key(t) in large:
                return None
            twin = lib.ggml_new_tensor(self.ctx, t.type, 4, t.ne)
            lib.ggml_set_input(twin)
            self._replicas.setdefault(side, {})[key(t)] = twin
            return twin

        found = Division(self.device, self.ctx, self.cgraph, self._crossings, self._max_nodes, replica)
        self.cgraph = found.cgraph
        if found.crossings or any(found.sides):
            self._split = Split(self.device, found.cgraph, found.sides, found.crossings)

    def _gather(self, inputs: list[Input]) -> None:
        """Allocate inputs contiguously, so that one copy uploads them all."""
        unit = self.device.alignment
        ends = np.cumsum([-(-i.nbytes // unit) * unit for i in inputs]).tolist()
        if not ends:
            return
        whole = self._inputs_on(self.device, ends[-1])
        memory = self._host_memory(whole)
        for i, at in zip(inputs, [0, *ends]):
            self._put(i.tensor, whole, at)
            i.use(memory[at : at + i.nbytes])
        for side, replicas in self._replicas.items():
            there = self._inputs_on(self.device.sides[side], ends[-1])
            self._upload(there, memory, self.device.sides[side])
            for i, at in zip(inputs, [0, *ends]):
                if (twin := replicas.get(key(i.tensor))) is not None:
                    self._put(twin, there, at)

    def _inputs_on(self, side: Device, size: int):
        """A tensor on a side for gathered inputs."""
        store = Store(side, 1)
        self._own_stores.append(store)
        whole = store.tensor(I32, -(-size // 4), name="inputs")
        store.allocate()
        return whole

    def _put(self, t, whole, at: int) -> None:
        address = ffi.cast("char *", whole.data) + at
        if lib.ggml_backend_tensor_alloc(whole.buffer, t, address) != lib.GGML_STATUS_SUCCESS:
            raise DeviceError(f"{self.device.info.name}: an input could not be placed")

    def _host_memory(self, t) -> np.ndarray:
        """The bytes of an input tensor: its own memory on the CPU, else an array that `run` uploads. An input that no operation
        reads (a mask in a model without attention) is neither allocated on the device nor uploaded."""
        if t.buffer == ffi.NULL and t.view_src == ffi.NULL:
            return np.zeros(lib.ggml_nbytes(t), np.uint8)
        if is_host(t):
            return np.frombuffer(ffi.buffer(t.data, lib.ggml_nbytes(t)), np.uint8)
        memory = np.zeros(lib.ggml_nbytes(t), np.uint8)
        self._upload(t, memory, self.device)
        return memory

    def _upload(self, t, memory: np.ndarray, side: Device) -> None:
        """Upload bytes to a tensor of this side before each run."""
        self._uploads.append((side.backend, t, ffi.from_buffer(memory), memory.nbytes))

    @property
    def valid(self) -> bool:
        """Whether the graph's memory is still where it was placed."""
        return self._workspace is not None and self._generation == self._workspace.generation

    @property
    def is_cold(self) -> bool:
        """Whether the next run takes longer than usual: the first touches memory, and a GPU captures one of the next two."""
        return self.runs < (3 if self.device.is_gpu else 2)

    @property
    def n_nodes(self) -> int:
        """Number of nodes before division among sides."""
        return lib.ggml_graph_n_nodes(self.cgraph)

    def run(self) -> None:
        """Upload the inputs and compute; a GPU may still be running on return, and reading a result waits for it.

        Raises:
            DeviceError: The backend fails.
        """
        for derive in self._derivations:
            derive()
        with self.device.lock:
            for backend, tensor, memory, size in self._uploads:
                lib.ggml_backend_tensor_set_async(backend, tensor, memory, 0, size)
            if self._split:
                self._split.run()
            else:
                self.device.run(self.cgraph)
        self.runs += 1

    def close(self) -> None:
        """Free the graph; persistent tensors stay."""
        self.fillers.clear()
        self._placings.clear()
        self._derivations.clear()
        if self._split:
            self._split.close()
        for store in self._own_stores:
            store.close()
        if self.ctx != ffi.NULL:
            lib.ggml_free(self.ctx)
            self.ctx = ffi.NULL

    # ---- the CPU beside a GPU

    def is_on_host(self, t: Tensor) -> bool:
        """Whether `t` is a weight in host memory; operations with it need `to_host` and `to_device`."""
        host = self.device.host
        return host is not None and self.device.side(t) == host.index

    def to_host(self, *results: Tensor) -> list[Tensor]:
        """Copies of device results on the host; operations on them run on the host."""
        assert self.device.host is not None
        host = self.device.host.index
        # pack all first, so that the device is synchronised once
        packed = [self.expand(t if lib.ggml_is_contiguous(t) else self.cont(t)) for t in results]
        return [self._cross(t, host) for t in packed]

    def to_device(self, t: Tensor, beside: Tensor | None = None) -> Tensor:
        """A copy of `t` (a host result or a weight in host memory) on the device, or on the side of the weight `beside`."""
        # kernels may read beyond a matrix: scratch memory is padded, and CUDA's matmuls clear the padding
        side = 0 if beside is None else self.device.side(beside) or 0
        return self._cross(t if lib.ggml_is_contiguous(t) else self.cont(t), side)

    def _cross(self, t, side: int):
        twin = lib.ggml_cont(self.ctx, t)
        self._crossings[key(twin)] = side
        return self.expand(twin)


def _pages(size: int) -> mmap.mmap:
    """Memory mapping for a graph, of which ggml touches little; on the heap, short-lived graphs would fragment it.
    Raises DeviceError.
    """
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    try:
        return mmap.mmap(-1, size, **private)
    except OSError as error:
        raise DeviceError(
            f"no room for a graph of {size / 2**20:.1f} MiB; lower the context (-c) or the budget, or take a smaller model"
        ) from error


def packed(graph: Graph, name: str, *lengths: int) -> list[Tensor]:
    """One int32 input divided into contiguous views, so that a step fills its small arrays as one."""
    whole = graph.input(name, I32, sum(lengths))
    views, at = [], 0
    for n in lengths:
        views.append(graph.aligned(graph.view(whole, (n,), offset=4 * at)))
        at += n
    return views


def _root(t):
    return t if t.view_src == ffi.NULL else t.view_src


def _values(source: Input, t) -> np.ndarray:
    """The host's values of an input, or of its contiguous view `t`."""
    flat, dims = source.array.reshape(-1), _dims(t)
    first = t.view_offs // flat.itemsize
    return flat[first : first + math.prod(dims)].reshape(dims)


def _dims(t) -> list[int]:
    """A tensor's shape in numpy's order, without dimensions of 1 in front."""
    dims = [int(n) for n in t.ne]
    while len(dims) > 1 and dims[-1] == 1:
        dims.pop()
    return dims[::-1]


def _copy(outs: list[np.ndarray], values: np.ndarray) -> None:
    outs[0].reshape(-1)[:] = values.reshape(-1)
