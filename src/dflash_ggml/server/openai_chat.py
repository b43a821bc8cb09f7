"""OpenAI's /v1/chat/completions: a body becomes a ChatRequest, events become `chat.completion(.chunk)`s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from sse_starlette import ServerSentEvent

from ..session.events import (
    ReasoningDelta,
    TextDelta,
    ToolCallArgs,
    ToolCallBegin,
)
from ..session.logprobs import chat_logprobs
from ..session.openai_parts import call_object
from ..session.requests import ChatRequest, ToolChoice
from .dialect import ApiCall, Settings, speculation, thinking, tool_choice
from .errors import bad_request
from .limits import check_count, check_stops
from .openai_encoder import OpenAIEncoder
from .schema import Body, Options, Positive, ResponseFormat, SamplingFields, gbnf, parse, unsupported

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(Body):
    type: Literal["text"]
    text: str


class CallFunction(Body):
    name: str
    arguments: str | dict[str, Any]


class Call(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CallFunction
    index: int | None = None  # some clients send streamed deltas back as they came


class Message(Body):
    """One message. Fields that only OpenAI's own answers carry may be sent back when they are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: FunctionName


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class ChatBody(SamplingFields):
    """The request. Fields typed None or with one literal are known to the API, and mean only that here."""

    model: str | None = None
    messages: list[Message]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    # labels of the caller's own, which have no bearing on the answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # only the value that describes what happens anyway
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    # of llama.cpp's and vLLM's servers, and our own
    grammar: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    return_progress: bool | None = None
    dflash: Options | None = None


def read_call(data: dict[str, Any], settings: Settings) -> ApiCall:
    """Validate a request body; raises ApiError naming the field."""
    for name in ("functions", "function_call"):
        if data.get(name) is not None:
            raise unsupported(name, "deprecated by OpenAI and not supported here; use tools and tool_choice")
    body = parse(ChatBody, data)
    model = settings.model(body.model)
    limits = settings.limits
    if body.n not in (None, 1):
        raise unsupported("n", "only one choice per request is supported")
    check_count(body.messages, limits.messages, "messages")
    check_count(body.tools or (), limits.tools, "tools")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or ()
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only allowed with stream", "stream_options")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs: true", "top_logprobs")
    if (
        None not in (body.max_tokens, body.max_completion_tokens)
        and body.max_tokens != body.max_completion_tokens
    ):
        raise bad_request("max_tokens: differs from max_completion_tokens", "max_tokens")
    if body.grammar is not None and body.response_format is not None:
        raise bad_request("grammar: cannot be combined with response_format", "grammar")
    switch, notes = thinking(body.reasoning_effort, "reasoning_effort")
    template = dict(body.chat_template_kwargs or {})
    if "enable_thinking" in template:
        wanted = template.pop("enable_thinking")
        if not isinstance(wanted, bool):
            raise bad_request("must be true or false", "chat_template_kwargs.enable_thinking")
        switch = wanted
    request = ChatRequest(
        messages=[m.model_dump(exclude_none=True) for m in body.messages],
        tools=tuple(t.model_dump(exclude_none=True) for t in body.tools or ()),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=body.response_format.plain("response_format") if body.response_format else None,
        grammar=gbnf(body.grammar),
        chat_template_kwargs=template,
        enable_thinking=switch,
        continue_final_message=bool(body.continue_final_message),
        sampling=body.sampling(settings.sampling),
        max_tokens=body.max_completion_tokens or body.max_tokens or settings.max_tokens,
        stop=check_stops(stops, limits),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        return_steps=bool(body.dflash and body.dflash.return_steps),
        **speculation(body.dflash),
    )
    options = body.stream_options
    encoder = ChatEncoder(
        model,
        include_usage=bool(options and options.include_usage),
        progress=bool(body.return_progress),
        logprobs=bool(body.logprobs),
    )
    return ApiCall(request, encoder, bool(body.stream), notes)


def _tool_choice(body: ChatBody) -> ToolChoice:
    choice, names = body.tool_choice, [t.function.name for t in body.tools or ()]
    if isinstance(choice, NamedChoice):
        return tool_choice(None, choice.function.name, names, "tool_choice")
    return tool_choice(choice, None, names, "tool_choice")


class ChatEncoder(OpenAIEncoder):
    """Renders `chat.completion` bodies and `chat.completion.chunk` streams."""

    id_prefix = "chatcmpl-"
    names = ("chat.completion.chunk", "chat.completion")
    _started = False

    def _choice(self, content: Any, reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": 0, "delta": content or {}, "logprobs": logprobs, "finish_reason": reason}

    def feed(self, event: Any) -> Iterator[ServerSentEvent]:
        self.answer.feed(event)
        if not self._started:
            self._started = True
            yield self._chunk({"role": "assistant", "content": ""})
        if isinstance(event, TextDelta):
            yield self._chunk({"content": event.text}, logprobs=chat_logprobs(event.logprobs or ()))
        elif isinstance(event, ReasoningDelta):
            yield self._chunk({"reasoning_content": event.text})
        elif isinstance(event, ToolCallBegin):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.id, "type": "function", "function": function}
            yield self._chunk({"tool_calls": [call]})
        elif isinstance(event, ToolCallArgs):
            yield self._chunk({"tool_calls": [{"index": event.index, "function": {"arguments": event.json}}]})
        else:
            yield from self._rest(event)

    def body(self) -> dict[str, Any]:
        answer = self.answer
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tools:
            message["tool_calls"] = [call_object(b) for b in answer.tools]
            message["content"] = answer.text or None
        return self._body(message=message, logprobs=chat_logprobs(answer.logprobs, asked=self._logprobs))
