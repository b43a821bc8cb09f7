"""The package's exceptions. `str(error)` is always one line that names the cause and what to do."""

from __future__ import annotations


class DflashError(Exception):
    """Base of every error that this package raises on purpose."""


class ModelFileError(DflashError, ValueError):
    """A model or draft file is damaged, unsupported or does not fit its partner."""


class ContextOverflowError(DflashError, ValueError):
    """The tokens do not fit the context window.

    Args:
        n_prompt, n_ctx: Tokens of the prompt, and tokens that fit, if known.
    """

    def __init__(self, message: str, n_prompt: int | None = None, n_ctx: int | None = None) -> None:
        super().__init__(message)
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class ConfigError(DflashError, ValueError):
    """An option has a value that cannot be honoured."""


class DeviceError(DflashError, RuntimeError):
    """A backend could not be opened, or a buffer could not be allocated on it."""


class NonFiniteError(DflashError, ArithmeticError):
    """The target's logits are NaN: corrupt weights or overflow."""


class NoRoomError(DeviceError):
    """The caches have no free rows for a sequence while others hold some; nothing was changed."""


def as_exception(error: BaseException) -> Exception:
    """The error to report: one that is not an Exception, such as a library's panic, is wrapped in a DflashError."""
    if isinstance(error, Exception):
        return error
    wrapped = DflashError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
