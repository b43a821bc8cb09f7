"""llama-cpp-python's chat handlers: callables by format name, including the model's own templates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import ConfigError
from ..text.chat_formats import CHATML, FORMATS
from .formatter import ChatFormatter, TemplateHandler, chat_formatter_to_chat_completion_handler
from .internals import absent

# llama-cpp-python's handlers of vision models
VISION_HANDLERS = """Llava15 Llava16 MTMD Gemma4 Obsidian Moondream NanoLlava Llama3VisionAlpha MiniCPMv26
    Qwen25VL"""


class ChatHandler(Protocol):
    """Answers a conversation: a dict, or an iterator of chunks with stream=True."""

    def __call__(self, *, llama: Any, messages: Any, **kwargs: Any) -> Any: ...


class LlamaChatCompletionHandlerNotFoundException(ConfigError):
    """No handler has that name."""


class _OwnCalls(TemplateHandler):
    """Handler for formats with unsupported tool-call marks: uses the model's own template, with one warning."""

    def __init__(self, name: str) -> None:
        super().__init__(CHATML.template, CHATML.stop)
        self.name = name

    def __call__(self, *, llama: Any, messages: Any, **kwargs: Any) -> Any:
        own = llama._chat_handlers.get("chat_template.default")
        instead = "the model's own template" if own is not None else "ChatML"
        warnings.warn(f"chat_format {self.name!r}: tools are called as in {instead}", stacklevel=3)
        if own is not None:
            return own(llama=llama, messages=messages, **kwargs)
        return super().__call__(llama=llama, messages=messages, **kwargs)


# As in llama-cpp-python, shared by all models; users add to it with `register_chat_completion_handler`.
_REGISTRY: dict[str, ChatHandler] = {
    name: TemplateHandler(chat_format.template, chat_format.stop) for name, chat_format in FORMATS.items()
}
# tools are described in the system message, as for every template without tools
_REGISTRY["chatml-function-calling"] = _REGISTRY["chatml"]
_REGISTRY |= {name: _OwnCalls(name) for name in ("functionary", "functionary-v1", "functionary-v2")}


class LlamaChatCompletionHandlerRegistry:
    """The registered handlers, shared by all objects of this class."""

    @property
    def _chat_handlers(self) -> dict[str, ChatHandler]:
        return _REGISTRY

    def register_chat_completion_handler(
        self, name: str, chat_handler: ChatHandler, overwrite: bool = False
    ) -> None:
        """Register a handler as chat_format=name.

        Raises:
            ValueError: The name is taken.
        """
        if name in _REGISTRY and not overwrite:
            raise ValueError(
                f"a chat handler named {name!r} is already registered; overwrite=True replaces it"
            )
        _REGISTRY[name] = chat_handler

    def unregister_chat_handler(self, name: str) -> None:
        """Unregister a handler.

        Raises:
            ValueError: There is none of that name.
        """
        if name not in _REGISTRY:
            raise ValueError(f"no chat handler named {name!r} is registered")
        del _REGISTRY[name]

    def get_chat_completion_handler_by_name(self, name: str) -> ChatHandler:
        """The handler of a format.

        Raises:
            LlamaChatCompletionHandlerNotFoundException: There is none of that name; it lists the known ones.
        """
        if name not in _REGISTRY:
            raise LlamaChatCompletionHandlerNotFoundException(
                f"Invalid chat handler: {name} (valid formats: {sorted(_REGISTRY)} and the model file's own templates)"
            )
        return _REGISTRY[name]


def register_chat_completion_handler(name: str) -> Callable[[ChatHandler], ChatHandler]:
    """Decorator that makes a handler known as chat_format=name.

    Raises:
        ValueError: The name is taken.
    """

    def decorate(handler: ChatHandler) -> ChatHandler:
        LlamaChatCompletionHandlerRegistry().register_chat_completion_handler(name, handler)
        return handler

    return decorate


def register_chat_format(name: str) -> Callable[[ChatFormatter], ChatFormatter]:
    """Decorator that makes a formatter known as chat_format=name.

    Raises:
        ValueError: The name is taken.
    """

    def decorate(formatter: ChatFormatter) -> ChatFormatter:
        register_chat_completion_handler(name)(chat_formatter_to_chat_completion_handler(formatter))
        return formatter

    return decorate


def get_chat_completion_handler(name: str) -> ChatHandler:
    """The handler of a format.

    Raises:
        LlamaChatCompletionHandlerNotFoundException: There is none of that name; it lists the known ones.
    """
    return LlamaChatCompletionHandlerRegistry().get_chat_completion_handler_by_name(name)


def guess_chat_format_from_gguf_metadata(metadata: dict[str, str]) -> str | None:
    """The name of the format whose template a file carries, word for word; None for all others."""
    source = metadata.get("tokenizer.chat_template")
    return next((name for name, known in FORMATS.items() if known.template == source), None)


_NO_PICTURES = "there is no image encoder here; leave chat_handler and clip_model_path away, images then become a line of text"
_VISION = [f"{name}ChatHandler" for name in VISION_HANDLERS.split()]
VISION: dict[str, type] = {name: absent(name, _NO_PICTURES) for name in _VISION}
VISION["Llama3VisionAlpha"] = VISION["Llama3VisionAlphaChatHandler"]
