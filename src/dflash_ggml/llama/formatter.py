"""llama-cpp-python's chat formatters, and chat handlers made of them.

A formatter converts messages to a prompt and stop strings; a handler answers with that prompt. `FUNCTION_NAMES`: the chat formats
as functions of `llama_cpp.llama_chat_format` (format_llama2, format_chatml, ...).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, Protocol

from ..errors import ConfigError
from ..text.chat_formats import FORMATS, ChatFormat
from ..text.template import ChatTemplate, content_text
from .state import StoppingCriteriaList
from .tokenizer import auto_tokenizer

P = ParamSpec("P")
# template for a prompt made by a formatter, passed as the variable `prompt`
FORMATTED = "{{ formatted_prompt }}"


@dataclass
class ChatFormatterResponse:
    """Result of a formatter.

    Attributes:
        prompt: The text.
        stop: Strings that end the answer.
        stopping_criteria: Whether the answer ends after a token.
        added_special: Whether the prompt includes BOS.
    """

    prompt: str
    stop: str | list[str] | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    added_special: bool = False


class ChatFormatter(Protocol):
    """A function from messages to a prompt."""

    def __call__(self, *, messages: Any, **kwargs: Any) -> ChatFormatterResponse: ...


def plain_rows(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with plain texts and common roles."""
    rows = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(f"messages[{i}]: expected an object with role and content")
        role = {"developer": "system", "tool": "tool", "function": "tool"}.get(str(message.get("role")))
        role = role or (message["role"] if message.get("role") in ("system", "assistant") else "user")
        text = content_text(message.get("content"), f"messages[{i}].content")
        rows.append({**message, "role": role, "content": text})
    return rows


class Jinja2ChatFormatter:
    """A formatter that renders a chat template.

    Args:
        template: Source text of the template.
        eos_token: Text of the token that ends an answer.
        bos_token: Text of the token that begins a prompt.
        add_generation_prompt: Open the assistant's message at the end.
        stop_token_ids: Tokens that end an answer too.

    Raises:
        ConfigError: The template does not compile.
    """

    def __init__(
        self,
        template: str,
        eos_token: str,
        bos_token: str,
        add_generation_prompt: bool = True,
        stop_token_ids: list[int] | None = None,
    ) -> None:
        self.template = template
        self.eos_token = eos_token
        self.bos_token = bos_token
        self.add_generation_prompt = add_generation_prompt
        self.stop_token_ids = None if stop_token_ids is None else set(stop_token_ids)
        self._compiled = ChatTemplate(template, bos_token=bos_token, eos_token=eos_token)

    def __call__(
        self,
        *,
        messages: Any,
        functions: Any = None,
        function_call: Any = None,
        tools: Any = None,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> ChatFormatterResponse:
        """The prompt of a conversation.

        Raises:
            ConfigError: The template refuses the conversation; with the template's message.
        """
        named = {"functions": functions, "function_call": function_call, "tool_choice": tool_choice}
        prompt = self._compiled.render(
            messages,
            tools=tools or (),
            add_generation_prompt=self.add_generation_prompt,
            **{**named, **kwargs},
        )
        ids = self.stop_token_ids
        criteria = None if ids is None else StoppingCriteriaList([lambda tokens, row: int(tokens[-1]) in ids])
        return ChatFormatterResponse(prompt, [self.eos_token], criteria, added_special=True)

    def to_chat_handler(self) -> Callable[..., Any]:
        """A chat handler that answers with this template."""
        formatted = chat_formatter_to_chat_completion_handler(self)
        if type(self) is not Jinja2ChatFormatter or not self.add_generation_prompt:
            return formatted
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        native = TemplateHandler(self.template, stop=(self.eos_token,), variables=tokens)

        def handler(*, llama: Any, messages: Any, **kwargs: Any) -> Any:
            # tokens that always end an answer need no check
            ends = (self.stop_token_ids or set()) <= llama._model.tokenizer.eog_ids
            return (native if ends else formatted)(llama=llama, messages=messages, **kwargs)

        handler.only_prompts = True  # type: ignore[attr-defined]
        return handler


def chat_formatter_to_chat_completion_handler(chat_formatter: ChatFormatter) -> Callable[..., Any]:
    """A chat handler for Llama(chat_handler=...), with a formatter's prompts.

    Tools are only described to the model if the formatter renders them.
    """

    def handler(*, llama: Any, messages: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.get(name) for name in ("functions", "function_call", "tools", "tool_choice")}
        more = dict(kwargs.pop("chat_template_kwargs", None) or {})
        made = chat_formatter(messages=messages, **given, **more)
        tokenizer = llama._model.tokenizer
        bos = "" if made.added_special else "".join(tokenizer.tokens[i] for i in tokenizer.bos_ids)
        return llama._chat(
            FORMATTED,
            [{"role": "user", "content": ""}],  # the formatter has read them, however they look
            stop=[*listed(kwargs.pop("stop", None)), *listed(made.stop)],
            stopping_criteria=made.stopping_criteria,
            chat_template_kwargs={"formatted_prompt": bos + made.prompt},
            **kwargs,
        )

    handler.only_prompts = True  # type: ignore[attr-defined]
    return handler


def hf_tokenizer_config_to_chat_formatter(
    tokenizer_config: dict[str, Any], add_generation_prompt: bool = True
) -> ChatFormatter:
    """A formatter from a tokenizer_config.json.

    A template that does not use `add_generation_prompt` gets an empty message of the assistant at the end instead.

    Raises:
        ConfigError: It lacks template or tokens.
    """
    for key in ("chat_template", "bos_token", "eos_token"):
        if not isinstance(tokenizer_config.get(key), str):
            raise ConfigError(f"tokenizer_config: {key!r} is missing or no text")
    source, bos, eos = (tokenizer_config[key] for key in ("chat_template", "bos_token", "eos_token"))
    template = ChatTemplate(source, bos_token=bos, eos_token=eos)
    empty_turn = add_generation_prompt and "add_generation_prompt" not in source

    def format_tokenizer_config(messages: Any, **kwargs: Any) -> ChatFormatterResponse:
        rows = [*messages, {"role": "assistant", "content": ""}] if empty_turn else list(messages)
        tools = kwargs.pop("tools", None) or ()
        prompt = template.render(rows, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)
        return ChatFormatterResponse(prompt, [eos, bos], added_special=True)

    return format_tokenizer_config


def hf_autotokenizer_to_chat_formatter(
    pretrained_model_name_or_path: str | os.PathLike[str],
) -> ChatFormatter:
    """A formatter with the chat template of a transformers tokenizer, by name or path.

    Raises:
        ImportError: The transformers package is missing.
    """
    tokenizer = auto_tokenizer("hf_autotokenizer_to_chat_formatter", pretrained_model_name_or_path)

    def format_autotokenizer(messages: Any, **kwargs: Any) -> ChatFormatterResponse:
        kwargs.setdefault("add_generation_prompt", True)
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        return ChatFormatterResponse(str(prompt), tokenizer.eos_token, added_special=True)

    return format_autotokenizer


def _handler_maker(make: Callable[P, ChatFormatter]) -> Callable[P, Callable[..., Any]]:
    """Makes a handler where the other makes a formatter."""

    @wraps(make)
    def handler(*args: P.args, **kwargs: P.kwargs) -> Callable[..., Any]:
        return chat_formatter_to_chat_completion_handler(make(*args, **kwargs))

    return handler


hf_tokenizer_config_to_chat_completion_handler = _handler_maker(hf_tokenizer_config_to_chat_formatter)
hf_autotokenizer_to_chat_completion_handler = _handler_maker(hf_autotokenizer_to_chat_formatter)


class TemplateHandler:
    """A chat handler that answers with one template.

    Args:
        template: Source text of the template.
        stop: Strings that end an answer.
        variables: Variables that the template sees.
    """

    only_prompts = True  # what `_chat` gives is passed on as it is

    def __init__(
        self, template: str, stop: Sequence[str] = (), variables: Mapping[str, Any] | None = None
    ) -> None:
        self.template = template
        self.stop = tuple(stop)
        self.variables = dict(variables or {})

    def __call__(self, *, llama: Any, messages: Any, **kwargs: Any) -> Any:
        if self.stop:
            kwargs["stop"] = [*listed(kwargs.get("stop")), *self.stop]
        if self.variables:
            given = kwargs.get("chat_template_kwargs") or {}
            kwargs["chat_template_kwargs"] = {**self.variables, **given}
        return llama._chat(self.template, messages, **kwargs)


def listed(stop: str | Sequence[str] | None) -> list[str]:
    """Stop strings as a list."""
    return [stop] if isinstance(stop, str) else list(stop or ())


def formatted(
    chat_format: ChatFormat, messages: Sequence[Mapping[str, Any]], **_: Any
) -> ChatFormatterResponse:
    """The prompt of a conversation, and the strings that end its answer.

    Raises:
        ConfigError: `messages` is not a list of messages.
    """
    prompt = ChatTemplate(chat_format.template).render(plain_rows(messages))
    return ChatFormatterResponse(prompt, stop=list(chat_format.stop) or None)


FUNCTION_NAMES = {
    "format_"
    + {"llama-2": "llama2", "llama-3": "llama3", "baichuan-2": "baichuan2"}.get(
        name, name.replace("-", "_")
    ): partial(formatted, chat_format)
    for name, chat_format in FORMATS.items()
} | {"format": partial(formatted, FORMATS["vicuna"])}
