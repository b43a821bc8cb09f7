"""Typed requests from the keywords of `Llama`'s methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..decode.sampling_params import OPTIONS, SamplingParams
from ..errors import ConfigError
from ..session.hooks import Hooks
from ..session.requests import ChatRequest, CompletionRequest, GrammarSpec, NamedTool, ToolChoice
from ..text.grammar import LlamaGrammar
from ..text.grammar_spec import spec_of
from .lenient import sampling_in_range, usable_choice, usable_messages
from .options import LLAMA_DEFAULT_SEED, LlamaOptions

# sampler options with the same name in the methods
SAMPLING_OPTIONS = tuple(
    name for name in OPTIONS if name not in ("temperature", "penalty_last_n", "logit_bias", "seed")
)


def sampling_params(*, seed: int, last_n_tokens_size: int, n_vocab: int, **options: Any) -> SamplingParams:
    """Sampler options, clamped to valid ranges; a seed of -1 or 2^32-1 means fresh entropy, as in llama.cpp."""
    seed &= 0xFFFFFFFF
    options = sampling_in_range(options, n_vocab)
    return SamplingParams(
        penalty_last_n=last_n_tokens_size,
        logit_bias=options["logit_bias"],
        seed=None if seed == LLAMA_DEFAULT_SEED else seed,
        **{name: options[name] for name in ("temperature", *SAMPLING_OPTIONS) if name in options},
    )


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple; empty ones are dropped, since llama-cpp-python users pass them."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    return tuple(s for s in stops if s)


def grammar_spec(grammar: Any) -> GrammarSpec | None:
    """The constraint of a `grammar` argument: a LlamaGrammar, a GrammarSpec, or GBNF text; None if empty."""
    if isinstance(grammar, LlamaGrammar):
        grammar = grammar.spec
    if isinstance(grammar, GrammarSpec):
        return grammar if grammar.kind == "json_object" else spec_of(grammar.kind, grammar.text)
    text = getattr(grammar, "_grammar", grammar)  # attribute of llama-cpp-python's class
    if text is None or isinstance(text, str):
        return spec_of("gbnf", text)
    raise ConfigError(f"grammar: expected a LlamaGrammar or GBNF text, got {type(grammar).__name__}")


def _shared(sampling: SamplingParams, options: Mapping[str, Any], opened: LlamaOptions) -> dict[str, Any]:
    """Common options of completions and chats, from a call's keywords and the constructor's."""
    limit = options["max_tokens"]
    return {
        "sampling": sampling,
        "max_tokens": None if limit is None or limit <= 0 else limit,
        "stop": stop_strings(options["stop"]),
        "grammar": grammar_spec(options["grammar"]),
        "penalize_prompt": opened.penalize_prompt,
        "mode": options["mode"],
        "budget": options["budget"],
    }


def as_tuple(functions: Any) -> tuple[Any, ...]:
    """A list of callables, one callable, or None."""
    if functions is None:
        return ()
    listed = isinstance(functions, Iterable) and (isinstance(functions, list) or not callable(functions))
    return tuple(functions) if listed else (functions,)


def hooks_of(options: Mapping[str, Any], **more: Any) -> Hooks:
    """The callables among a method's keywords."""
    return Hooks(
        logits_processor=as_tuple(options["logits_processor"]),
        stopping_criteria=as_tuple(options["stopping_criteria"]),
        on_step=options["on_step"],
        **more,
    )


def legacy_tools(
    functions: Sequence[Mapping[str, Any]] | None, function_call: Any, tools: Any, tool_choice: Any
) -> tuple[tuple[Mapping[str, Any], ...], Any]:
    """Translate `functions` and `function_call` into tools and tool_choice."""
    if functions is not None:
        tools = [{"type": "function", "function": f} for f in functions]
    if isinstance(function_call, str):
        tool_choice = function_call
    elif isinstance(function_call, Mapping):
        tool_choice = {"type": "function", "function": {"name": function_call.get("name")}}
    return tuple(tools or ()), tool_choice


def tool_choice_of(value: Any) -> ToolChoice:
    """A tool_choice argument as a typed choice.

    Raises:
        ConfigError: It is invalid.
    """
    if value is None:
        return "auto"
    if value in ("auto", "none", "required"):
        return value
    function = value.get("function") if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and value.get("type") == "function" and function is None:
        function = value  # the Responses API's form
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return NamedTool(function["name"])
    raise ConfigError(
        f"tool_choice: {value!r} is none of auto, none, required, {{'function': {{'name': ...}}}}"
    )


def completion_request(
    prompt: str | Sequence[int], sampling: SamplingParams, options: Mapping[str, Any], opened: LlamaOptions
) -> CompletionRequest:
    """A completion by the keywords of create_completion."""
    return CompletionRequest(
        prompt=prompt,
        logprobs=options["logprobs"],
        suffix=options["suffix"],
        suffix_first=opened.spm_infill,
        prompt_logprobs=options["echo"] and options["logprobs"] is not None,
        **_shared(sampling, options, opened),
    )


def chat_request(
    template: str,
    sampling: SamplingParams,
    tools: tuple[Mapping[str, Any], ...],
    tool_choice: Any,
    options: Mapping[str, Any],
    opened: LlamaOptions,
) -> ChatRequest:
    """A chat by the keywords of create_chat_completion."""
    return ChatRequest(
        messages=usable_messages(options["messages"]),
        template=template,
        tools=tools,
        tool_choice=tool_choice_of(usable_choice(tool_choice, tools)),
        parallel_tool_calls=options["parallel_tool_calls"] is not False,
        response_format=options["response_format"],
        logprobs=(options["top_logprobs"] or 0) if options["logprobs"] else None,
        chat_template_kwargs=options["chat_template_kwargs"] or {},
        **{name: options[name] for name in ("enable_thinking", "reasoning_budget", "reasoning_effort")},
        **_shared(sampling, options, opened),
    )
