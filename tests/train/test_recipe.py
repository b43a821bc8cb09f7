"""Tests of `dflash-train` before torch is needed: sizes, blocks, masks, texts, errors. A second; needs no torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.drafts.dflash.checkpoint import read_checkpoint
from dflash_ggml.errors import ConfigError, ModelFileError
from dflash_ggml.files.safetensors import SafetensorsFile
from dflash_ggml.train import blocks, corpus
from dflash_ggml.train.cli import main
from dflash_ggml.train.recipe import (
    Run,
    Shape,
    TargetSizes,
    check,
    check_head,
    config_json,
    default_shape,
    depth_weights,
    shape_of,
    spread,
)
from reference.tiny_models import safetensors_bytes

TARGET = TargetSizes(16, 256, 768, 8192, 1e7, 1e-6, 8188)
SHAPE = Shape("dflash", 3, 512, 4, 2, 64, 16, (1, 4, 7), 8189)
KINDS = {
    "dflash": SHAPE,
    "windows": dataclasses.replace(SHAPE, window=128),
    "causal windows": dataclasses.replace(SHAPE, window=128, causal_windows=True),
    "dflash2": dataclasses.replace(SHAPE, kind="dflash2", rank=32, candidates=12),
    "dspark": dataclasses.replace(SHAPE, kind="dspark", rank=32, block_size=15),
    "gated": dataclasses.replace(SHAPE, kind="dspark", rank=32, gated=True, from_anchor=False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_config_describes_the_training(tmp_path: Path, kind: str) -> None:
    """The reader of drafts, which was not made for the trainer, finds the shape in it; and so does the trainer."""
    shape = KINDS[kind]
    config = config_json(shape, TARGET)
    one = np.zeros((2, 32), np.float32)
    names = {
        "dflash2": ["candidate_selector.hidden_projection.weight"],
        "dspark": ["markov_head.markov_w1.weight"],
    }
    made = dict.fromkeys(names.get(shape.kind, ["fc.weight"]), ("F32", one))
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(made))
    (tmp_path / "config.json").write_text(json.dumps(config))
    fields = read_checkpoint(SafetensorsFile(tmp_path)).fields
    for name in ("n_layers", "n_ff", "n_heads", "n_kv_heads", "head_dim", "block_size", "taps", "mask_id"):
        assert fields[name] == getattr(shape, name), name
    assert fields["rope_theta"] == 1e7 and fields["n_draft_vocab"] is None
    assert fields["declared_causal"] is (None if shape.causal_windows else False)
    windowed = (True, True, False) if shape.window else (False,) * 3
    assert fields["window_layers"] == windowed and fields["sliding_window"] == (shape.window or None)
    selector, markov = fields["selector"], fields["markov"]
    assert (selector is not None) == (shape.kind == "dflash2") and (markov is not None) == (
        shape.kind == "dspark"
    )
    if selector:
        assert (selector.rank, selector.candidates, selector.group, selector.kernel) == (32, 12, 16, 2)
    if markov:
        assert (markov.rank, markov.is_gated, markov.from_anchor) == (32, shape.gated, shape.from_anchor)
    again = shape_of(config, tmp_path)
    if shape.kind == "dflash":
        again = dataclasses.replace(again, rank=shape.rank)
    assert again == shape


def test_defaults_follow_the_target() -> None:
    assert spread(64, 5) == (1, 16, 31, 46, 61), "the published taps of a target of 64 layers"
    assert spread(16, 5) == (1, 4, 7, 10, 13)
    assert spread(2, 5) == (1,) and spread(4, 3) == (1,)
    wide = default_shape("dflash", dataclasses.replace(TARGET, n_embd=2560, n_ff=9216), 5)
    assert wide == Shape("dflash", 5, 9216, 32, 8, 128, 16, (1, 4, 7, 10, 13), 5), "as published"
    narrow = default_shape("dflash2", dataclasses.replace(TARGET, n_embd=576, n_layers=30), 5)
    assert narrow == Shape("dflash2", 3, 960, 9, 3, 64, 8, (1, 8, 14, 20, 27), 5, rank=32), (
        "the package's draft"
    )
    for width in (64, 256, 896):
        check(default_shape("dflash2", dataclasses.replace(TARGET, n_embd=width), 0), Run(steps=1), TARGET)
    weights = depth_weights(15, 0)
    assert sum(weights) == pytest.approx(1) and weights[7] / weights[0] == pytest.approx(np.exp(-7 / 7.04))


def test_the_length_of_a_run() -> None:
    run = Run(steps=100, minutes=1, warm_up=10, lr=1.0)
    assert run.progress(50, 0) == 0.5 and run.progress(0, 45) == 0.75 and run.progress(200, 0) == 1
    rates = [run.rate(i, i / 100) for i in range(100)]
    assert rates[0] == 0.1 and rates[30] == 1 and rates[99] < 0.03
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(
    ("change", "run", "message"),
    [
        ({}, {"steps": 0}, "--steps or --minutes"),
        ({}, {"lr": 0.0}, "--lr is 0"),
        ({}, {"length": 20}, "--length 20 is too short"),
        ({"taps": (1, 16)}, {}, "layers are 0 to 15"),
        ({"taps": (4, 1)}, {}, "should ascend"),
        ({"mask_id": 9000}, {}, "has 8192 tokens"),
        ({"n_heads": 3}, {}, "do not divide over 2"),
        ({"kind": "dflash2", "group": 24}, {}, "--group 24"),
        ({"block_size": 1}, {}, "--block is 1"),
        ({"kind": "mtp", "n_steps": 0}, {}, "--draft-steps is 0"),
        ({"kind": "mtp"}, {"length": 4}, "--length 4 is too short for 4 tokens"),
        ({"n_kv_heads": 0}, {}, "--kv-heads is 0"),
        ({"n_heads": 0}, {}, "--heads is 0"),
        ({"n_ff": 0}, {}, "--ffn is 0"),
        ({"kind": "dflash2", "group": 0}, {}, "--group is 0"),
        ({"kind": "dspark", "rank": 0}, {}, "--rank is 0"),
        ({"kind": "dflash2", "candidates": 65}, {}, "--candidates is 65, it must be from 1 to 64"),
        ({"window": -1}, {}, "--window is -1"),
        ({}, {"seed": -1}, "--seed is -1"),
        ({}, {"checked": 0}, "--held is 0"),
    ],
)
def test_what_cannot_be_trained_is_reported(change: dict, run: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(dataclasses.replace(SHAPE, **change), Run(**{"steps": 1} | run), TARGET)
    check(SHAPE, Run(steps=1), TARGET)


def test_no_more_candidates_than_tokens() -> None:
    few = dataclasses.replace(TARGET, n_vocab=8)
    with pytest.raises(ConfigError, match="--candidates is 12, it must be from 1 to 8"):
        check(dataclasses.replace(SHAPE, kind="dflash2", candidates=12, mask_id=0), Run(steps=1), few)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", None])
def test_a_head_that_nothing_could_use_is_not_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str | None
) -> None:
    """Reported before the target is opened; the folder has no weights."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    options = ["-o", str(tmp_path / "out"), "--steps", "1", "--own-text", "1000"]
    assert main([str(tmp_path), *options, "--kind", "mtp"]) == 1
    printed = capsys.readouterr().err
    assert (
        "dense Qwen3.5" in printed and f"model_type is '{model_type}'" in printed and printed.count("\n") == 1
    )
    assert not (tmp_path / "out").exists()
    for dense in ("qwen3_5", "qwen3_5_text"):
        check_head({"model_type": dense}, tmp_path)


def test_columns_see_their_context_and_their_block() -> None:
    rng = np.random.default_rng(0)
    anchors = blocks.draw_anchors(rng, np.array([8, 30]), np.array([50, 32]), 5)
    assert (anchors[0] >= 8).all() and (anchors[0] <= 48).all() and (anchors[1] == 30).all()
    assert (np.diff(anchors) >= 0).all()
    for window, causal in ((0, False), (7, False), (7, True), (3, False)):
        context, own = blocks.visible(anchors, np.arange(20), np.arange(50), 4, window, causal)
        for row, column, key in np.ndindex(2, 20, 50):
            position = anchors[row, column // 4] + column % 4
            wanted = key < anchors[row, column // 4] and (not window or key > position - window)
            assert context[row, column, key] == wanted
        for a, b in np.ndindex(20, 20):
            seen = (not window or a - b < window) and (not causal or b <= a)
            assert own[a, b] == (a // 4 == b // 4 and seen)


def test_labels_end_with_the_row() -> None:
    positions, counts = blocks.labels_at(np.array([[3, 6]]), np.array([9]), 4, 10, np.arange(4))
    assert positions.tolist() == [[[4, 5, 6, 7], [7, 8, 9, 9]]]
    assert counts.tolist() == [[[True] * 4, [True, True, False, False]]]


def test_a_head_sees_the_sequence_and_its_own_drafts() -> None:
    seen = blocks.unrolled(np.arange(12), 4)  # three passes over four tokens
    assert (seen[:4, :4] == np.tri(4, dtype=bool)).all() and not seen[:4, 4:].any()
    row = seen[2 * 4 + 1]  # the third pass behind token 1
    assert np.flatnonzero(row).tolist() == [0, 1, 4 + 1, 8 + 1]


def letters(texts) -> list[list[int]]:
    return [[ord(c) for c in text] for text in texts]


def test_texts_of_every_form(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a" * 300)
    (tmp_path / "same.py").write_text("a" * 300)
    (tmp_path / "b.md").write_text("b" * 300)
    (tmp_path / "short.py").write_text("c")
    (tmp_path / "binary.py").write_bytes(b"\xff\0" * 300)
    lines = [
        {"text": "d" * 10},
        {"prompt": "go on"},
        {"messages": [{"role": "user", "content": "ask"}]},
        {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "told"}]},
    ]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def render(messages, answer) -> str:
        return "".join(f"<{m['role'][0]}>{m['content']}" for m in messages) + "<a>" * answer

    found = corpus.read_texts([tmp_path], 10**6, render)
    assert sorted(found.documents) == ["a" * 300, "b" * 300, "d" * 10]
    assert found.prompts == ["go on", "<u>ask<a>"] and found.answered == [("<u>ask<a>", "told")]
    assert corpus.read_texts([tmp_path], 10**6, render, [".md"]).documents == ["b" * 300]
    rows = corpus.answered_rows(found.answered, letters, 12)
    assert (
        rows.start.tolist() == [9]
        and rows.stop.tolist() == [12]
        and bytes(rows.ids[0].tolist()) == b"<u>ask<a>tol"
    )
    with pytest.raises(ConfigError, match="need a chat template"):
        corpus.read_texts([tmp_path], 10**6, None)
    (tmp_path / "talk.jsonl").write_text('{"text": "x"}\n{"other": 1}')
    with pytest.raises(ConfigError, match="line 2: expected an object"):
        corpus.read_texts([tmp_path], 10**6, None)
    with pytest.raises(ConfigError, match="no such file or folder"):
        corpus.read_texts([tmp_path / "none"], 10**6, None)
    with pytest.raises(ConfigError, match="no text found"):
        corpus.read_texts([tmp_path], 10**6, None, [".rs"])


def test_rows_of_tokens(tmp_path: Path) -> None:
    rows = corpus.document_rows(["abc", "defghij"], letters, 5, 0, first=2)
    assert [bytes(r.tolist()) for r in rows.ids] == [b"abc\0d", b"efghi"] and rows.n_tokens == 6
    both = corpus.joined([rows, corpus.answered_rows([("xy", "zzzzz")], letters, 8)])
    assert both.ids.shape == (3, 8) and both.start.tolist() == [2, 2, 2] and both.stop.tolist() == [5, 5, 7]
    both.save(tmp_path / "rows.npz")
    again = corpus.load_rows(tmp_path / "rows.npz")
    assert all((getattr(again, n) == getattr(both, n)).all() for n in ("ids", "start", "stop"))
    assert corpus.load_rows(tmp_path / "rows.npz").cut(4).stop.tolist() == [4, 4, 4]
    assert len(both.cut(3)) == 0, "one token behind the context teaches nothing"
    begun = corpus.beginnings(rows, 3, 4, np.random.default_rng(0))
    assert all(bytes(b) in b"abc\0d|efghi" and len(b) == 3 for b in begun)
    (tmp_path / "bad.npz").write_bytes(b"PK")
    with pytest.raises(ConfigError, match="no rows of tokens"):
        corpus.load_rows(tmp_path / "bad.npz")


def test_shapes_of_other_drafts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="LlamaForCausalLM is not a draft"):
        shape_of({"architectures": ["LlamaForCausalLM"]}, tmp_path)
    with pytest.raises(ModelFileError, match="key 'num_hidden_layers' is missing"):
        shape_of({"architectures": ["DFlashDraftModel"]}, tmp_path)
    config = config_json(KINDS["dflash2"], TARGET)
    del config["dflash_config"]["selector_rank"]
    with pytest.raises(ModelFileError, match="key 'selector_rank' is missing"):
        shape_of(config, tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "dflash",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling.rope_type is 'yarn'",
        ),
        ("dflash", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type is 'linear'"),
        ("dflash", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'"),
        ("dflash", {"rope_parameters": {"full_attention": {"rope_theta": 1e7}}}, "rope_parameters is"),
        ("dflash", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("dflash", {"rope_theta": 1e6}, "rope_theta is 1000000.0"),
        ("dflash", {"rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 1000000.0"),
        ("dflash", {"is_causal": True}, "is_causal is True"),
        ("dflash", {"dflash_config": {"causal": True}}, "causal is True"),
        ("dflash", {"dflash_config": {"use_swa": True}}, "use_swa is True"),
        ("dflash", {"dflash_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping is 30.0"),
        ("dflash", {"attention_bias": True}, "attention_bias is True"),
        ("dflash", {"draft_vocab_size": 512}, "draft_vocab_size is 512"),
        ("dflash", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        ("windows", {"layer_types": ["sliding_attention"] * 3}, "layer_types is"),
        ("windows", {"is_causal": True}, "is_causal is True"),
        ("windows", {"dflash_config": {"swa_window_size": 64}}, "swa_window_size is 64"),
        ("dflash2", {"dflash_config": {"conv_kernel_size": 4}}, "conv_kernel_size is 4"),
    ],
)
def test_a_draft_of_which_something_would_be_lost_is_refused(
    tmp_path: Path, kind: str, change: dict, message: str
) -> None:
    """Each field by its name; without it the same draft can be started from."""
    config = config_json(KINDS[kind], TARGET)
    shape_of(config, tmp_path, TARGET)
    changed = config | change
    changed["dflash_config"] = config["dflash_config"] | change.get("dflash_config", {})
    with pytest.raises(ModelFileError, match=message):
        shape_of(changed, tmp_path, TARGET)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "training.pt").write_bytes(b"")
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path), "-o", str(tmp_path / "out"), "--steps", "1"])
    assert stopped.value.code == 2 and "--resume goes on" in capsys.readouterr().err
    for option, value, message in (
        ("--taps", "1,x", "'1,x' is not a list of layers"),
        ("--device", "foo", "'foo' is none of cpu, cuda, cuda:N"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([str(tmp_path), "-o", str(tmp_path), option, value])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and f"{option}: {message}" in error
    for option, value in (
        ("--write-batch", "0"),
        ("--prompt", "0"),
        ("--prompt", "2047"),
        ("--greedy", "1.5"),
        ("--own-share", "-1.5"),
        ("--own-turns", "1.5"),
        ("--own-text", "-1"),
    ):
        options = ["-o", str(tmp_path), "--steps", "1", "--own-text", "100", option, value]
        assert main([str(tmp_path), *options]) == 1
        error = capsys.readouterr().err
        assert f"{option} is {value}" in error and error.count("\n") == 1
