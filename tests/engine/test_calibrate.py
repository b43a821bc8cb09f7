"""Tests of the costs measured on loading and cached on disk: they change speed, never output."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine import known_costs, loading
from dflash_ggml.engine.kernel_tuning import MatmulTable, Timing
from dflash_ggml.engine.known_costs import CostCache, Measured, default_folder
from dflash_ggml.policy.costs import Point
from dflash_ggml.policy.forecast import blocks
from reference.chi_square import assert_same_source
from reference.engine_kit import Solo

POINTS = [Point("plain", 1, 64, 1.25), Point("verify", 8, 4000, 2.5)]
MEASURED = Measured(tuple(POINTS), MatmulTable((Timing("q8_0", 8, 1.0, 2.0, 0.1),)))


@pytest.fixture()
def folder(tmp_path, monkeypatch):
    """An empty cache, and time to measure all."""
    monkeypatch.setattr(known_costs, "default_folder", lambda: tmp_path / "costs")
    monkeypatch.setattr(known_costs, "SECONDS", {True: 60.0, False: 60.0})
    return tmp_path / "costs"


def config(pair, **options) -> EngineConfig:
    return EngineConfig(*pair, n_ctx=512, n_threads=1, **options)


def text(engine: Solo, temperature: float = 0.0, n: int = 60) -> list[int]:
    engine.reset()
    engine.prefill([3, 1, 4, 1, 5])
    sampler = Sampler(SamplingParams(temperature=temperature, seed=3), engine.n_vocab)
    return [t for step in engine.generate(sampler, max_tokens=n, stop=lambda t: False) for t in step.tokens]


def test_loading_measures_and_leaves_nothing_behind(toy_pair, folder):
    with Solo.load(config(toy_pair, reference=True, type_k="f32", type_v="f32", calibrate="never")) as engine:
        assert engine.costs.points() == [] and not folder.exists() and engine.costs_file is None
        plain = text(engine)
    with Solo.load(config(toy_pair, reference=True, type_k="f32", type_v="f32")) as engine:
        seen = {(p.kind, p.width) for p in engine.costs.points()}
        assert {
            ("plain", 1),
            ("commit", 1),
            *(("draft", n) for n in blocks(engine.drafter.depth)[:2]),
        } <= seen
        assert {("verify", w) for w in (2, 3, 4, 6, 8, 16, 24, 32)} <= seen
        contexts = {p.context for p in engine.costs.points() if p.kind == "plain"}
        assert min(contexts) == 64 and len(contexts) == 2 and max(contexts) < engine.passes.n_rows
        assert engine.n_tokens == 0 and engine.snapshot().in_draft.size == 0
        assert text(engine) == plain


def test_a_second_start_reads_what_the_first_measured(toy_pair, folder, monkeypatch):
    with Solo.load(config(toy_pair)) as engine:
        points, kept = engine.costs.points(), engine.costs_file
    (file,) = folder.iterdir()
    assert kept == file
    monkeypatch.setattr(known_costs, "calibrate", lambda *_: pytest.fail("measured again"))
    with Solo.load(config(toy_pair)) as engine:
        assert engine.costs.points() == points and engine.costs_file == file
    # another number of threads is another machine
    monkeypatch.setattr(known_costs, "calibrate", lambda *_: POINTS)
    with Solo.load(EngineConfig(*toy_pair, n_ctx=512, n_threads=2)) as engine:
        assert [*engine.costs.points()] == POINTS
    assert len(list(folder.iterdir())) == 2
    with Solo.load(config(toy_pair, calibrate="always")) as engine:
        assert [*engine.costs.points()] == POINTS
    assert json.loads(file.read_text())["points"] == [list(p) for p in POINTS]


@pytest.mark.parametrize("known", [False, True])
def test_a_short_sequence_finds_its_graphs_built(toy_pair, folder, monkeypatch, known):
    monkeypatch.setattr(known_costs, "WARM_SECONDS", 60.0)
    if known:
        Solo.load(config(toy_pair)).close()
    with Solo.load(config(toy_pair)) as engine:
        passes, start = engine.passes, text(engine, n=1)  # the prompt's own graph
        built = passes.graphs.builds
        for mode, budget in (("plain", None), ("tree", 7), ("tree", 15), ("chain", None)):
            engine.reset()
            engine.prefill([3, 1, 4, 1, 5])
            sampler = Sampler(SamplingParams(temperature=0.0), engine.n_vocab)
            steps = engine.generate(sampler, max_tokens=12, mode=mode, budget=budget, stop=lambda t: False)
            assert [t for step in steps for t in step.tokens][:1] == start
        # one that takes in features alone, since plain steps came before, may be new
        assert passes.graphs.builds <= built + 1


@pytest.mark.parametrize("mode", ["plain", "chain", "tree"])
def test_a_named_mode_measures_nothing(toy_pair, folder, mode):
    with Solo.load(config(toy_pair, mode=mode)):
        assert not folder.exists()


def test_no_decision_of_a_reproducible_engine_looks_at_the_clock(toy_pair, folder):
    with Solo.load(config(toy_pair, reproducible=True, n_gpu_layers=0)) as engine:
        text(engine)
        assert not folder.exists() and engine.sequence.statistics.drafted == 0


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"[1]", b'{"points": [["plain", 1, 64]]}', b'{"points": [["hop", 1, 64, 1]]}',
     b'{"points": [["plain", 1, 64, -1]]}', b'{"points": [["plain", Infinity, 64, 1]]}',
     b'{"points": [["plain", 1, 1e999, 1]]}', b'{"points": [["plain", 1, 64, "x"]]}', b"\xff\xfe", b'{"points": [null]}'],
)  # fmt: skip
def test_a_broken_cache_is_no_cache(tmp_path, content):
    cache = CostCache.of({"device": "one"}, tmp_path)
    cache.path.write_bytes(content)
    assert cache.read() is None
    assert cache.write(MEASURED) and cache.read() == MEASURED


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path, toy_pair, folder, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    cache = CostCache.of({"device": "one"}, tmp_path / "file")
    assert not cache.write(MEASURED) and cache.read() is None
    monkeypatch.setattr(known_costs, "calibrate", lambda *_: POINTS)
    folder.write_text("in the way")
    with Solo.load(config(toy_pair)) as engine:
        assert [*engine.costs.points()] == POINTS and engine.costs_file is None


def test_what_measured_nothing_is_not_kept(toy_pair, folder, monkeypatch):
    """A machine too busy for one pass may not learn for ever that nothing is known."""
    given = []

    def nothing(passes, drafter, deadline):
        given.append(deadline - time.perf_counter())
        return []

    monkeypatch.setattr(known_costs, "calibrate", nothing)
    with Solo.load(config(toy_pair)) as engine:
        assert engine.costs.points() == [] and engine.costs_file is None and not folder.exists()
    loading.load(config(toy_pair), None, 7.0).device.close()
    assert 7 < given[0] <= 60 and 6 < given[1] <= 7


def test_a_user_without_a_home_folder_has_no_cache(monkeypatch):
    def nowhere() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(known_costs.Path, "home", nowhere)
    cache = CostCache.of({"device": "one"}, default_folder())
    assert not cache.write(MEASURED) and cache.read() is None


def test_the_cache_key_distinguishes_configurations(tmp_path):
    one, other = CostCache.of({"device": "one"}, tmp_path), CostCache.of({"device": "two"}, tmp_path)
    assert one.path != other.path and one.path == CostCache.of({"device": "one"}, tmp_path).path


def test_a_pass_whose_graph_was_built_first_is_not_measured(toy_pair):
    with Solo.load(config(toy_pair, calibrate="never")) as engine:
        engine.prefill([3, 1, 4, 1, 5])
        sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
        steps = engine.generate(sampler, mode="tree", stop=lambda t: False)
        next(steps), next(steps)
        engine.policy._learn()  # drafted steps are learned from while the next pass runs
        assert {p.kind for p in engine.costs.points()} <= {"host"}
        for _ in range(8):
            next(steps)
        engine.policy._learn()
        assert {p.kind for p in engine.costs.points()} == {"verify", "draft", "commit", "host"}
        steps.close()


def begun(engine: Solo, mode: str):
    slot = engine.open(40)
    slot.prefill([3, 1, 4, 1, 5])
    run = slot.begin(Sampler(SamplingParams(temperature=0), engine.n_vocab), mode=mode, stop=lambda t: False)
    slot.first()
    return slot, run


def test_a_batch_does_not_count_as_a_lone_sequence(toy_pair):
    with Solo.load(config(toy_pair, calibrate="never", parallel=2)) as engine:

        def learned(*sequences):
            for _ in range(4):
                assert not any(isinstance(step, Exception) for step in engine.step(sequences))
            engine.policy._learn()
            return engine.costs.points()

        (_, drafted), (_, plain) = begun(engine, "tree"), begun(engine, "plain")
        known = learned(drafted)
        assert {p.kind for p in known} == {"verify", "draft", "commit", "host"}
        alone = [p for p in learned(drafted, plain) if p.kind != "draft"]  # one of two drafts
        assert alone == [p for p in known if p.kind != "draft"]


def made_up(rng: np.random.Generator) -> list[Point]:
    """Costs that mean nothing."""
    return [
        Point("plain", 1, 64, float(rng.uniform(1, 100))),
        *(Point("verify", w, 64, float(rng.uniform(1, 100))) for w in (2, 4, 8, 16, 24, 32)),
        *(Point("draft", w, 64, float(rng.uniform(0.1, 10))) for w in (8, 16)),
    ]


def write(
    engine: Solo, temperature: float, mode: str, seed: int = 3, n: int = 150
) -> tuple[list[int], set[int]]:
    """The output and the widths of a run of `auto` whose costs are replaced at random every step."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(
        SamplingParams(temperature=temperature, top_k=0, top_p=1, min_p=0, seed=seed), engine.n_vocab
    )
    out: list[int] = []
    widths = set()
    for step in engine.generate(sampler, max_tokens=n, mode=mode, stop=lambda t: False):
        out += step.tokens
        widths.add(step.n_draft)
        if mode == "auto":
            engine.costs.__init__()
            engine.costs.learn(made_up(rng))
    return out, widths


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_costs_never_change_greedy_output(toy_pair, temperature):
    """In float32, with kernels that do not depend on the width."""
    with Solo.load(config(toy_pair, reference=True, type_k="f32", type_v="f32", calibrate="never")) as engine:
        outputs, widths = [], set()
        for mode in ("plain", "auto", "auto"):
            engine.reset()
            engine.prefill([3, 1, 4, 1, 5])
            text, used = write(engine, temperature, mode)
            outputs.append(text)
            widths |= used
        assert outputs[0] == outputs[1] == outputs[2] and len(widths) >= 2


def test_costs_never_change_the_distribution(toy_pair):
    """Short outputs from one prompt, `auto` with other costs in each, against plain decoding with other seeds."""
    with Solo.load(config(toy_pair, calibrate="never")) as engine:
        engine.prefill([3, 1, 4, 1, 5])
        start = engine.snapshot()
        counts, widths = {}, set()
        for mode, first in (("plain", 10_000), ("auto", 0)):
            found = np.zeros((4, engine.n_vocab), np.int64)
            for seed in range(700):
                engine.restore(start)
                text, used = write(engine, 1.0, mode, first + seed, 5)
                widths |= used
                for at, token in enumerate(text[1:]):
                    found[at, token] += 1
            counts[mode] = found
        assert len(widths) >= 5
        for plain, auto in zip(counts["plain"], counts["auto"]):
            assert_same_source(plain, auto)
