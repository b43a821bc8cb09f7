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
    """Tokens of an embedding request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """The vector of one input; of tokens without pooling a list of them."""

    index: int
    object: str
    embedding: list[float] | list[list[float]]


class CreateEmbeddingResponse(TypedDict):
    """The answer to an embedding request."""

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
    """Tokens of prompt and answer."""

    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion, a list entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """One completion of a prompt."""

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
    """A completion, or a chunk of one."""

    usage: CompletionUsage
    timings: dict[str, Any]


# --- parts of messages


class NamedFunction(TypedDict):
    """A function by name alone."""

    name: str


class ChatCompletionFunctionCall(TypedDict):
    """A called function, with its arguments as JSON text."""

    name: str
    arguments: str


class ChatCompletionMessageToolCall(TypedDict):
    """A tool call of a message."""

    id: str
    type: Literal["function"]
    function: ChatCompletionFunctionCall


class ChatCompletionRequestMessageContentPartText(TypedDict):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class _ImageUrl(TypedDict):
    url: str


class ChatCompletionRequestMessageContentPartImageImageUrl(_ImageUrl, total=False):
    """Where an image is."""

    detail: Literal["auto", "low", "high"]


class ChatCompletionRequestMessageContentPartImage(TypedDict):
    """A part of a message that is an image."""

    type: Literal["image_url"]
    image_url: str | ChatCompletionRequestMessageContentPartImageImageUrl


# --- messages of a request


class ChatCompletionRequestSystemMessage(TypedDict):
    """A message with instructions."""

    role: Literal["system"]
    content: str | None


class ChatCompletionRequestUserMessage(TypedDict):
    """A message of the user."""

    role: Literal["user"]
    content: str | list[ChatCompletionRequestMessageContentPart] | None


class _AssistantMessage(TypedDict):
    role: Literal["assistant"]


class ChatCompletionRequestAssistantMessage(_AssistantMessage, total=False):
    """An earlier answer."""

    content: str
    reasoning_content: str
    tool_calls: list[ChatCompletionMessageToolCall]
    function_call: ChatCompletionFunctionCall


class ChatCompletionRequestToolMessage(TypedDict):
    """The result of a tool call."""

    role: Literal["tool"]
    content: str | None
    tool_call_id: str


class ChatCompletionRequestFunctionMessage(TypedDict):
    """The result of a function call."""

    role: Literal["function"]
    content: str | None
    name: str


# --- tools and formats of a request


class _Function(TypedDict):
    name: str
    parameters: dict[str, Any]


class ChatCompletionFunction(_Function, total=False):
    """A function that may be called: its arguments as a JSON schema."""

    description: str
    strict: bool


class ChatCompletionTool(TypedDict):
    """A tool that may be called."""

    type: Literal["function"]
    function: ChatCompletionFunction


class ChatCompletionNamedToolChoice(TypedDict):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class _ResponseFormat(TypedDict):
    type: Literal["text", "json_object", "json_schema"]


class ChatCompletionRequestResponseFormat(_ResponseFormat, total=False):
    """The form that the answer has to have."""

    schema: JsonType
    json_schema: dict[str, Any]


# --- answers of a chat


class ChatCompletionTopLogprobToken(TypedDict):
    """A token that might have come, with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatCompletionLogprobToken(ChatCompletionTopLogprobToken):
    """A token of the answer with its log-probability and the best alternatives."""

    top_logprobs: list[ChatCompletionTopLogprobToken]


class ChatCompletionLogprobs(TypedDict):
    """Log-probabilities of a chat answer."""

    content: list[ChatCompletionLogprobToken] | None
    refusal: list[ChatCompletionLogprobToken] | None


class _ChatCompletionMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None


class ChatCompletionResponseMessage(_ChatCompletionMessage, total=False):
    """The message that answers."""

    reasoning_content: str
    tool_calls: list[ChatCompletionMessageToolCall]
    function_call: ChatCompletionFunctionCall


class ChatCompletionResponseChoice(TypedDict):
    """One answer to a conversation."""

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
    """The answers to a conversation."""

    timings: dict[str, Any]


# --- streams of a chat


class ChatCompletionMessageToolCallChunkFunction(TypedDict, total=False):
    """A piece of a called function: its name, or more of its arguments."""

    name: str | None
    arguments: str


class _ToolCallChunk(TypedDict):
    index: int
    function: ChatCompletionMessageToolCallChunkFunction


class ChatCompletionMessageToolCallChunk(_ToolCallChunk, total=False):
    """A piece of a tool call."""

    id: str
    type: Literal["function"]


class ChatCompletionStreamResponseDeltaFunctionCall(TypedDict, total=False):
    """A piece of a function call."""

    name: str
    arguments: str


class ChatCompletionStreamResponseDeltaEmpty(TypedDict):
    """The last delta."""


class ChatCompletionStreamResponseDelta(TypedDict, total=False):
    """What a chunk adds to the message."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ChatCompletionMessageToolCallChunk]
    function_call: ChatCompletionStreamResponseDeltaFunctionCall


class ChatCompletionStreamResponseChoice(TypedDict):
    """What a chunk adds to one answer."""

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
    """A chunk of a streamed answer."""

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
