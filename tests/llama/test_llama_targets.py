"""Tests of Llama and the server's sessions on K/V-only targets: templates, thinking, tools, cached prefixes. 8 seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dflash_ggml.llama.llama import Llama
from dflash_ggml.text.chat_formats import named_template
from reference import kv_toys
from reference.vendored import vendored

QWEN3 = """{%- if tools %}{{- '<|im_start|>system\\n' }}{{- tools | tojson }}<tool_call>{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"n_layers": 2},
    "laguna": {"arch": "laguna", "n_layers": 3, "period": 3, "window": 20, "n_rot": 16, "yarn": 8.0},
    "gemma3": {"arch": "gemma3", "n_layers": 3, "period": 3, "window": 20},
    "gemma4": {"arch": "gemma4", "n_layers": 3, "period": 3, "window": 20, "mixture": True},
    "gpt-oss": {"arch": "gpt-oss", "n_layers": 4, "period": 2, "window": 20},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "turn",
        "description": "Turn the lamp.",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"type": "string", "enum": ["on", "off"]},
                "steps": {"type": "integer", "maximum": 9},
            },
            "required": ["to", "steps"],
        },
    },
}
ASK = [{"role": "user", "content": "Turn the lamp on, please. " * 3}]


@pytest.fixture(scope="module", params=SIZES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    template = QWEN3
    if request.param == "gemma3":
        template = named_template("gemma")
    if request.param == "laguna":
        template = vendored("templates/poolside-Laguna-XS.2.jinja").read_text(encoding="utf-8")
    draft = {"normed_taps": request.param == "laguna", "taps": (0, 1), "window": 24}
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"n_vocab": 300, "template": template, "n_ctx": 8192, **SIZES[request.param]}
    pair = kv_toys.write_pair(folder, 51, draft, **sizes)
    options: dict[str, Any] = {
        "n_ctx": 4096,
        "type_k": 0,
        "type_v": 0,
        "n_threads": 1,
        "budget": 12,
        "verbose": False,
    }
    with Llama(str(pair[0]), draft_model=str(pair[1]), **options) as model:
        yield model


def reply(llm: Llama, messages: list[dict[str, Any]] = ASK, **options: Any) -> dict[str, Any]:
    answer: Any = llm.create_chat_completion(messages, **{"max_tokens": 20, "temperature": 0, **options})
    return answer["choices"][0]


def test_modes_write_one_answer(llm: Llama) -> None:
    answers = [reply(llm, mode=mode)["message"]["content"] for mode in ("plain", "tree", "chain", "auto")]
    assert answers[0] and len(set(answers)) == 1


def test_thinking(llm: Llama) -> None:
    """Where the template opens the answer within thoughts, output that never closes them is all thought."""
    template = llm.engine.tokenizer.chat_template
    assert template is not None
    thought, spoken = (reply(llm, enable_thinking=on)["message"] for on in (True, False))
    assert spoken["content"] and not spoken.get("reasoning_content")
    if "{{- '<think>' -}}" in template:
        assert thought["reasoning_content"] and not thought["content"]


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_a_forced_call(llm: Llama, mode: str) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra: grammar)")
    choice = reply(
        llm, tools=[TOOL], tool_choice="required", max_tokens=400, mode=mode, parallel_tool_calls=False
    )
    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "turn"
    assert arguments["to"] in ("on", "off") and arguments["steps"] <= 9


def test_results_of_calls_go_into_the_prompt(llm: Llama) -> None:
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "turn", "arguments": '{"to": "on", "steps": 2}'},
    }
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "It is on."},
    ]
    assert reply(llm, messages, tools=[TOOL])["message"]["content"] is not None


def test_a_conversation_goes_on_from_its_prefix(llm: Llama) -> None:
    """What was written is not read again, and the answer is that of a fresh start; also back to an earlier turn."""
    first = reply(llm, enable_thinking=False)["message"]["content"]
    more = [*ASK, {"role": "assistant", "content": first}, {"role": "user", "content": "And " + "now? " * 60}]
    answers = []
    for _ in range(2):
        answers.append(
            [
                reply(llm, m, enable_thinking=False, mode="tree")["message"]["content"]
                for m in (more, ASK, more)
            ]
        )
        llm.reset()
    assert answers[0] == answers[1] and answers[0][0] == answers[0][2] and answers[0][1] == first


def test_the_turns_end_ends_an_answer(llm: Llama) -> None:
    name = "</assistant>" if "laguna" in llm.model_path else "<|im_end|>"
    end = llm.engine.tokenizer.id_of(name)
    assert end in llm.engine.tokenizer.eog_ids
    choice = reply(llm, logit_bias={end: 200.0})
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == ""
