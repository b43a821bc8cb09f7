"""Types of the dicts that `Llama` takes and returns (OpenAI's shapes, and what this package adds to them).

The names are llama-cpp-python's. A class with an underscore has the keys that must be there, its subclass all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Union

if TYPE_CHECKING:
    from typing import TypedDict
else:
    try:  # pydantic, which brings it along, takes no other before Python 3.12
        from typing_extensions import TypedDict
    except ImportError:
        from typing import TypedDict

JsonType = Union[None, int, str, bool, list[Any], dict[str, Any]]


# --- embeddings


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    index: int
    object: str
    embedding: list[float] | list[list[float]]


class CreateEmbeddingResponse(TypedDict):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


# --- completions


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


# --- parts of messages


class NamedFunction(TypedDict):
    """A function by name alone."""

    name: str


class ChatCompletionFunctionCall(TypedDict):
    name: str
    arguments: str


class ChatCompletionMessageToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: ChatCompletionFunctionCall


class ChatCompletionRequestMessageContentPartText(TypedDict):
    type: Literal["text"]
    text: str


class _ImageUrl(TypedDict):
    url: str


class ChatCompletionRequestMessageContentPartImageImageUrl(_ImageUrl, total=False):
    detail: Literal["auto", "low", "high"]


class ChatCompletionRequestMessageContentPartImage(TypedDict):
    type: Literal["image_url"]
    image_url: str | ChatCompletionRequestMessageContentPartImageImageUrl


# --- messages of a request


class ChatCompletionRequestSystemMessage(TypedDict):
    role: Literal["system"]
    content: str | None


class ChatCompletionRequestUserMessage(TypedDict):
    role: Literal["user"]
    content: str | list[ChatCompletionRequestMessageContentPart] | None


class _AssistantMessage(TypedDict):
    role: Literal["assistant"]


class ChatCompletionRequestAssistantMessage(_AssistantMessage, total=False):
    content: str
    reasoning_content: str
    tool_calls: list[ChatCompletionMessageToolCall]
    function_call: ChatCompletionFunctionCall


class ChatCompletionRequestToolMessage(TypedDict):
    role: Literal["tool"]
    content: str | None
    tool_call_id: str


class ChatCompletionRequestFunctionMessage(TypedDict):
    role: Literal["function"]
    content: str | None
    name: str


# --- tools and formats of a request


class _Function(TypedDict):
    name: str
    parameters: dict[str, Any]


class ChatCompletionFunction(_Function, total=False):
    description: str
    strict: bool


class ChatCompletionTool(TypedDict):
    type: Literal["function"]
    function: ChatCompletionFunction


class ChatCompletionNamedToolChoice(TypedDict):
    type: Literal["function"]
    function: NamedFunction


class _ResponseFormat(TypedDict):
    type: Literal["text", "json_object", "json_schema"]


class ChatCompletionRequestResponseFormat(_ResponseFormat, total=False):
    schema: JsonType
    json_schema: dict[str, Any]


# --- answers of a chat


class ChatCompletionTopLogprobToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatCompletionLogprobToken(ChatCompletionTopLogprobToken):
    top_logprobs: list[ChatCompletionTopLogprobToken]


class ChatCompletionLogprobs(TypedDict):
    content: list[ChatCompletionLogprobToken] | None
    refusal: list[ChatCompletionLogprobToken] | None


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
    logprobs: ChatCompletionLogprobs | None
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


# --- streams of a chat


class ChatCompletionMessageToolCallChunkFunction(TypedDict, total=False):
    name: str | None
    arguments: str


class _ToolCallChunk(TypedDict):
    index: int
    function: ChatCompletionMessageToolCallChunkFunction


class ChatCompletionMessageToolCallChunk(_ToolCallChunk, total=False):
    id: str
    type: Literal["function"]


class ChatCompletionStreamResponseDeltaFunctionCall(TypedDict, total=False):
    name: str
    arguments: str


class ChatCompletionStreamResponseDeltaEmpty(TypedDict):
    """The last delta."""


class ChatCompletionStreamResponseDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ChatCompletionMessageToolCallChunk]
    function_call: ChatCompletionStreamResponseDeltaFunctionCall


class ChatCompletionStreamResponseChoice(TypedDict):
    index: int
    delta: ChatCompletionStreamResponseDelta | ChatCompletionStreamResponseDeltaEmpty
    logprobs: ChatCompletionLogprobs | None
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


# --- unions, and other names for the same types

ChatCompletionRequestMessageContentPart = Union[
    ChatCompletionRequestMessageContentPartText, ChatCompletionRequestMessageContentPartImage
]
ChatCompletionRequestMessage = Union[
    ChatCompletionRequestSystemMessage,
    ChatCompletionRequestUserMessage,
    ChatCompletionRequestAssistantMessage,
    ChatCompletionRequestToolMessage,
    ChatCompletionRequestFunctionMessage,
]
ChatCompletionFunctionParameters = dict[str, Any]
ChatCompletionMessageToolCalls = list[ChatCompletionMessageToolCall]
ChatCompletionFunctions = ChatCompletionToolFunction = ChatCompletionResponseFunction = ChatCompletionFunction
ChatCompletionFunctionCallOption = ChatCompletionRequestFunctionCallOption = NamedFunction
ChatCompletionNamedToolChoiceFunction = NamedFunction
ChatCompletionRequestFunctionCall = Union[Literal["none", "auto"], NamedFunction]
ChatCompletionToolChoiceOption = Union[Literal["none", "auto", "required"], ChatCompletionNamedToolChoice]
ChatCompletionMessageToolCallFunction = ChatCompletionFunctionCall
ChatCompletionRequestAssistantMessageFunctionCall = ChatCompletionFunctionCall
ChatCompletionResponseFunctionCall = ChatCompletionFunctionCall
EmbeddingData = Embedding
Completion = CompletionChunk = CreateCompletionStreamResponse = CreateCompletionResponse
ChatCompletion = CreateChatCompletionResponse
ChatCompletionChunk = ChatCompletionStreamResponse = CreateChatCompletionStreamResponse
ChatCompletionMessage = ChatCompletionResponseMessage
ChatCompletionChoice = ChatCompletionResponseChoice
ChatCompletionChunkChoice = ChatCompletionStreamResponseChoice
ChatCompletionChunkDelta = ChatCompletionStreamResponseDelta
ChatCompletionChunkDeltaEmpty = ChatCompletionStreamResponseDeltaEmpty
