"""Tests of sums over two graphs that run at the same time, each on a device of its own: two CPU backends, in two threads, and
two GPUs where there are two (GGML_CUDA_DEVICES=2 shows one as two)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dflash_ggml.errors import DeviceError
from dflash_ggml.ggml import mailboxes
from dflash_ggml.ggml.device import F32, Device, list_devices
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.mailboxes import Mailboxes
from dflash_ggml.ggml.store import Workspace

GPUS = [d for d in list_devices() if d.name.startswith("CUDA")]


@pytest.fixture(params=[(1, 1), (2, 1), (2, 2), "GPUs"], ids=str)
def ranks(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The first of two devices, CPUs with so many threads each, or GPUs."""
    if request.param == "GPUs" and len(GPUS) < 2:
        pytest.skip("fewer than two CUDA devices in this build or machine")
    first, second = map(Device, GPUS[:2]) if request.param == "GPUs" else map(Device.cpu, request.param)
    first.rank_with(first.join(second))
    yield first
    first.close()


def sums(g: Graph, boxes: Mailboxes, shapes: list[tuple[int, ...]], times: int) -> None:
    """For each rank sums of inputs of these shapes, repeated so often that the mailbox's halves are reused."""
    for rank, box in enumerate(boxes.tensors):
        for i, ne in enumerate(shapes):
            y = g.input(f"{rank}.{i}", F32, *ne)
            for _ in range(times):
                y = g.all_reduce(g.scale(y, 0.5), box)
            g.output(y, f"sum {rank}.{i}")


@pytest.mark.parametrize("cells", [20, 100, 4096, 1 << 17])
def test_both_have_the_bits_of_one_sum(ranks: Device, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes below, at and above what is sent at once: what is sent for one sum never meets the rest of another."""
    monkeypatch.setattr(mailboxes, "CELLS", cells)
    shapes, times = [(1,), (100, 1), (7, 3), (33, 5, 2), (1,), (100, 9)], 3
    if cells > 4096:  # as many as a GPU sends in another way, between others
        shapes[2:2] = [(5120, 52), (5120, 56)]
    boxes, workspace, g = Mailboxes(ranks.sides), Workspace(ranks), Graph(ranks)
    assert all(boxes.nbytes_on(side) >= 16 * cells for side in ranks.sides)
    sums(g, boxes, shapes, times)
    g.place(workspace)
    rng = np.random.default_rng(cells)
    for _ in range(3):
        for i in g.inputs.values():
            i.array[...] = rng.normal(size=i.array.shape).astype(np.float32)
        g.run()
        for i, ne in enumerate(shapes):
            a, b = (g.inputs[f"{rank}.{i}"].array for rank in (0, 1))
            for _ in range(times):
                # exact products, so that fused multiply-adds on a GPU round alike
                a = b = np.float32(0.5) * a + np.float32(0.5) * b
            for rank in (0, 1):
                found = ranks.read(g.outputs[f"sum {rank}.{i}"])
                np.testing.assert_array_equal(found, a.ravel(), err_msg=f"rank {rank}, {ne}")
    g.close()
    workspace.close()
    boxes.close()


def test_a_timed_out_wait_is_an_error(ranks: Device) -> None:
    """The mailbox is marked as failed, and no later sum waits: results are NaN."""
    boxes, workspace, g = Mailboxes(ranks.sides), Workspace(ranks), Graph(ranks)
    sums(g, boxes, [(5,)], 2)
    g.place(workspace)
    g.run()
    boxes.check()
    for box in boxes.tensors:
        ranks.write(box, np.ones(1, np.int64), 8)
    g.run()
    assert all(np.isnan(ranks.read(g.outputs[f"sum {rank}.0"])).all() for rank in (0, 1))
    with pytest.raises(DeviceError, match="did not answer within 10 seconds"):
        boxes.check()
    g.close()
    workspace.close()
    boxes.close()


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Device.cpu(1), Device.cpu(1)
    first.join(second)
    monkeypatch.setattr(Device, "is_gpu", True)
    with pytest.raises(DeviceError, match=r"CPU and CPU#1: .*CUDA devices only.*-sm layer"):
        first.rank_with(second)
    monkeypatch.undo()
    first.close()
