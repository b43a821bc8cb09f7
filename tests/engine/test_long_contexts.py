"""Tests of contexts of more than 100,000 tokens: rows, trees, snapshots and masks, and a step no more expensive than a short
one.

Nothing is prefilled that far: a cache's rows are filled with random values, from which the last tokens continue.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from test_engine_state import random_tree

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.tree import verify_width
from dflash_ggml.engine.slot import Slot
from dflash_ggml.ggml.device import Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.models import layers
from dflash_ggml.session.prompts import Prepared
from dflash_ggml.session.requests import CompletionRequest
from dflash_ggml.session.session import Session, run_completion
from dflash_ggml.session.slots import CachedSlot
from dflash_ggml.state.mask import ResidentMask
from reference.engine_kit import Solo, verify
from reference.toys import write_pair

LONG, N_CTX = 100_000, 131_072
TAIL = [5, 3, 9, 1]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    sizes = {"n_heads": 1, "head_dim": 32, "n_layers": 4, "window": 100, "draft_layers": 2, "full_layers": 1}
    pair = write_pair(tmp_path_factory.mktemp("long"), 51, n_ctx=262_144, **sizes)
    config = EngineConfig(
        *pair,
        n_ctx=N_CTX,
        budget=7,
        type_k="f32",
        type_v="f32",
        n_threads=1,
        n_gpu_layers=0,
        calibrate="never",
    )
    with Solo.load(config) as e:
        yield e


@pytest.fixture(scope="module")
def slot(engine):
    return engine.open()


def lay(slot: Slot, n: int, seed: int = 0) -> list[int]:
    """A sequence of n tokens whose rows hold random values, and TAIL behind them; all of its tokens."""
    rng, sequence, drafter = np.random.default_rng(seed), slot.sequence, slot.engine.drafter
    slot.reset()
    for t in (*slot.engine.passes.state.kv.slices, *drafter.rows):
        slot.engine.device.write(t, rng.normal(0, 1, (n, t.ne[0])).astype(np.float32))
    for t, rows, _ in drafter.rings:
        slot.engine.device.write(t, rng.normal(0, 1, (rows, t.ne[0])).astype(np.float32))
    drafter.prefilled(sequence, n, True)
    sequence.tokens += rng.integers(0, 60, n).tolist()
    slot.prefill(TAIL)
    return slot.tokens


def write(slot: Slot, n: int, mode: str = "tree") -> list[int]:
    sampler = Sampler(SamplingParams(temperature=0), slot.n_vocab)
    steps = slot.generate(sampler, max_tokens=n, mode=mode, stop=lambda t: False)
    return [token for step in steps for token in step.tokens]


def last_rows(slot: Slot, start: int) -> list[np.ndarray]:
    """The target's rows of the committed tokens from `start` on."""
    n = slot.n_tokens - start
    return [
        slot.engine.device.read(t, n * t.ne[0], offset=start * t.nb[1]).reshape(n, -1)
        for t in slot.engine.passes.state.kv.slices
    ]


def test_trees_commit_and_roll_back_what_plain_decoding_writes(slot):
    found = {}
    for mode in ("plain", "tree"):
        lay(slot, LONG)
        found[mode] = write(slot, 16, mode), last_rows(slot, LONG)
    assert slot.sequence.statistics.accepted > 0
    assert slot.sequence.statistics.drafted > slot.sequence.statistics.accepted
    assert found["tree"][0] == found["plain"][0]
    for ours, plain in zip(found["tree"][1], found["plain"][1], strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-4 * np.abs(plain).max())


@pytest.mark.parametrize("with_rows", [True, False])
def test_a_snapshot_restores_the_sequence(slot, with_rows):
    tokens = lay(slot, LONG)
    snapshot = slot.snapshot(with_rows=with_rows)
    assert snapshot.in_draft.all() and len(snapshot.in_draft) == LONG + len(TAIL)
    text = write(slot, 8)
    if with_rows:
        lay(slot, LONG // 2, seed=1)
    assert slot.can_restore(snapshot)
    slot.restore(snapshot)
    assert slot.tokens == tokens and slot.engine.drafter.seen(slot.sequence).all()
    snapshot = slot.snapshot(with_rows=with_rows)  # and once more, from what was restored
    assert write_again(slot) == text[1:]
    slot.restore(snapshot)
    assert write_again(slot) == text[1:]


def write_again(slot: Slot) -> list[int]:
    """What follows the token that the prompt's own pass gave: a snapshot has no logits of later use."""
    first = int(np.argmax(slot.logits))
    slot.prefill([first])
    return write(slot, 7)


def test_the_prefix_cache_goes_on_and_back(slot):
    """Two endings of one long prefix: the second comes from the snapshot where they part."""
    prefix = lay(slot, LONG)
    state = adopted(slot).slots.all[0]
    state.cache.put(slot.snapshot(with_rows=False))
    outputs = []
    for ending in ([7, 7, 7, 8], [9, 8], [7, 7, 7, 8]):
        ids = [*prefix, *ending]
        assert len(prefix) <= state.known(ids) < len(ids)
        state.load(ids)
        assert slot.tokens == ids
        state._has_logits = False  # decoding takes them
        outputs.append(write(slot, 4))
    assert outputs[0] == outputs[2]


@pytest.mark.parametrize("mode, temperature", [("plain", 0.8), ("tree", 0.0), ("tree", 0.8), ("auto", 0.8)])
def test_host_time_of_a_step_does_not_grow_with_length(slot, mode, temperature):
    """Memory that Python and numpy take in a step, at its peak: what is copied or made anew in proportion to the context
    would be 400 KB a list or array of its tokens."""
    params = SamplingParams(temperature=temperature, seed=3, repeat_penalty=1.1, frequency_penalty=0.1)
    peaks = {}
    for n in (1000, LONG):
        ids = lay(slot, n)
        session = adopted(slot)
        request = CompletionRequest(
            prompt=ids, sampling=params, mode=mode, max_tokens=60, ignore_eos=True, logprobs=2
        )
        events = run_completion(session, Prepared(request, "", tuple(ids)))
        for _ in range(8):  # graphs are built by then
            next(events)
        tracemalloc.start()
        taken = []
        for _ in range(7):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            next(events)
            taken.append(tracemalloc.get_traced_memory()[1] - before)
        tracemalloc.stop()
        events.close()
        peaks[n] = np.median(taken)
    assert peaks[LONG] < peaks[1000] + 20_000


def adopted(slot: Slot) -> Session:
    """A session that has this slot, and what was prefilled there."""
    session = Session(slot.engine)
    session.slots.all.append(cached := CachedSlot(slot, session.slots))
    cached._has_logits = True
    return session


def test_masks_far_out():
    """A mask over 131,072 slots against the rule itself."""
    device, width = Device.cpu(1), 16
    mask = ResidentMask(device, width, width, N_CTX)
    g = Graph(device, 32)
    g.output(mask.build(g, "m", N_CTX, width), "result")
    g.place(Workspace(device))
    seen_by = np.packbits(np.triu(np.ones((width, width), bool)), axis=1, bitorder="little")
    rng = np.random.default_rng(0)
    start = 110_000
    for _ in range(30):
        mask.fill(g, "m", N_CTX, start, seen_by)
        g.run()
        mask.ran()
        found = device.read(g.outputs["result"]).reshape(width, N_CTX) == 0
        np.testing.assert_array_equal(found, np.arange(N_CTX) <= start + np.arange(width)[:, None])
        start += int(rng.integers(0, 20))
    g.close()
    mask.close()


@pytest.mark.parametrize("first_row", [0, 300])
def test_attention_gets_the_ranges_of_rows_in_use(toy_pair, monkeypatch, first_row):
    """Which changes no bit of what a tree's columns see."""
    found = []
    for spanned in (1 << 30, 256):
        monkeypatch.setattr(layers, "SPANNED", spanned)
        with Solo.load(
            EngineConfig(*toy_pair, n_ctx=1500, n_threads=1, n_gpu_layers=0, calibrate="never")
        ) as engine:
            engine.sequence.first_row = first_row
            engine.prefill(np.random.default_rng(5).integers(0, 60, 700).tolist())
            tree = random_tree(np.random.default_rng(6), 12, 6, engine.n_vocab)
            graph = verify(engine, tree)
            assert ("span" in graph.inputs) == (spanned == 256)
            if spanned == 256:
                rows = graph.inputs["span"].array.tolist()
                assert rows == [first_row, engine.sequence.rows(verify_width(tree.n_nodes)).stop]
            found.append([engine.passes.logits_row(graph, node) for node in range(tree.n_nodes)])
    np.testing.assert_array_equal(*found)
