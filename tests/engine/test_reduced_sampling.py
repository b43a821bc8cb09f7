"""Tests of the whole engine with and without rows reduced on the device: same output for a seed, same distribution.

A GPU reduces; here the CPU is made to, so that the same path is tested without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine.passes import TargetPasses
from dflash_ggml.errors import DflashError
from dflash_ggml.text.grammar import GrammarCompiler
from dflash_ggml.text.grammar_spec import GrammarSpec
from reference import toys
from reference.chi_square import assert_same_source
from reference.engine_kit import Solo

OPEN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
# options, and the share of rows that may be fetched all the same
SETTINGS: dict[str, tuple[SamplingParams, float]] = {
    "defaults": (SamplingParams(), 0),
    "top-k 20, top-p 0.95": (replace(OPEN, temperature=0.7, top_k=20, top_p=0.95), 0),
    "all tokens": (OPEN, 0),
    "plain softmax": (replace(OPEN, temperature=-1.0), 0),
    "top-p alone": (replace(OPEN, temperature=0.8, top_p=0.9), 0.6),
    "min-p alone": (replace(OPEN, min_p=0.05), 0.2),
    "penalties": (replace(OPEN, temperature=0.8, top_k=40, repeat_penalty=1.1, frequency_penalty=0.2), 0.1),
    "penalties over all, of all tokens": (replace(OPEN, repeat_penalty=1.1, penalty_last_n=-1), 0.2),
    "bias": (replace(OPEN, top_k=30, logit_bias={5: 2.0, 300: -1.0, 301: -np.inf}), 0),
    "greedy with penalties": (SamplingParams(temperature=0, repeat_penalty=1.3), 0),
    "mirostat": (replace(OPEN, mirostat_mode=2), 1),
}


class Fetches:
    """Counts rows that passes give out whole, and blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = self.blocks = 0
        row, block = TargetPasses.logits_row, TargetPasses.logits_block

        def counted_row(*a, **k):
            self.rows += 1
            return row(*a, **k)

        def counted_block(*a, **k):
            self.blocks += 1
            return block(*a, **k)

        monkeypatch.setattr(TargetPasses, "logits_row", counted_row)
        monkeypatch.setattr(TargetPasses, "logits_block", counted_block)


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> Fetches:
    return Fetches(monkeypatch)


@pytest.fixture(scope="module")
def pair(f32_target: Path, f32_draft: Path) -> Iterator[dict[bool, Solo]]:
    """The embedded pair twice, with reduction and without."""
    config = EngineConfig(
        f32_target, f32_draft, n_ctx=512, n_threads=1, type_k="f32", type_v="f32", reference=True, budget=15
    )
    with ExitStack() as stack:
        engines = {on: stack.enter_context(Solo.load(config)) for on in (True, False)}
        engines[True].passes.reduces = True
        assert not engines[False].passes.reduces, "the CPU has its rows at hand"
        yield engines


PROMPT = "def fibonacci(n):\n"


def write(engine: Solo, params: SamplingParams, mode: str, n: int = 60, processors=(), **options):
    """Tokens behind the prompt, and the number of steps."""
    ids = engine.tokenizer.encode(PROMPT)
    engine.reset()
    engine.prefill(ids)
    sampler = Sampler(params, engine.n_vocab, [make(engine, len(ids)) for make in processors])
    steps = list(
        engine.generate(
            sampler, max_tokens=n, mode=mode, stop=options.pop("stop", lambda t: False), **options
        )
    )
    return [t for s in steps for t in s.tokens], steps


@pytest.mark.parametrize("mode", ["plain", "tree"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_seed_gives_the_same_output(
    pair: dict[bool, Solo], fetches: Fetches, setting: str, mode: str
) -> None:
    params, share = SETTINGS[setting]
    params = replace(params, seed=11)
    expected, _ = write(pair[False], params, mode)
    fetches.rows = fetches.blocks = 0
    found, steps = write(pair[True], params, mode)
    assert found == expected
    if mode == "tree":
        assert len(found) / len(steps) > 1.2, "some drafted tokens must be accepted, or the test means little"
    # one row is the prompt's own
    assert fetches.rows <= 1 + share * len(found)
    if setting in ("all tokens", "plain softmax"):
        assert fetches.blocks == len(found) - 1


@pytest.mark.parametrize(
    ("spec", "temperature", "share"),
    [
        (GrammarSpec("regex", r"[a-z0-9_ ():+\-\n]*"), 0.0, 0.1),
        (GrammarSpec("regex", r"[a-z0-9_ ():+\-\n]*"), 0.7, 0.3),
        (GrammarSpec("json_object", ""), 0.7, 1.0),
    ],
    ids=["greedy", "regex", "JSON"],
)
def test_a_grammar_gives_the_same_output(
    pair: dict[bool, Solo], fetches: Fetches, spec: GrammarSpec, temperature: float, share: float
) -> None:
    """The grammar is asked about kept tokens only; where the others could matter the row is fetched, of JSON's first
    tokens nearly always: few may come, and this model would write none of them."""

    def rules(engine: Solo, n_prompt: int):
        return GrammarCompiler(engine.tokenizer, engine.n_vocab).processor(spec, n_prompt)

    params = SamplingParams(temperature=temperature, seed=5)
    for mode in ("plain", "tree"):
        outputs = {}
        for on, engine in pair.items():
            fetches.rows = 0
            ends = engine.tokenizer.eog_ids
            outputs[on], _ = write(engine, params, mode, 60, [rules], stop=lambda t, ends=ends: t in ends)
            if on:
                n_rows = fetches.rows
        assert outputs[True] == outputs[False]
        assert n_rows <= 1 + share * len(outputs[True])


def test_processors_and_kept_rows_get_whole_rows(pair: dict[bool, Solo], fetches: Fetches) -> None:
    engine = pair[True]
    tokens, steps = write(engine, replace(OPEN, seed=3), "tree", 40, keep_logits=True)
    assert fetches.rows == 40 and sum(len(s.logits) for s in steps) == 40
    fetches.rows = 0
    again, _ = write(engine, replace(OPEN, seed=3), "tree", 40, [lambda *_: lambda ids, scores: scores])
    assert fetches.rows == 40 and again == tokens


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_a_mask_that_raises_leaves_a_state_to_go_on_from(pair: dict[bool, Solo], mode: str) -> None:
    """As with whole rows: after a plain step the row is there, and nothing is inconsistent."""

    class Breaks:
        left = 3

        def allows(self, history, ids):
            self.left -= 1
            if self.left < 0:
                raise DflashError("broken")
            return np.ones(len(ids), bool)

        def __call__(self, history, scores):
            return scores

    engine = pair[True]
    with pytest.raises(DflashError, match="broken"):
        write(engine, replace(OPEN, top_k=20, seed=1), mode, 40, [lambda *_: Breaks()])
    assert not engine.sequence.inconsistent
    if mode == "plain":
        n = engine.n_tokens
        assert len(write_on(engine, 5)) == 5 and engine.n_tokens == n + 4


def write_on(engine: Solo, n: int) -> list[int]:
    steps = engine.generate(Sampler(OPEN, engine.n_vocab), max_tokens=n, stop=lambda t: False)
    return [t for s in steps for t in s.tokens]


SEQUENCES, LENGTH = 1000, 5


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Solo]:
    """A vocabulary larger than what is kept, and no multiple of a block."""
    target, draft = toys.write_pair(tmp_path_factory.mktemp("toy"), seed=1, n_vocab=600)
    config = EngineConfig(
        target, draft, n_ctx=128, n_threads=1, type_k="f32", type_v="f32", reference=True, budget=7
    )
    with Solo.load(config) as engine:
        engine.prefill([3, 14, 15])
        yield engine


@pytest.mark.parametrize(
    "params",
    [OPEN, replace(OPEN, temperature=0.7, top_p=0.9), replace(OPEN, temperature=0.8, repeat_penalty=1.5)],
    ids=["all", "top-p", "penalties"],
)
def test_the_distribution_is_kept(toy: Solo, params: SamplingParams) -> None:
    """Outputs drawn from reduced rows of trees against outputs drawn from whole rows, with different seeds."""
    start, v = toy.snapshot(), toy.n_vocab
    outputs = {}
    for on in (True, False):
        toy.passes.reduces = on
        sampler, written = Sampler(replace(params, seed=1 + on), v), []
        for _ in range(SEQUENCES):
            toy.restore(start)
            steps = toy.generate(sampler, max_tokens=LENGTH, mode="tree", stop=lambda t: False)
            written.append([t for s in steps for t in s.tokens])
        outputs[on] = np.array(written)
    toy.restore(start)
    for at in range(LENGTH):
        assert_same_source(*(np.bincount(outputs[on][:, at], minlength=v) for on in outputs))
    assert_same_source(*(np.bincount(outputs[on].ravel(), minlength=v) for on in outputs))
    pairs = [
        np.unique(outputs[on][:, :-1].ravel() * v + outputs[on][:, 1:].ravel(), return_counts=True)
        for on in outputs
    ]
    both = np.union1d(pairs[0][0], pairs[1][0])
    counts = [np.zeros(len(both), np.int64) for _ in pairs]
    for count, (ids, n) in zip(counts, pairs, strict=True):
        count[np.searchsorted(both, ids)] = n
    assert_same_source(*counts)
