"""One engine, one generation at a time: requests in, events out. Knows nothing of HTTP or of response shapes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..text.chat_parser import ChatParser, new_call_id, reasoning_at_start
from ..text.constraints import chat_constraint, special_tags
from ..text.grammar import GrammarCompiler, GrammarProcessor
from ..text.stopping import StopStrings
from ..text.template import ChatTemplate, normalise_messages
from ..text.tools import check_tools, with_generic_tool_prompt
from .events import Event
from .generation import Generation
from .prefix_cache import PrefixCache
from .prompt_state import PromptState
from .requests import ChatRequest, CompletionRequest, NamedTool
from .sinks import ChatSink, TextSink
from .turns import Turns

if TYPE_CHECKING:
    from ..engine.engine import Engine

CACHE_BYTES = 1 << 30


class Session:
    """An engine with what its requests share: chat template, grammar compiler and prefix cache.

    cache_bytes: budget of the prefix cache in host memory (0 turns it off). template: instead of the model's own.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        cache_bytes: int = CACHE_BYTES,
        template: ChatTemplate | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.template = template or model_template(engine.tokenizer)
        self.state = PromptState(engine, PrefixCache(cache_bytes))
        self.turns = Turns()
        self._grammars: GrammarCompiler | None = None
        self._turn_marks: dict[str, int | None] = {}

    @property
    def grammars(self) -> GrammarCompiler:
        """The grammar compiler of this vocabulary, built at the first use. Raises ConfigError without llguidance."""
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.engine.n_vocab)
        return self._grammars

    def template_of(self, request: ChatRequest) -> ChatTemplate:
        """The template a request is rendered with. Raises ConfigError if neither it nor the model has one."""
        template = request.template or self.template
        if template is None:
            raise ConfigError(
                "messages: the model file has no chat template; name one or use a plain completion"
            )
        return template

    def prompt(self, request: ChatRequest) -> str:
        """The rendered prompt of a chat request. Raises ConfigError for messages or tools that cannot be rendered."""
        template = self.template_of(request)
        messages = normalise_messages(request.messages)
        check_tools(request.tools)
        tools = request.tools if request.tool_choice != "none" else ()
        if not template.supports_tools:
            messages, tools = with_generic_tool_prompt(messages, tools), ()
        extra: dict[str, Any] = dict(request.chat_template_kwargs)
        if request.enable_thinking is not None:
            extra["enable_thinking"] = request.enable_thinking
        return template.render(
            messages, tools=tools, continue_final_message=request.continue_final_message, **extra
        )

    def count_tokens(self, request: ChatRequest) -> int:
        """Length in tokens of a chat request's prompt."""
        return len(self.tokenizer.encode(self.prompt(request)))

    def boundaries(self, ids: Sequence[int], template: ChatTemplate) -> list[int]:
        """Positions at which messages start: where the token stands with which the template opens a turn."""
        if template.source not in self._turn_marks:
            header = self.tokenizer.encode(template.generation_header())
            mark = header[0] if header and self.tokenizer.is_control(header[0]) else None
            self._turn_marks[template.source] = mark
        mark = self._turn_marks[template.source]
        return [] if mark is None else [i for i, token in enumerate(ids) if token == mark]

    def completion_ids(self, request: CompletionRequest) -> list[int]:
        """The token ids of a completion prompt. Raises ConfigError for an empty one, or no fill-in-the-middle tokens."""
        tokenizer = self.tokenizer
        bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        if not isinstance(request.prompt, str):
            ids = [int(i) for i in request.prompt]
        elif request.suffix is None:
            ids = bos + tokenizer.encode(request.prompt)
        else:
            ids = tokenizer.encode(request.prompt, special=False)
        if request.suffix is not None:
            found = [tokenizer.id_of(f"<|fim_{name}|>") for name in ("prefix", "suffix", "middle")]
            marks = [i for i in found if i is not None]
            if len(marks) < 3:
                raise ConfigError("suffix: this model has no fill-in-the-middle tokens")
            before, after = [marks[0], *ids], [marks[1], *tokenizer.encode(request.suffix, special=False)]
            ids = bos + (after + before if request.suffix_first else before + after) + [marks[2]]
        if not ids:
            raise ConfigError("prompt: it is empty, there is nothing to continue")
        return ids


def model_template(tokenizer: Any) -> ChatTemplate | None:
    """The chat template that a model file carries, or None."""
    source = tokenizer.chat_template
    if not source:
        return None
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    return ChatTemplate(
        source,
        bos_token="" if bos is None else tokenizer.tokens[bos],
        eos_token="" if eos is None else tokenizer.tokens[eos],
    )


def run_chat(
    session: Session,
    request: ChatRequest,
    *,
    should_stop: Callable[[], bool] | None = None,
    new_call_id: Callable[[int, str], str] = new_call_id,
) -> Generator[Event, None, None]:
    """Yield the events of one answer; see `events` for their order. Closing the iterator cancels within one step.

    should_stop is asked once per step; new_call_id makes the id of a tool call from its index and name.
    Raises at the first next(): ContextOverflowError, ConfigError.
    """
    template = session.template_of(request)
    schemas = check_tools(request.tools)
    choice = request.tool_choice
    if isinstance(choice, NamedTool) and choice.name not in schemas:
        raise ConfigError(f"Tool choice '{choice.name}' not found in tools.")
    if choice == "required" and not schemas:
        raise ConfigError("tool_choice: 'required' needs tools")
    prompt = session.prompt(request)
    ids = session.tokenizer.encode(prompt)
    reasoning = reasoning_at_start(prompt) if request.split_reasoning else "off"
    parse_calls = bool(schemas) and choice != "none"
    stops = StopStrings(request.stop)
    parser = ChatParser(
        reasoning=reasoning, schemas=schemas if parse_calls else None, stops=stops, new_id=new_call_id
    )
    one_call = parse_calls and (isinstance(choice, NamedTool) or not request.parallel_tool_calls)
    sink = ChatSink(session.tokenizer, parser, stops, one_call)
    bound = chat_constraint(
        schemas,
        choice,
        template.tool_format,
        special_tags(session.tokenizer),
        grammar=request.grammar,
        response_format=request.response_format,
        parallel=request.parallel_tool_calls,
        strict=any(tool["function"].get("strict") for tool in request.tools),
    )
    grammar = None
    if bound is not None:
        # what binds the answer does not bind the thinking before it
        after = bound.after or ("</think>" if reasoning_at_start(prompt) == "open" else None)
        grammar = session.grammars.processor(bound.spec, len(ids), after, bound.repeat)
    generation = Generation(
        session.state,
        ids,
        request,
        sink,
        grammar=grammar,
        boundaries=session.boundaries(ids, template),
        should_stop=should_stop,
    )
    yield from session.turns.run(generation.events())


def run_completion(
    session: Session, request: CompletionRequest, *, should_stop: Callable[[], bool] | None = None
) -> Generator[Event, None, None]:
    """As run_chat, for a plain continuation: of the deltas only TextDelta occurs."""
    ids = session.completion_ids(request)
    grammar: GrammarProcessor | None = None
    if request.grammar is not None:
        grammar = session.grammars.processor(request.grammar, len(ids))
    generation = Generation(
        session.state,
        ids,
        request,
        TextSink(session.tokenizer, request.stop),
        grammar=grammar,
        should_stop=should_stop,
    )
    yield from session.turns.run(generation.events(prompt_logprobs=request.prompt_logprobs))
