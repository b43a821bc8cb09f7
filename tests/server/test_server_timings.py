"""Tests of timings and usage as other servers report them, and of an answer that the client has begun."""

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
from reference.fake_engine import FakeEngine, byte_vocabulary
from reference.server_kit import ScriptedRunner, application, serving, thoughtful
from reference.vendored import vendored

ASK = [{"role": "user", "content": "Hi"}]
TIMINGS = {
    "cache_n": 5,
    "prompt_n": 7,
    "prompt_ms": 8.0,
    "prompt_per_second": 875.0,
    "predicted_n": 9,
    "predicted_ms": 40.0,
    "predicted_per_second": 225.0,
    "prompt_n_cached": 5,
    "prefill_ms": 8.0,
    "prefill_tokens_per_sec": 875.0,
    "decode_ms": 40.0,
    "decode_tokens_per_sec": 225.0,
}
PATHS = {
    "/v1/chat/completions": {"messages": ASK, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": "Hi", "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": "toy", "max_tokens": 9, "messages": ASK},
}


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner(lambda request: thoughtful())


@pytest.fixture
def http(runner: ScriptedRunner) -> Iterator[TestClient]:
    with TestClient(application(runner)) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_usage_reports_times_and_cache_hits_under_both_names(http: TestClient, path: str) -> None:
    assert http.post(path, json=PATHS[path]).json()["usage"]["timings"] == TIMINGS
    lines = http.post(path, json={**PATHS[path], "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    usages = [event.get("usage") or (event.get("response") or {}).get("usage") for event in events]
    assert [usage["timings"] for usage in usages if usage and "timings" in usage] == [TIMINGS]


@pytest.mark.parametrize("stream", [False, True])
def test_lucebench_prints_rates_and_cache_hits(runner: ScriptedRunner, stream: bool) -> None:
    pytest.importorskip("lucebench", reason="lucebench is not installed")
    from lucebench import _display
    from lucebench import runner as bench
    from lucebench.areas import agent_recorded

    case = {"id": "c", "kind": "smoke", "prompt": "Hi"}
    with serving(application(runner)) as port:
        url = f"http://127.0.0.1:{port}"
        row = bench.run_case(url, case, model="toy", stream=stream, think=True)
        raw, wall = agent_recorded._http_post_chat_completions(
            url=url, messages=ASK, max_tokens=9, model="toy"
        )
    assert row["timings"] == TIMINGS and row["content"] == "Answer: 42" and row["reasoning_tokens"] == 3
    assert _display._format_throughput(row, row["timings"], 1.0).strip() == "225tps"
    assert _display._format_timing(row, row["timings"], 1.0) == "prefill=8ms decode=40ms"
    turn = agent_recorded._extract_row_from_response(raw, wall)
    assert (turn["prefix_len"], turn["restore"], turn["tps_decode"]) == (5, True, 225.0)
    assert (turn["prefill_s"], turn["decode_s"]) == (0.008, 0.04)


# --- an answer that the client has begun

BEGUN = [*ASK, {"role": "assistant", "content": "The answer is "}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("path", "body", "goes_on"),
    [
        ("/v1/chat/completions", {"messages": BEGUN}, True),
        ("/v1/chat/completions", {"messages": BEGUN, "thinking": {"type": "disabled"}}, True),
        ("/v1/chat/completions", {"messages": BEGUN, "continue_final_message": True}, True),
        ("/v1/chat/completions", {"messages": BEGUN, "continue_final_message": False}, False),
        ("/v1/chat/completions", {"messages": BEGUN, "add_generation_prompt": True}, False),
        ("/v1/chat/completions", {"messages": BEGUN, "chat_template_kwargs": {"add_generation_prompt": False}}, False),
        ("/v1/chat/completions", {"messages": ASK}, False),
        ("/v1/chat/completions", {"messages": [*ASK, {"role": "assistant", "content": ""}]}, False),
        ("/v1/chat/completions", {"messages": [*ASK, {"role": "assistant", "content": "a", "tool_calls": [CALL]}]}, False),
        ("/api/chat", {"model": "toy", "messages": BEGUN}, True),
        ("/api/chat", {"model": "toy", "messages": ASK}, False),
    ],
)  # fmt: skip
def test_a_begun_answer_is_gone_on_with(
    http: TestClient, runner: ScriptedRunner, path: str, body: dict[str, Any], goes_on: bool
) -> None:
    assert http.post(path, json=body).status_code == 200
    assert runner.requests[-1].continue_final_message is goes_on


class Prompts(Runner):
    """A runner that remembers the prompts."""

    def prepare(self, request: Any) -> Any:
        self.prepared = super().prepare(request)
        return self.prepared


def test_a_thought_that_lucebench_has_cut_is_closed_and_answered() -> None:
    template = vendored("templates/Qwen3.5-4B.jinja").read_text(encoding="utf-8")
    engine = FakeEngine(tokenizer=byte_vocabulary(template=template))
    engine.replies = ["\n\nFour."]
    runner = Prompts(Session(engine))  # type: ignore[arg-type]
    with TestClient(create_app(make_service(lambda progress: runner, Settings(names=("toy",))))) as http:
        body = {
            "messages": [*ASK, {"role": "assistant", "content": "Two and two</think>\n\n"}],
            "chat_template_kwargs": {"enable_thinking": False},
            "thinking": {"type": "disabled"},
            "reasoning_effort": "none",
        }
        answer = http.post("/v1/chat/completions", json=body)
    assert runner.prepared.text.endswith("<|im_start|>assistant\n<think>\nTwo and two\n</think>")
    message = answer.json()["choices"][0]["message"]
    assert message["content"].strip() == "Four." and "reasoning_content" not in message
    assert "x-dflash-notes" not in answer.headers


@pytest.mark.parametrize("path", PATHS)
def test_answers_to_prompts_in_8_bit_floats_say_so(runner: ScriptedRunner, path: str) -> None:
    runner.prefill_fp8 = True
    with TestClient(application(runner)) as http:
        assert (
            "prefilled in 8-bit floats (lossy" in http.post(path, json=PATHS[path]).headers["x-dflash-notes"]
        )
