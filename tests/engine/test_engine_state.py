"""Tests of the state after commits, snapshots, stops and errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.tree import Tree
from dflash_ggml.drafts.dflash.file import DraftFile
from dflash_ggml.engine import placement
from dflash_ggml.errors import ConfigError, ContextOverflowError, DeviceError, ModelFileError
from dflash_ggml.ggml import device, store
from reference.engine_kit import Solo, verify
from reference.engine_kit import commit as commit_path

GREEDY = SamplingParams(temperature=0)


@pytest.fixture()
def engine(toy_pair):
    target, draft = toy_pair
    with Solo.load(
        EngineConfig(target, draft, n_ctx=2048, type_k="f32", type_v="f32", reference=True, budget=48)
    ) as e:
        yield e


def random_tree(rng: np.random.Generator, n_nodes: int, max_depth: int, n_vocab: int) -> Tree:
    parents, depths = [-1], [0]
    while len(parents) <= n_nodes:
        parent = int(rng.integers(len(parents)))
        if depths[parent] < max_depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    tokens = rng.integers(0, n_vocab, len(parents)).astype(np.int32)
    return Tree(
        tokens, np.array(parents, np.int32), np.array(depths, np.int32), np.zeros(len(parents), np.float32)
    )


def commit(engine: Solo, tree: Tree, leaf: int) -> None:
    """Verify a tree after the committed tokens and commit its path to `leaf`, as a step would."""
    sequence, path = engine.sequence, []
    sequence.pending = int(tree.tokens[0])
    verify(engine, tree)
    while leaf >= 0:
        path.append(leaf)
        leaf = int(tree.parents[leaf])
    path = tuple(reversed(path))
    commit_path(engine, tree, path)
    sequence.commit(path, (*[int(tree.tokens[i]) for i in path[1:]], 0))


def cache_rows(engine: Solo, n: int) -> list[np.ndarray]:
    """Rows of the sequence's first n tokens in all caches, target's and draft's, as numbers."""
    first = engine.sequence.first_row
    caches = engine.kv.tensors().caches
    return [engine.device.read(t, n * t.ne[0], first * t.nb[1]).astype(np.float32) for t in caches]


@pytest.mark.parametrize("first_row", [0, 300])
@pytest.mark.parametrize("max_depth", [15, 47])
def test_any_commits_equal_a_fresh_prefill(engine, first_row, max_depth):
    """60 random trees with random accepted paths: state, K/V and next logits are those of a prefill (1e-4 of their scale),
    wherever the rows lie, also for paths that are longer than the draft's block."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, engine.n_vocab - 4, 5).tolist()
    engine.sequence.first_row = first_row
    engine.prefill(tokens)
    longest = 0
    for _ in range(60 if max_depth == 15 else 25):
        tree = random_tree(rng, int(rng.integers(1, 48)), max_depth, engine.n_vocab - 4)
        leaf = int(rng.integers(tree.width)) if max_depth == 15 else int(tree.depths.argmax())
        longest = max(longest, int(tree.depths[leaf]) + 1)
        commit(engine, tree, leaf)
        engine.drafter.take_in([engine.sequence])
    assert (longest > engine.drafter.block) == (max_depth == 47)
    engine.sequence.pending = None
    tokens, n, probe = engine.tokens, engine.n_tokens, int(rng.integers(engine.n_vocab - 4))

    def look() -> tuple[list, list, np.ndarray]:
        state = [engine.device.read(t) for t in engine.passes.state.live()]
        rows = cache_rows(engine, n)
        return state, rows, engine.passes.logits_row(engine.passes.linear(engine.sequence, [probe]))

    state, rows, logits = look()
    engine.reset()
    engine.sequence.first_row = 0
    engine.prefill(tokens)
    fresh_state, fresh_rows, fresh_logits = look()
    for ours, fresh in zip([*state, *rows], [*fresh_state, *fresh_rows], strict=True):
        np.testing.assert_allclose(ours, fresh, atol=1e-4 * np.abs(fresh).max())
    np.testing.assert_allclose(logits, fresh_logits, atol=1e-3)


@pytest.mark.parametrize("mode", ["plain", "chain", "tree"])
def test_output_does_not_depend_on_cache_row_positions(engine, mode):
    """Position and slot are different things: rotation and windows follow the first, caches and masks the second."""
    outputs = []
    for first_row in (0, 1, 777):
        engine.reset()
        engine.sequence.first_row = first_row
        engine.prefill([3, 1, 4, 1, 5])
        outputs.append(greedy_tokens(engine, 120, mode=mode))
        snapshot = engine.snapshot()
        engine.prefill([7])
        engine.restore(snapshot)
        engine.prefill([8])
        outputs[-1] += greedy_tokens(engine, 30, mode=mode)
    assert outputs[0] == outputs[1] == outputs[2]


def test_verify_leaves_the_state_alone(engine):
    rng = np.random.default_rng(1)
    engine.prefill(rng.integers(0, 60, 20).tolist())
    passes = engine.passes
    before = [passes.device.read(t) for t in passes.state.live()]
    verify(engine, random_tree(rng, 40, 7, 60))
    for a, t in zip(before, passes.state.live()):
        assert np.array_equal(a, passes.device.read(t))


def greedy_tokens(engine, n, **options) -> list[int]:
    sampler = Sampler(GREEDY, engine.n_vocab)
    return [
        t for s in engine.generate(sampler, max_tokens=n, stop=lambda t: False, **options) for t in s.tokens
    ]


@pytest.mark.parametrize("with_rows", [True, False])
def test_snapshot_goes_back(engine, with_rows):
    """After a restore the same text follows, whatever was decoded in between."""
    engine.prefill([3, 1, 4, 1, 5])
    greedy_tokens(engine, 20)
    prefix = engine.tokens
    engine.prefill([7])
    snapshot = engine.snapshot(with_rows)
    first = greedy_tokens(engine, 40)
    engine.restore(snapshot)
    assert engine.tokens == [*prefix, 7]
    assert greedy_tokens(engine, 40) == first
    engine.reset()
    engine.prefill([9, 9, 9])
    if with_rows:
        engine.restore(snapshot)
        assert greedy_tokens(engine, 40) == first
    else:
        with pytest.raises(ConfigError, match="rows"):
            engine.restore(snapshot)


@pytest.mark.parametrize("between", ["prefill", "plain", "plain and tree"])
def test_the_draft_sees_what_was_committed(engine, between):
    """The draft's context after trees, then something else, is that of a prefill: acceptance depends on it, text does not."""
    engine.prefill([3, 1, 4, 1, 5])
    greedy_tokens(engine, 25)
    engine.prefill([7])
    if between == "prefill":
        engine.prefill([8])
    else:
        greedy_tokens(engine, 100, mode="plain")
    if between == "plain and tree":
        engine.prefill([9])
        greedy_tokens(engine, 25)
    snapshot = engine.snapshot()  # the draft takes in what waits
    assert snapshot.in_draft.all() and len(snapshot.in_draft) == engine.n_tokens
    tokens, rows = engine.tokens, cache_rows(engine, engine.n_tokens)
    engine.reset()
    engine.prefill(tokens)
    for ours, fresh in zip(rows, cache_rows(engine, len(tokens)), strict=True):
        np.testing.assert_allclose(ours, fresh, atol=1e-4 * np.abs(fresh).max())


def test_the_limit_does_not_change_the_output(toy_pair):
    """A sequence in a context of just its length equals the one in a longer context."""
    target, draft = toy_pair
    ids, outputs = np.random.default_rng(3).integers(0, 60, 4200).tolist(), []
    for n_ctx in (4230, 1 << 20):
        config = EngineConfig(
            target, draft, n_ctx=n_ctx, type_k="f32", type_v="f32", reference=True, n_gpu_layers=0
        )
        with Solo.load(config) as e:
            e.prefill(ids)
            outputs.append(greedy_tokens(e, 30))
    assert outputs[0] == outputs[1]


def test_cancel_keeps_the_state_usable(engine):
    engine.prefill([1, 2, 3])
    seen = []

    def should_stop() -> bool:
        seen.append(1)
        return len(seen) == 4

    sampler = Sampler(GREEDY, engine.n_vocab)
    steps = list(engine.generate(sampler, stop=lambda t: False, should_stop=should_stop))
    assert steps[-1].finish == "cancelled" and steps[-1].tokens
    out = [t for s in steps for t in s.tokens]
    assert engine.tokens == [1, 2, 3, *out[:-1]]
    engine.prefill([engine.pending])
    rest = greedy_tokens(engine, 10)
    engine.reset()
    engine.prefill([1, 2, 3])
    assert greedy_tokens(engine, len(out) + 10) == out + rest


def test_closing_the_generator_keeps_the_state(engine):
    engine.prefill([1, 2, 3])
    steps = engine.generate(Sampler(GREEDY, engine.n_vocab), stop=lambda t: False)
    out = [t for _ in range(3) for t in next(steps).tokens]
    steps.close()
    assert engine.tokens == [1, 2, 3, *out[:-1]] and engine.pending == out[-1]


def test_stop_inside_a_path_commits_the_cut_prefix(engine):
    """A stop in the middle of an accepted path ends the output and the committed state there."""
    engine.prefill([1, 2, 3])
    text = greedy_tokens(engine, 60)
    for at in range(1, 30):
        engine.reset()
        engine.prefill([1, 2, 3])
        left = iter(range(at, -1, -1))
        steps = list(
            engine.generate(Sampler(GREEDY, engine.n_vocab), stop=lambda t, left=left: next(left) == 0)
        )
        assert [t for s in steps for t in s.tokens] == text[: at + 1] and steps[-1].finish == "stop"
        assert engine.tokens == [1, 2, 3, *text[:at]]


def test_interrupt_in_a_pass_asks_for_a_reset(engine, monkeypatch):
    engine.prefill([1, 2, 3])
    monkeypatch.setattr(engine.passes, "commit", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        greedy_tokens(engine, 20, mode="tree")
    with pytest.raises(DeviceError, match="reset"):
        engine.prefill([1])
    monkeypatch.undo()
    engine.reset()
    engine.prefill([1, 2, 3])
    assert len(greedy_tokens(engine, 5)) == 5


def test_errors_come_before_work(engine):
    with pytest.raises(ContextOverflowError, match="exceed context window of 2048"):
        engine.prefill([1] * 2049)
    with pytest.raises(ConfigError, match="vocabulary"):
        engine.prefill([1, engine.n_vocab])
    assert engine.tokens == []
    with pytest.raises(ConfigError, match="prefill"):
        next(engine.generate(Sampler(GREEDY, engine.n_vocab)))
    engine.prefill([1])
    with pytest.raises(ConfigError, match="budget"):
        next(engine.generate(Sampler(GREEDY, engine.n_vocab), budget=200))


def test_modes_need_a_draft(toy_pair):
    with pytest.raises(ConfigError, match="draft"):
        Solo.load(EngineConfig(toy_pair[0], mode="tree"))
    with Solo.load(EngineConfig(toy_pair[0], spec=())) as e:
        e.prefill([1, 2])
        with pytest.raises(ConfigError, match="draft"):
            next(e.generate(Sampler(GREEDY, e.n_vocab), mode="chain"))
        assert len(greedy_tokens(e, 10)) == 10


def test_draft_of_another_model_is_refused(toy_pair, demo_target):
    with pytest.raises(ModelFileError, match=toy_pair[1].name):
        Solo.load(EngineConfig(demo_target, toy_pair[1]))


def test_a_found_draft_stops_nothing(toy_pair, demo_target, tmp_path, caplog):
    """One that does not fit, a damaged one, one that fails late: a warning, and plain decoding. A mode that needs it raises."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF nonsense")
    for target, draft, reason in (
        (demo_target, toy_pair[1], "does not fit"),
        (toy_pair[0], broken, "broken.gguf"),
        (toy_pair[0], tmp_path / "nowhere.gguf", "no such file"),
    ):
        caplog.clear()
        config = EngineConfig(target, draft, n_ctx=256, n_threads=1, draft_found=True)
        with Solo.load(config) as e:
            assert not e.has_draft and e.config.draft is None
        warnings = [r.message for r in caplog.records if "decoding without a draft model" in r.message]
        assert len(warnings) == 1 and reason in warnings[0]
        with pytest.raises(
            ConfigError, match="mode tree needs a draft, and the one that was found cannot be used"
        ):
            Solo.load(replace(config, mode="tree"))
        with pytest.raises(ModelFileError):
            Solo.load(replace(config, draft_found=False))
    with Solo.load(EngineConfig(*toy_pair, n_ctx=256, n_threads=1, draft_found=True)) as e:
        assert e.has_draft
    with pytest.raises(ModelFileError, match="broken.gguf"):
        Solo.load(EngineConfig(broken, toy_pair[1], draft_found=True))
    with pytest.raises(ConfigError, match="draft_window: -1 is outside"):
        EngineConfig(*toy_pair, draft_window=-1)


def test_a_found_draft_that_fails_on_the_device_stops_nothing(toy_pair, monkeypatch, caplog):
    def start(*args, **options):
        raise DeviceError("no memory for the draft")

    monkeypatch.setattr("dflash_ggml.drafts.dflash.source.DFlashSource.start", start)
    config = EngineConfig(*toy_pair, n_ctx=256, n_threads=1, draft_found=True)
    with Solo.load(config) as e:
        assert not e.has_draft
        e.prefill([1, 2])
        assert len(greedy_tokens(e, 10)) == 10
    assert "decoding without a draft model: no memory for the draft" in caplog.text
    with pytest.raises(DeviceError):
        Solo.load(replace(config, draft_found=False))


def test_a_draft_with_sliding_windows(toy_pair, monkeypatch):
    """Window layers, which the newer drafts have, change what is drafted and never what is written."""
    target, draft = toy_pair
    opened = DraftFile.open

    def with_windows(path, **options):
        file = opened(path, **options)
        file.params = replace(file.params, sliding_window=12, window_layers=(True, False))
        return file

    outputs = []
    for windows in (False, True):
        if windows:
            monkeypatch.setattr("dflash_ggml.drafts.dflash.file.DraftFile.open", with_windows)
        with Solo.load(
            EngineConfig(target, draft, n_ctx=1024, type_k="f32", type_v="f32", reference=True)
        ) as e:
            assert len(e.drafter.context.groups) == 1 + windows
            for mode in ("plain", "chain", "tree"):
                e.reset()
                e.prefill([5, 4, 3, 2, 1])
                outputs.append(greedy_tokens(e, 300, mode=mode))
    assert all(text == outputs[0] for text in outputs)


def test_a_foreign_snapshot_leaves_the_state_as_it_is(engine, demo_target):
    with Solo.load(EngineConfig(demo_target, n_ctx=256, n_threads=1)) as other:
        other.prefill([1, 2, 3])
        foreign = other.snapshot()
    engine.prefill([1, 2, 3])
    with pytest.raises(ConfigError, match="snapshot"):
        engine.restore(foreign)
    assert engine.tokens == [1, 2, 3] and len(greedy_tokens(engine, 5)) == 5


@pytest.mark.parametrize("options", [{"budget": 0}, {"budget": -1}, {"mode": "forest"}])
def test_options_of_a_generation_are_checked(engine, options):
    engine.prefill([1, 2, 3])
    with pytest.raises(ConfigError, match=next(iter(options))):
        greedy_tokens(engine, 5, **options)
    assert len(greedy_tokens(engine, 5)) == 5


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_a_sampler_that_raises_leaves_the_state_whole(engine, mode):
    """What was committed by then is that of a prefill, and continues as such."""

    class Fails(Sampler):
        def sample(self, row, history=()):
            if len(history) == 12:
                raise RuntimeError("no such token")
            return super().sample(row, history)

    engine.prefill([1, 2, 3])
    text = []
    with pytest.raises(RuntimeError):
        sampler = Fails(SamplingParams(temperature=1, seed=1), engine.n_vocab)
        for step in engine.generate(sampler, mode=mode, stop=lambda t: False):
            text += step.tokens
    committed = engine.tokens
    assert committed == [1, 2, 3, *text][: len(committed)]
    engine.prefill([7])
    rest = greedy_tokens(engine, 20)
    engine.reset()
    engine.prefill([*committed, 7])
    assert greedy_tokens(engine, 20) == rest


def test_an_interrupt_before_a_pass_runs_leaves_no_stale_mask(engine, monkeypatch):
    """A pass whose inputs were filled but that never ran has not rewritten the mask's slots."""
    engine.prefill([1, 2, 3])
    text = greedy_tokens(engine, 60)
    engine.reset()
    engine.forget()  # else a few steps would copy all of it
    engine.prefill([1, 2, 3])
    steps = engine.generate(Sampler(GREEDY, engine.n_vocab), mode="tree", stop=lambda t: False)
    out = [t for _ in range(6) for t in next(steps).tokens]
    fill = engine.passes.tree_mask.fill

    def interrupted(*args, **options):
        fill(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.passes.tree_mask, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    monkeypatch.undo()
    engine.prefill([engine.pending])
    assert [*out, *greedy_tokens(engine, 60 - len(out))] == text


def test_scratch_memory_that_could_not_grow_voids_the_graphs_in_it(engine, monkeypatch):
    """ggml frees the old memory first."""
    engine.prefill([1, 2, 3])
    ((_, graph),) = engine.passes.graphs
    assert graph.valid

    class NoRoom:
        def __getattr__(self, name):
            return (lambda *_: False) if name == "ggml_gallocr_alloc_graph" else getattr(lib, name)

    lib = store.lib
    monkeypatch.setattr(store, "lib", NoRoom())
    with pytest.raises(DeviceError, match="scratch"):
        engine.passes.workspace.place(graph.cgraph)
    assert not graph.valid


def test_memory_dropped_unclosed_is_freed(engine, monkeypatch):
    """What a load that fails half way leaves behind."""
    freed = []

    class Counting:
        def __getattr__(self, name):
            if name != "ggml_backend_buffer_free":
                return getattr(lib, name)
            return lambda buffer: (freed.append(1), lib.ggml_backend_buffer_free(buffer))

    lib = store.lib
    monkeypatch.setattr(store, "lib", Counting())
    for close in (False, True):
        memory = store.Store(engine.device, 1)
        memory.tensor(device.F32, 8)
        memory.allocate()
        if close:
            memory.close()
        del memory
        assert len(freed) == 1 + close


def test_reference_kernels_mean_the_cpu(toy_pair, monkeypatch):
    cpu = device.list_devices()[-1]
    found = [replace(cpu, name="CUDA0", is_gpu=True), cpu]
    monkeypatch.setattr(placement, "list_devices", lambda: found)
    chosen = placement.choose_device(EngineConfig(toy_pair[0], reference=True, n_threads=1))
    assert not chosen.is_gpu
    chosen.close()


@pytest.mark.parametrize(
    ("options", "yields"),
    [
        *(({"mode": mode}, True) for mode in ("auto", "plain", "chain", "tree")),
        ({"n_threads": 3}, False),
        ({"reproducible": True}, False),
        ({"reference": True}, False),
    ],
    ids=str,
)
def test_threads_yield_unless_their_number_was_given(toy_pair, monkeypatch, options, yields):
    """Whatever the mode: fewer compute while other processes want the cores."""
    monkeypatch.setattr(device, "physical_cores", lambda: 3)
    monkeypatch.setattr(device, "WINDOW", 0.0)
    waits = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(device.Pool, "waited", lambda _: next(waits))
    with Solo.load(EngineConfig(*toy_pair, n_ctx=512, n_gpu_layers=0, calibrate="never", **options)) as e:
        e.prefill([3, 1, 4])
        assert e.device.n_threads == 3
        assert (e.device.threads_now < 3) == yields


def test_a_closed_engine_raises(toy_pair):
    e = Solo.load(EngineConfig(*toy_pair, n_ctx=512))
    e.close()
    with pytest.raises(DeviceError, match="closed"):
        e.prefill([1])
