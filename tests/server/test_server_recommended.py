"""Tests of sampling defaults that `dflash-serve` takes from the model file; flags win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("dflash_ggml.ggml.bindings")

from dflash_ggml.decode.sampling_params import SamplingParams
from dflash_ggml.server import cli
from reference.gguf_bytes import build


class Made(Exception):
    """The service would be made now."""


def test_defaults_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(build({"general.sampling.temp": 0.6, "general.sampling.top_k": 20}).data)
    seen: list[SamplingParams] = []

    def make(opener: Any, settings: Any, **options: Any) -> None:
        seen.append(settings.sampling)
        raise Made

    monkeypatch.setattr(cli, "make_service", make)
    for flags in ([], ["--top-k", "7"]):
        args = cli.build_parser().parse_args(["-m", str(model), "--mode", "plain", "--port", "0", *flags])
        with pytest.raises(Made):
            cli.run(args)
    assert [(p.temperature, p.top_k) for p in seen] == [(0.6, 20), (0.6, 7)]
