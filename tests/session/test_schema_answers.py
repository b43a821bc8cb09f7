"""Tests of schema-constrained answers of the embedded pair at temperature 1: complete and valid within 120 tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("dflash_ggml.ggml.bindings")
pytest.importorskip("llguidance")

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling_params import SamplingParams
from dflash_ggml.engine.engine import Engine
from dflash_ggml.session.events import Finish, TextDelta, ToolCallArgs
from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import Session, run_chat

PLACE = {
    "type": "object",
    "properties": {"floor": {"type": "integer"}, "garden": {"type": "boolean"}},
    "required": ["floor"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "choice": {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "blue"]},
            "n": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["colour", "n", "ok"],
    },
    "nested": {
        "type": "object",
        "properties": {"home": PLACE, "weight": {"type": "number"}},
        "required": ["home", "weight"],
    },
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    "strings": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}},
        "required": ["name"],
    },
}


@pytest.fixture(scope="module")
def session(demo_target: Path, demo_draft: Path) -> Iterator[Session]:
    config = EngineConfig(demo_target, demo_draft, n_ctx=512, n_threads=1, n_gpu_layers=0, calibrate="never")
    with Engine.load(config) as engine:
        yield Session(engine)


def answered(session: Session, seed: int, **options: Any) -> tuple[str, str]:
    """The answer, or the arguments of the call that it is, and why it ended."""
    request = ChatRequest(
        messages=[{"role": "user", "content": "Write it down."}],
        sampling=SamplingParams(temperature=1.0, seed=seed),
        max_tokens=120,
        **options,
    )
    text, reason = "", ""
    for event in run_chat(session, request):
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, ToolCallArgs):
            text += event.json
        elif isinstance(event, Finish):
            reason = event.reason
    return text, reason


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_complete_and_valid(session: Session, name: str) -> None:
    schema = SCHEMAS[name]
    form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    for seed in range(3):
        text, reason = answered(session, seed, response_format=form)
        assert reason == "stop", text
        jsonschema.validate(json.loads(text), schema)
        assert set(json.loads(text)) <= set(schema.get("properties", ())) or name == "array"


def test_forced_calls_carry_declared_keys_only(session: Session) -> None:
    for schema in (SCHEMAS["choice"], {**SCHEMAS["nested"], "minProperties": 1}):  # as text, and as JSON
        tool = {"type": "function", "function": {"name": "note", "parameters": schema}}
        for seed in range(1):
            text, reason = answered(
                session, seed, tools=(tool,), tool_choice="required", parallel_tool_calls=False
            )
            assert reason == "tool_calls", text
            jsonschema.validate(json.loads(text), {**schema, "additionalProperties": False})
