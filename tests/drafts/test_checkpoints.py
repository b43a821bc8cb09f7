"""Checkpoints of DFlash2 and DSpark drafts read like the GGUF files made of them; their faults are named. 3 seconds."""

from __future__ import annotations

import dataclasses
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.drafts.dflash.file import DraftFile
from dflash_ggml.engine.engine import Engine
from dflash_ggml.errors import ModelFileError
from dflash_ggml.files.torch_vector import read_torch_vector
from reference import toys
from reference.checkpoints import write_checkpoint
from reference.engine_kit import fresh

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash2": ("z-lab", {"draft": "dflash2", "window": 24, "causal": False, "block_size": 8}),
    "dflash-six-layers": (
        "z-lab",
        {"draft_layers": 6, "n_layers": 9, "taps": tuple(range(8)), "own_tables": True},
    ),
    "dflash-yarn": ("z-lab", {"yarn": 32.0, "draft_rot": 16, "block_size": 10}),
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
    ("sizes", "config", "said"),
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
def test_faults_are_named(tmp_path: Path, sizes: dict[str, Any], config: dict[str, Any], said: str) -> None:
    _, gguf = toys.write_pair(tmp_path, 5, **sizes)
    with pytest.raises(ModelFileError, match=said):
        DraftFile.open(write_checkpoint(tmp_path / "draft", gguf, "deepspec", **config))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("selector_rank", 31, "selector_hidden.weight' has shape"),
        ("conv_group_size", 48, "groups of 48 channels do not divide the hidden size 64"),
        ("conv_kernel_size", 0, "conv_kernel_size': 0 is out of range"),
        ("selector_top_k", 65, "selector_top_k': 65 is out of range"),
    ],
)
def test_faults_of_a_selector_are_named(tmp_path: Path, key: str, value: int, said: str) -> None:
    _, gguf = toys.write_pair(tmp_path, 5, draft="dflash2")
    good = DraftFile.open(write_checkpoint(tmp_path / "a", gguf)).params
    sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 6}
    drafting = {"mask_token_id": good.mask_id, "target_layer_ids": list(good.taps), **sizes, key: value}
    with pytest.raises(ModelFileError, match=said):
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
    """It stands where the mask token's embedding would: a vector equal to that changes nothing, another one does."""
    target, gguf = toys.write_pair(tmp_path, 5)
    folder = write_checkpoint(tmp_path / "draft", gguf)
    p = DraftFile.open(folder).params

    def drafted(name: str) -> np.ndarray:
        config = EngineConfig(
            target, tmp_path / name, n_ctx=64, n_threads=1, reference=True, calibrate="never"
        )
        with Engine.load(config) as engine:
            fresh(engine)
            engine.sequence.pending = 3
            assert engine.drafter is not None
            return engine.drafter.propose(engine.sequence, 8).log_probs

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
