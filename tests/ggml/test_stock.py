"""Tests of the compositions of our operations against the native ones of the CPU, on the CPU and on every device that needs
them.

Both sum the same terms in another order, so float32 results differ by some units in the last place of the largest
summand; 1e-5 of the largest magnitude allows for sums of a few hundred.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from dflash_ggml.ggml import stock
from dflash_ggml.ggml.device import F16, F32, I32, Device, list_devices
from dflash_ggml.ggml.graph import Graph, packed
from dflash_ggml.ggml.store import Store, Workspace
from reference import tree_ops as ref

TOL = 1e-5
GPUS = [
    d for d in list_devices() if d.is_gpu and not d.name.startswith(("CUDA", "ROCm"))
]  # which have kernels
TYPES = {np.dtype(np.float32): F32, np.dtype(np.int32): I32, np.dtype(np.float16): F16}
S, H_K, H_V, K, CHANNELS = 16, 2, 4, 4, 24

Array = np.ndarray
Build = Callable[..., object]


@pytest.fixture(scope="module")
def native() -> Iterator[Device]:
    device = Device.cpu(2)
    yield device
    device.close()


@pytest.fixture(scope="module", params=["CPU", *(d.name for d in GPUS)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device that composes."""
    found = next((d for d in GPUS if d.name == request.param), None)
    opened = Device.cpu(2, stock=True) if found is None else Device(found, stock=True)
    yield opened
    opened.close()


def run(device: Device, build: Build, stores: dict[str, Array], inputs: dict[str, Array]) -> dict[str, Array]:
    """Results by name, and what the stores hold afterwards. build(graph, stores, inputs) declares the outputs."""
    store, workspace = Store(device, len(stores) + 1), Workspace(device)
    kept = {name: store.tensor(TYPES[a.dtype], *a.shape[::-1], name=name) for name, a in stores.items()}
    store.allocate()
    for name, array in stores.items():
        device.write(kept[name], np.ascontiguousarray(array))
    g = Graph(device, 256)
    build(g, kept, {name: g.input(name, TYPES[a.dtype], *a.shape[::-1]) for name, a in inputs.items()})
    g.place(workspace)
    for name, array in inputs.items():
        g.inputs[name].array.reshape(-1)[:] = array.reshape(-1)
    g.run()
    found = {name: device.read(t) for name, t in (g.outputs | kept).items()}
    g.close()
    workspace.close()
    store.close()
    return found


def compare(native: Device, device: Device, *what) -> None:
    expected, found = run(native, *what), run(device, *what)
    assert expected.keys() == found.keys()
    for name, right in expected.items():
        assert_close(found[name], right, name)


def assert_close(found: Array, expected: Array, name: str) -> None:
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= TOL * np.abs(expected).max(), name


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).uniform(-1, 1, shape).astype(np.float32)


def forest(seed: int) -> tuple[Array, Array, int]:
    """Parents and sequences of trees in 13 columns, of which the last belongs to none; 4 states."""
    rng = np.random.default_rng(seed)
    sizes, states = (5, 1, 6), rng.permutation(4)[:3]
    parents = np.concatenate([*(ref.random_parents(rng, n) for n in sizes), [-1]]).astype(np.int32)
    seqs = np.array([(i, first, n) for i, first, n in zip(states, (0, 5, 6), sizes)] + [(0, 0, 0)], np.int32)
    return parents, seqs, 13


@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_convolution_of_a_tree(native: Device, device: Device, n: int) -> None:
    def build(g: Graph, stores, inputs) -> None:
        x, c = stores["x"], stores["c"]
        g.output(g.ssm_conv_tree(stores["state"], x, c, inputs["parents"]), "out")

    stores = {"state": numbers(CHANNELS, K - 1), "x": numbers(n, CHANNELS), "c": numbers(CHANNELS, K)}
    parents = ref.random_parents(np.random.default_rng(n), n).astype(np.int32)
    compare(native, device, build, stores, {"parents": parents})


@pytest.mark.parametrize("path", [[0], [0, 2], [0, 1, 3, 6], [-1]])
def test_commit_of_a_convolution(native: Device, device: Device, path: list[int]) -> None:
    def build(g: Graph, stores, inputs) -> None:
        g.expand(g.ssm_conv_tree_commit(stores["state"], stores["x"], inputs["path"]))

    stores = {"state": numbers(3, CHANNELS, K - 1), "x": numbers(3, 7, CHANNELS)}
    compare(native, device, build, stores, {"path": np.array([*path, *[-1] * (5 - len(path))], np.int32)})


def net(g: Graph, stores, state, *more):
    """Outputs of a delta net of trees, and its factors."""
    q, k, v, decay, beta = (stores[name] for name in ("q", "k", "v", "decay", "beta"))
    o, factors = g.gated_delta_net_tree_persist(q, k, v, decay, beta, state, stores["factors"], *more)
    return g.output(g.cont(o), "out"), factors


def net_inputs(n: int, h_k: int = H_K) -> dict[str, Array]:
    """Keys of length 1, as models have them; some decays are strong enough to overflow a quotient of their exponentials."""
    k = numbers(n, h_k, S, seed=2)
    decay = -np.exp(2 * numbers(n, H_V, 1, seed=4))
    decay[n // 2 :: 5] -= 60
    return {
        "q": numbers(n, h_k, S, seed=1),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": numbers(n, H_V, S, seed=3),
        "decay": decay,
        "beta": np.abs(numbers(n, H_V, 1, seed=5)),
        "factors": numbers(n, S * (H_V + h_k) + H_V),
    }


@pytest.mark.parametrize(("n", "h_k"), [(1, 2), (5, 2), (16, 4), (33, 1)])
def test_delta_net_of_a_tree(native: Device, device: Device, n: int, h_k: int) -> None:
    def build(g: Graph, stores, inputs) -> None:
        net(g, stores, stores["state"], inputs["parents"])

    parents = ref.random_parents(np.random.default_rng(n), n).astype(np.int32)
    stores = net_inputs(n, h_k) | {"state": numbers(H_V, S, S)}
    compare(native, device, build, stores, {"parents": parents})


def test_delta_net_of_views_that_begin_anywhere(
    native: Device, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml-vulkan would end the process: its shader takes no offset beside what memory can be bound at."""
    n = 7
    misaligned = []

    def build(g: Graph, stores, inputs) -> None:
        qkv, heads = stores["qkv"], ((H_K, 0), (H_K, H_K), (H_V, 2 * H_K))
        views = [g.view(qkv, (S, h, n), (4 * S, qkv.nb[1]), offset=4 * (3 + at * S)) for h, at in heads]
        out = g.output(g.gated_delta_net(*views, stores["decay"], stores["beta"], stores["state"]), "out")
        misaligned.extend(out.src[i].view_offs % g.device.view_alignment for i in range(6))

    stores = net_inputs(n) | {"state": numbers(H_V, S, S), "qkv": numbers(n, 3 + S * (2 * H_K + H_V)) / 4}
    stores = {name: a for name, a in stores.items() if name not in ("q", "k", "v", "factors")}
    expected = run(native, build, stores, {})["out"]
    monkeypatch.setattr(Device, "view_alignment", 64)
    assert_close(run(device, build, stores, {})["out"], expected, "out")
    assert not any(misaligned)


@pytest.mark.parametrize("path", [[0], [0, 2, 3], [0, 1, 3, 5, 6], [-1]])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_commit_of_a_delta_net(
    native: Device, device: Device, path: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers at once, and one after the other."""

    def build(g: Graph, stores, inputs) -> None:
        g.expand(g.gated_delta_net_tree_commit(stores["state"], stores["factors"], inputs["path"]))

    monkeypatch.setattr(stock, "_CHUNK", chunk)
    factors = numbers(3, 7, S * (H_V + H_K) + H_V)
    factors[..., -H_V:] = -np.abs(factors[..., -H_V:]) * np.arange(7)[:, None]
    stores = {"state": numbers(3, H_V, S, S), "factors": factors}
    compare(native, device, build, stores, {"path": np.array([*path, *[-1] * (5 - len(path))], np.int32)})


@pytest.mark.parametrize("seed", range(3))
def test_operations_of_a_forest(native: Device, device: Device, seed: int) -> None:
    """States lie between those of another layer, as they do in an engine; sequences of one column take it in."""
    parents, seqs, n = forest(seed)

    def build(g: Graph, stores, inputs) -> None:
        windows, deltas = stores["windows"], stores["deltas"]
        window = g.view(windows, (K - 1, CHANNELS, 4), (windows.nb[1], windows.nb[3]), offset=windows.nb[2])
        size = deltas.nb[3]
        delta = g.view(deltas, (S, S, H_V, 4), (4 * S, 4 * S * S, size), offset=size // 2)
        rows = g.view(deltas, (S, S * H_V, 4), (4 * S, size), offset=size // 2)
        conv = g.ssm_conv_tree(window, stores["x"], stores["c"], inputs["parents"], inputs["seqs"])
        g.output(conv, "conv")
        g.expand(g.ssm_conv_tree_commit(window, stores["x"], None, inputs["seqs"]))
        _, factors = net(g, stores, delta, inputs["parents"], inputs["seqs"])
        g.expand(g.gated_delta_net_tree_commit(rows, factors, None, inputs["seqs"]))

    stores = net_inputs(n) | {"x": numbers(n, CHANNELS), "c": numbers(CHANNELS, K)}
    stores |= {"windows": numbers(4, 2, CHANNELS, K - 1), "deltas": numbers(4, 2 * H_V, S, S)}
    owned = np.arange(n) < 12
    expected, found = (run(d, build, stores, {"parents": parents, "seqs": seqs}) for d in (native, device))
    for name, right in expected.items():
        left = found[name]
        if name in ("conv", "out", "factors"):
            left, right = (a.reshape(n, -1)[owned] for a in (left, right))
        assert_close(left, right, name)


@pytest.mark.parametrize("seed", range(3))
def test_commits_of_a_forest(native: Device, device: Device, seed: int) -> None:
    """All layers; what is no column of a path, NaN among it, reaches no state."""
    _, seqs, n = forest(seed)
    path = np.full((4, 5), -1, np.int32)
    path[0, :3], path[2, :2] = (0, 1, 4), (0, 3)

    def build(g: Graph, stores, inputs) -> None:
        windows, deltas = stores["windows"], stores["deltas"]
        window = g.view(windows, (K - 1, CHANNELS, 4, 2), (windows.nb[1], windows.nb[3], windows.nb[2]))
        a_delta = deltas.nb[3] // 2
        rows = g.view(deltas, (S, S * H_V, 4, 2), (4 * S, deltas.nb[3], a_delta))
        g.expand(g.ssm_conv_tree_commit(window, stores["x"], inputs["path"], inputs["seqs"]))
        g.expand(g.gated_delta_net_tree_commit(rows, stores["factors"], inputs["path"], inputs["seqs"]))

    factors, x = -np.abs(numbers(2, n, S * (H_V + H_K) + H_V)), numbers(2, n, CHANNELS)
    factors[..., -H_V:] *= np.arange(n)[:, None]
    stores = {"windows": numbers(4, 2, CHANNELS, K - 1), "deltas": numbers(4, 2 * H_V, S, S)}
    stores |= {"factors": factors, "x": x}
    clean = run(native, build, stores, {"path": path, "seqs": seqs})
    used = {0, 1, 4, 6, 9}
    for column in set(range(n)) - used:
        factors[:, column] = x[:, column] = np.nan
    found = run(device, build, stores, {"path": path, "seqs": seqs})
    for name in ("windows", "deltas"):
        assert_close(found[name], clean[name], name)


@pytest.mark.parametrize("pieces", [1, 2])
def test_masks(native: Device, device: Device, pieces: int) -> None:
    """Bounds beyond the rows, ends before beginnings."""
    parents, seqs, n = forest(7)
    rng = np.random.default_rng(pieces)
    n_kv = 256
    ranges = rng.integers(-20, n_kv + 20, (2 * pieces, n)).astype(np.int32)
    rows = rng.permutation(n_kv + 9)[:n].astype(np.int32)

    def build(g: Graph, stores, inputs) -> None:
        g.output(g.cast(g.range_mask(inputs["ranges"], n_kv), F32), "ranges")
        forest_mask = g.forest_mask(*(inputs[name] for name in ("ranges", "rows", "parents", "seqs")), n_kv)
        g.output(g.cast(forest_mask, F32), "forest")

    inputs = {"ranges": ranges, "rows": rows, "parents": parents, "seqs": seqs}
    expected, found = (run(d, build, {}, inputs) for d in (native, device))
    np.testing.assert_array_equal(found["ranges"], expected["ranges"])
    np.testing.assert_array_equal(found["forest"], expected["forest"])


@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_over_ranges(native: Device, device: Device, has_sinks: bool) -> None:
    """Values are float16 below 1 and ggml's attention adds them up as such, weighted: 2^-11 for each of a few roundings."""
    n, n_kv, d = 9, 256, 64

    def build(g: Graph, stores, inputs) -> None:
        q, k, v = (stores[name] for name in "qkv")
        g.output(g.range_attention(q, k, v, inputs["ranges"], d**-0.5, stores.get("sinks")), "out")

    low = np.arange(n, dtype=np.int32) * 5
    ranges = np.stack([low, low + 100])
    stores = {"q": numbers(2, n, d), "k": numbers(1, n_kv, d, seed=1), "v": numbers(1, n_kv, d, seed=2)}
    stores |= {name: stores[name].astype(np.float16) for name in "kv"}
    stores |= {"sinks": np.array([-2, 4], np.float32)} if has_sinks else {}
    expected, found = (run(d, build, stores, {"ranges": ranges})["out"] for d in (native, device))
    assert np.isfinite(found).all() and np.abs(found - expected).max() <= 4 * 2.0**-11


@pytest.mark.parametrize("n", [97, 4096, 64 * 65])
def test_largest_of_rows(native: Device, device: Device, n: int) -> None:
    """Rows that have no blocks, square and other ones; a row of NaN gives what a step takes for one."""
    logits = np.stack([np.random.default_rng(i).permutation(n) for i in range(4)]).astype(np.float32)
    logits[2, n - 1] = n
    logits[3] = np.nan

    def build(g: Graph, stores, inputs) -> None:
        g.output(g.argmax(stores["logits"]), "out")

    found = run(device, build, {"logits": logits}, {})["out"]
    assert found[:3].tolist() == logits[:3].argmax(1).tolist() and found[3] <= 0


@pytest.mark.parametrize(("n", "k", "rows"), [(50, 1, 1), (1000, 8, 3), (3000, 16, 5)])
def test_best_candidates(native: Device, device: Device, n: int, k: int, rows: int) -> None:
    logits = np.stack([np.random.default_rng(i).permutation(n) for i in range(rows)]).astype(np.float32) / 100

    def build(g: Graph, stores, inputs) -> None:
        g.output(g.top_k_log_probs(stores["logits"], k), "out")

    compare(native, device, build, {"logits": logits}, {})


def test_positions_are_found_wherever_they_lie_in_a_packed_input(native: Device, device: Device) -> None:
    """Parts of one column begin at any multiple of four bytes."""
    heads = numbers(1, 2, 32)

    def build(g: Graph, stores, inputs) -> None:
        _, second, third = packed(g, "ints", 1, 1, 1)
        for name, at in (("second", second), ("third", third)):
            g.output(g.rope(stores["x"], at, 32, 1e4), name)

    def rotated(d: Device) -> dict[str, Array]:
        store, workspace = Store(d, 2), Workspace(d)
        x = store.tensor(F32, 32, 2, 1)
        store.allocate()
        d.write(x, heads)
        g = Graph(d, 64)
        build(g, {"x": x}, {})
        g.place(workspace)
        g.inputs["ints"].array[:] = 9, 3, 5
        g.run()
        found = {name: d.read(t) for name, t in g.outputs.items()}
        for closing in (g, workspace, store):
            closing.close()
        return found

    expected, found = rotated(native), rotated(device)
    for name, right in expected.items():
        np.testing.assert_allclose(found[name], right, atol=1e-5)


def test_what_is_composed_is_reported_once(native: Device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dflash_ggml"):
        device = Device.cpu(1, stock=True)
        for _ in range(2):
            g = Graph(device, 64)
            g.range_mask(g.input("ranges", I32, 4, 2), 256)
            g.close()
        assert stock.lacking(native) == []
        assert len(stock.lacking(device)) == 7
        device.close()
    assert [r.getMessage() for r in caplog.records] == ["CPU: masks of ranges by composition"]


def test_nothing_can_be_derived_from_a_result(device: Device) -> None:
    g = Graph(device, 64)
    with pytest.raises(ValueError, match="not an input"):
        g.range_mask(g.cast(g.input("x", F32, 4, 2), I32), 256)
    g.close()
