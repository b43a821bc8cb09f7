"""Tests of damaged or odd safetensors checkpoints: one clear error each. 8 seconds, most of them for the fuzzing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_ggml.drafts.dflash.file import DraftFile
from dflash_ggml.errors import ModelFileError
from reference import tiny_models as tiny


def test_truncated_safetensors(tmp_path: Path):
    folder = tiny.write_zlab_draft(tmp_path / "draft")
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    for end in (*range(40), *range(40, len(data), 61), len(data) - 1):
        weights.write_bytes(data[:end])
        with pytest.raises(ModelFileError, match="draft"):
            DraftFile.open(folder)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"[" * 10**5, b"\xff\xfe", b'{"a": NaN}'])
def test_bad_config_json(tmp_path: Path, text: bytes):
    folder = tiny.write_zlab_draft(tmp_path / "draft")
    (folder / "config.json").write_bytes(text)
    with pytest.raises(ModelFileError, match="draft"):
        DraftFile.open(folder)


def test_missing_config_json(tmp_path: Path):
    folder = tiny.write_zlab_draft(tmp_path / "draft")
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match="config.json: no such file; it must lie beside"):
        DraftFile.open(folder / "model.safetensors")


def test_other_element_types_are_refused(tmp_path: Path):
    folder = tiny.write_zlab_draft(tmp_path / "draft")
    values = {tiny.zlab_name(name): ("F64", x.astype(np.float64)) for name, x in tiny.draft_values().items()}
    (folder / "model.safetensors").write_bytes(tiny.safetensors_bytes(values))
    with pytest.raises(ModelFileError, match="is stored as f64, which no weight may be"):
        DraftFile.open(folder)
    values |= {"extra": ("U8", np.zeros(4, np.uint8))}
    (folder / "model.safetensors").write_bytes(tiny.safetensors_bytes(values))
    with pytest.raises(ModelFileError, match="'extra' has the unsupported type U8"):
        DraftFile.open(folder)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def test_fuzz_safetensors(tmp_path: Path):
    folder = tiny.write_zlab_draft(tmp_path / "draft")
    config, weights = folder / "config.json", folder / "model.safetensors"
    good = tiny.zlab_config() | {"use_sliding_window": True, "sliding_window": 4}
    good_config, data = json.dumps(good).encode(), weights.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    keys = [*good, "is_causal", "rope_is_neox_style", "rope_parameters", "partial_rotary_factor"]

    @settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.dictionaries(st.sampled_from(keys), JSON, max_size=3),
        st.lists(st.tuples(st.integers(0, end - 1), st.integers(0, 255)), max_size=3),
    )
    def run(changes: dict[str, Any], bytes_: list[tuple[int, int]]) -> None:
        config.write_text(json.dumps(good | changes))
        damaged = bytearray(data)
        for at, value in bytes_:
            damaged[at] = value
        weights.write_bytes(damaged)
        try:
            opened = DraftFile.open(folder)
            for name in opened.names:
                opened.tensor(name)
        except ModelFileError as error:
            assert str(tmp_path) in str(error)

    config.write_bytes(good_config)
    DraftFile.open(folder)
    run()


@pytest.mark.parametrize(
    "weight_map",
    [
        {},
        [],
        {"a": ["x.safetensors"]},
        {"a": {"b": 1}},
        {"a": 3},
        {"a": "../x.safetensors"},
        {"a": "x.safetensors", "b": 4},
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, weight_map: object):
    folder = tiny.write_zlab_draft(tmp_path / "draft")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelFileError, match="weight_map should map tensor names"):
        DraftFile.open(folder)
