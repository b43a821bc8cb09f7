"""Keywords of `Llama`'s methods as in llama-cpp-python: the single list, with order, types and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ..decode.sampling_params import OPTIONS

if TYPE_CHECKING:
    from ..engine.step import Step
    from ..text.grammar import LlamaGrammar
    from .state import LogitsProcessorList, StoppingCriteriaList

P = ParamSpec("P")
R = TypeVar("R")

# Options whose default is overridden by the model file's recommendation.
RECOMMENDABLE = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")


class LeftOutFloat(float):
    """A default value that was not passed explicitly: behaves like the plain number, with a distinct class."""


class LeftOutInt(int):
    """As `LeftOutFloat`, for integers."""


# keywords of the methods; those after `*` are this package's own


def create_completion(
    self: Any,
    prompt: str | Sequence[int] | Sequence[str],
    suffix: str | None = None,
    max_tokens: int | None = 16,
    temperature: float = LeftOutFloat(0.8),
    top_p: float = LeftOutFloat(0.95),
    min_p: float = LeftOutFloat(0.05),
    typical_p: float = 1.0,
    logprobs: int | None = None,
    echo: bool = False,
    stop: str | list[str] | None = None,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repeat_penalty: float = LeftOutFloat(1.0),
    top_k: int = LeftOutInt(40),
    stream: bool = False,
    seed: int | None = None,
    tfs_z: float = 1.0,
    mirostat_mode: int = 0,
    mirostat_tau: float = 5.0,
    mirostat_eta: float = 0.1,
    model: str | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    logits_processor: LogitsProcessorList | None = None,
    grammar: LlamaGrammar | None = None,
    logit_bias: Mapping[int, float] | None = None,
    *,
    mode: str | None = None,
    budget: int | None = None,
    on_step: Callable[[Step], None] | None = None,
    n: int | None = None,
) -> None:
    """Keywords of `Llama.create_completion`."""


def create_chat_completion(
    self: Any,
    messages: list[Mapping[str, Any]],
    functions: list[Mapping[str, Any]] | None = None,
    function_call: str | Mapping[str, Any] | None = None,
    tools: list[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    temperature: float = LeftOutFloat(0.2),
    top_p: float = LeftOutFloat(0.95),
    top_k: int = LeftOutInt(40),
    min_p: float = LeftOutFloat(0.05),
    typical_p: float = 1.0,
    stream: bool = False,
    stop: str | list[str] | None = None,
    seed: int | None = None,
    response_format: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repeat_penalty: float = LeftOutFloat(1.0),
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
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    enable_thinking: bool | None = None,
    reasoning_budget: int | None = None,
    reasoning_effort: str | None = None,
    parallel_tool_calls: bool | None = None,
    mode: str | None = None,
    budget: int | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> None:
    """Keywords of `Llama.create_chat_completion`."""


def generate(
    self: Any,
    tokens: Sequence[int],
    top_k: int = LeftOutInt(40),
    top_p: float = LeftOutFloat(0.95),
    min_p: float = LeftOutFloat(0.05),
    typical_p: float = 1.0,
    temp: float = LeftOutFloat(0.8),
    repeat_penalty: float = LeftOutFloat(1.0),
    reset: bool = True,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    tfs_z: float = 1.0,
    mirostat_mode: int = 0,
    mirostat_tau: float = 5.0,
    mirostat_eta: float = 0.1,
    penalize_nl: bool = True,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    grammar: LlamaGrammar | None = None,
) -> None:
    """Keywords of `Llama.generate`."""


def sample(
    self: Any,
    top_k: int = LeftOutInt(40),
    top_p: float = LeftOutFloat(0.95),
    min_p: float = LeftOutFloat(0.05),
    typical_p: float = 1.0,
    temp: float = LeftOutFloat(0.8),
    repeat_penalty: float = LeftOutFloat(1.0),
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    tfs_z: float = 1.0,
    mirostat_mode: int = 0,
    mirostat_eta: float = 0.1,
    mirostat_tau: float = 5.0,
    penalize_nl: bool = True,
    logits_processor: LogitsProcessorList | None = None,
    grammar: LlamaGrammar | None = None,
    idx: int | None = None,
) -> None:
    """Keywords of `Llama.sample`."""


SIGNATURES = {
    form.__name__: signature(form) for form in (create_completion, create_chat_completion, generate, sample)
}


_DEFAULTS = {name: {p.name: p.default for p in made.parameters.values()} for name, made in SIGNATURES.items()}


def arguments(method: str, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call with all defaults, `self` among them.

    Raises:
        TypeError: They do not match the signature.
    """
    defaults = _DEFAULTS[method]
    found = {**defaults, **dict(zip(defaults, args)), **kwargs}
    is_plain = len(args) <= 2 and not any(name in kwargs for name in tuple(defaults)[: len(args)])
    if is_plain and len(found) == len(defaults) and not any(v is Parameter.empty for v in found.values()):
        return found
    try:
        bound = SIGNATURES[method].bind(*args, **kwargs)  # 50 times slower
    except TypeError as error:
        raise TypeError(f"{method}() {error}") from None
    return {**defaults, **bound.arguments}


def takes(form: Callable[P, None]) -> Callable[[Callable[[Any, dict[str, Any]], R]], Callable[P, R]]:
    """Decorator: a method takes the keywords of `form`, as a dict."""

    def decorate(method: Callable[[Any, dict[str, Any]], R]) -> Callable[P, R]:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = arguments(form.__name__, *args, **kwargs)
            return method(given.pop("self"), given)

        call.__signature__ = SIGNATURES[form.__name__]  # type: ignore[attr-defined]
        call.__annotations__ = {}
        return call

    return decorate


def for_handler(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for a chat handler: all of llama-cpp-python's, and the given ones of this package."""
    known = SIGNATURES["create_chat_completion"].parameters
    own = {name for name, parameter in known.items() if parameter.kind is Parameter.KEYWORD_ONLY}
    return {name: value for name, value in options.items() if value is not None or name not in own}


def sampling_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The sampler's options among a method's keywords."""
    named = {"temperature": options["temp"], **options} if "temp" in options else options
    return {name: named[name] for name in OPTIONS if name in named and name != "seed"}


def settled(options: Mapping[str, Any], recommended: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with omitted and None values replaced by the model file's recommendations, else plain numbers."""

    def one(name: str, value: Any) -> Any:
        if value is None:
            return recommended.get(name)
        is_left_out = isinstance(value, (LeftOutFloat, LeftOutInt))
        return recommended.get(name, value.real) if is_left_out else value

    return {name: one(name, value) for name, value in options.items()}
