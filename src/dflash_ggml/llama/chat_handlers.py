"""Chat handlers as llama-cpp-python has them: callables by format name, the model's own templates among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..errors import ConfigError
from ..text.template import CHATML


class ChatHandler(Protocol):
    """Answers a conversation: a dict, or an iterator of chunks with stream=True."""

    def __call__(self, *, llama: Any, messages: Any, **kwargs: Any) -> Any: ...


class TemplateHandler:
    """A handler that renders one template (its source text) and parses the answer natively."""

    def __init__(self, template: str) -> None:
        self.template = template

    def __call__(self, *, llama: Any, messages: Any, **kwargs: Any) -> Any:
        return llama._chat(self.template, messages, **kwargs)


# Registered by users with `register_chat_completion_handler`; as in llama-cpp-python, shared by all models.
_REGISTRY: dict[str, ChatHandler] = {"chatml": TemplateHandler(CHATML)}


def register_chat_completion_handler(name: str) -> Callable[[ChatHandler], ChatHandler]:
    """Decorator that makes a handler known as chat_format=name. Raises ValueError if the name is taken."""

    def decorate(handler: ChatHandler) -> ChatHandler:
        if name in _REGISTRY:
            raise ValueError(f"a chat handler named {name!r} is already registered")
        _REGISTRY[name] = handler
        return handler

    return decorate


def get_chat_completion_handler(name: str) -> ChatHandler:
    """The handler of a format. Raises ConfigError listing the known ones."""
    if name not in _REGISTRY:
        raise ConfigError(
            f"Invalid chat handler: {name} (valid formats: {sorted(_REGISTRY)} and the model file's own templates)"
        )
    return _REGISTRY[name]
