"""Model lists: the served model under its names, in one object for the clients of all APIs."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from .dialect import Settings
from .runner import Runner


def model_object(name: str, settings: Settings, runner: Runner | None) -> dict[str, Any]:
    """An entry of OpenAI's and Anthropic's lists, with llama-server's `aliases` and `meta`; runner None: still loading."""
    info = runner.info() if runner is not None else {}
    meta = {
        "vocab_type": 2,  # BPE, in llama.cpp's numbering
        "n_vocab": info.get("n_vocab"),
        "n_ctx_train": info.get("n_ctx_train"),
        "n_embd": info.get("n_embd"),
        "n_params": info.get("n_params"),
        "size": info.get("model_size"),
    }
    return {
        "id": name,
        "object": "model",
        "created": settings.created,
        "owned_by": "dflash-ggml",
        "aliases": [other for other in settings.names if other != name],
        "meta": meta if runner is not None else None,
        "type": "model",
        "display_name": name,
        "created_at": timestamp(settings.created),
        "max_input_tokens": info.get("n_ctx"),
    }


def model_list(runner: Runner | None, settings: Settings) -> dict[str, Any]:
    """The list of GET /v1/models."""
    names = settings.names
    data = [model_object(name, settings, runner) for name in names]
    return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def timestamp(seconds: float) -> str:
    """A time in ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()
