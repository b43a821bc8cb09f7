"""Tests of drafts whose window layers keep a ring: same proposals as with all rows kept."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.drafts import registry
from dflash_ggml.drafts.combined import CombinedSource
from dflash_ggml.session.disk_cache import DiskCache, state_identity
from dflash_ggml.state import context
from reference.engine_kit import Solo
from reference.toys import write_pair

WINDOW, RING = 100, 256
IDS = np.random.default_rng(8).integers(0, 60, 2000).tolist()


@pytest.fixture(scope="module", params=[0, 1], ids=["windows only", "and a full layer"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rings")
    sizes = {"window": WINDOW, "full_layers": request.param, "draft_layers": 2, "n_ctx": 4096}
    return write_pair(folder, 31 + request.param, **sizes)


def load(pair, **options) -> Solo:
    base = {
        "n_ctx": 4000,
        "n_batch": 300,
        "type_k": "f32",
        "type_v": "f32",
        "n_threads": 1,
        "n_gpu_layers": 0,
    }
    return Solo.load(EngineConfig(*pair, **{**base, **options}))


@pytest.fixture()
def ringed(pair):
    with load(pair) as engine:
        assert [group.n_rows for group in engine.drafter.context.groups if group.window] == [RING]
        yield engine


@pytest.fixture()
def whole(pair, monkeypatch):
    monkeypatch.setattr(context, "ring_rows", lambda window, block, n_rows: n_rows)
    with load(pair) as engine:
        monkeypatch.undo()
        assert not engine.drafter.rings
        yield engine


def walk(engine: Solo, seed: int, given: list | None = None) -> list:
    """Proposals over prefills, plain and drafted steps, resets, restores and continuations, past many wraps of a ring. given:
    those of another engine, which the run follows, so that a near-tie does not make the two diverge."""
    rng, proposed, kept = np.random.default_rng(seed), [], []
    propose = engine.drafter.propose

    def noted(*args, **options):
        (rows,) = propose(*args, **options)
        at = len(proposed)
        proposed.append((engine.n_tokens, rows.ids.copy(), rows.log_probs.copy()))
        return [CandidateBlock(*given[at][1:]) if given else rows]

    engine.drafter.propose = noted
    engine.reset()
    engine.prefill(IDS[:5])
    while len(proposed) < 110:
        sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
        mode = str(rng.choice(["tree", "chain", "plain"]))
        steps = engine.generate(sampler, max_tokens=int(rng.integers(2, 40)), mode=mode, stop=lambda t: False)
        assert all(step.tokens for step in steps)
        what = rng.random()
        usable = [snapshot for snapshot in kept if engine.can_restore(snapshot)]
        if usable and what < 0.15:
            engine.restore(usable[int(rng.integers(len(usable)))])
        elif what < 0.3:
            kept.append(engine.snapshot(with_rows=bool(rng.integers(2))))
        if engine.n_tokens > 3000 or what > 0.95:
            engine.reset()
        engine.prefill(IDS[: int(rng.choice([1, 40, 299, 700]))])
    del engine.drafter.propose
    return proposed


def test_it_proposes_what_all_rows_propose(ringed, whole):
    """Sums come in another order once the ring has wrapped, so the last bits differ."""
    ours = walk(ringed, seed=0)
    theirs = walk(whole, seed=0, given=ours)
    assert max(at for at, *_ in ours) > 8 * RING
    for (at, tokens, scores), (other_at, other_tokens, other_scores) in zip(ours, theirs, strict=True):
        assert at == other_at
        np.testing.assert_allclose(scores, other_scores, atol=2e-4)
        apart = np.diff(other_scores, axis=1) < -1e-3  # near-ties may be swapped
        sure = apart & np.roll(apart, 1, axis=1)
        sure[:, 0] = apart[:, 0]
        assert sure.mean() > 0.5
        np.testing.assert_array_equal(tokens[:, :-1][sure], other_tokens[:, :-1][sure])


def test_a_batch_that_is_longer_than_the_ring(pair, whole):
    """Only its last rows stay; no row is written twice."""
    with load(pair, n_batch=1000) as engine:
        for e in (engine, whole):
            e.prefill(IDS[:1999])
            e.sequence.pending = 3
        ours, theirs = (e.drafter.propose([e.sequence], 20)[0] for e in (engine, whole))
    np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=2e-4)


def test_a_snapshot_without_rows_has_the_ring(ringed):
    """The sequence continued and the ring wrapped: its content at the snapshot is restored with it."""
    ringed.prefill(IDS[:400])
    bare = ringed.snapshot(with_rows=False)
    assert [ring.nbytes for ring in bare.rings] == [(WINDOW - 1) * t.nb[1] for t, *_ in ringed.drafter.rings]
    ringed.sequence.pending = 7
    before = ringed.drafter.propose([ringed.sequence], 20)[0].log_probs
    ringed.prefill(IDS[:1500])
    ringed.restore(bare)
    ringed.sequence.pending = 7
    np.testing.assert_array_equal(ringed.drafter.propose([ringed.sequence], 20)[0].log_probs, before)
    short = ringed.snapshot()
    assert short.in_draft.all() and short.nbytes > bare.nbytes


def test_a_file_has_the_ring(pair, tmp_path):
    """Another process continues from the file."""
    drafted = []
    for _ in range(2):
        with load(pair) as engine:
            cache = DiskCache(tmp_path, 1 << 30, state_identity(engine))
            snapshot = cache.load(IDS, len(IDS))
            if snapshot is None:
                engine.prefill(IDS[:1100])
                assert cache.put(engine.snapshot())
                cache.close()
            else:
                engine.restore(snapshot)
            assert engine.n_tokens == 1100 and engine.drafter.seen(engine.sequence).all()
            engine.sequence.pending = 7
            drafted.append(engine.drafter.propose([engine.sequence], 20)[0].log_probs)
    np.testing.assert_array_equal(*drafted)


def test_two_drafts_have_a_ring_each(pair, ringed, monkeypatch):
    """What a prefill puts into both is what it puts into one, and a snapshot has both."""
    ringed.prefill(IDS[:1100])
    (expected, *_), n = ringed.snapshot().rings, len(ringed.drafter.rings)

    open_draft = registry.open_draft

    def twice(*args):
        return CombinedSource([open_draft(*args), open_draft(*args)])

    monkeypatch.setattr(registry, "open_draft", twice)
    with load(pair) as engine:
        engine.prefill(IDS[:1100])
        rings = engine.snapshot().rings
        assert len(rings) == 2 * n
        assert np.array_equal(rings[0], expected) and np.array_equal(rings[n], expected)


def test_a_window_that_the_context_does_not_exceed_has_no_ring(pair):
    with load(pair, n_ctx=200, budget=1) as engine:
        assert not engine.drafter.rings
        engine.prefill(IDS[:150])
        engine.sequence.pending = 3
        engine.drafter.propose([engine.sequence], 4)[0]
