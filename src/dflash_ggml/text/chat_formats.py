"""Named chat formats of llama-cpp-python and llama.cpp, as templates of our own.

Turn marks are those published with each model. Unlike llama-cpp-python's, they add no default system message, and every system
message is rendered in its position.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

Around = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A format of `chat_formats.json`: the marks before and after each role's text, and the opening of the answer.

    Attributes:
        stop: Strings that end an answer.
        joins: Whether a system message is part of the following user turn.
    """

    system: Around
    user: Around
    assistant: Around
    opening: str
    stop: tuple[str, ...] = ()
    joins: bool = False

    @property
    def template(self) -> str:
        """Source of the chat template; tool results are rendered as user messages."""
        around = {"system": self.system, "user": self.user, "tool": self.user, "assistant": self.assistant}
        goes_on = "loop.previtem and loop.previtem.role == 'system' and m.role != 'assistant'"
        before = f"('' if {goes_on} else around[m.role][0])" if self.joins else "around[m.role][0]"
        return (
            f"{{%- set around = {around!r} -%}}"
            f"{{%- for m in messages -%}}{{{{ {before} + m.content + around[m.role][1] }}}}{{%- endfor -%}}"
            f"{{%- if add_generation_prompt -%}}{{{{ {self.opening!r} }}}}{{%- endif -%}}"
        )


def _read(fields: Mapping[str, Any]) -> ChatFormat:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return ChatFormat(**values)


_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
FORMATS = {name: _read(fields) for name, fields in _DATA.items()}
CHATML = FORMATS["chatml"]


def named_template(name: str) -> str:
    """The template of a format, by its name here or in llama.cpp (`llama3`).

    Raises:
        ConfigError: The name is unknown; the message lists the known ones.
    """
    found = {key.replace("-", ""): form for key, form in FORMATS.items()}.get(name.replace("-", ""))
    if found is None:
        raise ConfigError(
            f"{name!r} is not a known chat format: give the template itself, or one of {', '.join(FORMATS)}"
        )
    return found.template
