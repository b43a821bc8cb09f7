"""Tests of caches of every pair of types: rotation, attention over the rows, and moves that keep every bit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from dflash_ggml.errors import ConfigError
from dflash_ggml.ggml.device import F16, F32, I32, NARROW_COLUMNS, Device, list_devices
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.state.kv import KvCache, under
from dflash_ggml.state.kv_type import KV_TYPES, KvType, is_quantised, row_bytes, stored_row
from dflash_ggml.state.mask import HIDDEN
from dflash_ggml.state.rotation import Rotations, hadamard, rotation_bytes
from dflash_ggml.state.spec import KvLayer, StateSpec
from dflash_ggml.state.state import TargetState, commit_graph

PAIRS = list(product(KV_TYPES, KV_TYPES))
# what ggml's CPU kernels round queries to before they are multiplied with such keys
QUERIES = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16}


GPUS = [d for d in list_devices() if d.is_gpu]


def opened(name: str) -> Device:
    """ "CPU", "reference", which is the CPU with plain kernels, or a GPU by ggml's name."""
    for gpu in GPUS:
        if gpu.name == name:
            return Device(gpu)
    return Device.cpu(2, reference=name == "reference")


@pytest.fixture(params=["CPU", *(gpu.name for gpu in GPUS)])
def device(request):
    found = opened(request.param)
    yield found
    found.close()


def rounded(x: np.ndarray, kind: Type) -> np.ndarray:
    return dequantize(quantize(np.ascontiguousarray(x, np.float32), kind), kind).astype(np.float64)


def turned(x: np.ndarray, w: int) -> np.ndarray:
    """Each group of w values rotated, float64."""
    return (x.reshape(-1, w) @ hadamard(w).astype(np.float64)).reshape(x.shape)


def contents(device: Device, t, row: int) -> np.ndarray:
    """The rows of a cache tensor as float64 [n_rows, row]."""
    data = device.read_bytes(t, np.empty(t.nb[1] * t.ne[1], np.uint8)).reshape(t.ne[1], -1)
    return dequantize(data, Type(t.type))[:, :row].astype(np.float64)


def attended(
    device: Device, cache: KvCache, q, k, v, first: int, n_kv: int, mask, by_ranges: bool = False
) -> np.ndarray:
    """Write k and v [n, kv_heads, d] to rows from `first` on and let q [n, heads, d] attend -> [n, heads, d].

    by_ranges: as prompt batches do, over the rows that a causal mask shows.
    """
    n, heads, d = q.shape
    g = Graph(device, 64)
    inputs = [g.input(name, F32, d, x.shape[1], n) for name, x in (("q", q), ("k", k), ("v", v))]
    rows, seen = g.input("rows", I32, n), g.input("mask", F16, n_kv, n)
    ranges = g.input("ranges", I32, n, 2)
    layer = cache.layer(0)
    queries = layer.queries(g, inputs[0])
    written = layer.write(g, inputs[1], g.reshape(inputs[2], d * k.shape[1], n), rows)

    def over_ranges(g: Graph, q, keys, values, scale: float):
        return g.range_attention(q, keys, values, ranges, scale)

    attention = over_ranges if by_ranges else under(seen)
    g.output(written.attend(g, queries, attention, n_kv), "o")
    workspace = Workspace(device)
    g.place(workspace)
    at = np.arange(first, first + n)
    bounds = np.stack([np.zeros_like(at), at + 1])
    for name, x in (("q", q), ("k", k), ("v", v), ("rows", at), ("mask", mask), ("ranges", bounds)):
        g.inputs[name].array[...] = x.reshape(g.inputs[name].array.shape)
    g.run()
    o = device.read(g.outputs["o"]).reshape(n, heads, d)
    g.close()
    workspace.close()
    return o


def expected(device: Device, cache: KvCache, q, n_kv: int, mask, whole: bool = False) -> np.ndarray:
    """Attention in float64 over what the cache holds, turned back; `whole`: queries are not rounded."""
    (layer,) = cache.layers
    heads, d = q.shape[1:]
    share = heads // layer.heads
    keys, values = (contents(device, t, layer.row)[:n_kv] for t in cache.slices)
    name = {type_: name for name, type_ in KV_TYPES.items()}[cache.type.k]
    queries = turned(q, d & -d) if is_quantised(cache.type.k) else q
    queries = queries if whole else rounded(queries, QUERIES.get(name, Type.Q8_0))
    o = np.empty(q.shape)
    for i in range(heads):
        part = slice(i // share * d, (i // share + 1) * d)
        scores = queries[:, i] @ keys[:, part].T * d**-0.5 + mask.astype(np.float64)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        o[:, i] = weights / weights.sum(1, keepdims=True) @ values[:, part]
    if is_quantised(cache.type.v):
        o = turned(o, min(d & -d, 64))
    return o


def draws(seed: int, n: int, heads: int, kv_heads: int, d: int) -> tuple[np.ndarray, ...]:
    """q, k, v with a few outliers, as keys have them."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((n, h, d)).astype(np.float32) for h in (heads, kv_heads, kv_heads))
    k[..., :2] *= 6
    return q, k, v


def causal(n: int, first: int, n_kv: int) -> np.ndarray:
    return np.where(np.arange(n_kv) > first + np.arange(n)[:, None], HIDDEN, np.float16(0))


@pytest.mark.parametrize("k", KV_TYPES)
def test_attention_against_float64(device, k):
    """Over what lies in the cache, with values of every type; and against the numbers that went in: what the types cost."""
    n, first, n_kv = 9, 40, 256
    q, keys, values = draws(1, first + n, 4, 2, 64)
    begun, mask, full = causal(first, 0, n_kv), causal(n, first, n_kv), causal(first + n, 0, n_kv)
    truth = None
    for v in KV_TYPES:
        found = []
        for pair in ((k, v), ("f32", "f32")):
            if pair == ("f32", "f32") and truth is not None:
                continue
            cache = KvCache(device, [KvLayer(2, 64)], KvType.named(*pair), n_kv)
            attended(device, cache, q[:first], keys[:first], values[:first], 0, n_kv, begun)
            o = attended(device, cache, q[first:], keys[first:], values[first:], first, n_kv, mask)
            # a machine may round a tie of a query the other way; values of float16 are added in float16, and a GPU rounds
            # queries in ways of its own
            tolerance = 3e-2 if device.is_gpu else 1e-2 if "f16" in pair else 2e-3
            np.testing.assert_allclose(o, expected(device, cache, q[first:], n_kv, mask), atol=tolerance)
            batch = attended(device, cache, q, keys, values, 0, n_kv, full, by_ranges=True)
            tolerance = 3e-2 if device.is_gpu else 1e-4
            np.testing.assert_allclose(
                batch, expected(device, cache, q, n_kv, full, whole=True), atol=tolerance
            )
            cache.close()
            found.append(o)
        truth = found[1] if truth is None else truth
        bits = min(int(t[1]) if t[0] == "q" else 8 for t in (k, v))
        assert np.abs(found[0] - truth).max() < {4: 0.3, 5: 0.2, 8: 0.05}[bits], v


@pytest.mark.parametrize(
    ("pair", "shape", "n"),
    [
        (("q8_0", "q4_0"), (2, 1, 64), 520),
        (("q8_0", "q8_0"), (2, 1, 96), 520),
        (("q4_1", "q5_1"), (1, 1, 256), 520),
        (("f16", "q5_0"), (2, 1, 32), 520),
        (("q8_0", "q4_0"), (6, 1, 256), 24),
        (("q8_0", "q4_0"), (4, 1, 128), 16),
        (("q8_0", "q8_0"), (6, 1, 256), 1),
    ],
    ids=str,
)
def test_long_contexts_and_wide_batches(device, pair, shape, n):
    """More than 2,048 rows, more than 512 columns, and rows that are no multiple of 4 bytes unless padded."""
    heads, kv_heads, d = shape
    if device.is_gpu and d not in (64, 128, 256):
        d = 64  # there are no kernels for other heads
    first, n_kv = 2040, 2560
    cache = KvCache(device, [KvLayer(kv_heads, d)], KvType.named(*pair), n_kv)
    rng = np.random.default_rng(2)
    for t in cache.slices:
        rows = rng.standard_normal((first, t.ne[0])).astype(np.float32)
        device.write(t, quantize(rows, Type(t.type)).view(np.uint8).reshape(-1))
    q, k, v = draws(3, n, heads, kv_heads, d)
    mask = causal(n, first, n_kv)
    o = attended(device, cache, q, k, v, first, n_kv, mask)
    # a GPU rounds the queries of wide batches to float16 at most
    whole = device.is_gpu and n > NARROW_COLUMNS
    np.testing.assert_allclose(o, expected(device, cache, q, n_kv, mask, whole=whole), atol=3e-3)
    o = attended(device, cache, q, k, v, first, n_kv, mask, by_ranges=True)
    # one column alone is rounded as under a mask
    tolerance = 3e-3 if device.is_gpu or n == 1 else 1e-4
    np.testing.assert_allclose(o, expected(device, cache, q, n_kv, mask, whole=n > 1), atol=tolerance)
    cache.close()


@pytest.mark.parametrize(
    ("pair", "reference"),
    [
        (("q8_0", "q4_0"), False),
        (("q4_1", "q5_1"), False),
        (("q5_0", "f16"), False),
        (("f16", "q8_0"), False),
        (("f32", "f16"), False),
        (("bf16", "bf16"), False),
        (("f32", "f32"), True),
        (("f16", "f16"), True),
        (("q8_0", "q4_0"), True),
    ],
    ids=str,
)
def test_a_column_does_not_depend_on_the_width(pair, reference):
    """In reference mode; with rows of two types, or of others than float32 and float16, fast kernels neither: they take such
    columns one by one."""
    device = Device.cpu(2, reference=reference)
    n, first, n_kv = 70, 600, 768
    q, k, v = draws(4, n, 2, 1, 64)
    mask = causal(n, first, n_kv)
    cache = KvCache(device, [KvLayer(1, 64)], KvType.named(*pair), n_kv)

    def codes() -> list[np.ndarray]:
        return [device.read_bytes(t, np.empty(t.nb[1] * n_kv, np.uint8)) for t in cache.slices]

    together = attended(device, cache, q, k, v, first, n_kv, mask)
    written = codes()
    for i in range(0, n, 9):
        one = slice(i, i + 1)
        alone = attended(device, cache, q[one], k[one], v[one], first + i, n_kv, mask[one])
        assert np.array_equal(alone, together[one])
    if reference:
        assert np.array_equal(attended(device, cache, q, k, v, first, n_kv, mask, by_ranges=True), together)
    for before, after in zip(written, codes(), strict=True):
        assert np.array_equal(before, after)
    cache.close()
    device.close()


@pytest.mark.parametrize("name", ["CPU", "reference", *(gpu.name for gpu in GPUS)])
@pytest.mark.parametrize("width", [32, 64, 128, 256, 512])
def test_rotations_are_orthonormal(name, width):
    """The fast transform and the multiplication by its matrix do the same, and twice is once back."""
    if width == 32 and name not in ("CPU", "reference"):
        width = 64  # no transform of its own, and no attention over such heads
    device = opened(name)
    matrix = hadamard(width)
    np.testing.assert_allclose(matrix @ matrix, np.eye(width), atol=2e-6)
    assert np.array_equal(matrix, matrix.T)
    kv_type = KvType.named("q8_0", "q4_0")
    rotations = Rotations(device, [width], kv_type)
    assert rotations.store.nbytes == rotation_bytes([width], kv_type)
    x = np.random.default_rng(5).standard_normal((7, 3 * width)).astype(np.float32)
    g, workspace = Graph(device, 32), Workspace(device)
    given = g.input("x", F32, 3 * width, 7)
    of = rotations.of(width)
    for name, turn, shape in (("keys", of.of_keys, (width, 3, 7)), ("values", of.of_values, (3 * width, 7))):
        once = turn(g, g.reshape(given, *shape))
        g.output(g.cont(once), name)
        g.output(turn(g, once), name + " back")
    g.place(workspace)
    g.inputs["x"].array[...] = x
    g.run()
    for name, w in (("keys", width), ("values", min(width, 64))):
        once = turned(x, w)
        np.testing.assert_allclose(device.read(g.outputs[name]).reshape(x.shape), once, atol=5e-6)
        np.testing.assert_allclose(device.read(g.outputs[name + " back"]).reshape(x.shape), x, atol=5e-6)
    for thing in (g, workspace, rotations.store, device):
        thing.close()


def test_rotation_pays_where_keys_have_outliers(monkeypatch):
    """Two of 64 channels twelve times as large as the others: 4-bit keys add half of what they would unrotated."""
    device = Device.cpu(1)
    n = n_kv = 256
    q, k, v = draws(7, n, 4, 2, 64)
    k[..., :2] *= 2
    q[..., :2] /= 12
    mask, found = causal(n, 0, n_kv), []
    for pair, rotated in ((("f32", "f32"), True), (("q4_0", "f32"), True), (("q4_0", "f32"), False)):
        if not rotated:
            monkeypatch.setattr("dflash_ggml.state.rotation._pair", lambda *_: (0, 0))
        cache = KvCache(device, [KvLayer(2, 64)], KvType.named(*pair), n_kv)
        found.append(attended(device, cache, q, k, v, 0, n_kv, mask))
        cache.close()
    truth, ours, bare = found
    assert 2 * np.abs(ours - truth).mean() < 1.2 * np.abs(bare - truth).mean()
    device.close()


def test_rotation_follows_the_type():
    device = Device.cpu(1)
    for pair in PAIRS:
        rotations = Rotations(device, [128, 96], KvType.named(*pair))
        of = [rotations.of(d) for d in (128, 96)]
        widths = [[None if t is None else t.ne[0] for t in (r.keys, r.values)] for r in of]
        k, v = (is_quantised(KV_TYPES[t]) for t in pair)
        assert widths == [[128 if k else None, 64 if v else None], [32 if k else None, 32 if v else None]]
        rotations.store.close()
    device.close()


LAYERS = (KvLayer(2, 32), KvLayer(4, 32, window=64), KvLayer(2, 32), KvLayer(1, 96))


@pytest.mark.parametrize(
    "pair", [(t, t) for t in KV_TYPES] + [("q8_0", "q4_0"), ("f16", "q5_0")], ids="/".join
)
def test_a_commit_moves_every_bit(device, pair):
    """Rows of random bytes, numbers or not, by paths that overlap what they are moved to."""
    kv_type = KvType.named(*pair)
    state = TargetState(device, StateSpec(LAYERS), kv_type, 256, 8, 0)
    caches = [cache for _, cache in state.caches]
    assert [len(cache.layers) for cache in caches] == [3, 1]
    for cache in caches:
        assert cache.nbytes == StateSpec(cache.layers).kv_bytes(256, kv_type)
    rng, workspace = np.random.default_rng(6), Workspace(device)
    before, slices = [], [t for cache in caches for t in cache.slices]
    for t in slices:
        before.append(rng.integers(0, 256, (256, t.nb[1]), np.uint8))
        device.write(t, before[-1].reshape(-1))
    g = commit_graph(device, state, 6, 6).place(workspace)
    sources = [100, 102, 103, 104, 107, 105]
    for prefix, cache in state.caches:
        g.inputs[f"{prefix}to"].array[:] = range(100, 106)
        for i in range(len(cache.wholes)):
            g.inputs[f"{prefix}from{i}"].array[:] = sources
    g.run()
    for t, rows in zip(slices, before, strict=True):
        after = device.read_bytes(t, np.empty(rows.size, np.uint8)).reshape(rows.shape)
        rows[100:106] = rows[sources]
        assert np.array_equal(after, rows)
    g.close()
    for thing in (state, workspace):
        thing.close()


def test_rows_are_whole_words():
    for type_ in KV_TYPES.values():
        for row in (32, 64, 96, 128, 1024):
            assert row_bytes(type_, row) % 4 == 0 and stored_row(type_, row) - row in (
                0,
                32 if row % 64 else 0,
            )
    assert row_bytes(KV_TYPES["q8_0"], 1024) == 1088 and row_bytes(KV_TYPES["q4_0"], 1024) == 576


def test_what_a_gpu_copies_for_many_columns():
    """One layer at a time, and only what is not float16 already: 4,096 bytes a row at 27B."""
    spec = StateSpec((KvLayer(4, 256), KvLayer(2, 256)))
    sizes = [
        spec.f16_copy(1000, KvType.named(*p)) for p in (("f16", "f16"), ("f16", "q4_0"), ("q8_0", "bf16"))
    ]
    assert sizes == [0, 2_048_000, 4_096_000]


def test_what_a_gpu_copies_by_heads():
    """At most 256 MiB or one head, and never less for more rows."""
    spec, q4, mib = StateSpec((KvLayer(4, 256), KvLayer(2, 256))), KvType.named("q4_0", "q4_0"), 1 << 20
    rows = (1000, 65_536, 80_000, 262_144, 524_288)
    sizes = [spec.f16_copy(n, q4, by_heads=True) / mib for n in rows]
    assert sizes == [4096 * 1000 / mib, 256, 256, 256, 512]
    assert spec.f16_copy(262_144, KvType.named("f16", "f16"), by_heads=True) == 0


def test_heads_that_blocks_do_not_divide():
    KvType.named("f16", "bf16").check(48, "target")
    with pytest.raises(
        ConfigError, match="type_v: q4_0 has blocks of 32 .* the draft's head dimension 48; take f16"
    ):
        KvType.named("f16", "q4_0").check(48, "draft")
