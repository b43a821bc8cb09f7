"""Tests of the engine on a GPU against the engine on the CPU. Skipped where this build or machine has no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_engine_state import cache_rows, commit, random_tree
from test_stale_rows import contaminate

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.reduced import ReducedRows, watch
from dflash_ggml.decode.sampling import BLOCK, Sampler, SamplingParams, largest
from dflash_ggml.engine.batches import BatchSizes
from dflash_ggml.engine.kernel_tuning import WIDTHS, MatmulTable, Timing, apply, measure_matmuls
from dflash_ggml.ggml.device import list_devices
from dflash_ggml.state import context
from reference.engine_kit import Solo, verify

GPUS = [d for d in list_devices() if d.is_gpu]
pytestmark = pytest.mark.skipif(not GPUS, reason="no GPU in this build or machine")
PROMPT_FILE = (
    Path(__file__).resolve().parents[2] / "src" / "dflash_ggml" / "data" / "prompts" / "python.jsonl"
)
PROMPTS = [json.loads(line)["prompt"] for line in PROMPT_FILE.read_text().splitlines() if line.strip()][:50]
GREEDY = SamplingParams(temperature=0)
# Q8_0 matmuls round activations in blocks. On the CPU that moves the logits compared here by up to 0.174 from those of float32
# matmuls; the GPU rounds as coarsely, so the two differ by at most twice that. Logits spread over about 30.
LOGITS_TOLERANCE = 0.35
NEAR_TIE = 0.3


@pytest.fixture(scope="module")
def cpu(demo_target, demo_draft):
    with Solo.load(EngineConfig(demo_target, demo_draft, n_gpu_layers=0, n_threads=4)) as e:
        yield e


@pytest.fixture(scope="module")
def gpu(demo_target, demo_draft):
    with Solo.load(EngineConfig(demo_target, demo_draft)) as e:
        assert e.device.is_gpu
        yield e


@pytest.fixture(scope="module")
def repeating(demo_target, demo_draft):
    """A GPU whose output does not depend on earlier ones: prompt lookup in them makes trees wider, and widths round
    differently."""
    with Solo.load(EngineConfig(demo_target, demo_draft, reproducible=True)) as e:
        yield e


def write_on(engine: Solo, mode: str, n: int) -> list[int]:
    """Greedy tokens from where the engine stands, whatever they are."""
    sampler = Sampler(GREEDY, engine.n_vocab)
    steps = engine.generate(sampler, max_tokens=n, mode=mode, stop=lambda t: False)
    return [t for s in steps for t in s.tokens]


def fork(a: list[int], b: list[int]) -> int:
    """Where two outputs diverge."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


def write(engine: Solo, ids: list[int], mode: str, n: int) -> tuple[list[int], int]:
    """Greedy tokens, and the passes they took, without prompt lookup in earlier output."""
    engine.reset()
    engine.forget()
    engine.prefill(ids)
    steps = list(engine.generate(Sampler(GREEDY, engine.n_vocab), max_tokens=n, mode=mode))
    return [t for s in steps for t in s.tokens], len(steps) - 1


@pytest.mark.parametrize("n", [5, 40, 100])
def test_a_sequence_after_a_nonfinite_one(repeating, n):
    """Kernels multiply masked rows by 0: none may hold NaN."""
    ids = (repeating.tokenizer.encode(PROMPTS[0]) * 30)[:400]
    expected = {mode: write(repeating, ids[:n], mode, 20) for mode in ("plain", "tree")}
    for mode, written in expected.items():
        write(repeating, ids, mode, 20)
        contaminate(repeating, np.nan)
        assert write(repeating, ids[:n], mode, 20) == written
        assert not repeating.sequence.undraftable


def test_logits(cpu, gpu, capsys):
    worst = 0.0
    for prompt in PROMPTS:
        ids = cpu.tokenizer.encode(prompt)
        for engine in (cpu, gpu):
            engine.reset()
            engine.prefill(ids)
        worst = max(worst, float(np.abs(cpu.logits - gpu.logits).max()))
    with capsys.disabled():
        print(f"\nlargest difference of a logit, GPU against CPU, over {len(PROMPTS)} prompts: {worst:.4f}")
    assert worst < LOGITS_TOLERANCE


def test_hidden_states_and_every_row(cpu, gpu):
    """Hidden states point the same way as the CPU's, and beside them the held sequence continues as before."""
    ids = cpu.tokenizer.encode(PROMPTS[0])
    other = cpu.tokenizer.encode(PROMPTS[1])
    states, rows = {}, {}
    for engine in (cpu, gpu):
        engine.reset()
        rows[engine], states[engine] = [], []
        engine.prefill(ids[:8], take_row=rows[engine].append)
        tokens = write_on(engine, "plain", 12)
        engine.reset()
        engine.prefill(ids[:8])
        engine.hidden_states(other, states[engine].append)
        assert write_on(engine, "plain", 12) == tokens
    # the largest of 65,000 logits of the first eight tokens: 0.28 on an H100
    assert np.abs(np.array(rows[cpu]) - np.array(rows[gpu])).max() < LOGITS_TOLERANCE
    a, b = (np.concatenate(states[engine]) for engine in (cpu, gpu))
    cosines = (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    assert a.shape == (len(other), cpu.params.n_embd) and cosines.min() > 0.999


def test_greedy_text(cpu, gpu, capsys):
    """Text of 50 prompts equals the CPU's up to near-ties."""
    forks = []
    for prompt in PROMPTS:
        ids = cpu.tokenizer.encode(prompt)
        ours, reference = write(gpu, ids, "tree", 64)[0], write(cpu, ids, "tree", 64)[0]
        at = next((i for i, (a, b) in enumerate(zip(ours, reference)) if a != b), None)
        if at is None:
            continue
        cpu.reset()
        cpu.prefill(ids + reference[:at])
        forks.append(float(cpu.logits[reference[at]] - cpu.logits[ours[at]]))
    with capsys.disabled():
        print(f"\n{len(forks)} of {len(PROMPTS)} texts fork, gaps {sorted(round(f, 4) for f in forks)}")
    assert all(abs(f) < NEAR_TIE for f in forks)


def test_modes_agree(gpu):
    """Plain, chain and tree on the GPU diverge at near-ties only."""
    for prompt in PROMPTS[:12]:
        ids = gpu.tokenizer.encode(prompt)
        plain = write(gpu, ids, "plain", 64)[0]
        for mode in ("chain", "tree"):
            other = write(gpu, ids, mode, 64)[0]
            at = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), None)
            if at is not None:
                gpu.reset()
                gpu.prefill(ids + plain[:at])
                assert abs(gpu.logits[plain[at]] - gpu.logits[other[at]]) < NEAR_TIE


def test_state_after_many_commits(gpu):
    """200 random commits leave the state of a prefill of the same tokens (2 % of its scale: kernels differ by width)."""
    rng = np.random.default_rng(0)
    gpu.reset()
    gpu.prefill(rng.integers(0, gpu.n_vocab - 8, 5).tolist())
    for _ in range(200):
        tree = random_tree(rng, int(rng.integers(1, 31)), gpu.drafter.depth, gpu.n_vocab - 8)
        commit(gpu, tree, int(rng.integers(tree.width)))
        gpu.drafter.take_in([gpu.sequence])
        if not gpu.device.info.name.startswith("CUDA"):
            gpu.device.synchronize()  # as a step does when it reads: until then ggml-vulkan keeps what each graph needs
    gpu.sequence.pending = None
    tokens = gpu.tokens

    def look() -> list[np.ndarray]:
        return [
            *(gpu.device.read(t) for t in gpu.passes.state.live()),
            *cache_rows(gpu, len(tokens)),
        ]

    ours = look()
    gpu.reset()
    gpu.prefill(tokens)
    for a, b in zip(ours, look(), strict=True):
        assert np.sqrt(np.mean((a - b) ** 2)) < 0.02 * np.sqrt(np.mean(b**2))


def test_acceptance(cpu, gpu, capsys):
    """Tokens per pass are the CPU's within noise, over all prompts and over those whose outputs are equal.

    The draft's rows are rounded too, so a chain may diverge from the CPU's where the output does not."""
    for mode in ("chain", "tree"):
        lengths, same = [], []
        for prompt in PROMPTS:
            found = [write(engine, engine.tokenizer.encode(prompt), mode, 96) for engine in (cpu, gpu)]
            lengths.append([(len(tokens) - 1) / passes for tokens, passes in found])
            same.append(found[0][0] == found[1][0])
        on_cpu, on_gpu = np.array(lengths).T
        difference, equal = on_gpu - on_cpu, np.array(same)
        noise, noise_equal = (d.std(ddof=1) / len(d) ** 0.5 for d in (difference, difference[equal]))
        with capsys.disabled():
            print(
                f"\n{mode}: {on_cpu.mean():.3f} tokens per pass on the CPU, {on_gpu.mean():.3f} on the GPU, "
                f"standard error {noise:.3f}; {sum(same)} of {len(same)} texts equal"
            )
        assert abs(difference[equal].mean()) < 3 * noise_equal + 0.01
        assert abs(difference.mean()) < 3 * noise + 0.01


def test_any_choice_of_matmul_kernels(cpu, gpu, capsys):
    """The measured table, ggml's own matmuls everywhere, and random tables: logits and trees stay within the tolerances."""
    measured = measure_matmuls(gpu.device, gpu.passes.weights.values(), 1.0)
    kinds = {t.type for t in measured.timings}
    with capsys.disabled():
        print("\nmatmuls, ours against ggml's in ms:", *measured.timings, sep="\n  ")
    assert kinds == {"q8_0"} and measured.timings[0].width == WIDTHS[0]
    rng = np.random.default_rng(0)

    def chosen(stock_ms) -> MatmulTable:
        return MatmulTable(tuple(Timing("q8_0", width, 1.0, stock_ms()) for width in WIDTHS))

    tables = [measured, chosen(lambda: 0.5), *(chosen(lambda: rng.choice([0.5, 2.0])) for _ in range(3))]
    prompts = [cpu.tokenizer.encode(prompt) for prompt in PROMPTS[:4]]
    text = [t for prompt in PROMPTS for t in cpu.tokenizer.encode(prompt)]
    prompts += [text[:n] for n in (13, 24, 31, 45, 64)]  # prefills of every kind of width
    try:
        for table in tables:
            apply(gpu.device, table)
            for ids in prompts:
                for engine in (cpu, gpu):
                    engine.reset()
                    engine.prefill(ids)
                assert np.abs(cpu.logits - gpu.logits).max() < LOGITS_TOLERANCE
                ours, reference = write_on(gpu, "tree", 32), write_on(cpu, "tree", 32)
                if ours != reference:
                    at = fork(ours, reference)
                    cpu.reset()
                    cpu.prefill(ids + reference[:at])
                    assert abs(cpu.logits[reference[at]] - cpu.logits[ours[at]]) < NEAR_TIE
    finally:
        apply(gpu.device, MatmulTable())


def test_batches_of_any_width(gpu):
    """Columns with a mask, columns over ranges, few and many of them, whole and shared rows: the same logits."""
    ids = np.concatenate([gpu.tokenizer.encode(p) for p in PROMPTS])[:2200].tolist()
    before, rows = gpu.batches, []
    for most in (64, 100, 320, 1024, 4096):
        gpu.batches = BatchSizes(most)
        gpu.reset()
        gpu.prefill(ids)
        rows.append(gpu.logits.copy())
    gpu.batches = before
    assert max(float(np.abs(row - rows[0]).max()) for row in rows) < LOGITS_TOLERANCE


def test_graphs_are_built_once(gpu):
    """The same generation again builds no graph: what CUDA has captured can be replayed."""
    ids = gpu.tokenizer.encode(PROMPTS[0])
    write(gpu, ids, "tree", 128)
    built = gpu.run_counts()["graphs"]
    write(gpu, ids, "tree", 128)
    assert gpu.run_counts()["graphs"] == built


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_output_does_not_depend_on_cache_row_positions(gpu, mode):
    """The same kernels over the same rows, elsewhere in the caches."""
    outputs = []
    for first_row in (0, 256):
        gpu.reset()
        gpu.sequence.first_row = first_row
        gpu.prefill(gpu.tokenizer.encode(PROMPTS[2]))
        outputs.append(write_on(gpu, mode, 64))
    gpu.reset()
    gpu.sequence.first_row = 0
    gpu.prefill(gpu.tokenizer.encode(PROMPTS[2]) + outputs[0][: fork(*outputs)])
    if outputs[0] != outputs[1]:
        at = fork(*outputs)
        assert abs(gpu.logits[outputs[0][at]] - gpu.logits[outputs[1][at]]) < NEAR_TIE


def test_the_draft_sees_plain_steps(gpu):
    """Plain steps leave their features for the draft, in columns that the device writes to by an input."""
    gpu.reset()
    gpu.prefill(gpu.tokenizer.encode(PROMPTS[3]))
    write_on(gpu, "plain", 70)
    assert gpu.snapshot().in_draft.all()
    tokens, ours = gpu.tokens, cache_rows(gpu, gpu.n_tokens)
    gpu.reset()
    gpu.prefill(tokens)
    for a, b in zip(ours, cache_rows(gpu, len(tokens)), strict=True):
        assert np.sqrt(np.mean((a - b) ** 2)) < 0.02 * np.sqrt(np.mean(b**2))


def test_seeded_sampling(repeating):
    """The same seed gives the same text, whatever was written before."""
    outputs = []
    for prompt in (1, 2, 1):
        repeating.reset()
        repeating.prefill(repeating.tokenizer.encode(PROMPTS[prompt]))
        sampler = Sampler(SamplingParams(temperature=0.8, seed=7), repeating.n_vocab)
        outputs.append([t for s in repeating.generate(sampler, max_tokens=64, mode="tree") for t in s.tokens])
    assert outputs[0] == outputs[2]


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_the_same_rows_again(repeating, mode):
    """Bit for bit, ten times: no kernel begins before what it reads is there."""
    ids, found = repeating.tokenizer.encode(PROMPTS[0]), []
    for _ in range(10):
        repeating.reset()
        repeating.prefill(ids)
        sampler = Sampler(SamplingParams(temperature=0, repeat_penalty=1.2), repeating.n_vocab)
        steps = repeating.generate(sampler, max_tokens=100, mode=mode, stop=lambda t: False, keep_logits=True)
        found.append(np.stack([row for step in steps for row in step.logits or ()]))
    assert all(np.array_equal(rows, found[0]) for rows in found)


UNFILTERED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS = [
    {"temperature": 0.8},
    UNFILTERED,
    {"temperature": 0.8, "top_k": 0, "top_p": 0.8, "repeat_penalty": 1.1},
    {"temperature": 0.0, "repeat_penalty": 1.2},
]


@pytest.mark.parametrize("mode", ["plain", "tree"])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_reduced_rows_write_what_whole_rows_write(repeating, options: dict, mode: str) -> None:
    """The same text for a seed, whichever of the two a sampled step reads. Where nothing is filtered, sums of whole rows and of
    blocks round apart: a draw at the edge of a token may give its neighbour, with nothing to speak of between the two."""
    assert repeating.passes.reduces, "a GPU reduces its rows"
    ids, outputs = repeating.tokenizer.encode(PROMPTS[0]), []
    try:
        for repeating.passes.reduces in (True, False):
            repeating.reset()
            repeating.prefill(ids)
            sampler = Sampler(SamplingParams(seed=7, **options), repeating.n_vocab)
            steps = repeating.generate(sampler, max_tokens=100, mode=mode, stop=lambda t: False)
            outputs.append([t for s in steps for t in s.tokens])
    finally:
        repeating.passes.reduces = True
    if outputs[0] != outputs[1]:
        at = fork(*outputs)
        repeating.reset()
        repeating.prefill(ids + outputs[0][:at])
        low, high = sorted(text[at] for text in outputs)
        sampler = Sampler(SamplingParams(seed=7, **options), repeating.n_vocab)
        probs = sampler.probs(repeating.logits, ids + outputs[0][:at])
        between = float(probs[low + 1 : high].sum())
        assert options == UNFILTERED and between < 1e-5, (at, low, high, probs[low], between, probs[high])


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_reduced_rows_are_parts_of_the_whole(repeating, options: dict) -> None:
    """What a pass reduces of its rows beside them: the same bits of each logit, and sums of float32. The rows are those of a pass
    that does not reduce."""
    ids, rng = repeating.tokenizer.encode(PROMPTS[0]), np.random.default_rng(0)
    tree = random_tree(rng, 31, repeating.drafter.depth, repeating.n_vocab - 8)
    sampler = Sampler(SamplingParams(**options), repeating.n_vocab)
    text = [*ids, *rng.integers(0, repeating.n_vocab - 8, 90).tolist()]
    whole = []
    for seen in (watch(sampler, text, tree.tokens), None):
        repeating.reset()
        repeating.prefill(ids)
        graph = verify(repeating, tree, seen)
        whole.append(np.stack([repeating.passes.logits_row(graph, node) for node in range(tree.width)]))
        if seen is None:
            continue
        reduced = ReducedRows(repeating.passes.reduced_rows(graph), seen, repeating.n_vocab)
        for node, row in enumerate(whole[0]):
            found, best = reduced[node], largest(row, len(reduced[node].ids))
            assert np.array_equal(found.logits, row[best]) and np.array_equal(found.logits, row[found.ids])
            if repeating.device.has_own_kernels:
                assert np.array_equal(found.ids, best)
            else:  # sums of float16 tie there, and which of equal logits comes first is the backend's choice
                assert len(set(found.ids.tolist())) == len(best)
            assert np.array_equal(found.watched, row[seen.ids])
            scaled = (row.astype(np.float64) - row.max()) / seen.temperature
            np.testing.assert_allclose(
                found.masses,
                np.add.reduceat(np.exp(scaled), np.arange(0, len(row), BLOCK)),
                rtol=1e-5,
                atol=1e-30,
            )
            assert abs(found.log_sum - row.max() - np.log(np.exp(scaled * seen.temperature).sum())) < 1e-5
    assert np.array_equal(*whole)


@pytest.mark.parametrize(
    "pair", [("q8_0", "q4_0"), ("q8_0", "q8_0"), ("q5_1", "q4_1"), ("f16", "q5_0")], ids="/".join
)
def test_quantised_caches(demo_target, demo_draft, pair):
    """Logits like the CPU's with the same types; the draft is followed about as far as with f16 caches."""
    config = EngineConfig(
        demo_target, demo_draft, type_k=pair[0], type_v=pair[1], spec=("dflash",), calibrate="never"
    )
    usual = replace(config, type_k="f16", type_v="f16")
    passes, rows = [], []
    for one in (usual, config, replace(config, n_gpu_layers=0)):
        with Solo.load(one) as engine:
            ids = engine.tokenizer.encode(PROMPTS[2])
            engine.reset()
            engine.prefill(ids)
            sampler = Sampler(GREEDY, engine.n_vocab)
            passes.append(
                len(list(engine.generate(sampler, max_tokens=96, mode="tree", stop=lambda t: False)))
            )
            engine.reset()
            engine.prefill(ids + engine.tokenizer.encode(PROMPTS[3]))
            rows.append(engine.logits.copy())
    # rounding on the two sides of a code's edge moves logits about as far as the type itself does
    assert np.abs(rows[1] - rows[2]).max() < 1.5
    # 18 to 20 on the CPU; a convention that writing and reading do not share ends in one token a pass
    assert max(passes) < 48


def test_a_ring_proposes_what_all_rows_do(demo_target, demo_draft, monkeypatch):
    """After more than four wraps of it, in two prompts."""
    ids, proposed = np.random.default_rng(2).integers(0, 8000, 900).tolist(), []
    config = EngineConfig(demo_target, demo_draft, draft_window=64, calibrate="never")
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(context, "ring_rows", lambda window, block, n_rows: n_rows)
        with Solo.load(config) as engine:
            assert bool(engine.drafter.rings) != whole
            engine.prefill(ids)
            engine.prefill(ids[:300])
            engine.sequence.pending = 7
            proposed.append(engine.drafter.propose([engine.sequence], 20)[0].log_probs)
    np.testing.assert_allclose(*proposed, atol=0.05)


def test_a_window_at_decode(demo_target, demo_draft, f32_target):
    """A tree's logits under it are the CPU's, and not those without it."""
    ids, logits = np.random.default_rng(2).integers(0, 8000, 600).tolist(), []
    tree = random_tree(np.random.default_rng(3), 16, 6, 8000)
    for target, options in (
        (demo_target, {"fa_window": 100}),
        (demo_target, {"fa_window": 100, "n_gpu_layers": 0}),
        (f32_target, {"fa_window": 100, "n_gpu_layers": 0}),
        (demo_target, {}),
    ):
        with Solo.load(EngineConfig(target, demo_draft, calibrate="never", **options)) as engine:
            engine.prefill(ids)
            graph = verify(engine, tree)
            logits.append([engine.passes.logits_row(graph, node).copy() for node in range(tree.width)])
    gpu, cpu, exact, full = (np.array(rows) for rows in logits)
    # how far rounded activations move the CPU's logits: 0.23 of these 140,000; the GPU's move as far, to either side
    tolerance = 2 * np.abs(cpu - exact).max()
    assert np.abs(gpu - cpu).max() < tolerance
    assert np.abs(gpu - full).max(axis=1).min() > tolerance  # of every node: 1.4 at least
