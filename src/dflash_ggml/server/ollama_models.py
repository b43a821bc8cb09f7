"""The served model in Ollama's API: lists, details, capabilities."""

from __future__ import annotations

import hashlib
from typing import Any

from .catalogue import timestamp
from .dialect import Settings
from .notes import Notes
from .ollama import model_name
from .runner import Runner
from .schema import Body, parse

# version of the API; clients refuse old servers
VERSION = {"version": "0.12.6"}


class ShowBody(Body):
    """The request to /api/show."""

    quiet = frozenset(("verbose",))
    model: str | None = None
    name: str | None = None


def read_show(data: dict[str, Any], settings: Settings) -> str:
    """Validate a request to /api/show: the model's name."""
    body = parse(ShowBody, data, Notes(settings.strict))
    return model_name(body.model or body.name, settings)


def show(runner: Runner, name: str) -> dict[str, Any]:
    """The answer of /api/show."""
    info = runner.info()
    return {
        "license": "",
        "modelfile": f"# {name} is served by dflash-ggml from {info['model_path']}\n",
        "parameters": "",
        "template": info["chat_template"] or "",
        "details": _details(info),
        "model_info": runner.metadata(),
        "capabilities": ["completion", *runner.skills()],
    }


def _details(info: dict[str, Any]) -> dict[str, Any]:
    family = info.get("architecture", "")
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": _size(info.get("n_params", 0)),
        "quantization_level": info.get("file_type", "unknown"),
    }


def _size(n: int) -> str:
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"


def _entry(name: str, runner: Runner | None, settings: Settings) -> dict[str, Any]:
    info = runner.info() if runner is not None else {}
    size = info.get("model_size", 0)
    # clients only compare digests, so hash name and size instead of gigabytes
    digest = hashlib.sha256(f"{info.get('model_path')}:{size}".encode()).hexdigest()
    modified = timestamp(settings.created)
    return {
        "name": name,
        "model": name,
        "modified_at": modified,
        "size": size,
        "digest": digest,
        "details": _details(info),
    }


def tags(runner: Runner | None, settings: Settings) -> dict[str, Any]:
    """The answer of /api/tags."""
    return {"models": [_entry(name, runner, settings) for name in settings.names]}


def running(runner: Runner | None, settings: Settings) -> dict[str, Any]:
    """The answer of /api/ps: the served model, which never expires."""
    if runner is None:
        return {"models": []}
    entry = _entry(settings.names[0], runner, settings)
    loaded = {"expires_at": timestamp(1 << 35), "size_vram": entry["size"], "context_length": runner.n_ctx}
    return {"models": [{**entry, **loaded}]}
