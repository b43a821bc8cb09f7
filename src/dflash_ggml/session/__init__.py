"""Requests in, events out: what the class, the server and the commands share.

The events are in `session.events`.
"""

from __future__ import annotations

from .hooks import Hooks
from .prompts import Prepared
from .requests import ChatRequest, CompletionRequest
from .session import Session, run_chat, run_completion

__all__ = ["ChatRequest", "CompletionRequest", "Hooks", "Prepared", "Session", "run_chat", "run_completion"]
