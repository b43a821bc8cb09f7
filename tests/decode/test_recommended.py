"""Tests of the sampling options that a model file recommends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_ggml.decode.recommended import described, recommended


def test_published_keys() -> None:
    keys = {
        "temp": float(np.float32(0.6)),
        "top_k": 20,
        "top_p": float(np.float32(0.95)),
        "penalty_repeat": 1,
    }
    found = recommended(
        {f"general.sampling.{key}": value for key, value in keys.items()} | {"general.name": "x"}
    )
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repeat_penalty": 1.0}
    assert isinstance(found["repeat_penalty"], float)
    assert described(found) == "temperature 0.6, top_k 20, top_p 0.95, repeat_penalty 1"
    assert recommended({}) == {}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("top_p", 3.0, "out of range"),
        ("temp", float("nan"), "out of range"),
        ("temp", "hot", "out of range"),
        ("top_k", 2.5, "out of range"),
        ("mirostat", True, "out of range"),
        ("xtc_probability", 0.5, "no such option here"),
    ],
)
def test_what_cannot_be_taken_is_named(
    key: str, value: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert recommended({f"general.sampling.{key}": value}) == {}
    assert f"general.sampling.{key} = {value} in the model file: {message}" in caplog.text
