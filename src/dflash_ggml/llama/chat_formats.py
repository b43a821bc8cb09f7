"""The chat formats as functions of `llama_cpp.llama_chat_format`: format_llama2, format_chatml, ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..text.chat_formats import FORMATS, ChatFormat
from ..text.template import ChatTemplate
from .formatter import ChatFormatterResponse, plain_rows


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
