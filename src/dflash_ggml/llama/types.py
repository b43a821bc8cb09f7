"""Types of the dicts that `Llama` takes and returns (OpenAI's shapes, and what this package adds to them)."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Union

JsonType = Union[None, int, str, bool, list[Any], dict[str, Any]]


class _CompletionUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionUsage(_CompletionUsage, total=False):
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class CompletionLogprobs(TypedDict):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class _CreateCompletionResponse(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]


class CreateCompletionResponse(_CreateCompletionResponse, total=False):
    usage: CompletionUsage
    timings: dict[str, Any]


class ChatCompletionFunctionCall(TypedDict):
    name: str
    arguments: str


class ChatCompletionMessageToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: ChatCompletionFunctionCall


class _ChatCompletionMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None


class ChatCompletionResponseMessage(_ChatCompletionMessage, total=False):
    reasoning_content: str
    tool_calls: list[ChatCompletionMessageToolCall]
    function_call: ChatCompletionFunctionCall


class ChatCompletionResponseChoice(TypedDict):
    index: int
    message: ChatCompletionResponseMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class _CreateChatCompletionResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: CompletionUsage


class CreateChatCompletionResponse(_CreateChatCompletionResponse, total=False):
    timings: dict[str, Any]


class ChatCompletionStreamResponseDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    function_call: dict[str, str]


class ChatCompletionStreamResponseChoice(TypedDict):
    index: int
    delta: ChatCompletionStreamResponseDelta
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class _CreateChatCompletionStreamResponse(TypedDict):
    id: str
    model: str
    object: Literal["chat.completion.chunk"]
    created: int
    choices: list[ChatCompletionStreamResponseChoice]


class CreateChatCompletionStreamResponse(_CreateChatCompletionStreamResponse, total=False):
    usage: CompletionUsage
    timings: dict[str, Any]


# Requests are plain dicts in OpenAI's shapes; `text.template.normalise_messages` and `text.tools.check_tools` check them.
ChatCompletionRequestMessage = dict[str, Any]
ChatCompletionTool = dict[str, Any]
ChatCompletionFunction = dict[str, Any]
ChatCompletionToolChoiceOption = Union[str, dict[str, Any]]
ChatCompletionRequestFunctionCall = Union[str, dict[str, Any]]
ChatCompletionRequestResponseFormat = dict[str, Any]

# other names for the same types
Completion = CompletionChunk = CreateCompletionStreamResponse = CreateCompletionResponse
ChatCompletion = CreateChatCompletionResponse
ChatCompletionChunk = ChatCompletionStreamResponse = CreateChatCompletionStreamResponse
ChatCompletionMessage = ChatCompletionResponseMessage
ChatCompletionChoice = ChatCompletionResponseChoice
ChatCompletionChunkChoice = ChatCompletionStreamResponseChoice
ChatCompletionChunkDelta = ChatCompletionStreamResponseDelta
