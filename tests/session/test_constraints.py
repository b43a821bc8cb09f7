"""Tests of output constraints: compiled when a request is prepared, and refused there."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("llguidance")

from dflash_ggml.errors import ConfigError
from dflash_ggml.session.requests import ChatRequest, CompletionRequest, GrammarSpec
from dflash_ggml.session.session import Session, run_chat
from reference.fake_engine import FakeEngine


def test_a_schema_compiles_once_for_a_request() -> None:
    """What a session prepares it does not compile again when it answers."""
    made: list[GrammarSpec] = []
    session = Session(FakeEngine(replies=['{"a": 1}']), vet=made.append)  # type: ignore[arg-type]
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    request = ChatRequest(messages=[{"role": "user", "content": "x"}], response_format=form, max_tokens=20)
    prepared = session.prepare(request)
    assert len(made) == 1
    list(run_chat(session, prepared))
    assert len(made) == 1
    with pytest.raises(ConfigError, match="multipleOf"):
        session.prepare(
            replace(request, response_format={**form, "json_schema": {"schema": {"multipleOf": 1e7}}})
        )


def test_a_grammar_that_cannot_be_is_refused_when_it_is_prepared() -> None:
    session = Session(FakeEngine())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown name"):
        session.prepare(CompletionRequest(prompt="x", grammar=GrammarSpec("lark", "start: foo")))
