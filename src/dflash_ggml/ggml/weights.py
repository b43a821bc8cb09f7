"""Model files to device tensors: each tensor in the memory where its operation runs best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ..errors import DeviceError, ModelFileError
from .bindings import ffi, lib
from .device import BF16, F16, F32, Device, Store

TENSOR_ALIGNMENT = 32  # what ggml's CPU buffers ask for
Progress = Callable[[str, int, int], None]


class Source(NamedTuple):
    """One tensor of a file: ggml type, shape in ggml order, its bytes."""

    type: int
    shape: tuple[int, ...]
    data: np.ndarray | memoryview


def bf16_as_f16(name: str, s: Source) -> Source:
    """The same tensor in float16, for GPUs that multiply BF16 slowly; values below 6e-8 become 0.

    Raises ModelFileError when a value is too large for float16."""
    if s.type != BF16:
        return s
    bits = np.frombuffer(s.data, np.uint16).astype(np.uint32) << 16
    values = bits.view(np.float32)
    if np.abs(values).max(initial=0) > np.finfo(np.float16).max:
        raise ModelFileError(
            f"tensor {name}: BF16 values beyond float16's range, and this GPU has no BF16 products; use a Q8_0 file"
        )
    return Source(F16, s.shape, values.astype(np.float16).view(np.uint8))


class Weights(Mapping):
    """ggml tensors by their GGUF name."""

    def __init__(self) -> None:
        self._tensors: dict[str, object] = {}
        self._stores: list[Store] = []
        self._mapped: list = []
        self.nbytes = 0

    def __getitem__(self, name: str):
        return self._tensors[name]

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @classmethod
    def load(
        cls,
        device: Device,
        sources: Mapping[str, Source],
        gathered: Iterable[str] = ("token_embd.weight",),
        progress: Progress | None = None,
        stage: str = "weights",
    ) -> Weights:
        """Bring `sources` to `device`. Matrices take a layout made for matrix products where the device has one, except
        those `gathered` row by row; on the CPU all others stay in the file's mapping.

        `progress(stage, bytes done, bytes in all)`. Raises DeviceError when they do not fit, ModelFileError for a type
        that the device cannot multiply.
        """
        self = cls()
        gathered = set(gathered)
        total = sum(memoryview(s.data).nbytes for s in sources.values())
        plain_type = device.buffer_type
        groups: dict[object, list[str]] = {}
        for name, s in sources.items():
            is_matrix = len(s.shape) == 2 and s.shape[1] > 1 and name not in gathered and s.type != F32
            chosen = next(
                (b for b in device.matmul_buffer_types() if is_matrix and _can_multiply(device, s, b)),
                plain_type,
            )
            if is_matrix and chosen == plain_type and not _can_multiply(device, s, plain_type):
                kind = ffi.string(lib.ggml_type_name(s.type)).decode()
                raise ModelFileError(
                    f"tensor {name}: {device.info.name} has no matrix product for type {kind}"
                )
            groups.setdefault(chosen, []).append(name)
        done = 0
        for buffer_type, names in groups.items():
            store = Store(device, len(names), buffer_type)
            self._stores.append(store)
            for name in names:
                self._tensors[name] = store.tensor(sources[name].type, *sources[name].shape, name=name)
            if buffer_type == plain_type and not device.is_gpu:
                mapped = [name for name in names if _is_aligned(sources[name].data)]
                self._map(mapped, sources)
                names = [name for name in names if name not in mapped]
            if names:
                store.allocate(clear=False, weights=True)
                for name in names:
                    data = sources[name].data
                    lib.ggml_backend_tensor_set(
                        self._tensors[name], ffi.from_buffer(data), 0, memoryview(data).nbytes
                    )
                    done += memoryview(data).nbytes
                    if progress:
                        progress(stage, done, total)
        self.nbytes = sum(s.nbytes for s in self._stores) + sum(memoryview(d).nbytes for _, d in self._mapped)
        if progress:
            progress(stage, total, total)
        return self

    def _map(self, names: list[str], sources: Mapping[str, Source]) -> None:
        """Let CPU tensors point into the file's mapping."""
        for name in names:
            data = memoryview(sources[name].data)
            address = ffi.from_buffer(data)
            size = lib.ggml_nbytes(self._tensors[name])
            if size != data.nbytes:
                raise ModelFileError(f"tensor {name}: {data.nbytes} bytes in the file, {size} expected")
            buffer = lib.ggml_backend_cpu_buffer_from_ptr(address, size)
            lib.ggml_backend_buffer_set_usage(buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
            if lib.ggml_backend_tensor_alloc(buffer, self._tensors[name], address) != lib.GGML_STATUS_SUCCESS:
                raise DeviceError(f"tensor {name}: cannot be mapped")
            self._mapped.append((ffi.gc(buffer, lib.ggml_backend_buffer_free), data))

    def close(self) -> None:
        self._tensors.clear()
        for store in self._stores:
            store.close()
        self._stores.clear()
        self._mapped.clear()


def _is_aligned(data) -> bool:
    """Whether ggml may use the bytes where they lie; safetensors files promise no alignment."""
    return int(ffi.cast("uintptr_t", ffi.from_buffer(data))) % TENSOR_ALIGNMENT == 0


def _can_multiply(device: Device, s: Source, buffer_type) -> bool:
    """Whether the device multiplies a matrix like `s` that lies in a buffer of this type."""
    probe = Store(device, 4)
    w = probe.tensor(s.type, *s.shape)
    x = probe.tensor(F32, s.shape[0], 16)
    op = lib.ggml_mul_mat(probe.ctx, w, x)
    buffer = lib.ggml_backend_buft_alloc_buffer(buffer_type, 0)
    w.buffer = buffer
    answer = lib.ggml_backend_dev_supports_op(device.info.handle, op)
    w.buffer = ffi.NULL
    lib.ggml_backend_buffer_free(buffer)
    probe.close()
    return bool(answer)
