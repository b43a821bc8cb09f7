"""Tests of `dflash-convert`: its output reads like its input, and has the keys that llama.cpp needs. 6 seconds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from dflash_ggml.cli.convert import main
from dflash_ggml.drafts.dflash.file import DraftFile
from reference import toys
from reference.checkpoints import write_checkpoint
from reference.numpy_draft import read

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("z-lab", {"window": 24, "full_layers": 1, "draft_rot": 32}),
    "dflash2": ("z-lab", {"draft": "dflash2", "window": 24, "causal": False, "yarn": 4.0}),
    "laguna": ("poolside", {"normed_taps": True, "window": 24, "causal": True}),
    "dspark": ("deepspec", {"draft": "dspark", "confidence": True, "block_size": 7}),
    "dspark-reduced": ("speculators", {"draft": "dspark", "n_draft_vocab": 40, "from_anchor": False}),
    "dspark-gated": ("deepspec", {"draft": "dspark", "gated": True}),
}


def convert(target: Path, draft: Path, out: Path, *options: str) -> int:
    return main([str(draft), "-m", str(target), "-o", str(out), *options])


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_was_read(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    schema, sizes = CASES[case]
    target, gguf = toys.write_pair(tmp_path, 5, draft_tokens=True, **sizes)
    folder = write_checkpoint(tmp_path / "draft", gguf, schema)  # type: ignore[arg-type]
    out = tmp_path / "out.gguf"
    assert convert(target, folder, out) == 0
    a, b = DraftFile.open(folder), DraftFile.open(out)
    assert a.params == b.params and a.names == b.names
    for name in a.names:
        assert bytes(a.tensor(name)[2]) == bytes(b.tensor(name)[2]), name
    before, after = read(gguf), read(out)
    assert before[1].keys() == after[1].keys() and all(
        np.array_equal(x, after[1][n]) for n, x in before[1].items()
    )
    ours = {
        "dflash.rope.dimension_sections",
        "general.type",
        "general.file_type",
        "general.quantization_version",
    }
    assert set(after[0]) - ours == set(before[0])
    for key, value in before[0].items():
        if key != "general.name":
            assert after[0][key] == value, key
    assert ("for dflash-ggml alone" in capsys.readouterr().out) == (case in ("dspark-gated", "laguna"))


def test_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, gguf = toys.write_pair(tmp_path, 5, draft="dflash2")
    folder = write_checkpoint(tmp_path / "draft", gguf, half=True)
    for name, number in (("q8_0", 7), ("f16", 1)):
        out = tmp_path / f"{name}.gguf"
        assert convert(target, folder, out, "--type", name) == 0
        kinds = {t.name: t.tensor_type.name for t in GGUFReader(out).tensors}
        assert kinds["fc.weight"] == kinds["selector_predecessor.weight"] == name.upper()
        assert kinds["output_norm.weight"] == kinds["blk.0.attn_conv_base"] == "F32"
        assert read(out)[0]["general.file_type"] == number
    assert convert(target, folder, tmp_path / "as.gguf") == 0
    assert read(tmp_path / "as.gguf")[0]["general.file_type"] == 32
    assert convert(target, tmp_path / "q8_0.gguf", tmp_path / "again.gguf") == 0, "a GGUF file goes in too"


def test_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, gguf = toys.write_pair(tmp_path, 5)
    folder = write_checkpoint(tmp_path / "draft", gguf)
    out = tmp_path / "out.gguf"
    out.write_bytes(b"mine")
    with pytest.raises(SystemExit) as stopped:
        convert(target, folder, out)
    assert stopped.value.code == 2 and out.read_bytes() == b"mine"
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"target_layer_ids": [0', '"target_layer_ids": [90'))
    assert convert(target, folder, out, "--force") == 1
    assert "dflash-convert:" in capsys.readouterr().err and out.read_bytes() == b"mine"
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.gguf"], "nothing is left half written"


def test_a_mask_vector_becomes_a_row_of_the_embedding(tmp_path: Path) -> None:
    from drafts.test_checkpoints import torch_archive

    target, gguf = toys.write_pair(tmp_path, 5)
    folder = write_checkpoint(tmp_path / "draft", gguf)
    p = DraftFile.open(folder).params
    vector = np.arange(p.n_embd, dtype=np.float32)
    torch_archive(folder / "mask_embedding.pt", {"mask_token_id": p.mask_id}, vector, "FloatStorage")
    out = tmp_path / "out.gguf"
    assert convert(target, folder, out) == 0
    table, tables = read(out)[1]["token_embd.weight"], read(target)[1]
    assert np.array_equal(table[p.mask_id], vector)
    assert np.array_equal(
        np.delete(table, p.mask_id, 0), np.delete(tables["token_embd.weight"], p.mask_id, 0)
    )
    assert np.array_equal(read(out)[1]["output.weight"], tables["output.weight"])
    assert DraftFile.open(out).params == dataclasses.replace(p, own=("token_embd.weight", "output.weight"))
