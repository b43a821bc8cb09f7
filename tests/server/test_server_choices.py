"""Tests of several choices and several prompts in one request, prompts' own log-probabilities, and the best of many."""

from __future__ import annotations

import http.client as http_client
import json
import math
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
openai = pytest.importorskip("openai")

from starlette.testclient import TestClient  # noqa: E402

from dflash_ggml.server.app import create_app, make_service  # noqa: E402
from dflash_ggml.server.dialect import Settings  # noqa: E402
from dflash_ggml.server.runner import Runner  # noqa: E402
from dflash_ggml.session.events import Begin  # noqa: E402
from dflash_ggml.session.session import Session  # noqa: E402
from reference.fake_engine import FakeEngine  # noqa: E402
from reference.server_kit import ScriptedRunner, plain, service, serving, wait_until  # noqa: E402

ASK = [{"role": "user", "content": "Weather?"}]


@pytest.fixture
def http() -> Iterator[TestClient]:
    runner = Runner(Session(FakeEngine()))
    with TestClient(create_app(make_service(lambda progress: runner, Settings(names=("toy",))))) as client:
        yield client


@pytest.fixture
def client(http: TestClient) -> Any:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=http, max_retries=0)


def texts(completion: Any) -> list[str]:
    assert [c.index for c in completion.choices] == list(range(len(completion.choices)))
    return [c.text for c in completion.choices]


def test_choices_differ_and_come_again(client: Any) -> None:
    ask = {"model": "toy", "prompt": "Once upon", "max_tokens": 12, "seed": 5}
    three = client.completions.create(**ask, n=3)
    assert len(set(texts(three))) == 3 and texts(client.completions.create(**ask, n=3)) == texts(three)
    alone = [client.completions.create(**{**ask, "seed": 5 + i}) for i in range(3)]
    assert texts(three) == [texts(one)[0] for one in alone]
    assert three.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert three.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
    together, each = three.model_extra["timings"], [one.model_extra["timings"] for one in alone]
    assert together["steps"] == sum(t["steps"] for t in each)
    (all_drafts,) = together["sources"]
    assert all_drafts["draft_n"] == together["draft_n"] == sum(t["sources"][0]["draft_n"] for t in each)
    assert all_drafts["steps"] == sum(t["sources"][0]["steps"] for t in each)
    assert sum(w["steps"] for w in together["widths"]) == sum(w["steps"] for t in each for w in t["widths"])
    unseeded = client.completions.create(**{**ask, "seed": None}, n=2)
    assert len(set(texts(unseeded))) == 2


def test_lists_of_prompts_answer_as_each_alone(client: Any) -> None:
    prompts: list[Any] = ["Once upon", "hello", "STOP it"]
    ask = {"model": "toy", "max_tokens": 8, "seed": 9}
    alone = [client.completions.create(prompt=p, **ask) for p in prompts]
    together = client.completions.create(prompt=prompts, **ask)
    assert texts(together) == [texts(one)[0] for one in alone]
    for part in ("prompt_tokens", "completion_tokens"):
        assert getattr(together.usage, part) == sum(getattr(one.usage, part) for one in alone)
    tokens = [
        client.post("http://testserver/tokenize", body={"content": p}, cast_to=object)["tokens"]
        for p in prompts
    ]
    assert texts(client.completions.create(prompt=tokens, **ask)) == texts(together)
    two = client.completions.create(prompt=prompts[:2], n=2, **ask)
    assert texts(two)[::2] == texts(together)[:2] and len(set(texts(two))) == 4
    assert two.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone[:2])


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_of_choices_equals_the_body(client: Any, echo: bool) -> None:
    ask = {
        "model": "toy",
        "prompt": ["Once", "hello"],
        "n": 2,
        "seed": 1,
        "max_tokens": 6,
        "logprobs": 1,
        "echo": echo,
    }
    whole = client.completions.create(**ask)
    answers, tokens, reasons, usage = [""] * 4, [[] for _ in range(4)], [None] * 4, None
    for chunk in client.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            answers[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert answers == texts(whole) and reasons == [c.finish_reason for c in whole.choices]
    assert tokens == [c.logprobs.tokens for c in whole.choices]
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_chat_choices(client: Any) -> None:
    ask = {"model": "toy", "messages": ASK, "n": 2, "seed": 3, "max_tokens": 6}
    whole = client.chat.completions.create(**ask)
    contents = [c.message.content for c in whole.choices]
    assert len(set(contents)) == 2 and [c.index for c in whole.choices] == [0, 1]
    assert whole.system_fingerprint.startswith("dflash-ggml-")
    streamed, roles = ["", ""], [0, 0]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role is not None
    assert streamed == contents and roles == [1, 1]


def test_prompt_log_probabilities_without_an_answer(client: Any) -> None:
    """What evaluation harnesses send: the log-probabilities of given texts."""
    ask = {"model": "toy", "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    prompts = [[72, 101, 108, 108], [79, 110, 99]]
    scored = client.completions.create(prompt=prompts, **ask)
    for ids, choice in zip(prompts, scored.choices):
        assert choice.finish_reason == "length" and len(choice.logprobs.tokens) == len(ids)
        assert choice.text == "".join(choice.logprobs.tokens)
        first, *rest = choice.logprobs.token_logprobs
        assert first is None and all(p <= 0 for p in rest)
        assert all(
            max(top.values()) >= p for top, p in zip(choice.logprobs.top_logprobs[1:], rest, strict=True)
        )
    assert scored.usage.completion_tokens == 0 and scored.usage.prompt_tokens == 7
    longer = client.completions.create(prompt=prompts[0], **{**ask, "max_tokens": 1}).choices[0]
    assert longer.logprobs.token_logprobs[:4] == pytest.approx(
        scored.choices[0].logprobs.token_logprobs, nan_ok=True
    )
    assert len(longer.logprobs.tokens) == 5
    text = client.completions.create(prompt="hello there", **ask).choices[0]
    assert text.text == "hello there" and text.logprobs.text_offset[0] == 0


def test_best_of_shows_the_likeliest(client: Any) -> None:
    ask = {"model": "toy", "prompt": "Once upon", "max_tokens": 5, "seed": 2}
    all_five = client.completions.create(**ask, n=5, logprobs=0)

    def mean(choice: Any) -> float:
        return math.fsum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    ranked = sorted(all_five.choices, key=mean, reverse=True)
    two = client.completions.create(**ask, n=2, best_of=5)
    assert texts(two) == [c.text for c in ranked[:2]] and two.choices[0].logprobs is None
    assert two.usage.completion_tokens == all_five.usage.completion_tokens
    raw = client.completions.with_raw_response.create(**ask, best_of=5, stream=True)
    assert "best_of" in raw.headers["x-dflash-notes"]


def test_too_many_choices_name_the_field(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="toy", prompt=["a"] * 20, n=7)
    assert caught.value.param == "n" and "128" in str(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="toy", prompt="a", best_of=1000)
    assert caught.value.param == "best_of"


def test_a_json_format_binds_a_completion(client: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.completions.create(
        model="toy", prompt="Once", max_tokens=60, seed=1, extra_body={"response_format": wanted}
    )
    assert answer.choices[0].text.lstrip().startswith("{")


def test_other_clients_come_between_the_choices() -> None:
    """A request of many answers counts as one request for those that wait."""
    gate = threading.Event()

    def gated(request: Any) -> Iterator[Any]:
        yield Begin(1, 0)
        gate.wait(60)
        yield from plain()[1:]

    runner = ScriptedRunner(gated)
    made = service(runner, keys=["one", "two"], queue_limit=1)
    with serving(create_app(made)) as port, ThreadPoolExecutor() as pool:

        def post(key: str, prompt: str, **more: Any) -> Any:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps({"prompt": prompt, **more}).encode(),
                {"content-type": "application/json", "x-api-key": key},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)

        many = pool.submit(post, "one", "many", n=4)
        wait_until(lambda: len(runner.requests) == 1)
        other = pool.submit(post, "two", "other")
        wait_until(lambda: made.worker.waiting == 1)
        gate.set()
        assert len(many.result()["choices"]) == 4 and len(other.result()["choices"]) == 1
    assert [r.prompt for r in runner.requests] == ["many", "other", "many", "many", "many"]


def test_a_disconnect_ends_all_choices() -> None:
    runner = ScriptedRunner(lambda request: None)
    made = service(runner)
    with serving(create_app(made)) as port:
        connection = http_client.HTTPConnection("127.0.0.1", port)
        body = json.dumps({"prompt": "endless", "n": 5, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        wait_until(lambda: len(runner.requests) == 1)
        connection.close()
        wait_until(lambda: runner.cancelled == 1 and made.worker.running == 0)
    assert len(runner.requests) == 1
