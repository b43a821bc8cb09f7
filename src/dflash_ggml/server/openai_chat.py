"""OpenAI's /v1/chat/completions: a body becomes a ChatRequest, events become `chat.completion(.chunk)`s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from ..session.answer import Answer, Block
from ..session.events import ReasoningDelta, TextDelta, ToolCallArgs, ToolCallBegin, ToolCallEnd
from ..session.logprobs import chat_logprobs
from ..session.openai_parts import call_object
from ..session.requests import ChatRequest
from .choices import check_choices
from .constraint_fields import ConstraintFields
from .dialect import ApiCall, Settings, opened, speculation, text_format, thinking
from .errors import bad_request
from .function_calls import FunctionCalls, with_tools
from .ignored_fields import IDLE_CHAT
from .limits import check_count
from .media import content_text, note_role, thoughts
from .notes import Notes
from .openai_encoder import OpenAIEncoder
from .schema import Alternatives, Body, Echoed, Options, SamplingFields, Whole, unsupported
from .tools import FreeText, ToolSet, choose, free_text, openai_tools

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
Limit = Annotated[Whole, Field(ge=-1)]  # -1 means none in llama.cpp's and other clients


class CallFunction(Echoed):
    """The function of a call."""

    name: str
    arguments: Any = None


class CustomCall(Echoed):
    """The call of a custom tool."""

    name: str
    input: str = ""


class Call(Echoed):
    """A call of an earlier answer. `index` and more: some clients send streamed deltas back as they came."""

    id: str | None = None
    function: CallFunction | None = None
    custom: CustomCall | None = None


class Message(Echoed):
    """One message. Clients send answers back with additional keys, which are ignored."""

    role: str
    content: str | list[Any] | dict[str, Any] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    function_call: CallFunction | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    thinking_blocks: Any = None
    refusal: str | None = None

    def plain(self, where: str, notes: Notes) -> dict[str, Any]:
        """The message in the session's form.

        Raises:
            ApiError: A part cannot be read; the error names it.
        """
        note_role(self.role, ROLES, where, notes)
        text = content_text(self.content, f"{where}.content", notes)
        message: dict[str, Any] = {"role": self.role, "content": text or self.refusal or ""}
        for key in ("name", "tool_call_id"):
            if getattr(self, key) is not None:
                message[key] = getattr(self, key)
        thought = self._thought()
        if thought:
            message["reasoning_content"] = thought
        calls = [
            _plain_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls or ())
        ]
        if self.function_call is not None:
            calls.append(_plain_call(Call(function=self.function_call), f"{where}.function_call"))
        if calls:
            message["tool_calls"] = calls
        return message

    def _thought(self) -> str:
        """The reasoning of an earlier answer, under any of the clients' names."""
        if self.reasoning_content is not None:
            return self.reasoning_content
        if isinstance(self.reasoning, str):
            return self.reasoning
        return thoughts(self.thinking_blocks) or thoughts(self.content)


def _plain_call(call: Call, where: str) -> dict[str, Any]:
    if call.custom is not None:
        name, arguments = call.custom.name, {"input": call.custom.input}
    elif call.function is not None:
        name, arguments = call.function.name, call.function.arguments
    else:
        raise bad_request("a function with a name is needed", f"{where}.function")
    head = {} if call.id is None else {"id": call.id}
    return {**head, "type": "function", "function": {"name": name, "arguments": arguments}}


class Reasoning(Body):
    """OpenRouter's form of reasoning_effort and reasoning_budget."""

    effort: str | None = None
    max_tokens: Limit | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ThinkingSwitch(Body):
    """Anthropic's and others' form of the same."""

    type: str
    budget_tokens: Limit | None = None


class StreamOptions(Body):
    """Stream options."""

    quiet = frozenset(("include_obfuscation", "continuous_usage_stats", "chunk_include_usage"))
    include_usage: bool | None = None


class GeneratingBody(SamplingFields, ConstraintFields):
    """Common fields of chats and text completions."""

    model: str | None = None
    max_tokens: Limit | None = None
    n: Whole | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    dflash: Options | None = None

    def shown(self, notes: Notes) -> dict[str, Any]:
        """Fields of an encoder: what the answer reports besides its text.

        Raises:
            ApiError: A strict server got stream options without a stream.
        """
        if self.stream_options is not None and not self.stream and notes.strict:
            raise bad_request("stream_options: only allowed with stream", "stream_options")
        usage = self.stream_options is not None and self.stream_options.include_usage
        return {"include_usage": bool(usage), "progress": bool(self.return_progress)}


class Budgets(Body):
    """The limit of reasoning by its names in llama.cpp, Qwen and vLLM; the first one given counts."""

    reasoning_budget: Limit | None = None
    thinking_budget: Limit | None = None
    thinking_budget_tokens: Limit | None = None
    reasoning_budget_tokens: Limit | None = None
    thinking_token_budget: Limit | None = None


class ChatBody(GeneratingBody, Budgets):
    """The request."""

    idle = IDLE_CHAT

    messages: list[Message]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    n_probs: Alternatives | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    thinking: ThinkingSwitch | None = None
    enable_thinking: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def read_call(data: dict[str, Any], settings: Settings) -> ApiCall:
    """Validate a request body.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    legacy = bool(data.get("functions"))
    if legacy:
        data = with_tools(data)
    if data.get("audio"):
        raise unsupported("audio", "this model answers in text only")
    body, notes = opened(ChatBody, data, settings)
    model = settings.model(body.model)
    limits = settings.limits
    n = check_choices(body.n)
    check_count(body.messages, limits.messages, "messages")
    check_count(body.tools or (), limits.tools, "tools")
    shown = body.shown(notes)
    tool_set, choice = choose(body.tool_choice, openai_tools(body.tools, notes), notes)
    response_format, grammar = body.constraint()
    add_prompt = body.add_generation_prompt is not False
    thought, template = _thinking(body, notes), dict(body.chat_template_kwargs or {})
    if "enable_thinking" in template:
        wanted = template.pop("enable_thinking")
        if not isinstance(wanted, bool):
            raise bad_request("must be true or false", "chat_template_kwargs.enable_thinking")
        thought["enable_thinking"] = wanted
    if body.reasoning_format == "deepseek-legacy":
        notes.weaken("reasoning_format", "thinking is in reasoning_content only")
    messages = [m.plain(f"messages[{i}]", notes) for i, m in enumerate(body.messages)]
    request = ChatRequest(
        messages=messages,
        tools=tool_set.definitions,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=text_format(response_format, choice),
        grammar=grammar,
        chat_template_kwargs=template,
        split_reasoning=_split(body),
        add_generation_prompt=add_prompt,
        continue_final_message=_continues(body, messages),
        max_tokens=_limit(body, notes) or settings.max_tokens,
        logprobs=_logprobs(body, notes),
        return_steps=bool(body.dflash and body.dflash.return_steps),
        **thought,
        **body.arguments(settings.sampling, limits),
        **speculation(body.dflash),
    )
    hidden = body.include_reasoning is False or bool(body.reasoning and body.reasoning.exclude)
    kind = LegacyEncoder if legacy else ChatEncoder
    encoder = kind(
        model,
        tool_set=tool_set,
        show_reasoning=not hidden,
        logprobs=request.logprobs is not None,
        n=n,
        **shown,
    )
    return ApiCall(request, encoder, bool(body.stream), notes, n=n)


def _continues(body: ChatBody, messages: Sequence[dict[str, Any]]) -> bool:
    """Whether to continue the last message: as requested, else like llama.cpp's server."""
    asked = (body.continue_final_message, body.add_generation_prompt)
    if asked == (None, None) and "add_generation_prompt" not in (body.chat_template_kwargs or ()):
        return is_begun(messages)
    return bool(body.continue_final_message)


def is_begun(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether the last message is the beginning of an answer: an assistant's text without calls."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _limit(body: ChatBody, notes: Notes) -> int | None:
    """The limit of tokens, None for as many as fit."""
    new, old = body.max_completion_tokens, body.max_tokens
    for name, value in (("max_completion_tokens", new), ("max_tokens", old)):
        if value == 0:
            raise bad_request(f"{name}: expected 1 or more", name)
    if None not in (new, old) and new != old:
        notes.weaken("max_tokens", "max_completion_tokens differs and counts")
    limit = old if new is None else new
    return None if limit == -1 else limit


def _split(body: ChatBody) -> bool | None:
    """Whether reasoning is separated from the text; None if the request does not specify it."""
    if body.reasoning_format is None and body.separate_reasoning is None:
        return None
    return body.reasoning_format != "none" and body.separate_reasoning is not False


def _logprobs(body: ChatBody, notes: Notes) -> int | None:
    if body.n_probs:
        return max(body.n_probs, body.top_logprobs or 0)
    if body.top_logprobs and not body.logprobs:
        notes.ignore("top_logprobs", "needs logprobs: true")
    return (body.top_logprobs or 0) if body.logprobs else None


def _thinking(body: ChatBody, notes: Notes) -> dict[str, Any]:
    """The reasoning arguments of a ChatRequest, by any of the clients' names."""
    switch = body.enable_thinking
    budgets = [getattr(body, name) for name in Budgets.model_fields]
    effort: dict[str, Any] = {}
    if body.thinking is not None:
        switch = body.thinking.type != "disabled" if switch is None else switch
        budgets.append(body.thinking.budget_tokens)
    if body.reasoning is not None:
        on = body.reasoning.max_tokens is not None or None
        enabled = body.reasoning.enabled if body.reasoning.enabled is not None else on
        switch = enabled if switch is None else switch
        budgets.append(body.reasoning.max_tokens)
        effort = thinking(body.reasoning.effort, "reasoning.effort", notes)
    effort |= thinking(body.reasoning_effort, "reasoning_effort", notes)
    budget = next((n for n in budgets if n is not None), None)
    return {"enable_thinking": switch, **effort, "reasoning_budget": budget}


@dataclass(kw_only=True)
class ChatEncoder(OpenAIEncoder):
    """Renders `chat.completion` bodies and `chat.completion.chunk` streams."""

    id_prefix = "chatcmpl-"
    names = ("chat.completion.chunk", "chat.completion")

    tool_set: ToolSet
    show_reasoning: bool = True
    _text: FreeText = field(default_factory=FreeText)

    def _choice(self, content: Any, reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": 0, "delta": content or {}, "logprobs": logprobs, "finish_reason": reason}

    def feed(self, event: Any) -> Iterator[bytes]:
        """What the client sees of one event."""
        self.answer.feed(event)
        if not self._started:
            self._started = True
            yield self._chunk({"role": "assistant", "content": ""})
        if isinstance(event, TextDelta):
            yield self._chunk({"content": event.text}, logprobs=chat_logprobs(event.logprobs or ()))
        elif isinstance(event, ReasoningDelta):
            if self.show_reasoning:
                yield self._chunk({"reasoning_content": event.text})
        elif isinstance(event, ToolCallBegin):
            self._text = FreeText()
            call = {"index": event.index, **self._call(Block("tool", id=event.id, name=event.name))}
            yield self._chunk({"tool_calls": [call]})
        elif isinstance(event, (ToolCallArgs, ToolCallEnd)) and self._is_custom(self.answer.blocks[-1]):
            piece = self._text.more(self.answer.blocks[-1].text, isinstance(event, ToolCallEnd))
            if piece:
                yield self._chunk({"tool_calls": [{"index": event.index, "custom": {"input": piece}}]})
        elif isinstance(event, ToolCallArgs):
            yield self._chunk({"tool_calls": [{"index": event.index, "function": {"arguments": event.json}}]})
        else:
            yield from self._rest(event)

    def _is_custom(self, block: Block) -> bool:
        return self.tool_set.kind(block.name) == "custom"

    def _call(self, block: Block) -> dict[str, Any]:
        """A call by the client's name of the tool."""
        own, _ = self.tool_set.own(block.name)
        if self._is_custom(block):
            custom = {"name": own, "input": free_text(block.text)}
            return {"id": block.id, "type": "custom", "custom": custom}
        return call_object(block, own)

    def _whole(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning and self.show_reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tools:
            message["tool_calls"] = [self._call(b) for b in answer.tools]
            message["content"] = answer.text or None
        logprobs = chat_logprobs(answer.logprobs, asked=self.logprobs)
        return {"message": message, "logprobs": logprobs}


class LegacyEncoder(FunctionCalls, ChatEncoder):
    """For requests with `functions`."""
