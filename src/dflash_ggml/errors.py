"""The exceptions of the package. `str(error)` is always one line that names the thing at fault and what to do."""

from __future__ import annotations


class DflashError(Exception):
    """Base of every error that this package raises on purpose."""


class ModelFileError(DflashError, ValueError):
    """A model or draft file is damaged, unsupported or does not fit its partner."""


class ContextOverflowError(DflashError, ValueError):
    """The tokens asked for do not fit the context window. n_prompt, n_ctx: how many, and how many fit, where known."""

    def __init__(self, message: str, n_prompt: int | None = None, n_ctx: int | None = None) -> None:
        super().__init__(message)
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class ConfigError(DflashError, ValueError):
    """An option has a value that cannot be honoured."""


class DeviceError(DflashError, RuntimeError):
    """A backend could not be opened, or a buffer could not be allocated on it."""


class NoNumbersError(DflashError, ArithmeticError):
    """The target's logits are NaN: corrupt weights or overflow."""


class NoRoomError(DeviceError):
    """The caches have no room left for a text, of which others have some; nothing was changed."""


def as_exception(error: BaseException) -> Exception:
    """An error to tell to who asked: what is no Exception, as the panic of a library, becomes a DflashError."""
    if isinstance(error, Exception):
        return error
    wrapped = DflashError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
