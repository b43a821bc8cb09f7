"""Prompts of requests: rendered and tokenised once, in any thread, without waiting for the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..text import harmony
from ..text.chat_parser import ReasoningMode, reasoning_at_start
from ..text.pieces import PIECE
from ..text.prompt_selection import Choice, LexicalScorer, PromptSelector, Selection
from ..text.roles import fit
from ..text.template import last_thought, normalise_messages
from ..text.tokenizer import Tokenizer, TooManyTokens
from ..text.tools import NamedTool, check_tools, with_generic_tool_prompt
from .requests import ChatRequest, CompletionRequest
from .templates import Templates

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with its prompt, as plain data.

    Attributes:
        text: The rendered conversation, or the text before a completion.
        boundaries: Positions in ids at which messages start.
        first_answer: Position at which the assistant's first message starts.
        reasoning: Whether the text ends inside an open think block, and whether that is begun.
        selection: How the prompt was shortened to ids; None if it was not.
    """

    request: ChatRequest | CompletionRequest
    text: str
    ids: tuple[int, ...]
    boundaries: tuple[int, ...] = ()
    first_answer: int = 0
    reasoning: ReasoningMode = "closed"
    selection: Selection | None = None

    @property
    def choice(self) -> Choice | None:
        """The pending selection of a prompt scorer; until it is made ids are the whole prompt."""
        return None if self.selection is None else self.selection.choice

    @property
    def read_n(self) -> int:
        """Upper bound of the prompt's tokens to prefill."""
        return len(self.ids) if self.selection is None else self.selection.kept_n

    @property
    def sent_n(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.ids) if self.selection is None else self.selection.sent_n


class Prompts:
    """Makes prompts for one vocabulary; thread-safe.

    Args:
        thinking, variables, reasoning_budget: Defaults for chats.
        prompt_keep: Smallest share of a prompt that a request may keep; None: prompts are never shortened.
        scorer: Name of the scorer model; None for lexical scoring.

    Raises:
        ConfigError: The package for lexical scoring is not installed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Templates,
        thinking: bool | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
        reasoning_budget: int | None = None,
        prompt_keep: float | None = None,
        scorer: str | None = None,
    ) -> None:
        if prompt_keep is not None and not 0 < prompt_keep <= 1:
            raise ConfigError(f"prompt_keep: expected more than 0 and at most 1, got {prompt_keep}")
        self._tokenizer = tokenizer
        self._templates = templates
        self._thinking, self._budget = thinking, reasoning_budget
        self._variables = _template_variables(variables)
        self._least_keep = prompt_keep
        self._selector = PromptSelector(tokenizer)
        self._scorer, self._by_words = (
            scorer,
            None if scorer or prompt_keep is None else LexicalScorer(tokenizer),
        )

    @property
    def scorer(self) -> str | None:
        """What scores prompts to shorten them: a model's name, or "lexical"; None if prompts are never shortened."""
        return None if self._least_keep is None else self._scorer or LexicalScorer.name

    def budget(self, request: ChatRequest) -> int | None:
        """The reasoning budget of a request, else the session's; None: given by its effort, if at all."""
        if request.reasoning_budget is not None or request.reasoning_effort is not None:
            return request.reasoning_budget
        return None if self._budget == 0 and request.enable_thinking else self._budget

    def make(self, request: ChatRequest | CompletionRequest, most: int | None = None) -> Prepared:
        """The prompt of a request.

        Args:
            request: A chat or a completion.
            most: Tokens beyond which counting stops.

        Raises:
            ConfigError: The prompt cannot be rendered.
            TooManyTokens: There are more than `most` tokens; raised as soon as that is certain.
        """
        if isinstance(request, ChatRequest):
            return self._chat(request, most)
        return self._completion(request, most)

    def _chat(self, request: ChatRequest, most: int | None) -> Prepared:
        template, header = self._templates.of(request.template)
        schemas, choice = check_tools(request.tools), request.tool_choice
        if isinstance(choice, NamedTool) and choice.name not in schemas:
            raise ConfigError(f"Tool choice '{choice.name}' not found in tools.")
        if choice == "required" and not schemas:
            raise ConfigError("tool_choice: 'required' needs tools")
        messages = normalise_messages(request.messages)
        tools = request.tools if choice != "none" else ()
        if not template.supports_tools:
            messages, tools = with_generic_tool_prompt(messages, tools), ()
        messages = fit(messages, template.renders)
        level: str | None = request.reasoning_effort
        if template.is_harmony:
            level = harmony.EFFORTS.get(level or "", level)
        effort = {} if level is None else {"reasoning_effort": level}
        extra = self._variables | effort | _template_variables(request.chat_template_kwargs)
        ends = {
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
        }
        ends |= {name: extra.pop(name) for name in ends if name in extra}
        asked = False if request.reasoning_budget == 0 else request.enable_thinking
        thinking = False if self.budget(request) == 0 else self._thinking if asked is None else asked
        if thinking is not None and (asked is not None or "enable_thinking" not in extra):
            extra["enable_thinking"] = thinking
            if template.is_harmony and not thinking:  # which cannot do without
                extra.setdefault("reasoning_effort", "low")
        keep = self._keep(request)
        text = template.render(messages, tools=tools, **ends, **extra)
        ids = tuple(self._tokenizer.encode(text, most=_sent(most, keep)))
        if not ids:
            raise ConfigError(
                "messages: the chat template made no prompt of them, there is nothing to answer"
            )
        selection = None if request.prompt_keep is None else self._select(request, text, ids, keep, messages)
        if selection is not None and selection.choice is None:
            ids = selection.ids
        boundaries, first = _starts(ids, header)
        if template.is_harmony:
            reasoning = harmony.reasoning_at_start(text)
        else:
            reasoning = reasoning_at_start(text, template.tags)
        if ends["continue_final_message"] and (last_thought(messages[-1], template.tags) or "").strip():
            reasoning = "begun"
        return Prepared(request, text, ids, boundaries, first, reasoning, selection)

    def _keep(self, request: ChatRequest | CompletionRequest) -> float | None:
        """The share of the prompt to prefill; None for all of it."""
        if request.prompt_keep is None or self._least_keep is None:
            return None
        return max(request.prompt_keep, self._least_keep)

    def _select(
        self,
        request: ChatRequest | CompletionRequest,
        text: str,
        ids: tuple[int, ...],
        keep: float | None,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> Selection:
        """The selected part of a prompt, or a pending selection for a scorer model."""
        if keep is None:
            return Selection(
                ids, ((0, len(ids)),), len(ids), 0.0, "the server was started without --prompt-keep"
            )
        if self._scorer is not None and request.prompt_scorer != "lexical":
            return self._selector.select(self._scorer, text, ids, keep, messages)
        if self._by_words is None:
            self._by_words = LexicalScorer(self._tokenizer)
        return self._selector.select(self._by_words, text, ids, keep, messages)

    def settled(self, prepared: Prepared) -> Prepared | None:
        """The prompt, if its selection is known from another request; None if it has still to be made."""
        assert prepared.selection is not None
        selection = self._selector.settled(prepared.ids, prepared.selection)
        return None if selection is None else self._with(prepared, selection)

    def chosen(self, prepared: Prepared, scores: np.ndarray | None, score_ms: float) -> Prepared:
        """A prompt once its units are scored; see `PromptSelector.chosen`."""
        assert prepared.selection is not None
        return self._with(prepared, self._selector.chosen(prepared.ids, prepared.selection, scores, score_ms))

    def _with(self, prepared: Prepared, selection: Selection) -> Prepared:
        """The prompt reduced to the selected part."""
        request, found = prepared.request, replace(prepared, ids=selection.ids, selection=selection)
        if not isinstance(request, ChatRequest):
            return found
        boundaries, first = _starts(selection.ids, self._templates.of(request.template)[1])
        return replace(found, boundaries=boundaries, first_answer=first)

    def _completion(self, request: CompletionRequest, most: int | None) -> Prepared:
        tokenizer, prompt = self._tokenizer, request.prompt
        if request.prompt_keep is not None and request.prompt_logprobs:
            raise ConfigError(
                "prompt_keep: leave it out, log-probabilities of the whole prompt are requested"
            )
        keep = self._keep(request)
        most = _sent(most, keep)
        bos = tokenizer.bos_ids
        if not isinstance(prompt, str):
            begins = bool(prompt) and isinstance(prompt[0], str) and request.suffix is None
            ids = bos[:] if begins else []
            for part in prompt:
                ids += tokenizer.encode(part, most=most) if isinstance(part, str) else [int(part)]
                _check(ids, most)
            known = (i for i in ids if 0 <= i < tokenizer.n_vocab)
            text = tokenizer.decode_bytes(known).decode("utf-8", "ignore")
        elif request.suffix is None:
            ids, text = bos + tokenizer.encode(prompt, most=most), prompt
        else:
            ids, text = tokenizer.encode(prompt, special=False, most=most), prompt
        if request.suffix is not None:
            found = [tokenizer.id_of(f"<|fim_{name}|>") for name in ("prefix", "suffix", "middle")]
            marks = [i for i in found if i is not None]
            if len(marks) < 3:
                raise ConfigError("suffix: this model has no fill-in-the-middle tokens")
            behind = tokenizer.encode(request.suffix, special=False, most=most)
            before, after = [marks[0], *ids], [marks[1], *behind]
            ids = self._files(request.files, most) + bos
            ids += (after + before if request.suffix_first else before + after) + [marks[2]]
        if not ids:
            raise ConfigError("prompt: it is empty, at least one token is needed")
        if request.prompt_keep is None or request.suffix is not None:
            return Prepared(request, text, tuple(ids))
        selection = self._select(request, tokenizer.decode(ids, special=True), tuple(ids), keep)
        kept = tuple(ids) if selection.choice else selection.ids
        return Prepared(request, text, kept, selection=selection)

    def _files(self, files: Sequence[Mapping[str, str]], most: int | None) -> list[int]:
        """Other files of a project, in the format of fill-in-the-middle models; marks that the vocabulary lacks are left out."""
        encode, found = self._tokenizer.encode, self._tokenizer.id_of
        repository, separator = (
            [i] if (i := found(f"<|{name}|>")) is not None else [] for name in ("repo_name", "file_sep")
        )
        ids = repository + encode("project\n", special=False) if files and repository else []
        for file in files:
            text = f"{file['filename']}\n{file['text']}\n"
            ids += separator + encode(text, special=False, most=most)
            _check(ids, most)
        return ids + separator if files else ids


def _starts(ids: tuple[int, ...], header: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Positions at which messages start, and that of the assistant's first. header: start of the assistant's messages."""
    found = tuple(i for i, token in enumerate(ids) if header[:1] == (token,))
    return found, next((i for i in found if ids[i : i + len(header)] == header), 0)


def _sent(most: int | None, keep: float | None) -> int | None:
    """Longest prompt of which at most so many tokens are kept."""
    return most if most is None or keep is None else math.ceil(most / keep)


def _check(ids: Sequence[int], most: int | None) -> None:
    """Raise TooManyTokens for a text of several parts under the conditions of a single part."""
    if most is not None and len(ids) > most + PIECE:
        raise TooManyTokens(len(ids))


def _template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for a template. Raises ConfigError for reserved or invalid names."""
    for name, value in given.items():
        if name in ("messages", "tools", "self"):
            raise ConfigError(f"chat_template_kwargs.{name}: not a variable of its own; leave it out")
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"chat_template_kwargs: {name!r:.80} is not a name that a template can use")
        if name in ("add_generation_prompt", "continue_final_message") and not isinstance(value, bool):
            raise ConfigError(f"chat_template_kwargs.{name}: must be true or false")
    return dict(given)
