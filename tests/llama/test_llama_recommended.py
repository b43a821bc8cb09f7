"""Tests of sampling defaults from the model file in the class; what is passed wins, default or not."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.decode.sampling_params import SamplingParams
from dflash_ggml.llama.llama import Llama
from reference.toy_llama import ToyLlama

FILE = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.9}
CHAT = [{"role": "user", "content": "hello"}]


class Recommending(ToyLlama):
    def _open_engine(self) -> Any:
        engine = super()._open_engine()
        engine.metadata = engine.metadata | FILE
        return engine


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.gguf"
    path.touch()
    return str(path)


def used(llm: Llama, call: str, *args: Any, **options: Any) -> SamplingParams:
    """The sampling of the request that a method makes."""
    seen = []
    prepare = llm.session.prepare
    llm.session.prepare = lambda request: seen.append(request) or prepare(request)  # type: ignore[method-assign]
    getattr(llm, call)(*args, max_tokens=2, **options)
    llm.session.prepare = prepare  # type: ignore[method-assign]
    return seen[0].sampling


@pytest.mark.parametrize(("call", "args"), [("create_completion", ["x"]), ("create_chat_completion", [CHAT])])
def test_left_out_and_given(model: str, call: str, args: list[Any]) -> None:
    own = {"create_completion": 0.8, "create_chat_completion": 0.2}[call]
    with Recommending(model) as llm:
        taken = used(llm, call, *args)
        assert (taken.temperature, taken.top_k, taken.top_p, taken.min_p) == (0.6, 20, 0.9, 0.05)
        assert type(taken.min_p) is float  # plain data
        given = used(llm, call, *args, temperature=own, top_k=40)  # the defaults' own numbers, but given
        assert (given.temperature, given.top_k, given.top_p) == (own, 40, 0.9)
    with ToyLlama(model) as llm:
        taken = used(llm, call, *args)
        assert (taken.temperature, taken.top_k, taken.top_p) == (own, 40, 0.95)


def test_generate(model: str) -> None:
    others = {"logits_processor": None, "grammar": None}
    with Recommending(model) as llm:
        sampler = llm._sampler_of({"temp": 0.5, "top_k": 40, **others}, 0)
        assert sampler.params.temperature == 0.5 and sampler.params.top_k == 40
        default = inspect.signature(Llama.generate).parameters["temp"].default
        assert llm._sampler_of({"temp": default, "top_k": 3, **others}, 0).params.temperature == 0.6


def test_the_signature_keeps_its_defaults() -> None:
    shown = str(inspect.signature(Llama.create_completion))
    assert "temperature: 'float' = 0.8" in shown and "top_k: 'int' = 40" in shown


def test_recommended_sampling_is_reported(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing that the class does not take."""
    FILE["general.sampling.mirostat"] = 2
    Recommending(model, verbose=True).close()
    del FILE["general.sampling.mirostat"]
    printed = capsys.readouterr().err
    assert (
        "sampling as the model file has it, where not given: temperature 0.6, top_k 20, top_p 0.9\n"
        in printed
    )
