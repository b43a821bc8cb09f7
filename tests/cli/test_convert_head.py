"""Tests of `dflash-convert` on a prediction head: the target's file gets back the head that it had. 2 seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from dflash_ggml.cli.convert import main
from dflash_ggml.drafts.mtp.convert import _NAMES
from reference import toys
from reference.numpy_draft import read
from reference.tiny_models import safetensors_bytes


def parted(target: Path, folder: Path, bare: Path, per_file: int = 0) -> None:
    """Take a toy's head out of its file: into a folder as checkpoints have it, and the rest into `bare`.

    per_file: tensors of a part, where `bare` is to be in parts.
    """
    keys, tensors = read(target)
    block = keys["qwen35.block_count"] - 1
    folder.mkdir()
    names = {f"blk.{block}.{new}": f"mtp.{old}.weight" for old, new in _NAMES.items()}
    made = {
        names[n]: ("F32", (x - (x.ndim == 1)).astype(np.float32)) for n, x in tensors.items() if n in names
    }
    (folder / "model.safetensors").write_bytes(safetensors_bytes(made))
    (folder / "config.json").write_text(json.dumps({"mtp_num_hidden_layers": 1}))
    reader = GGUFReader(target)
    writer = GGUFWriter(bare, "qwen35", split_max_tensors=per_file)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "qwen35.nextn_predict_layers"):
            continue
        value = field.contents()
        if key == "qwen35.block_count":
            value = block
        if key == "qwen35.attention.recurrent_layers":
            value = value[:-1]
        writer.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for t in reader.tensors:
        if not t.name.startswith(f"blk.{block}."):
            writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_head_goes_back_into_its_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, _ = toys.write_pair(tmp_path, 5, nextn=True)
    folder, bare, out = tmp_path / "head", tmp_path / "bare.gguf", tmp_path / "out.gguf"
    parted(target, folder, bare)
    assert main([str(folder), "-m", str(bare), "-o", str(out)]) == 0
    assert "prediction head, 15 tensors" in capsys.readouterr().out
    (keys, tensors), (before, wanted) = read(out), read(target)
    assert keys == before and tensors.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_allclose(tensors[name], x, rtol=1e-6, atol=1e-7, err_msg=name)
    assert main([str(folder), "-m", str(bare), "-o", str(tmp_path / "q.gguf"), "--type", "q8_0"]) == 0
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "q.gguf").tensors}
    block = before["qwen35.block_count"] - 1
    assert kinds[f"blk.{block}.nextn.eh_proj.weight"] == "Q8_0" and kinds["output.weight"] != "Q8_0"


def test_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, _ = toys.write_pair(tmp_path, 5, nextn=True)
    folder, bare, out = tmp_path / "head", tmp_path / "bare.gguf", tmp_path / "out.gguf"
    parted(target, folder, bare)
    assert main([str(folder), "-m", str(target), "-o", str(out)]) == 1
    assert "a prediction head already" in capsys.readouterr().err
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data.replace(b"mtp.norm.weight", b"mtp.nurm.weight"))
    assert main([str(folder), "-m", str(bare), "-o", str(out)]) == 1
    assert "tensor 'mtp.nurm.weight'" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*")), "nothing is left half written"


def test_a_target_in_parts_is_to_be_joined_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, _ = toys.write_pair(tmp_path, 5, nextn=True)
    parted(target, tmp_path / "head", tmp_path / "bare.gguf", per_file=40)
    part = min(tmp_path.glob("bare-00001-of-*.gguf"))
    assert main([str(tmp_path / "head"), "-m", str(part), "-o", str(tmp_path / "out.gguf")]) == 1
    printed = capsys.readouterr().err
    assert "parts" in printed and "llama-gguf-split --merge" in printed and printed.count("\n") == 1
    assert not list(tmp_path.glob("out*"))
