"""Counter of the two calls that make a prompt: rendering a conversation and tokenising its text."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_ggml.text.template import ChatTemplate
from dflash_ggml.text.tokenizer import Tokenizer


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The list to which every later call adds its name, "render" or "encode"."""
    made: list[str] = []
    for kind, name in ((ChatTemplate, "render"), (Tokenizer, "encode")):
        real = getattr(kind, name)

        def call(self: Any, *args: Any, _real: Any = real, _name: str = name, **k: Any) -> Any:
            made.append(_name)
            return _real(self, *args, **k)

        monkeypatch.setattr(kind, name, call)
    return made
