"""Requests in, events out: shared by the Python class, the server and the commands.

The events are in `session.events`.
"""

from __future__ import annotations

from .hooks import Hooks
from .prompts import Prepared
from .requests import ChatRequest, CompletionRequest
from .session import Session, run_chat, run_completion

__all__ = ["ChatRequest", "CompletionRequest", "Hooks", "Prepared", "Session", "run_chat", "run_completion"]
