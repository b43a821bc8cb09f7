"""Compiled chat templates: the model's own, and those sent with requests."""

from __future__ import annotations

from functools import lru_cache

from ..errors import ConfigError
from ..text.template import ChatTemplate
from ..text.tokenizer import Tokenizer

N_KEPT = 16  # most compiled templates of requests


class Templates:
    """Compiled templates by their source, for one vocabulary; thread-safe.

    Args:
        source: The default template (None: the vocabulary's own).
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._kept = lru_cache(N_KEPT)(self._compile)
        source = source or tokenizer.chat_template
        self._default = self._compile(source) if source else None

    @property
    def source(self) -> str | None:
        """The default template's source, if there is one."""
        return None if self._default is None else self._default[0].source

    def of(self, source: str | None) -> tuple[ChatTemplate, tuple[int, ...]]:
        """A template and the two tokens that open its answers; none if the first is not a control token.

        Raises:
            ConfigError: The template does not compile, or there is no default.
        """
        if source is None or (self._default is not None and source == self._default[0].source):
            if self._default is None:
                raise ConfigError(
                    "messages: the model file has no chat template; --chat-template and --chat-template-file give one, or use a "
                    "plain completion"
                )
            return self._default
        return self._kept(source)

    def _compile(self, source: str) -> tuple[ChatTemplate, tuple[int, ...]]:
        tokenizer = self._tokenizer
        bos, eos = (
            "" if token is None else tokenizer.tokens[token] for token in (tokenizer.bos_id, tokenizer.eos_id)
        )
        template = ChatTemplate(source, bos_token=bos, eos_token=eos)
        _ = template.renders  # fail at start, not in the first request
        header = tokenizer.encode(template.generation_header())
        return template, tuple(header[:2]) if header and tokenizer.is_control(header[0]) else ()
