"""The conversations of `Llama`: formats and their handlers, requests, and bodies in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..session.requests import NamedTool
from ..text.grammar import LlamaGrammar
from ..text.tools import check_tools
from .chat_completion import chat_body, chat_chunks
from .chat_handlers import ChatHandler, get_chat_completion_handler
from .completion import Heading
from .left_out import CHAT_TEMPERATURE, MIN_P, REPEAT_PENALTY, TOP_K, TOP_P
from .requests import SAMPLING_OPTIONS, chat_request, hooks_of, legacy_tools
from .runs import Batch
from .several import LlamaSeveral
from .state import LogitsProcessorList
from .template_handler import TemplateHandler

if TYPE_CHECKING:
    from ..engine.step import Step

_THINKING = ("enable_thinking", "reasoning_budget", "reasoning_effort")
_CHAT_EXTRAS = frozenset(
    ("chat_template_kwargs", "parallel_tool_calls", "mode", "budget", "on_step", *_THINKING)
)


class LlamaChat(LlamaSeveral):
    """The part of `Llama` that answers conversations."""

    chat_handler: ChatHandler | None
    chat_format: str | None

    def _choose_handler(self, chat_format: str | None, chat_handler: ChatHandler | None) -> None:
        """A handler for each template of the model's file, and the format that is taken where a call has no handler."""
        self.chat_handler = chat_handler
        self._chat_handlers: dict[str, ChatHandler] = {
            name[len("tokenizer.") :]: self._handler(source)
            for name, source in self.metadata.items()
            if name.startswith("tokenizer.chat_template.")
        }
        source = self.metadata.get("tokenizer.chat_template")
        if source:
            self._chat_handlers["chat_template.default"] = self._handler(source)
        self.chat_format = chat_format
        if chat_format is None and chat_handler is None:
            self.chat_format = "chat_template.default" if source else "chatml"

    def _handler(self, source: str) -> TemplateHandler:
        """A handler of one of the model's templates, compiled now, so that a bad one is found here."""
        if self._session is not None:
            self._session.templates.of(source)
        return TemplateHandler(source)

    def create_chat_completion(
        self,
        messages: list[Mapping[str, Any]],
        functions: list[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: list[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        temperature: float = CHAT_TEMPERATURE,
        top_p: float = TOP_P,
        top_k: int = TOP_K,
        min_p: float = MIN_P,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | list[str] | None = None,
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = REPEAT_PENALTY,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        **extras: Any,
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Answer a conversation: one dict, or with stream=True an iterator of chunks.

        Reasoning comes as `reasoning_content`, tool calls as `tool_calls` in every tool_choice. response_format takes
        json_object and json_schema. extras, of this package alone: chat_template_kwargs, enable_thinking,
        reasoning_budget (tokens), reasoning_effort, parallel_tool_calls, mode, budget, on_step. A chat_handler gets all of it
        as keywords.
        Raises as create_completion.
        """
        arguments = {k: v for k, v in locals().items() if k not in ("self", "extras")}
        unknown = sorted(set(extras) - _CHAT_EXTRAS)
        if unknown:
            raise TypeError(f"create_chat_completion() got an unexpected keyword argument {unknown[0]!r}")
        return self._handler_in_use()(llama=self, **arguments, **extras)

    def _handler_in_use(self) -> ChatHandler:
        handler = self.chat_handler or self._chat_handlers.get(self.chat_format or "")
        return handler or get_chat_completion_handler(str(self.chat_format))

    def _chat(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        functions: Any = None,
        function_call: Any = None,
        tools: Any = None,
        tool_choice: Any = None,
        stream: bool | Batch = False,
        seed: int | None = None,
        model: str | None = None,
        tfs_z: float = 1.0,
        temperature: float = CHAT_TEMPERATURE,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        on_step: Callable[[Step], None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        **options: Any,
    ) -> Any:
        """A chat's body, with `stream` its chunks; as part of a batch what gives the body once that runs."""
        sampling = {name: options.pop(name) for name in (*SAMPLING_OPTIONS, "logit_bias") if name in options}
        thinking = {name: options.pop(name) for name in _THINKING if name in options}
        params = self._sampling(seed, temperature=temperature, **sampling)
        all_tools, choice = legacy_tools(functions, function_call, tools, tool_choice)
        request = chat_request(
            template,
            messages,
            params,
            tools=all_tools,
            tool_choice=choice,
            chat_template_kwargs=chat_template_kwargs,
            parallel_tool_calls=parallel_tool_calls,
            thinking=thinking,
            penalize_prompt=self._options.penalize_prompt,
            **options,
        )
        check_tools(all_tools)
        head = Heading(self.model_path if model is None else model)

        def new_id(index: int, name: str) -> str:
            return f"call__{index}_{name}_{head.id}"

        hooks = hooks_of(logits_processor, stopping_criteria, on_step, new_call_id=new_id)
        events = self._events(request, hooks, stream if isinstance(stream, Batch) else None)
        legacy = isinstance(request.tool_choice, NamedTool) or functions is not None
        if isinstance(stream, Batch):
            return partial(chat_body, events, head, legacy_call=legacy)
        return (chat_chunks if stream else chat_body)(events, head, legacy_call=legacy)

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """As create_chat_completion, in the types of the openai package (which must be installed)."""
        try:
            from openai.types.chat import ChatCompletion, ChatCompletionChunk
        except ImportError:
            raise ImportError(
                "create_chat_completion_openai_v1 needs the openai package: pip install openai"
            ) from None
        answer: Any = self.create_chat_completion(*args, **kwargs)
        if kwargs.get("stream", False):
            return (ChatCompletionChunk(**chunk) for chunk in answer)
        return ChatCompletion(**answer)
