"""OpenAI's /v1/responses: validation into a ChatRequest, events into response objects and response events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..session.answer import Answer, Block
from ..session.events import Finish, ReasoningDelta, TextDelta, ToolCallArgs, ToolCallBegin, ToolCallEnd
from ..session.logprobs import chat_logprob
from ..session.openai_parts import call_object, timings_dict, usage_timings
from ..session.requests import ChatRequest
from .dialect import ApiCall, Settings, data_event, new_id, opened, speculation, text_format, thinking
from .errors import ApiError, bad_request
from .limits import check_count
from .response_store import ResponseStore, input_items
from .responses_schema import ResponsesBody, all_tools, chat_messages, seal, with_instructions
from .schema import sampling_params, unsupported
from .tools import FreeText, ToolSet, choose, free_text, openai_tools, shell_action

LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
_PREFIXES = {"function": "fc_", "custom": "ctc_", "local_shell": "lsh_"}


def read_call(data: dict[str, Any], settings: Settings, store: ResponseStore) -> ApiCall:
    """Validate a request body.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    for name in ("prompt", "conversation"):
        if data.get(name) is not None:
            raise unsupported(name, "it is kept by OpenAI's service and not known here; send it as input")
    body, notes = opened(ResponsesBody, data, settings)
    model = settings.model(body.model)
    if not isinstance(body.input, str):
        check_count(body.input, settings.limits.messages, "input")
    tools = all_tools(body)
    check_count(tools, settings.limits.tools, "tools")
    include = body.include or []
    logprobs = LOGPROBS in include or bool(body.top_logprobs)
    if body.top_logprobs and LOGPROBS not in include:
        notes.weaken("top_logprobs", f"taken as if include had {LOGPROBS}")
    thought = thinking(body.reasoning.effort if body.reasoning else None, "reasoning.effort", notes)
    if body.reasoning is not None and body.reasoning.summary is not None:
        notes.say("reasoning.summary: the whole reasoning is returned, not a summary")
    if SEALED in include:
        notes.say("include: reasoning is encoded, not encrypted")
    new = chat_messages(body.input, notes, store.get)
    if not new:
        raise bad_request("input: must not be empty", "input")
    history = store.history(body.previous_response_id) if body.previous_response_id is not None else []
    tool_set, choice = choose(body.tool_choice, openai_tools(tools, notes), notes)
    response_format = body.text.format.plain() if body.text and body.text.format else None
    request = ChatRequest(
        messages=with_instructions(body.instructions, [*history, *new]),
        tools=tool_set.definitions,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=text_format(response_format, choice),
        reasoning_budget=body.reasoning.max_tokens if body.reasoning else None,
        **thought,
        sampling=sampling_params(settings.sampling, temperature=body.temperature, top_p=body.top_p),
        max_tokens=body.max_output_tokens or settings.max_tokens,
        logprobs=(body.top_logprobs or 0) if logprobs else None,
        **speculation(body.dflash),
    )
    kept = store if body.store is not False else None
    encoder = ResponseEncoder(model, body, request, new, tool_set, kept, input_items(data["input"]))
    return ApiCall(request, encoder, bool(body.stream), notes)


@dataclass
class ResponseEncoder:
    """Renders response objects and response event streams. One output item per block of the answer.

    Attributes:
        messages: Messages of this request alone, without the history.
        tool_set: Its tools.
        store: Store for the response; None: not stored.
        items: The request's input.
    """

    model: str
    asked: ResponsesBody
    request: ChatRequest
    messages: list[dict[str, Any]]
    tool_set: ToolSet
    store: ResponseStore | None
    items: list[dict[str, Any]]

    def __post_init__(self) -> None:
        self.answer = Answer()
        self._id = new_id("resp_")
        self._created = int(time.time())
        self._sequence = -1
        self._started = self._open = False
        self._items: list[str] = []  # ids, one per block of the answer
        self._text = FreeText()

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return data_event({"type": kind, "sequence_number": self._sequence, **fields}, event=kind)

    def feed(self, event: Any) -> Iterator[bytes]:
        """What the client sees of one event."""
        if isinstance(event, Finish) and event.reason != "length" and not self._has_output():
            yield from self.feed(TextDelta(""))  # clients expect a message, even an empty one
        blocks = len(self.answer.blocks)
        # Close items before the next block is added, so that the last block is always the open one.
        if isinstance(event, (ToolCallBegin, Finish)) or self._changes_kind(event):
            yield from self._close_item("incomplete" if self._cut(event) else "completed")
        self.answer.feed(event)
        if not self._started:
            self._started = True
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))
        if len(self.answer.blocks) > blocks:
            yield from self._open_item()
        if isinstance(event, TextDelta):
            logprobs = [chat_logprob(t) for t in event.logprobs or ()]
            yield self._part_event("response.output_text.delta", delta=event.text, logprobs=logprobs)
        elif isinstance(event, ReasoningDelta):
            yield self._part_event("response.reasoning_text.delta", delta=event.text)
        elif isinstance(event, ToolCallArgs):
            block = self.answer.blocks[-1]
            kind = self.tool_set.kind(block.name)
            if kind == "function":
                yield self._item_event("response.function_call_arguments.delta", delta=event.json)
            elif kind == "custom" and (piece := self._text.more(block.text)):
                yield self._item_event("response.custom_tool_call_input.delta", delta=piece)
        elif isinstance(event, ToolCallEnd):
            yield from self._close_item("completed")
        elif isinstance(event, Finish):
            status = "incomplete" if event.reason == "length" else "completed"
            self._remember(response := self._response(status))
            yield self._event(f"response.{status}", response=response)

    def _has_output(self) -> bool:
        return any(block.kind != "reasoning" for block in self.answer.blocks)

    def _changes_kind(self, event: Any) -> bool:
        kind = {TextDelta: "text", ReasoningDelta: "reasoning"}.get(type(event))
        return kind is not None and bool(self.answer.blocks) and self.answer.blocks[-1].kind != kind

    @staticmethod
    def _cut(event: Any) -> bool:
        return isinstance(event, Finish) and event.reason == "length"

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1], output_index=len(self._items) - 1, **fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _open_item(self) -> Iterator[bytes]:
        block = self.answer.blocks[-1]
        self._text = FreeText()
        kind = _PREFIXES[self.tool_set.kind(block.name)] if block.kind == "tool" else ""
        self._items.append(new_id(kind or {"text": "msg_", "reasoning": "rs_"}[block.kind]))
        self._open = True
        index = len(self._items) - 1
        yield self._event(
            "response.output_item.added", output_index=index, item=self._item(index, "in_progress")
        )
        if block.kind != "tool":
            yield self._part_event("response.content_part.added", part=_part(Block(block.kind)))

    def _close_item(self, status: str) -> Iterator[bytes]:
        if not self._open:
            return
        self._open = False
        block = self.answer.blocks[-1]
        if block.kind == "tool":
            yield from self._call_done(block)
        else:
            kind = "output_text" if block.kind == "text" else "reasoning_text"
            extra: dict[str, Any] = {}
            if block.kind == "text":
                extra["logprobs"] = [chat_logprob(t) for t in block.logprobs]
            yield self._part_event(f"response.{kind}.done", text=block.text, **extra)
            yield self._part_event("response.content_part.done", part=_part(block))
        index = len(self._items) - 1
        yield self._event("response.output_item.done", output_index=index, item=self._item(index, status))

    def _call_done(self, block: Block) -> Iterator[bytes]:
        kind, (own, _) = self.tool_set.kind(block.name), self.tool_set.own(block.name)
        if kind == "function":
            yield self._item_event("response.function_call_arguments.done", name=own, arguments=block.text)
        elif kind == "custom":
            if piece := self._text.more(block.text, last=True):
                yield self._item_event("response.custom_tool_call_input.delta", delta=piece)
            yield self._item_event("response.custom_tool_call_input.done", input=free_text(block.text))

    def _call(self, block: Block) -> dict[str, Any]:
        """A call as an item of the tool's kind, without id and status."""
        kind, (own, namespace) = self.tool_set.kind(block.name), self.tool_set.own(block.name)
        if kind == "local_shell":
            return {"type": "local_shell_call", "call_id": block.id, "action": shell_action(block.text)}
        item: dict[str, Any] = {"type": "function_call", "call_id": block.id, "name": own}
        if kind == "custom":
            item |= {"type": "custom_tool_call", "input": free_text(block.text)}
        else:
            item["arguments"] = block.text
        return item if namespace is None else {**item, "namespace": namespace}

    def _item(self, index: int, status: str) -> dict[str, Any]:
        block, item_id = self.answer.blocks[index], self._items[index]
        if block.kind == "tool":
            return {**self._call(block), "id": item_id, "status": status}
        parts = [] if status == "in_progress" else [_part(block)]
        if block.kind == "reasoning":
            item = {"type": "reasoning", "id": item_id, "summary": [], "content": parts, "status": status}
            if parts and SEALED in (self.asked.include or ()):
                item["encrypted_content"] = seal(block.text)
            return item
        return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": parts}

    def error(self, error: ApiError) -> Iterator[bytes]:
        """A failure in mid-stream: agents stop at the first event, the official client raises at the second."""
        cause = {"code": error.code or "server_error", "message": error.message}
        yield self._event("response.failed", response={**self._response("failed"), "error": cause})
        yield self._event("error", code=error.code, message=error.message, param=error.param)

    def _remember(self, response: dict[str, Any]) -> None:
        if self.store is None:
            return
        answer = self.answer
        reply: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            reply["reasoning_content"] = answer.reasoning
        if answer.tools:
            reply["tool_calls"] = [call_object(b) for b in answer.tools]
        items = [self._item(i, "completed") for i in range(len(self._items))]
        messages = [*self.messages, reply]
        self.store.put(self._id, self.asked.previous_response_id, messages, items, response, self.items)

    def body(self) -> dict[str, Any]:
        """The whole response."""
        _, finish = self.answer.done()
        return self._response("incomplete" if finish.reason == "length" else "completed")

    def _response(self, status: str) -> dict[str, Any]:
        body, request, usage = self.asked, self.request, self.answer.usage
        last = len(self._items) - 1
        cut = "incomplete" if status == "failed" else status
        output = [self._item(i, cut if i == last else "completed") for i in range(len(self._items))]
        response: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": self.store is not None,
            "temperature": request.sampling.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
            if body.text and body.text.format
            else {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_echo(tool) for tool in body.tools or ()],
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if usage is not None:
            response["usage"] = {
                "input_tokens": usage.prompt_n,
                "input_tokens_details": {"cached_tokens": usage.cached_n, "cache_write_tokens": 0},
                "output_tokens": usage.predicted_n,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_n},
                "total_tokens": usage.prompt_n + usage.predicted_n,
                "timings": usage_timings(usage),
            }
            response["timings"] = timings_dict(usage)
        return response


def _echo(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of the request, with the fields that clients' types require."""
    if tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "parameters": None, "strict": None, "description": None, **tool}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    logprobs = [chat_logprob(t) for t in block.logprobs]
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}
