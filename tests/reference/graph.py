"""Runner of a few ggml operations on numpy arrays, directly on the binding."""

from __future__ import annotations

import numpy as np

from dflash_ggml.ggml.bindings import ffi, lib

_TYPES = {
    np.dtype(np.float32): lib.GGML_TYPE_F32,
    np.dtype(np.int32): lib.GGML_TYPE_I32,
    np.dtype(np.int64): lib.GGML_TYPE_I64,
}
_DTYPES = {type_: dtype for dtype, type_ in _TYPES.items()}


def device_names() -> list[str]:
    """ggml's names of the devices that tests of operations run on: the CPU and every GPU."""
    devices = [lib.ggml_backend_dev_get(i) for i in range(lib.ggml_backend_dev_count())]
    gpus = [d for d in devices if lib.ggml_backend_dev_type(d) == lib.GGML_BACKEND_DEVICE_TYPE_GPU]
    return ["CPU"] + [ffi.string(lib.ggml_backend_dev_name(d)).decode() for d in gpus]


class OpGraph:
    """One use: make tensors with `tensor`, ops with `lib.ggml_...(graph.ctx, ...)`, then `run` the results.

    Tensor shapes are the reverse of the numpy shapes. All memory is filled with NaN before the inputs are
    written, so an element that an operation forgets shows. `backend` is borrowed; without it a CPU backend
    with `threads` is used.
    """

    def __init__(self, threads: int = 1, backend=None) -> None:
        self.ctx = lib.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
        self._own = backend is None
        self.backend = lib.ggml_backend_cpu_init() if backend is None else backend
        if self._own:
            lib.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self._data: list[tuple[object, np.ndarray]] = []
        self._buffer = ffi.NULL

    def __enter__(self) -> OpGraph:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._buffer != ffi.NULL:
            lib.ggml_backend_buffer_free(self._buffer)
        if self._own:
            lib.ggml_backend_free(self.backend)
        lib.ggml_free(self.ctx)

    def tensor(self, array: np.ndarray):
        """A tensor that holds `array` (float32, int32 or int64) when the graph runs."""
        array = np.ascontiguousarray(array)
        t = lib.ggml_new_tensor(
            self.ctx, _TYPES[array.dtype], array.ndim, ffi.new("int64_t[]", array.shape[::-1])
        )
        self._data.append((t, array))
        return t

    def columns(self, t, first: int, *ne: int):
        """View [*ne, n, seqs] of elements first.. of each row of t [row, n, seqs]."""
        size = lib.ggml_type_size(t.type)
        if len(ne) == 1:
            return lib.ggml_view_3d(self.ctx, t, ne[0], t.ne[1], t.ne[2], t.nb[1], t.nb[2], first * size)
        return lib.ggml_view_4d(
            self.ctx, t, ne[0], ne[1], t.ne[1], t.ne[2], ne[0] * size, t.nb[1], t.nb[2], first * size
        )

    def flat(self, t, count: int, first: int = 0):
        """View of `count` elements of the contiguous tensor t from element `first` on."""
        size = lib.ggml_type_size(t.type)
        return lib.ggml_view_3d(self.ctx, t, count, 1, 1, count * size, count * size, first * size)

    def run(self, *outputs) -> list[np.ndarray]:
        """Compute; the contiguous outputs as four-dimensional arrays."""
        graph = self.prepare(*outputs)
        assert lib.ggml_backend_graph_compute(self.backend, graph) == lib.GGML_STATUS_SUCCESS
        return [self.read(t) for t in outputs]

    def prepare(self, *outputs):
        """Give every tensor memory and its data; the graph of `outputs`, in this order, ready to compute."""
        graph = lib.ggml_new_graph_custom(self.ctx, 1024, False)
        for t in outputs:
            lib.ggml_build_forward_expand(graph, t)
        self._buffer = lib.ggml_backend_alloc_ctx_tensors(self.ctx, self.backend)
        assert self._buffer != ffi.NULL
        lib.ggml_backend_buffer_clear(self._buffer, 0xFF)
        for t, array in self._data:
            lib.ggml_backend_tensor_set(t, ffi.from_buffer(array), 0, array.nbytes)
        return graph

    def read(self, t) -> np.ndarray:
        """The contents of a contiguous tensor."""
        out = np.empty([int(n) for n in t.ne][::-1], _DTYPES[t.type])
        lib.ggml_backend_tensor_get(t, ffi.from_buffer(out), 0, out.nbytes)
        return out
