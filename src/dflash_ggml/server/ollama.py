"""Ollama's API: chats, completions, embeddings. Answers stream as JSON lines.

Names and shapes are those of its documentation; a model is always loaded, so `keep_alive` and loading requests do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ..session.answer import Answer, Block
from ..session.events import Event, Finish, ReasoningDelta, TextDelta, ToolCallEnd
from ..session.logprobs import chat_logprobs
from ..session.requests import ChatRequest, CompletionRequest
from ..text.grammar_spec import response_format_spec
from ..text.json_text import loads
from .catalogue import timestamp
from .dialect import ApiCall, Settings, dumps, opened, thinking
from .embeddings import EmbeddingCall, EmbeddingEncoder, Vectors, named
from .errors import ApiError, bad_request
from .ignored_fields import QUIET_LABELS, QUIET_SAMPLING
from .limits import check_count
from .media import content_text
from .notes import Notes
from .openai_chat import Message, is_begun
from .schema import Alternatives, Body, Positive, SamplingFields, Whole, parse
from .tools import ToolSet, openai_tools

# load-time options, without effect here
_LOADING = """num_ctx num_batch num_gpu main_gpu num_thread num_keep use_mmap use_mlock
    low_vram numa vocab_only penalize_newline f16_kv logits_all embedding_only"""

Format = Literal["json", ""] | dict[str, Any]
Think = bool | str


class OllamaOptions(SamplingFields):
    """`options` of a request."""

    quiet = QUIET_SAMPLING | set(_LOADING.split())
    num_predict: Whole | None = None


class OllamaBody(Body):
    """Common fields of chats and completions."""

    quiet = QUIET_LABELS
    model: str
    stream: bool | None = None
    format: Format | None = None
    options: dict[str, Any] | None = None
    think: Think | None = None
    keep_alive: str | int | float | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None


class ChatBody(OllamaBody):
    """The request to /api/chat."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


class GenerateBody(OllamaBody):
    """The request to /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None


class EmbedBody(Body):
    """The request to /api/embed."""

    quiet = QUIET_LABELS | {"options"}
    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Positive | None = None


class EmbeddingsBody(Body):
    """The request to /api/embeddings, which /api/embed replaced."""

    quiet = QUIET_LABELS | {"options"}
    model: str
    prompt: str | None = None


def model_name(asked: str | None, settings: Settings) -> str:
    """The name to report; ":latest" may follow it.

    Raises:
        ApiError: 404 for a name that is not served.
    """
    if asked is not None and asked not in settings.names:
        asked = asked.removesuffix(":latest")
    return settings.model(asked)


def read_chat(data: dict[str, Any], settings: Settings) -> ApiCall | dict[str, Any]:
    """Validate a request to /api/chat; an immediate answer to an empty request.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    body, notes = opened(ChatBody, data, settings)
    model = model_name(body.model, settings)
    if not body.messages:
        return {**_head(model), "message": {"role": "assistant", "content": ""}, **_loaded(body)}
    check_count(body.messages, settings.limits.messages, "messages")
    check_count(body.tools or (), settings.limits.tools, "tools")
    tool_set = openai_tools(body.tools, notes)
    options = _options(body, settings, notes)
    messages = [_message(m, f"messages[{i}]", notes) for i, m in enumerate(body.messages)]
    request = ChatRequest(
        messages=messages,
        continue_final_message=is_begun(messages),
        tools=tool_set.definitions,
        response_format=_format(body.format),
        **_think(body.think, notes),
        **options,
    )
    return ApiCall(request, ChatLines(model, tool_set), body.stream is not False, notes, lines=True)


def read_generate(data: dict[str, Any], settings: Settings) -> ApiCall | dict[str, Any]:
    """Validate a request to /api/generate; an immediate answer to an empty request.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    body, notes = opened(GenerateBody, data, settings)
    model = model_name(body.model, settings)
    if not body.prompt and not body.suffix:
        return {**_head(model), "response": "", **_loaded(body)}
    options = _options(body, settings, notes)
    request: ChatRequest | CompletionRequest
    if body.raw or body.suffix:
        grammar = response_format_spec(_format(body.format))
        request = CompletionRequest(
            prompt=body.prompt, suffix=body.suffix or None, grammar=grammar, **options
        )
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        prompt = _with_images(body.prompt, body.images, "images", notes)
        request = ChatRequest(
            messages=[*system, {"role": "user", "content": prompt}],
            response_format=_format(body.format),
            **_think(body.think, notes),
            **options,
        )
    return ApiCall(request, GenerateLines(model), body.stream is not False, notes, lines=True)


def _options(body: OllamaBody, settings: Settings, notes: Notes) -> dict[str, Any]:
    """The arguments of a request set by `options`."""
    options = parse(OllamaOptions, body.options or {}, notes, "options")
    limit = settings.max_tokens if options.num_predict is None else options.num_predict
    return {
        "max_tokens": None if limit is None or limit < 0 else limit,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        **options.arguments(settings.sampling, settings.limits, "options.stop"),
    }


def _format(given: Format | None) -> dict[str, Any] | None:
    if not given:
        return None
    if isinstance(given, str):
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": given}}


def _think(given: Think | None, notes: Notes) -> dict[str, Any]:
    """The arguments of a ChatRequest set by `think`: a switch, or an effort."""
    if given is None or isinstance(given, bool):
        return {"enable_thinking": given}
    return thinking(given, "think", notes)


def _with_images(text: str, images: Any, where: str, notes: Notes) -> str:
    """A text after a line per omitted image."""
    parts = [{"type": "image"}] * len(images or ()) + [{"type": "text", "text": text}]
    return content_text(parts, where, notes, "\n\n") if images else text


def _message(given: dict[str, Any], where: str, notes: Notes) -> dict[str, Any]:
    """A message in the session's form; raises ApiError that names the malformed part."""
    images, thinking = given.get("images"), given.get("thinking")
    if images is not None and not isinstance(images, list):
        raise bad_request(f"{where}.images: a list is expected", f"{where}.images", "invalid_value")
    known = {key: given[key] for key in ("role", "content", "tool_calls", "tool_call_id") if key in given}
    message = parse(Message, known, notes, where).plain(where, notes)
    message["content"] = _with_images(message["content"], images, f"{where}.images", notes)
    if isinstance(thinking, str) and thinking:
        message["reasoning_content"] = thinking
    if isinstance(given.get("tool_name"), str):
        message.setdefault("tool_call_id", given["tool_name"])
    return message


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": timestamp(time.time())}


def _loaded(body: OllamaBody) -> dict[str, Any]:
    """The answer to a request that only loads or unloads."""
    return {"done": True, "done_reason": "unload" if body.keep_alive in (0, "0", "0s") else "load"}


class _Lines:
    """Base encoder of answers as JSON lines, or as one body."""

    def __init__(self, model: str, tool_set: ToolSet | None = None) -> None:
        self.answer = Answer()
        self._model = model
        self._offer = tool_set or ToolSet()
        self._clock = time.monotonic()

    def _content(self, text: str = "", thinking: str = "", calls: Any = ()) -> dict[str, Any]:
        """The content of a line or a body: `text`, `thinking` or `calls`."""
        raise NotImplementedError

    def feed(self, event: Event) -> Iterator[bytes]:
        """The lines of one event; it is added to `answer` first."""
        self.answer.feed(event)
        if isinstance(event, TextDelta):
            yield self._line(**self._content(text=event.text), **self._logprobs(event.logprobs or ()))
        elif isinstance(event, ReasoningDelta):
            yield self._line(**self._content(thinking=event.text))
        elif isinstance(event, ToolCallEnd):
            yield self._line(**self._content(calls=self._calls(self.answer.tools[-1:])))
        elif isinstance(event, Finish):
            yield self._line(**self._content(), **self._end())

    def error(self, error: ApiError) -> Iterator[bytes]:
        """A failure in mid-stream."""
        yield dumps({"error": error.named()}).encode() + b"\n"

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        answer = self.answer
        content = self._content(text=answer.text, thinking=answer.reasoning, calls=self._calls(answer.tools))
        return {**_head(self._model), **content, **self._logprobs(answer.logprobs), **self._end()}

    def _line(self, **fields: Any) -> bytes:
        return dumps({**_head(self._model), "done": False, **fields}).encode() + b"\n"

    def _logprobs(self, entries: Any) -> dict[str, Any]:
        logprobs = chat_logprobs(entries)
        return {} if logprobs is None else {"logprobs": logprobs["content"]}

    def _calls(self, blocks: Sequence[Block]) -> list[dict[str, Any]]:
        """Tool calls by the client's names, without a truncated one."""
        calls = []
        for block in blocks:
            try:
                arguments = loads(block.text or "{}")
            except ValueError:
                continue
            function = {"name": self._offer.own(block.name)[0], "arguments": arguments}
            calls.append({"id": block.id, "function": function})
        return calls

    def _end(self) -> dict[str, Any]:
        """The end of an answer: token counts, and durations in nanoseconds."""
        usage, finish = self.answer.done()
        return {
            "done": True,
            "done_reason": "length" if finish.reason == "length" else "stop",
            "total_duration": int(1e9 * (time.monotonic() - self._clock)),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_n,
            "prompt_eval_duration": int(1e6 * usage.prompt_ms),
            "eval_count": usage.predicted_n,
            "eval_duration": int(1e6 * usage.predicted_ms),
        }


class ChatLines(_Lines):
    """Answers of /api/chat."""

    def _content(self, text: str = "", thinking: str = "", calls: Any = ()) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(calls)
        return {"message": message}


class GenerateLines(_Lines):
    """Answers of /api/generate."""

    def _content(self, text: str = "", thinking: str = "", calls: Any = ()) -> dict[str, Any]:
        return {"response": text} | ({"thinking": thinking} if thinking else {})


def read_embed(data: dict[str, Any], settings: Settings) -> EmbeddingCall | dict[str, Any]:
    """Validate a request to /api/embed; an immediate answer to an empty request.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    body, notes = opened(EmbedBody, data, settings)
    model = model_name(body.model, settings)
    clock = time.monotonic()

    def render(vectors: Vectors, n_tokens: int) -> dict[str, Any]:
        spent = int(1e9 * (time.monotonic() - clock))
        counts = {"total_duration": spent, "load_duration": 0, "prompt_eval_count": n_tokens}
        return {"model": model, "embeddings": [v.tolist() for v in vectors], **counts}

    if not body.input:
        return render([], 0)
    return EmbeddingCall(
        named(body.input, "input"),
        EmbeddingEncoder(render, body.dimensions),
        notes,
        truncate=body.truncate is not False,
    )


def read_embeddings(data: dict[str, Any], settings: Settings) -> EmbeddingCall | dict[str, Any]:
    """Validate a request to /api/embeddings; an immediate answer to an empty request.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    body, notes = opened(EmbeddingsBody, data, settings)
    model_name(body.model, settings)

    def render(vectors: Vectors, n_tokens: int) -> dict[str, Any]:
        return {"embedding": vectors[0].tolist()}

    if not body.prompt:
        return {"embedding": []}
    return EmbeddingCall(named(body.prompt, "prompt"), EmbeddingEncoder(render), notes, truncate=True)
