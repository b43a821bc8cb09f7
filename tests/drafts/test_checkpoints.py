"""Tests of DFlash2 and DSpark checkpoints: they read like the GGUF files made of them; errors are named. 3 seconds."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_ggml.config import EngineConfig
from dflash_ggml.drafts.dflash.file import DraftFile
from dflash_ggml.errors import ModelFileError
from dflash_ggml.files.torch_vector import read_torch_vector
from reference import toys
from reference.checkpoints import write_checkpoint
from reference.engine_kit import Solo, fresh

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash2": ("z-lab", {"draft": "dflash2", "window": 24, "causal": False, "block_size": 8}),
    "dflash-six-layers": (
        "z-lab",
        {"draft_layers": 6, "n_layers": 9, "taps": tuple(range(8)), "own_tables": True},
    ),
    "dflash-yarn": ("z-lab", {"yarn": 32.0, "draft_rot": 16, "block_size": 10}),
    "laguna": (
        "poolside",
        {"normed_taps": True, "window": 24, "draft_layers": 3, "n_heads": 3, "taps": (0, 1, 3)},
    ),
    "dspark": ("deepspec", {"draft": "dspark", "block_size": 7, "confidence": True}),
    "dspark-gated": ("deepspec", {"draft": "dspark", "gated": True}),
    "dspark-reduced": (
        "speculators",
        {"draft": "dspark", "n_draft_vocab": 40, "from_anchor": False, "yarn": 8.0},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_reads_like_its_gguf(tmp_path: Path, case: str) -> None:
    schema, sizes = CASES[case]
    _, gguf = toys.write_pair(tmp_path, 5, **sizes)
    folder = write_checkpoint(tmp_path / "draft", gguf, schema)  # type: ignore[arg-type]
    a, b = DraftFile.open(gguf), DraftFile.open(folder)
    assert a.params == b.params
    assert set(a.names) == set(b.names)
    for name in a.names:
        (kind, shape, data), (other_kind, other_shape, other) = a.tensor(name), b.tensor(name)
        assert (kind, shape) == (other_kind, other_shape) == (a.kind(name)[0], a.kind(name)[1]), name
        assert bytes(data) == bytes(other), name


def test_a_copy_of_the_targets_head_is_left_out(tmp_path: Path) -> None:
    """Of a DSpark draft with the whole vocabulary, as llama.cpp's converter leaves it out too."""
    _, gguf = toys.write_pair(tmp_path, 5, draft="dspark", own_tables=True)
    assert DraftFile.open(write_checkpoint(tmp_path / "draft", gguf, "deepspec")).params.own == (
        "token_embd.weight",
    )


@pytest.mark.parametrize(
    ("sizes", "config", "message"),
    [
        ({"draft": "dspark"}, {"markov_head_type": "rnn"}, "Markov head of kind 'rnn' is not supported"),
        ({"draft": "dspark"}, {"markov_head_type": "gated"}, "'markov_gate.weight' is missing"),
        (
            {"draft": "dspark", "gated": True},
            {"markov_head_type": "vanilla"},
            "'markov_gate.weight' is unknown",
        ),
        (
            {"draft": "dspark", "n_draft_vocab": 40},
            {"draft_vocab_size": 39},
            "'d2t' is i64 .40., expected i64 .39.",
        ),
        ({"draft": "dspark", "n_draft_vocab": 40}, {"vocab_size": 42}, "'d2t': its ids are not|has shape"),
        ({"draft": "dspark"}, {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is not supported"),
    ],
)
def test_faults_are_named(
    tmp_path: Path, sizes: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    _, gguf = toys.write_pair(tmp_path, 5, **sizes)
    with pytest.raises(ModelFileError, match=message):
        DraftFile.open(write_checkpoint(tmp_path / "draft", gguf, "deepspec", **config))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("selector_rank", 31, "selector_hidden.weight' has shape"),
        ("conv_group_size", 48, "groups of 48 channels do not divide the hidden size 64"),
        ("conv_kernel_size", 0, "conv_kernel_size': 0 is out of range"),
        ("selector_top_k", 65, "selector_top_k': 65 is out of range"),
    ],
)
def test_faults_of_a_selector_are_named(tmp_path: Path, key: str, value: int, message: str) -> None:
    _, gguf = toys.write_pair(tmp_path, 5, draft="dflash2")
    good = DraftFile.open(write_checkpoint(tmp_path / "a", gguf)).params
    sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 6}
    drafting = {"mask_token_id": good.mask_id, "target_layer_ids": list(good.taps), **sizes, key: value}
    with pytest.raises(ModelFileError, match=message):
        DraftFile.open(write_checkpoint(tmp_path / "b", gguf, dflash_config=drafting))


def torch_archive(
    path: Path, content: dict[str, Any], vector: np.ndarray, element: str = "BFloat16Storage"
) -> None:
    """What torch.save writes of a dictionary with a vector under `embedding`, put together by hand."""
    out = io.BytesIO()
    stream = pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.MARK

    def text(x: str) -> bytes:
        return pickle.BINUNICODE + len(x.encode()).to_bytes(4, "little") + x.encode()

    def number(n: int) -> bytes:
        return pickle.BININT + n.to_bytes(4, "little", signed=True)

    stream += text("embedding") + pickle.GLOBAL + b"torch._utils\n_rebuild_tensor_v2\n" + pickle.MARK
    storage = text("storage") + pickle.GLOBAL + f"torch\n{element}\n".encode() + text("0") + text("cpu")
    stream += pickle.MARK + storage + number(len(vector)) + pickle.TUPLE + pickle.BINPERSID
    stream += number(0) + number(len(vector)) + pickle.TUPLE1 + number(1) + pickle.TUPLE1 + pickle.NEWFALSE
    stream += pickle.GLOBAL + b"collections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE
    stream += pickle.TUPLE + pickle.REDUCE
    for key, value in content.items():
        stream += text(key) + number(value)
    out.write(stream + pickle.SETITEMS + pickle.STOP)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mask/data.pkl", out.getvalue())
        archive.writestr("mask/data/0", vector.tobytes())


def test_a_mask_vector_of_its_own(tmp_path: Path) -> None:
    """It replaces the mask token's embedding: an equal vector changes nothing, another one does."""
    target, gguf = toys.write_pair(tmp_path, 5)
    folder = write_checkpoint(tmp_path / "draft", gguf)
    p = DraftFile.open(folder).params

    def drafted(name: str) -> np.ndarray:
        config = EngineConfig(
            target, tmp_path / name, n_ctx=64, n_threads=1, reference=True, calibrate="never"
        )
        with Solo.load(config) as engine:
            fresh(engine)
            engine.sequence.pending = 3
            assert engine.drafter is not None
            return engine.drafter.propose([engine.sequence], 8)[0].log_probs

    before = drafted("draft")
    same = np.zeros(p.n_embd, np.float32)  # the toy's mask token is nothing but a 1 in front
    same[0] = 1
    torch_archive(
        folder / "mask_embedding.pt", {"mask_token_id": p.mask_id}, (same.view("<u4") >> 16).astype("<u2")
    )
    assert DraftFile.open(folder).params == dataclasses.replace(p, has_mask_vector=True)
    assert np.array_equal(drafted("draft"), before)
    other = same + np.float32(2)
    torch_archive(folder / "mask_embedding.pt", {"mask_token_id": p.mask_id}, other, "FloatStorage")
    assert not np.allclose(drafted("draft"), before)
    torch_archive(folder / "mask_embedding.pt", {"mask_token_id": 1}, other, "FloatStorage")
    with pytest.raises(
        ModelFileError, match="for token 1, but config.json has hidden size 64 and mask token 63"
    ):
        DraftFile.open(folder)


def test_archives_that_ask_for_more_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mask_embedding.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"embedding": dataclasses.replace}))
    with pytest.raises(ModelFileError, match="it asks for dataclasses.replace"):
        read_torch_vector(path, "embedding")
    for raw in (b"", b"PK nonsense"):
        path.write_bytes(raw)
        with pytest.raises(ModelFileError, match="no archive of PyTorch"):
            read_torch_vector(path, "embedding")
    torch_archive(path, {}, np.zeros(4, np.float32), "FloatStorage")
    with pytest.raises(ModelFileError, match="it has no vector 'other'"):
        read_torch_vector(path, "other")


@pytest.mark.parametrize("case", ["dflash2", "dspark-gated", "dspark-reduced"])
def test_damaged_checkpoints(tmp_path: Path, case: str) -> None:
    """Wrong values in config.json and wrong bytes in the header: read, or refused by name."""
    schema, sizes = CASES[case]
    _, gguf = toys.write_pair(tmp_path, 5, **sizes)
    folder = write_checkpoint(tmp_path / "draft", gguf, schema)  # type: ignore[arg-type]
    config, weights = folder / "config.json", folder / "model.safetensors"
    good, data = json.loads(config.read_text()), weights.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    inner = [(key, name) for key, part in good.items() if isinstance(part, dict) for name in part]
    keys = [*((None, key) for key in good), *inner, (None, "sample_from_anchor"), (None, "rope_scaling")]
    values = st.sampled_from(
        [None, True, -1, 0, 1, 3, 10**9, 2**70, 0.5, -2.5, "", "yarn", [], [1], {}, {"factor": 2.0}]
    )

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.tuples(st.sampled_from(keys), values), max_size=2),
        st.lists(st.tuples(st.integers(0, end - 1), st.integers(0, 255)), max_size=2),
    )
    def run(changes: list[tuple[tuple[str | None, str], Any]], bytes_: list[tuple[int, int]]) -> None:
        changed = copy.deepcopy(good)
        for (part, key), value in changes:
            inside = changed if part is None else changed.get(part)
            if isinstance(inside, dict):
                inside[key] = copy.deepcopy(value)
        config.write_text(json.dumps(changed))
        damaged = bytearray(data)
        for at, value in bytes_:
            damaged[at] = value
        weights.write_bytes(damaged)
        try:
            opened = DraftFile.open(folder)
            for name in opened.names:
                opened.tensor(name)
        except ModelFileError as error:
            assert str(tmp_path) in str(error) and "\n" not in str(error)

    run()


@pytest.mark.parametrize("case", ["dflash2", "dspark", "dspark-reduced"])
def test_damaged_gguf_files(tmp_path: Path, case: str) -> None:
    _, gguf = toys.write_pair(tmp_path, 5, **CASES[case][1])
    data = gguf.read_bytes()
    end = data.index(b"output_norm.weight") + 200
    path = tmp_path / "x.gguf"

    @settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(
            st.tuples(st.integers(0, end), st.sampled_from([0, 1, 2, 127, 128, 255])), min_size=1, max_size=3
        )
    )
    def run(bytes_: list[tuple[int, int]]) -> None:
        damaged = bytearray(data)
        for at, value in bytes_:
            damaged[at] = value
        path.write_bytes(damaged)
        try:
            opened = DraftFile.open(path)
            for name in opened.names:
                opened.tensor(name)
        except ModelFileError as error:
            assert str(path) in str(error) and "\n" not in str(error)

    run()


def test_a_gate_that_cannot_be_split(tmp_path: Path) -> None:
    """Its columns belong to two inputs; a block of a quantised row may not lie across."""
    sizes = {"draft": "dspark", "gated": True, "n_embd": 48, "rank": 16}
    _, gguf = toys.write_pair(tmp_path, 5, kind=toys.GGMLQuantizationType.Q8_0, **sizes)
    with pytest.raises(
        ModelFileError, match="'markov_gate.weight' is q8_0, whose blocks do not end .* at 48"
    ):
        DraftFile.open(gguf)


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    _, gguf = toys.write_pair(tmp_path, 5, normed_taps=True, window=24)
    for config, message in (
        (
            {"num_key_value_heads": 2},
            r"self_attn.qkv_proj.weight' has shape \[64, 256\], expected rows of 2 \+ 2 \* 2",
        ),
        (
            {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1, 2]}},
            "enc.aux_norm.weight|fc.weight",
        ),
    ):
        folder = write_checkpoint(tmp_path / str(len(message)), gguf, "poolside", **config)
        with pytest.raises(ModelFileError, match=message):
            DraftFile.open(folder)


def test_a_laguna_draft_is_causal_unless_its_file_declares_otherwise(tmp_path: Path) -> None:
    _, gguf = toys.write_pair(tmp_path, 5, normed_taps=True)
    p = DraftFile.open(gguf).params
    assert p.normed_taps and p.gated and p.causal_full and p.causal_window
    _, gguf = toys.write_pair(tmp_path, 5, normed_taps=True, causal=False)
    assert not DraftFile.open(gguf).params.causal_full
