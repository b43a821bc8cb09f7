"""Descriptions of tools that clients declare by type alone and run themselves."""

from __future__ import annotations

from typing import Any


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _number(description: str) -> dict[str, Any]:
    return {"type": "integer", "description": description}


# description and parameters
LOCAL_SHELL = (
    "Runs a program on the user's machine and returns its output.",
    _object(
        ["command"],
        command={
            "type": "array",
            "items": {"type": "string"},
            "description": "The program and its arguments, one string each.",
        },
        working_directory=_text("Where to run it."),
        timeout_ms=_number("When to give up, in milliseconds."),
    ),
)

_PATH = _text("Absolute path of a file or folder.")
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "For view: first and last line, counted from 1; -1 is the end of the file.",
}
_EDITOR: dict[str, Any] = {
    "path": _PATH,
    "file_text": _text("For create: the whole content."),
    "old_str": _text("For str_replace: the text to replace, which must occur exactly once."),
    "new_str": _text("For str_replace: the text to put there. For insert in older versions: the new lines."),
    "insert_line": _number("For insert: the line behind which to put the text, 0 for the top."),
    "insert_text": _text("For insert: the text to put there."),
    "view_range": _RANGE,
}


def _commands(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(words), "description": "What to do."}


# prefix of the type -> description and parameters
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Runs a command in a shell that stays open between calls, and returns its output.",
        _object(
            [],
            command=_text("The command line; needed unless restart is true."),
            restart={"type": "boolean", "description": "Start the shell anew."},
        ),
    ),
    "text_editor_2024": (
        "Views, creates and edits files.",
        _object(
            ["command", "path"],
            command=_commands("view", "create", "str_replace", "insert", "undo_edit"),
            **_EDITOR,
        ),
    ),
    "text_editor_": (
        "Views, creates and edits files.",
        _object(["command", "path"], command=_commands("view", "create", "str_replace", "insert"), **_EDITOR),
    ),
    "memory_": (
        "Keeps notes in files under /memories: looks at them, writes, edits, deletes and renames them.",
        _object(
            ["command"],
            command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITOR,
            old_path=_text("For rename: the present path."),
            new_path=_text("For rename: the path to be."),
        ),
    ),
}
