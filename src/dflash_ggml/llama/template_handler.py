"""The handler behind a chat template: renders it, and lets the session parse the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
