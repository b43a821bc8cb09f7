"""What llama-cpp-python takes though it has no meaning: brought into range, and told in one warning per call."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from ..text.template import normalise_messages

_SHARES = ("top_p", "min_p", "typical_p")
_LABELS = {"image_url": "image", "input_image": "image", "input_audio": "audio", "file": "document"}


def sampling_in_range(options: Mapping[str, Any], n_vocab: int) -> dict[str, Any]:
    """Sampler options as the sampler takes them: shares between 0 and 1, penalties above 0, a bias on known ids only."""
    out, told = dict(options), []
    for name in _SHARES:
        value = out.get(name)
        if isinstance(value, (int, float)) and not 0 <= value <= 1 and not math.isnan(value):
            out[name] = min(max(value, 0.0), 1.0)
            told.append(f"{name} {value} is taken as {out[name]:g}")
    penalty = out.get("repeat_penalty")
    if isinstance(penalty, (int, float)) and penalty <= 0:
        out["repeat_penalty"] = 1.0
        told.append(f"repeat_penalty {penalty} is no penalty, none is applied")
    if out.get("mirostat_mode", 0) not in (0, 1, 2):
        told.append(f"mirostat_mode {out['mirostat_mode']} is none of 0, 1, 2 and taken as 0")
        out["mirostat_mode"] = 0
    bias = {int(k): float(v) for k, v in (out.get("logit_bias") or {}).items()}
    unknown = sorted(token for token in bias if not 0 <= token < n_vocab)
    if unknown:
        told.append(f"logit_bias {unknown[0]} is no token id below {n_vocab} and left out")
    out["logit_bias"] = {token: value for token, value in bias.items() if 0 <= token < n_vocab}
    warn(told)
    return out


def usable_messages(messages: Any) -> Any:
    """The conversation in text, with roles that templates know, and at least one message; what is no list stays as it is."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        return messages
    out, told = [], []
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else "user"
        if not _is_role(role):
            told.append(f"messages[{i}].role {role!r} is read as 'user'")
            message = {**message, "role": "user"}
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)):
            parts = [_readable(part) for part in content]
            left_out = [k for k, part in enumerate(parts) if part is not content[k]]
            if left_out:
                told.append(f"messages[{i}].content[{left_out[0]}]: this model reads text only")
                message = {**message, "content": parts}
        out.append(message)
    if not out:
        told.append("messages is empty: an empty message of the user stands in")
        out = [{"role": "user", "content": ""}]
    warn(told)
    return out


def _is_role(role: Any) -> bool:
    """Whether the templates' layer takes this for a role."""
    try:
        normalise_messages([{"role": role, "content": ""}])
    except ConfigError:
        return False
    return True


def _readable(part: Any) -> Any:
    """A part of a message's content; in place of one that is no text, a line that says what was left out."""
    if not isinstance(part, Mapping) or isinstance(part.get("text"), str) or "type" not in part:
        return part
    label = _LABELS.get(str(part["type"]), part["type"])
    return {"type": "text", "text": f"[{label} left out: this model reads text only]"}


def usable_choice(choice: Any, tools: Sequence[Any]) -> Any:
    """A tool_choice that has something to choose from; what is no choice at all stays as it is."""
    if choice == "any":  # some clients' word
        choice = "required"
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        warn([f"tool_choice {choice!r} is none of auto, none, required and taken as auto"])
        return "auto"
    if not tools and choice not in (None, "auto", "none"):
        warn(["tool_choice asks for a call, but there are no tools: it is left out"])
        return None
    return choice


def warn(told: Sequence[str]) -> None:
    """One warning, shown at the line that called into this package."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("dflash_ggml."):
        frame, level = frame.f_back, level + 1
    if told:
        warnings.warn("; ".join(told), stacklevel=level)
