"""Tests of embeddings over HTTP: every form of input, both encodings, and a generation that runs meanwhile."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
openai = pytest.importorskip("openai")

from starlette.testclient import TestClient  # noqa: E402

from dflash_ggml.server.app import create_app, make_service  # noqa: E402
from dflash_ggml.server.dialect import Settings  # noqa: E402
from dflash_ggml.server.runner import Runner  # noqa: E402
from dflash_ggml.session.embedding import embed, normalised  # noqa: E402
from dflash_ggml.session.session import Session  # noqa: E402
from reference.fake_engine import FakeEngine  # noqa: E402

TEXTS = ["hello there", "Once upon"]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    runner = Runner(Session(engine))
    with TestClient(create_app(make_service(lambda progress: runner, Settings(names=("toy",))))) as client:
        yield client


def vectors(http: TestClient, given: Any, **more: Any) -> list[Any]:
    answer = http.post("/v1/embeddings", json={"input": given, "model": "toy", **more})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [d["index"] for d in data] == list(range(len(data)))
    return [d["embedding"] for d in data]


def states(engine: FakeEngine, ids: list[int]) -> Any:
    rows: list[Any] = []
    FakeEngine(engine.config, engine.tokenizer).open().hidden_states(ids, rows.append)
    return np.concatenate(rows)


def test_they_are_normalised_means_of_the_hidden_states(http: TestClient, engine: FakeEngine) -> None:
    for text, vector in zip(TEXTS, vectors(http, TEXTS), strict=True):
        mean = states(engine, engine.tokenizer.encode(text)).mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)


def test_every_form_of_input(http: TestClient, engine: FakeEngine) -> None:
    both = vectors(http, TEXTS)
    ids = [engine.tokenizer.encode(text) for text in TEXTS]
    assert vectors(http, TEXTS[0]) == both[:1] == vectors(http, ids[0])
    assert vectors(http, ids) == both == vectors(http, [TEXTS[0], ids[1]])
    answer = http.post("/v1/embeddings", json={"input": TEXTS}).json()
    n = sum(len(i) for i in ids)
    assert answer["usage"] == {"prompt_tokens": n, "total_tokens": n} and answer["model"] == "toy"
    assert http.post("/embeddings", json={"input": TEXTS}).json()["data"] == answer["data"]


def test_the_official_client_reads_both_encodings(http: TestClient) -> None:
    client = openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=http, max_retries=0)
    plain = vectors(http, TEXTS[0], encoding_format="float")[0]
    np.testing.assert_allclose(
        client.embeddings.create(model="toy", input=TEXTS[0]).data[0].embedding, plain, atol=1e-7
    )
    raw = vectors(http, TEXTS[0], encoding_format="base64")[0]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(raw), "<f4"), plain, atol=1e-7)


def test_fewer_dimensions_are_cut_and_normalised_again(http: TestClient) -> None:
    whole, short = vectors(http, TEXTS[0])[0], vectors(http, TEXTS[0], dimensions=8)[0]
    assert len(short) == 8 and np.linalg.norm(short) == pytest.approx(1)
    np.testing.assert_allclose(short, np.array(whole[:8]) / np.linalg.norm(whole[:8]), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "empty"),
        ({"input": "x" * 2000}, "exceed context"),
        ({"input": [[1, 99_999]]}, "outside the vocabulary"),
        ({"dimensions": 65}, "64"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"input": ["a"] * 2049}, "at most 2048"),
    ],
)
def test_what_cannot_be_is_refused_by_name(http: TestClient, change: dict[str, Any], words: str) -> None:
    answer = http.post("/v1/embeddings", json={"input": "a", **change})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [""]}, "input[0]"),
        ("/v1/embeddings", {"input": ["a", "", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": [[1], []]}, "input[1]"),
        ("/embedding", {"content": ""}, "content"),
        ("/embedding", {"content": ["a", ""]}, "content[1]"),
        ("/embedding", {"input": ["a", ""]}, "input[1]"),
        ("/api/embed", {"model": "toy", "input": ["a", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": ["a", "x" * 2000]}, "input[1]"),
        ("/v1/embeddings", {"input": [[1], [99_999]]}, "input[1]"),
    ],
)
def test_the_input_at_fault_is_named(http: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error if path.startswith("/api") else error["message"]).startswith(f"{param}: ")
    assert path.startswith("/api") or error["param"] == param
    assert "continue" not in answer.text and "prompt:" not in answer.text


def test_a_blank_is_a_text(http: TestClient) -> None:
    assert len(vectors(http, [" ", "\n"])) == 2


@pytest.mark.parametrize("given", [{}, {"input": None}, {"input": ""}, {"input": []}])
def test_ollamas_empty_request_only_loads(http: TestClient, given: dict[str, Any]) -> None:
    answer = http.post("/api/embed", json={"model": "toy", **given})
    assert answer.status_code == 200 and answer.json()["embeddings"] == [], answer.text
    prompt = {"prompt": given["input"]} if isinstance(given.get("input"), str) else {}
    answer = http.post("/api/embeddings", json={"model": "toy", **prompt})
    assert answer.status_code == 200 and answer.json() == {"embedding": []}


def test_unknown_fields_are_named(http: TestClient) -> None:
    answer = http.post("/v1/embeddings", json={"input": "a", "input_type": "query"})
    assert answer.status_code == 200 and "input_type" in answer.headers["x-dflash-notes"]


def test_llama_cpps_own_shape(http: TestClient) -> None:
    (plain,) = vectors(http, TEXTS[0])
    assert http.post("/embedding", json={"content": TEXTS[0]}).json() == [{"index": 0, "embedding": [plain]}]
    raw = http.post("/embedding", json={"content": TEXTS[0], "embd_normalize": -1}).json()[0]["embedding"][0]
    assert np.linalg.norm(raw) > 1.01
    np.testing.assert_allclose(normalised(np.array(raw, np.float32)), plain, atol=1e-6)


def test_a_conversation_keeps_its_prefix(http: TestClient) -> None:
    ask = {"messages": [{"role": "user", "content": "Hello " * 20}], "max_tokens": 5, "temperature": 0}
    first = http.post("/v1/chat/completions", json=ask).json()
    vectors(http, ["something else " * 10, "more"])
    again = http.post("/v1/chat/completions", json=ask).json()
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > first["usage"]["prompt_tokens"] - 32
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


def test_poolings(engine: FakeEngine) -> None:
    session, ids = Session(engine), [3, 1, 4, 1, 5]
    rows = states(engine, ids)
    np.testing.assert_allclose(embed(session, ids), rows.mean(axis=0), atol=1e-6)
    assert np.array_equal(embed(session, ids, pooling="none"), rows)
    assert np.array_equal(embed(session, ids, pooling="first"), rows[0])
    assert np.array_equal(embed(session, ids, pooling="last"), rows[-1])
    assert not embed(session, ids, should_stop=lambda: True).any()
    assert np.array_equal(normalised(np.zeros(3, np.float32)), np.zeros(3))
