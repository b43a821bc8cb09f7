"""Message content as text: readable parts are joined, others become a line that says what is missing."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection
from typing import Any

from .errors import bad_request
from .notes import Notes

_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
_KINDS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "computer_screenshot": "screenshot",
    "input_audio": "audio",
    "audio": "audio",
    "audio_url": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "document": "document",
    "file": "file",
    "input_file": "file",
    "container_upload": "file",
}
MOST_TEXT = 1 << 20  # bytes of a file to include as text


def content_text(content: Any, where: str, notes: Notes, sep: str = "") -> str:
    """The text of a message's content: a string, None, or a list of parts of any dialect.

    Reasoning parts are left out; see `thoughts`.

    Raises:
        ApiError: A part has no type or an invalid text; the error names it.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise bad_request("expected a string or a list of parts", where)
    texts = (part_text(part, f"{where}[{i}]", notes) for i, part in enumerate(content))
    return sep.join(text for text in texts if text is not None)


def note_role(role: str, roles: Collection[str], where: str, notes: Notes) -> None:
    """Note an unknown role of a message."""
    if role not in roles:
        shown = f"{role[:40]!r} is shown as the chat template shows it, or as the user's words"
        notes.weaken(f"{where}.role", shown)


def thoughts(content: Any) -> str:
    """The reasoning among the parts of an assistant's content."""
    parts = content if isinstance(content, list) else []
    found = [
        p.get("thinking") or p.get("text") for p in parts if isinstance(p, dict) and p.get("type") in THOUGHTS
    ]
    return "\n\n".join(text for text in found if isinstance(text, str) and text)


def part_text(part: Any, where: str, notes: Notes) -> str | None:
    """The text of one part; None for thinking."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad_request("expected a part with a type", where)
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise bad_request("the type of a part is a string", f"{where}.type")
    if kind in THOUGHTS:
        return None
    if kind in _TEXTS or kind == "refusal":
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            raise bad_request("a string is needed", f"{where}.{name}")
        return str(part[name])
    reader = _READERS.get(kind)
    text = reader(part, where, notes) if reader is not None else None
    if text is not None:
        return text
    if kind not in _KINDS and isinstance(part.get("text"), str):
        notes.weaken(where, f"{kind} is read as text")
        return str(part["text"])
    what = _KINDS.get(kind, f"part of type {kind[:40]}")
    notes.leave_out(what, where)
    title = next((part[k] for k in ("title", "filename", "name") if isinstance(part.get(k), str)), None)
    inner = part.get("file")
    if title is None and isinstance(inner, dict) and isinstance(inner.get("filename"), str):
        title = inner["filename"]
    label = what if title is None else f"{what} {title[:200]!r}"
    return f"[{label} left out: this model reads text only]"


def _document(part: dict[str, Any], where: str, notes: Notes) -> str | None:
    """Anthropic's document; None if it is not text."""
    source = part.get("source")
    if not isinstance(source, dict):
        return None
    data, kind = source.get("data"), source.get("type")
    text: str | None = None
    if kind == "text" and isinstance(data, str):
        text = data
    elif kind == "content":
        text = content_text(source.get("content"), f"{where}.source.content", notes, "\n")
    elif kind == "base64" and isinstance(data, str):
        text = _decoded(str(source.get("media_type")), data)
    return None if text is None else _titled(part, text)


def _file(part: dict[str, Any], where: str, notes: Notes) -> str | None:
    """OpenAI's file, inline as a data URL; None if it is not text."""
    inner = part.get("file")
    file = inner if isinstance(inner, dict) else part
    data = file.get("file_data")
    if not isinstance(data, str) or not data.startswith("data:"):
        return None
    kind, _, encoded = data.removeprefix("data:").partition(";base64,")
    text = _decoded(kind, encoded)
    return None if text is None else _titled(file, text)


def _search_result(part: dict[str, Any], where: str, notes: Notes) -> str | None:
    return _titled(part, content_text(part.get("content"), f"{where}.content", notes, "\n"))


def _tool_reference(part: dict[str, Any], where: str, notes: Notes) -> str | None:
    """Result of a tool search; here all tools are available from the start."""
    name = part.get("tool_name")
    return f"The tool {name} can be used now." if isinstance(name, str) else None


_READERS: dict[str, Callable[[dict[str, Any], str, Notes], str | None]] = {
    "document": _document,
    "file": _file,
    "input_file": _file,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
}


def _titled(part: dict[str, Any], text: str) -> str:
    head = [part[k] for k in ("title", "filename", "source", "context") if isinstance(part.get(k), str)]
    return "\n".join([*head, text])


def _decoded(media_type: str, data: str) -> str | None:
    """A base64 text file, None for others."""
    plain = media_type.partition(";")[0].strip()
    readable = plain.startswith("text/") or plain in (
        "application/json",
        "application/xml",
        "application/yaml",
    )
    if not readable or len(data) > MOST_TEXT * 4 // 3:
        return None
    return base64_text(data)


def base64_text(data: str) -> str | None:
    """The text that is encoded in base64; None for anything else."""
    try:
        return base64.b64decode(data, validate=True).decode("utf-8")
    except ValueError:
        return None
