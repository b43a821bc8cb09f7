"""Adaptation of conversations to a template: one system message at the start, and only roles that it renders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

KNOWN = ("system", "user", "assistant", "tool")
_MARK = "qzxj"


@dataclass(frozen=True, slots=True)
class Renders:
    """Capabilities of a template with respect to roles.

    Attributes:
        system, system_later: It renders a system message at the start, and after others.
        repeated: It renders two consecutive user messages.
        without_user: It renders a conversation without user messages.
        role: Whether it renders a role of this name.
    """

    system: bool
    system_later: bool
    repeated: bool
    without_user: bool
    role: Callable[[str], bool]


def probe(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> Renders:
    """Determine the capabilities by rendering short conversations; `render` raises ConfigError if the template refuses."""

    def shows(*rows: tuple[str, str]) -> bool:
        try:
            text = render([{"role": role, "content": content} for role, content in rows])
        except ConfigError:
            return False
        return all(content in text for _, content in rows)

    asked, answered = ("user", f"{_MARK} one"), ("assistant", f"{_MARK} two")
    return Renders(
        system=shows(("system", f"{_MARK} three"), asked),
        system_later=shows(("system", f"{_MARK} three"), asked, answered, ("system", f"{_MARK} four"), asked),
        repeated=shows(asked, ("user", f"{_MARK} five")),
        without_user=shows(("system", f"{_MARK} three")),
        role=lambda name: shows(asked, (name, f"{_MARK} six")),
    )


def fit(messages: Sequence[Mapping[str, Any]], renders: Renders) -> list[dict[str, Any]]:
    """The conversation in roles that the template renders; messages as `normalise_messages` returns them.

    System messages at the start become one. Later messages that the template would refuse or drop become user text
    between tags with the role's name, appended to the previous message if that is the user's or a tool's: a separate
    message would end a turn with tool calls.
    """
    n = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    head, rest = [dict(m) for m in messages[:n]], messages[n:]
    if n > 1:
        head = [{"role": "system", "content": _joined(*(m["content"] for m in head))}]
    rows: list[dict[str, Any]] = head
    silent = not renders.without_user and all(m["role"] != "user" for m in rest)
    if head and (silent or not renders.system):
        rows = [{"role": "user", "content": head[0]["content"]}]
    for message in rest:
        row, last = dict(message), rows[-1] if rows else {"role": ""}
        if _is_foreign(row["role"], renders):
            row = {"role": "user", "content": f"<{row['role']}>\n{row['content']}\n</{row['role']}>"}
            joins = last["role"] in ("user", "tool")
        else:
            joins = row["role"] == last["role"] == "user" and not renders.repeated
        if joins:
            rows[-1] = {**last, "content": _joined(last["content"], row["content"])}
        else:
            rows.append(row)
    return rows


def _is_foreign(role: str, renders: Renders) -> bool:
    if role == "system":
        return not renders.system_later
    return role not in KNOWN and not renders.role(role)


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
