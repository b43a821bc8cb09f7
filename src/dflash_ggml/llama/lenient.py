"""Lenient input handling as in llama-cpp-python: invalid values are clamped, with one warning per call."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from ..server.errors import ApiError
from ..server.media import content_text, thoughts
from ..server.notes import Notes
from ..text.template import normalise_messages

_SHARES = ("top_p", "min_p", "typical_p")
_WHOLE = ("top_k", "mirostat_mode")


def sampling_in_range(options: Mapping[str, Any], n_vocab: int) -> dict[str, Any]:
    """Sampler options in valid ranges: shares between 0 and 1, penalties above 0, biases of known ids only, no None.

    Changes are reported in a warning.

    Raises:
        ConfigError: A count is not a whole number.
    """
    out, changed = {name: value for name, value in options.items() if value is not None}, []
    for name in _WHOLE:
        if name in out:
            out[name] = whole(name, out[name])
    for name in _SHARES:
        value = out.get(name)
        if isinstance(value, (int, float)) and not 0 <= value <= 1 and not math.isnan(value):
            out[name] = min(max(value, 0.0), 1.0)
            changed.append(f"{name} {value} is taken as {out[name]:g}")
    penalty = out.get("repeat_penalty")
    if isinstance(penalty, (int, float)) and penalty <= 0:
        out["repeat_penalty"] = 1.0
        changed.append(f"repeat_penalty {penalty} is not a penalty, none is applied")
    if out.get("mirostat_mode", 0) not in (0, 1, 2):
        changed.append(f"mirostat_mode {out['mirostat_mode']} is none of 0, 1, 2 and taken as 0")
        out["mirostat_mode"] = 0
    bias = {int(k): float(v) for k, v in (out.get("logit_bias") or {}).items()}
    unknown = sorted(token for token in bias if not 0 <= token < n_vocab)
    if unknown:
        changed.append(f"logit_bias {unknown[0]} is not a token id below {n_vocab} and left out")
    out["logit_bias"] = {token: value for token, value in bias.items() if 0 <= token < n_vocab}
    warn(changed)
    return out


def whole(name: str, value: Any) -> int:
    """A whole number, also from a float such as 2.0.

    Raises:
        ConfigError: It is not whole; the error names the option.
    """
    if isinstance(value, float) and not value.is_integer():
        raise ConfigError(f"{name}: {value} is not a whole number")
    return int(value)


def usable_messages(messages: Any) -> Any:
    """The conversation as text, as in the server, with known roles and at least one message.

    Anything but a list is returned unchanged.

    Raises:
        ConfigError: A part cannot be read.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        return messages
    out, changed, notes = [], [], Notes()
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            out.append(message)
            continue
        row, content = dict(message), message.get("content")
        if not _is_role(message.get("role")):
            changed.append(f"messages[{i}].role {message.get('role')!r} is read as 'user'")
            row["role"] = "user"
        try:
            row["content"] = content_text(content, f"messages[{i}].content", notes) or message.get("refusal")
        except ApiError as error:
            raise ConfigError(f"{error.param}: {error.message}") from None
        thought = thoughts(message.get("thinking_blocks")) or thoughts(content)
        if thought:
            row.setdefault("reasoning_content", thought)
        if message.get("tool_calls"):
            row["tool_calls"] = [_function_call(call) for call in message["tool_calls"]]
        out.append(row)
    if not out:
        changed.append("messages is empty: an empty message of the user stands in")
        out = [{"role": "user", "content": ""}]
    warn([*changed, notes.header] if notes.header else changed)
    return out


def _is_role(role: Any) -> bool:
    """Whether it is a valid role name."""
    try:
        normalise_messages([{"role": role, "content": ""}])
    except ConfigError:
        return False
    return True


def _function_call(call: Any) -> Any:
    """An earlier call of a tool with text input, as a function call."""
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping):
        return call
    function = {"name": custom.get("name"), "arguments": {"input": custom.get("input", "")}}
    return {**call, "type": "function", "function": function}


def usable_choice(choice: Any, tools: Sequence[Any]) -> Any:
    """A usable tool_choice; invalid ones are returned unchanged."""
    if choice == "any":  # some clients' name
        choice = "required"
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        warn([f"tool_choice {choice!r} is none of auto, none, required and taken as auto"])
        return "auto"
    if not tools and choice not in (None, "auto", "none"):
        warn(["tool_choice asks for a call, but there are no tools: it is left out"])
        return None
    return choice


def warn(messages: Sequence[str]) -> None:
    """Emit one warning, attributed to the line that called into this package."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("dflash_ggml."):
        frame, level = frame.f_back, level + 1
    if messages:
        warnings.warn("; ".join(messages), stacklevel=level)
