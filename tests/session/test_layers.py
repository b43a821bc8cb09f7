"""What may import what, and what the session's package offers."""

from __future__ import annotations

import ast
from pathlib import Path

import dflash_ggml
from dflash_ggml.session import ChatRequest, CompletionRequest, Session, events, run_chat, run_completion

PACKAGE = Path(dflash_ggml.__file__).parent
BELOW_TEXT = {"decode", "state", "files", "ggml", "errors", "config"}


def imported_rooms(path: Path) -> set[str]:
    """First names behind `dflash_ggml.` of what a module two levels down imports relatively."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    above = (n for n in nodes if isinstance(n, ast.ImportFrom) and n.level == 2)
    return {n.module.split(".")[0] if n.module else n.names[0].name for n in above}


def test_text_stands_on_what_is_below_it() -> None:
    rooms = {path.name: imported_rooms(path) for path in (PACKAGE / "text").glob("*.py")}
    assert "errors" in rooms["tokenizer.py"]
    assert {name: found - BELOW_TEXT for name, found in rooms.items() if found - BELOW_TEXT} == {}


def test_the_session_package_and_its_events() -> None:
    assert all(callable(name) for name in (ChatRequest, CompletionRequest, Session, run_chat, run_completion))
    assert {"ReasoningDelta", "TextDelta", "ToolCallBegin", "Finish"} <= set(events.__all__)
    assert events.TextDelta.__module__ == "dflash_ggml.text.deltas"
