"""Tests of llama.cpp's own endpoints: what its clients, its editor plugins and its own tests request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from starlette.testclient import TestClient

from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.session import Session
from dflash_ggml.text.tokenizer import Tokenizer
from reference.fake_engine import MERGES, FakeEngine, byte_vocabulary


def infill_vocabulary() -> Tokenizer:
    """The toy vocabulary with the marks of models that fill in."""
    plain = byte_vocabulary()
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]
    types = [3 if plain.is_control(i) else 1 for i in range(plain.n_vocab)]
    return Tokenizer(
        [*plain.tokens, *marks], [*types, *[3] * 5], MERGES, "qwen35", special_ids=plain.special_ids
    )


def serving(engine: FakeEngine) -> TestClient:
    runner = Runner(Session(engine))
    return TestClient(create_app(make_service(lambda progress: runner, Settings(names=("toy", "other")))))


@pytest.fixture
def http() -> Iterator[TestClient]:
    with serving(FakeEngine()) as client:
        yield client


def completed(http: TestClient, **body: Any) -> Any:
    answer = http.post("/completion", json={"prompt": "Once upon", "n_predict": 8, "seed": 4, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(http: TestClient, **body: Any) -> list[Any]:
    ask = {"prompt": "Once upon", "n_predict": 8, "seed": 4, "stream": True, **body}
    lines = http.post("/completion", json=ask).text.split("\n\n")
    assert all(line.startswith("data: ") for line in lines if line)
    return [json.loads(line[6:]) for line in lines if line]


def test_a_completion_and_its_stream(http: TestClient) -> None:
    whole = completed(http, return_tokens=True)
    assert whole["stop"] is True and whole["stop_type"] == "limit" and whole["index"] == 0
    assert whole["tokens_predicted"] == 8 == len(whole["tokens"]) and whole["tokens_evaluated"] == 8
    assert whole["prompt"] == "Once upon" and whole["generation_settings"]["n_predict"] == 8
    assert whole["timings"]["predicted_n"] == 8
    assert http.post("/detokenize", json={"tokens": whole["tokens"]}).json()["content"] == whole["content"]
    assert completed(http)["tokens"] == []
    *parts, last = chunks(http, timings_per_token=True)
    assert "".join(p["content"] for p in parts) == whole["content"] and last["content"] == ""
    assert [t for p in parts for t in p["tokens"]] == whole["tokens"]
    assert not any(p["stop"] for p in parts) and last["stop"] and last["stop_type"] == "limit"
    assert all(p["timings"]["predicted_n"] == p["tokens_predicted"] for p in parts)
    assert "timings" not in chunks(http)[0]


def test_stop_reasons_name_their_cause(http: TestClient) -> None:
    engine = FakeEngine(replies=["one STOP two", "ended"])
    with serving(engine) as client:
        stopped = completed(client, n_predict=40, stop=["STOP"], temperature=0)
        assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", "STOP")
        assert stopped["content"] == "one "
        ended = completed(client, n_predict=40, temperature=0)
        assert (ended["stop_type"], ended["content"]) == ("eos", "ended")


def test_probabilities_of_tokens(http: TestClient) -> None:
    whole = completed(http, n_probs=3)
    entries = whole["completion_probabilities"]
    assert len(entries) == 8
    for entry in entries:
        assert (
            len(entry["top_logprobs"]) == 3 and entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0
        )
        assert bytes(entry["bytes"]).decode("latin-1") and isinstance(entry["id"], int)
    streamed = [e for c in chunks(http, n_probs=3) for e in c.get("completion_probabilities", [])]
    assert streamed == entries


def test_response_fields_choose(http: TestClient) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing/here"]
    assert set(completed(http, response_fields=fields)) == {"content", "generation_settings/n_predict"}


def test_prompts_of_every_form(http: TestClient) -> None:
    ids = http.post("/tokenize", json={"content": "Once upon"}).json()["tokens"]
    text = completed(http)["content"]
    assert completed(http, prompt=ids)["content"] == text
    assert completed(http, prompt=["Once", *ids[4:]])["content"] == text
    assert completed(http, prompt={"prompt_string": "Once upon"})["content"] == text
    many = completed(http, prompt=["Once upon", ids, ["Once", *ids[4:]], "hello"])
    assert [m["content"] for m in many[:3]] == [text] * 3 and [m["index"] for m in many] == [0, 1, 2, 3]
    two = completed(http, n_cmpl=2)
    assert two[0]["content"] == text != two[1]["content"]
    for bad in ([], [["x", None]], [True, False], {"prompt": "x"}):
        assert http.post("/completion", json={"prompt": bad}).status_code == 400


def test_no_tokens_only_take_the_prompt_in(http: TestClient) -> None:
    nothing = completed(http, n_predict=0)
    assert nothing["content"] == "" and nothing["tokens_predicted"] == 0
    assert completed(http)["timings"]["cache_n"] > 0


def test_biases_of_tokens_and_texts(http: TestClient) -> None:
    banned = completed(http, temperature=0, n_predict=1, n_probs=1)["completion_probabilities"][0]["id"]
    for bias in ([[banned, False]], [[banned, -1000.0]], {str(banned): -1000.0}):
        ids = completed(http, temperature=0, n_predict=4, logit_bias=bias, return_tokens=True)["tokens"]
        assert banned not in ids[:1]
    assert set(completed(http, n_predict=3, logit_bias=[["Z", 1000.0]])["content"]) == {"Z"}
    for bad in ([[None, 1]], [[1, 10**400]], [[10**400, 1]]):
        assert http.post("/completion", json={"prompt": "a", "logit_bias": bad}).status_code == 400


def test_an_end_may_be_ignored() -> None:
    with serving(FakeEngine(replies=["ended"])) as client:
        assert completed(client, temperature=0, ignore_eos=True)["tokens_predicted"] == 8


def test_a_schema_binds() -> None:
    pytest.importorskip("llguidance")
    with serving(FakeEngine()) as client:
        schema = {"type": "object", "properties": {"a": {"enum": [True, False]}}, "required": ["a"]}
        assert completed(client, n_predict=80, json_schema=schema)["content"].lstrip().startswith("{")
        assert completed(client, n_predict=5, grammar='root ::= "x" "y"')["content"] == "xy"


def test_fields_without_effect_are_named(http: TestClient) -> None:
    ask = {"prompt": "a", "n_predict": 1, "cache_prompt": True, "id_slot": 0, "dry_multiplier": 0.8}
    answer = http.post("/completion", json=ask)
    assert answer.status_code == 200 and "dry_multiplier" in answer.headers["x-dflash-notes"]
    assert "cache_prompt" not in answer.headers["x-dflash-notes"]


def test_one_path_two_clients(http: TestClient) -> None:
    assert "content" in http.post("/completions", json={"prompt": "a", "n_predict": 2}).json()
    assert "choices" in http.post("/completions", json={"prompt": "a", "max_tokens": 2}).json()


def test_infill() -> None:
    engine = FakeEngine(tokenizer=infill_vocabulary(), replies=["return 1", "x"])
    with serving(engine) as client:
        ask = {"input_prefix": "def f():\n    ", "input_suffix": "\n", "n_predict": 20, "temperature": 0}
        answer = client.post("/infill", json={**ask, "prompt": "if x: "})
        assert answer.status_code == 200 and answer.json()["content"] == "return 1"
        tokenizer = engine.tokenizer
        text = tokenizer.decode(engine.tokens, special=True)
        assert text.startswith(
            "<|fim_prefix|>def f():\n    if x: <|fim_suffix|>\n<|fim_middle|>return 1"[: len(text)]
        )
        extra = [{"filename": "a.py", "text": "A = 1"}, {"text": "B = 2"}]
        client.post("/infill", json={**ask, "input_extra": extra})
        text = tokenizer.decode(engine.tokens, special=True)
        begins = "<|repo_name|>project\n<|file_sep|>a.py\nA = 1\n<|file_sep|>file\nB = 2\n<|file_sep|><|fim_prefix|>"
        assert text.startswith(begins)
    with serving(FakeEngine()) as client:
        refused = client.post("/infill", json=ask)
        error = refused.json()["error"]
        assert refused.status_code == 501 and "<|fim_prefix|>" in error["message"]
        assert error["type"] == "not_supported_error"


def test_tokenize_lists_and_templates(http: TestClient) -> None:
    ids = http.post("/tokenize", json={"content": "hello é"}).json()["tokens"]
    mixed = http.post("/tokenize", json={"content": ["hello", *ids[1:]]}).json()["tokens"]
    assert mixed == ids
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    prompt = http.post("/apply-template", json=body).json()["prompt"]
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_vllms_names_for_the_vocabulary(http: TestClient) -> None:
    """By which evaluation harnesses tokenise as the server does."""
    info = http.get("/tokenizer_info").json()
    assert (
        info["eos_token"] == "<|im_end|>"
        and info["bos_token"] is None
        and "<|im_start|>" in info["chat_template"]
    )
    ids = http.post("/tokenize", json={"content": "hello <|im_end|>"}).json()["tokens"]
    named = http.post("/tokenize", json={"prompt": "hello <|im_end|>", "add_special_tokens": False}).json()
    assert named == {"tokens": ids, "count": len(ids), "max_model_len": 1024}
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "hello <|im_end|>"
    assert http.post("/tokenize", json={"text": "x"}).status_code == 400


def test_props_slots_and_names(http: TestClient) -> None:
    props = http.get("/props").json()
    assert props["model_path"] == "toy.gguf" and props["total_slots"] == 1
    params = props["default_generation_settings"]["params"]
    assert (params["repeat_last_n"], params["n_predict"]) == (64, -1)
    assert props["default_generation_settings"]["n_ctx"] == 1024 and props["modalities"]["vision"] is False
    (slot,) = http.get("/slots").json()
    assert slot["id"] == 0 and slot["n_ctx"] == 1024 and slot["is_processing"] is False
    assert http.get("/slots", params={"fail_on_no_slot": 1}).status_code == 200
    for path in ("/v1/models", "/v1/models/", "/models"):
        first = http.get(path).json()["data"][0]
        assert first["aliases"] == ["other"] and first["meta"]["n_vocab"] == props["n_vocab"]


def test_paths_without_a_version(http: TestClient) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat = http.post("/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert chat.json()["object"] == "chat.completion"
    assert (
        http.post("/responses", json={"input": "Hi", "max_output_tokens": 2}).json()["object"] == "response"
    )
    assert http.get("/v1/health").json()["status"] == "ok"
