"""Tests of the sampling options in every interface: command line, /set, HTTP requests, the class."""

from __future__ import annotations

import argparse
import inspect
import io
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.cli.arguments import file_metadata
from dflash_ggml.cli.repl import Conversation
from dflash_ggml.cli.sampling_options import ABOUT, add_sampling_options, sampling_params, token_bias
from dflash_ggml.decode.sampling_params import OPTIONS, SamplingParams
from dflash_ggml.llama.llama import Llama
from dflash_ggml.llama.requests import SAMPLING_OPTIONS
from dflash_ggml.server.schema import SamplingFields
from dflash_ggml.session.session import Session
from reference.fake_engine import FakeEngine
from reference.gguf_bytes import build

FIELDS = [f.name for f in fields(SamplingParams)]
# a value of each that is not the default, as one writes it, and llama.cpp's flag and request field
CASES: dict[str, tuple[str, Any, str, str]] = {
    "temperature": ("0.5", 0.5, "--temp", "temperature"),
    "top_k": ("3", 3, "--top-k", "top_k"),
    "top_p": ("0.7", 0.7, "--top-p", "top_p"),
    "min_p": ("0.1", 0.1, "--min-p", "min_p"),
    "typical_p": ("0.9", 0.9, "--typical", "typical_p"),
    "repeat_penalty": ("1.2", 1.2, "--repeat-penalty", "repeat_penalty"),
    "presence_penalty": ("0.3", 0.3, "--presence-penalty", "presence_penalty"),
    "frequency_penalty": ("0.4", 0.4, "--frequency-penalty", "frequency_penalty"),
    "penalty_last_n": ("-1", -1, "--repeat-last-n", "repeat_last_n"),
    "logit_bias": ("7+1.5", {7: 1.5}, "--logit-bias", "logit_bias"),
    "seed": ("5", 5, "--seed", "seed"),
    "mirostat_mode": ("2", 2, "--mirostat", "mirostat"),
    "mirostat_tau": ("3.0", 3.0, "--mirostat-ent", "mirostat_tau"),
    "mirostat_eta": ("0.2", 0.2, "--mirostat-lr", "mirostat_eta"),
}


def parsed(*flags: str) -> SamplingParams:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    return sampling_params(parser.parse_args(flags))


def test_the_cases_are_all_fields() -> None:
    assert list(CASES) == FIELDS == list(OPTIONS) == list(ABOUT)


@pytest.mark.parametrize("name", FIELDS)
def test_every_face_offers_every_option(name: str) -> None:
    text, value, flag, request = CASES[name]
    changed = replace(SamplingParams(), **{name: value})
    assert parsed(flag, text) == changed
    chat = Conversation(Session(FakeEngine()), io.StringIO(), io.StringIO())
    chat.say(f"/set {name} {text}")
    assert chat.sampling == changed
    body = {"logit_bias": {"7": 1.5}} if name == "logit_bias" else {request: value}
    assert SamplingFields.model_validate(body).sampling(SamplingParams()) == changed
    own = {"penalty_last_n": "last_n_tokens_size"}.get(name, name)
    keywords = inspect.signature(Llama if own != name else Llama.create_completion).parameters
    assert own in keywords
    assert name in SAMPLING_OPTIONS or name in ("temperature", "penalty_last_n", "logit_bias", "seed")


def test_nothing_given_is_the_default() -> None:
    assert parsed() == SamplingParams()


def test_the_model_file_comes_before_our_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Flags win, also at the default's own value; what was taken is reported, unless decoding is greedy."""
    recommends = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    params = sampling_params(parser.parse_args(["--top-k", "40"]), recommends)
    assert params == replace(SamplingParams(), temperature=0.6)
    assert "from the model file: temperature 0.6; flags win" in caplog.text
    caplog.clear()
    assert sampling_params(parser.parse_args(["--temp", "0"]), recommends).top_k == 20
    assert not caplog.text
    file = tmp_path / "x.gguf"
    file.write_bytes(build(recommends).data)
    assert dict(file_metadata(file)) == pytest.approx(recommends)
    file.write_bytes(b"no model")
    assert file_metadata(file) == {}


def test_biases_add_up_and_ban() -> None:
    params = parsed("-l", "7+1", "-l", "8-inf,9-0.5", "-l", "7-2")
    assert params.logit_bias == {7: -2.0, 8: -math.inf, 9: -0.5}
    assert token_bias("none") == {}


@pytest.mark.parametrize("text", ["", "7", "+1", "7+", "7+x", "7+-1", "x+1", "7+1,"])
def test_a_bias_that_is_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="ID|float"):
        token_bias(text)
    with pytest.raises(SystemExit):
        parsed(f"--logit-bias={text}")
    assert f"-l/--logit-bias: {text!r} is not ID+BIAS or ID-BIAS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1.5"], "-s/--seed: '1.5' is not a whole number"),
        (["--seed", "-2"], "-s/--seed: must be a whole number from 0, got -2"),
        (["--top-k", "many"], "--top-k: 'many' is not a whole number"),
        (["--temp", "hot"], "--temp/--temperature: 'hot' is not a number"),
        (["--mirostat", "3"], "--mirostat: must be 0, 1 or 2, got 3"),
        (["--repeat-last-n", "-5"], "--repeat-last-n: must be a count, or -1 for all, got -5"),
        (["-l", "5+inf"], "-l/--logit-bias: must be finite, or -inf to ban the token, got inf"),
    ],
)
def test_errors_name_the_flag(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*flags)
    err = capsys.readouterr().err
    assert f"argument {message}\n" in err and not any(f"{name} " in err.splitlines()[-1] for name in FIELDS)


def test_a_random_seed() -> None:
    assert parsed("-s", "-1").seed is None
