"""A session: one engine with its scheduler, prefix cache and templates; takes requests and yields events. No HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ContextOverflowError
from ..text import harmony
from ..text.chat_parser import ChatParser
from ..text.constraints import Constraint, chat_constraint, special_tags
from ..text.grammar import GrammarCompiler, GrammarProcessor
from ..text.grammar_spec import GrammarSpec
from ..text.harmony import HarmonyParser
from ..text.schema_fault import find_fault
from ..text.stopping import StopStrings
from ..text.tokenizer import TooManyTokens
from ..text.tool_grammar import Schemas
from ..text.tools import NamedTool, check_tools
from .binding import binding_schemas, is_strict
from .disk_cache import DiskCache
from .events import Event
from .generation import RequestGeneration, answer_limit
from .hooks import Hooks
from .prefix_cache import PrefixCache
from .prompts import NO_VARIABLES, Prepared, Prompts
from .requests import ChatRequest, CompletionRequest
from .scheduler import Scheduler
from .scoring import Scoring
from .sinks import ChatSink, TextSink
from .slots import Slots
from .templates import Templates
from .thinking import ThoughtLimit, check_thinking, effort_budget

if TYPE_CHECKING:
    from ..engine.engine import Engine

log = logging.getLogger("dflash_ggml")

CACHE_BYTES = 1 << 30
NO_HOOKS = Hooks()


class Session:
    """An engine with the parts that requests share: chat templates, grammar compiler, scheduler and prefix cache.

    Args:
        engine: The scheduler takes all of its slots.
        cache_bytes: Budget of the prefix cache in host memory (0 turns it off).
        template: Chat template source, instead of the model's own.
        thinking: Default of chats, on or off; None leaves it to the template.
        variables: Defaults of the template's variables.
        split_reasoning: Default of chats: whether reasoning is separated from the text.
        reasoning_budget: Default of chats: tokens of reasoning before its end is forced; None or -1 for no limit.
        vet: Called before a grammar is compiled (see GrammarCompiler).
        disk: Persistent prefix cache; `close` writes the last prefixes.
        prompt_keep: Smallest share of a prompt that a request may keep, lossy; None: prompts are never shortened.

    Raises:
        ConfigError: the template does not compile, cannot take a variable, or the budget is below -1.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        cache_bytes: int = CACHE_BYTES,
        template: str | None = None,
        thinking: bool | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
        split_reasoning: bool = True,
        reasoning_budget: int | None = None,
        vet: Callable[[GrammarSpec], None] | None = None,
        disk: DiskCache | None = None,
        prompt_keep: float | None = None,
    ) -> None:
        check_thinking(reasoning_budget, None)
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.templates = Templates(engine.tokenizer, template)
        scorer = None if engine.scorer is None or prompt_keep is None else engine.scorer.name
        self.prompts = Prompts(
            engine.tokenizer, self.templates, thinking, variables, reasoning_budget, prompt_keep, scorer
        )
        self.split_reasoning = split_reasoning
        self.slots = Slots(engine, PrefixCache(cache_bytes), disk)
        self.scheduler = Scheduler(self.slots)
        self._vet = vet
        self._warned_of_length = False
        self._grammars: GrammarCompiler | None = None

    @property
    def grammars(self) -> GrammarCompiler:
        """The grammar compiler of this vocabulary, built at the first use.

        Raises:
            ConfigError: Without llguidance.
        """
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.engine.n_vocab, self._vet)
        return self._grammars

    @property
    def can_switch_thinking(self) -> bool:
        """Whether the chat template, if there is one, has a switch for thinking."""
        return self.templates.source is not None and self.templates.of(None)[0].supports_thinking

    def prepare(self, request: ChatRequest | CompletionRequest) -> Prepared:
        """Render and tokenise a request's prompt, for run_chat or run_completion; thread-safe.

        Raises:
            ConfigError: The prompt cannot be rendered, or the grammar not compiled.
            ContextOverflowError: The prompt leaves no room for an answer.
        """
        engine = self.engine
        try:
            prepared = self.prompts.make(request, most=engine.n_ctx - 1)
        except TooManyTokens as error:
            raise ContextOverflowError(
                f"Requested tokens ({error.found}) exceed context window of {engine.n_ctx}; they were not all counted",
                error.found,
                engine.n_ctx,
            ) from None
        n = prepared.read_n
        if n >= engine.n_ctx:
            raise ContextOverflowError(
                f"Requested tokens ({n}) exceed context window of {engine.n_ctx}", n, engine.n_ctx
            )
        bad = next((i for i in prepared.ids if not 0 <= i < engine.n_vocab), None)
        if bad is not None:
            raise ConfigError(f"prompt: token id {bad} is outside the vocabulary of {engine.n_vocab}")
        trained = engine.params.n_ctx_train
        if n > trained and not self._warned_of_length:
            self._warned_of_length = True
            log.warning(
                "a prompt of %d tokens: %s was trained for %d, longer texts it understands less well",
                *(n, engine.config.model.name, trained),
            )
        try:
            bound = self.constraint(prepared)
            if bound is not None:
                # compile and cache now, so that errors come before queueing
                self.grammars.matcher(bound.spec)
        except ConfigError as error:
            fault = find_fault(binding_schemas(request), self.grammars.refusal)
            raise ConfigError(fault or str(error)) from None
        return prepared

    def chosen(
        self, prepared: Prepared, should_stop: Callable[[], bool] | None = None
    ) -> Generator[Event, None, Prepared]:
        """The prompt with its selection made; a scorer model runs first, which yields progress.

        Raises:
            ContextOverflowError: The prompt exceeds the scorer's limit.
        """
        if prepared.choice is None:
            return prepared
        scoring = Scoring(self.engine, self.prompts, prepared, should_stop)
        yield from self.scheduler.run(scoring)
        return scoring.prepared

    def constraint(self, prepared: Prepared) -> Constraint | None:
        """The constraint on the answer's form that a request implies, None without one.

        Raises:
            ConfigError: Options exclude each other.
        """
        asked = prepared.request
        if isinstance(asked, CompletionRequest):
            return None if asked.grammar is None else Constraint(asked.grammar)
        template = self.templates.of(asked.template)[0]
        bound = chat_constraint(
            check_tools(asked.tools),
            asked.tool_choice,
            template.tool_format,
            special_tags(self.tokenizer),
            grammar=asked.grammar,
            response_format=asked.response_format,
            parallel=asked.parallel_tool_calls,
            strict=is_strict(asked.tools),
        )
        if bound is not None and prepared.reasoning != "closed" and not bound.is_turn:
            # constraints do not apply to reasoning
            before = harmony.FINAL if template.is_harmony else (template.tags.end_think,)
            return replace(bound, after=(*before, *bound.after))
        return bound

    def processor(self, prepared: Prepared) -> GrammarProcessor | None:
        """The logits processor of a constraint, for one generation."""
        bound = self.constraint(prepared)
        if bound is None:
            return None
        return self.grammars.processor(bound.spec, len(prepared.ids), bound.after, bound.repeat)

    def thought_limit(self, prepared: Prepared) -> ThoughtLimit | None:
        """The limit on a chat's reasoning, None without one."""
        asked = prepared.request
        if not isinstance(asked, ChatRequest):
            return None
        template, budget = self.templates.of(asked.template)[0], self.prompts.budget(asked)
        # harmony models are trained with effort levels
        if budget is None and asked.reasoning_effort is not None and not template.is_harmony:
            longest = min(self.engine.params.longest_answer, answer_limit(self.engine, prepared))
            budget = effort_budget(asked.reasoning_effort, longest)
        if budget is None or budget < 0:
            return None
        end = template.end_of_thought
        if template.is_harmony:
            end = harmony.end_of_thought(bool(asked.tools) and asked.tool_choice != "none")
        return ThoughtLimit(budget, tuple(self.tokenizer.encode(end)))

    def close(self) -> None:
        """Write prefixes to disk, and free the engine's memory."""
        self.scheduler.close()
        try:
            self.slots.close()
        finally:
            self.engine.close()

    def count_tokens(self, request: ChatRequest | CompletionRequest) -> int:
        """Length in tokens of a request's prompt, whether it fits the context or not."""
        return self.prompts.make(request).sent_n


def generation_of(
    session: Session,
    prepared: Prepared,
    hooks: Hooks = NO_HOOKS,
    should_stop: Callable[[], bool] | None = None,
) -> RequestGeneration:
    """The generation of a request, to be submitted to the session's scheduler."""
    asked = prepared.request
    sink: TextSink | ChatSink
    if isinstance(asked, CompletionRequest):
        sink = TextSink(session.tokenizer, asked.stop, len(prepared.text))
    else:
        schemas, choice = check_tools(asked.tools), asked.tool_choice
        parse_calls = bool(schemas) and choice != "none"
        stops = StopStrings(asked.stop)
        split = session.split_reasoning if asked.split_reasoning is None else asked.split_reasoning
        template = session.templates.of(asked.template)[0]
        bare = asked.grammar is None and (asked.response_format or {}).get("type", "text") == "text"

        def reader(split: bool, schemas: Schemas | None, **options: Any) -> ChatParser:
            if template.is_harmony:
                return HarmonyParser(prepared.text, split=split, schemas=schemas, **options)
            reasoning = prepared.reasoning if split else "off"
            options["form"] = template.tags
            return ChatParser(reasoning=reasoning, schemas=schemas, bare=bare, **options)

        parser = reader(split, schemas if parse_calls else None, stops=stops, new_id=hooks.new_call_id)
        thought = parser if split else reader(True, None)
        one_call = parse_calls and (isinstance(choice, NamedTool) or not asked.parallel_tool_calls)
        limit = session.thought_limit(prepared)
        sink = ChatSink(session.tokenizer, parser, thought, stops, one_call, limit)
    grammar = session.processor(prepared)
    return RequestGeneration(
        session.engine, prepared, sink, hooks=hooks, grammar=grammar, should_stop=should_stop
    )


def run_chat(
    session: Session,
    request: ChatRequest | Prepared,
    *,
    hooks: Hooks = NO_HOOKS,
    should_stop: Callable[[], bool] | None = None,
) -> Generator[Event, None, None]:
    """Yield the events of one answer; see `events` for their order. Closing the iterator cancels within one step.

    Args:
        session: The session to use.
        request: The chat, or the result of `Session.prepare`.
        hooks: Callables for steps and the end.
        should_stop: Called once per step; true cancels.

    Raises:
        ContextOverflowError: The prompt leaves no room for an answer; at the first next().
        ConfigError: An option cannot be honoured; at the first next().
    """
    prepared = request if isinstance(request, Prepared) else session.prepare(request)
    if not isinstance(prepared.request, ChatRequest):
        raise ConfigError("run_chat: this request is a completion; use run_completion")
    prepared = yield from session.chosen(prepared, should_stop)
    yield from session.scheduler.run(generation_of(session, prepared, hooks, should_stop))


def run_completion(
    session: Session,
    request: CompletionRequest | Prepared,
    *,
    hooks: Hooks = NO_HOOKS,
    should_stop: Callable[[], bool] | None = None,
) -> Generator[Event, None, None]:
    """As run_chat, for a plain continuation: of the deltas only TextDelta occurs."""
    prepared = request if isinstance(request, Prepared) else session.prepare(request)
    if not isinstance(prepared.request, CompletionRequest):
        raise ConfigError("run_completion: this request is a chat; use run_chat")
    prepared = yield from session.chosen(prepared, should_stop)
    yield from session.scheduler.run(generation_of(session, prepared, hooks, should_stop))
