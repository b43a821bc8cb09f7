"""The legacy `functions` and `function_call` of chat completions, in terms of `tools`."""

from __future__ import annotations

from typing import Any

from .errors import bad_request
from .openai_encoder import OpenAIEncoder


def with_tools(data: dict[str, Any]) -> dict[str, Any]:
    """A request with `functions` as one with tools, one call at a time.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    functions, choice = data["functions"], data.get("function_call")
    if not isinstance(functions, list):
        raise bad_request("functions: expected a list of functions", "functions")
    if data.get("tools"):
        raise bad_request("functions: cannot be combined with tools", "functions")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    rest = {k: v for k, v in data.items() if k not in ("functions", "function_call")}
    tools = [{"type": "function", "function": function} for function in functions]
    return {**rest, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


class FunctionCalls(OpenAIEncoder):
    """Mixin before ChatEncoder: answers have `function_call` instead of `tool_calls`."""

    def _choice(self, content: Any, reason: str | None, logprobs: Any) -> dict[str, Any]:
        return super()._choice(_renamed(content), _reason(reason), logprobs)

    def body(self) -> dict[str, Any]:
        """The whole answer, with `function_call` instead of `tool_calls`."""
        body = super().body()
        for choice in body["choices"]:
            choice.update(message=_renamed(choice["message"]), finish_reason=_reason(choice["finish_reason"]))
        return body


def _renamed(content: Any) -> Any:
    if not content or "tool_calls" not in content:
        return content
    rest = {k: v for k, v in content.items() if k != "tool_calls"}
    return {**rest, "function_call": content["tool_calls"][0]["function"]}


def _reason(reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" else reason
