"""Requests of a session: typed plain data with every supported parameter and no other.

Requests can be pickled or sent as JSON to an engine in another process. Callables are not part of a request: they
travel beside it in `Hooks`, which only a session in the same process accepts (docs/decisions/0006).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..config import Mode
from ..decode.sampling import SamplingParams
from ..errors import ConfigError
from ..text.grammar_spec import GrammarSpec
from ..text.tools import NamedTool, ToolChoice
from .thinking import Effort, check_thinking

PromptScorer = Literal["lexical"]

__all__ = ["ChatRequest", "CompletionRequest", "GenerationOptions", "GrammarSpec", "NamedTool", "ToolChoice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Options of completions and chats.

    Attributes:
        max_tokens: None fills the context, 0 only prefills the prompt.
        logprobs: None for none, else how many alternatives per token (0 is allowed).
        mode, budget: Override the engine's speculation for this request.
        return_steps: Emit a StepReport for every step.
        return_tokens: Deltas have their tokens also without logprobs.
        min_tokens: The end-of-generation token is masked before so many tokens.
        ignore_eos: It is always masked (a grammar still ends the answer).
        stop_token_ids: Further tokens that end the answer, and are not shown.
        penalize_prompt: Penalties count the prompt too, not only generated tokens.
        prompt_keep: The share of the prompt to prefill, lossy (see `text.prompt_selection`); None: all of it.
        prompt_scorer: "lexical" overrides a scorer model.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None
    logprobs: int | None = None
    mode: Mode | None = None
    budget: int | None = None
    return_steps: bool = False
    return_tokens: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    penalize_prompt: bool = True
    prompt_keep: float | None = None
    prompt_scorer: PromptScorer | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not all(isinstance(s, str) for s in self.stop):
            raise ConfigError("stop: expected a sequence of strings")
        if self.mode is not None and self.mode not in get_args(Mode):
            raise ConfigError(f"mode: {self.mode!r} is none of {', '.join(get_args(Mode))}")
        if self.budget is not None and self.budget < 1:
            raise ConfigError(f"budget: expected 1 or more, got {self.budget}")
        if self.logprobs is not None and self.logprobs < 0:
            raise ConfigError(f"logprobs: expected 0 or more, got {self.logprobs}")
        if self.prompt_keep is not None and not 0 < self.prompt_keep <= 1:
            raise ConfigError(f"prompt_keep: expected more than 0 and at most 1, got {self.prompt_keep}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(GenerationOptions):
    """Continue a text, a token list, or a list of tokens and texts.

    Attributes:
        suffix: Fill in between prompt and suffix.
        suffix_first: The suffix comes first in the prompt.
        files: Other files in front of both, `filename` and `text`.
        prompt_logprobs: Also report the prompt's tokens; the prefix cache is then not used.
    """

    prompt: str | Sequence[int | str]
    suffix: str | None = None
    suffix_first: bool = False
    files: tuple[Mapping[str, str], ...] = ()
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationOptions):
    """Answer a conversation; messages and tools in the shapes of OpenAI's chat completions.

    Stop strings and the grammar bind the visible text only, not the reasoning.

    Attributes:
        parallel_tool_calls: False ends the answer after one call.
        template: Source text of a chat template instead of the session's own.
        enable_thinking: None: the session's choice, else the template's.
        reasoning_budget: Tokens of reasoning before its end is forced, -1 without a limit; None: by
            `reasoning_effort` (see `session.thinking`), else the session's.
            split_reasoning: False leaves reasoning in the text; None: the session's choice.
            continue_final_message: The last message is the assistant's and is to be continued.
            add_generation_prompt: False: the prompt ends after the last message, without opening the assistant's.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    reasoning_budget: int | None = None
    reasoning_effort: Effort | None = None
    split_reasoning: bool | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    def __post_init__(self) -> None:
        GenerationOptions.__post_init__(self)
        check_thinking(self.reasoning_budget, self.reasoning_effort)
