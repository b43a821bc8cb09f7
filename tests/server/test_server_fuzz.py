"""Tests of requests changed at random: every answer is a success or an error that the client can parse, never a 500."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import Session
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary
from reference.requests import REQUESTS
from reference.server_kit import ScriptedRunner, application, calling

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(("\ud83d", "a\udc00b", 2.0, -1.0, 1e300)),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside `value`."""
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield (*path, key)
        yield from paths(child, (*path, key))


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """An endpoint, and a body in which up to three things were replaced, removed or added."""
    path = draw(st.sampled_from(sorted(REQUESTS)))
    body = copy.deepcopy(REQUESTS[path])
    for _ in range(draw(st.integers(0, 3))):
        where = draw(st.sampled_from(sorted(paths(body), key=repr) or [("x",)]))
        holder: Any = body
        for key in where[:-1]:
            holder = holder[key]
        action = draw(st.sampled_from(("replace", "remove", "add")))
        if action == "replace" or (action == "add" and not isinstance(holder, dict)):
            holder[where[-1]] = draw(JUNK)
        elif action == "add":
            holder[draw(st.text(min_size=1, max_size=5))] = draw(JUNK)
        else:
            del holder[where[-1]]
    return path, body


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    runner = ScriptedRunner(lambda request: calling())
    session = Session(FakeEngine(tokenizer=byte_vocabulary(template=TOOL_TEMPLATE)))

    def count(
        request: Any,
    ) -> int:  # a real session renders and counts the prompt, only the answer is scripted
        return session.count_tokens(request) if isinstance(request, ChatRequest) else 1

    runner.n_ctx = 4096
    runner.count = count  # type: ignore[method-assign]
    with TestClient(application(runner)) as made:
        yield made


def test_the_unchanged_requests_are_fine(client: TestClient) -> None:
    for path, body in REQUESTS.items():
        response = client.post(path, json=body)
        assert response.status_code == 200, (path, response.text)
        assert '"error"' not in response.text.replace('"error":null', ""), (path, response.text)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changed())
def test_changed_requests_never_crash(client: TestClient, case: tuple[str, dict[str, Any]]) -> None:
    path, body = case
    written = json.dumps(body)  # with escapes for what UTF-8 cannot encode
    response = client.post(path, content=written, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200 and path.startswith("/api/"):
        assert response.json()["error"]
    elif response.status_code != 200:
        error = response.json()["error"]
        assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")
    else:
        assert "internal error" not in response.text
