"""The exceptions of the package. `str(error)` is always one line that names the thing at fault and what to do."""

from __future__ import annotations


class DflashError(Exception):
    """Base of every error that this package raises on purpose."""


class ModelFileError(DflashError, ValueError):
    """A model or draft file is damaged, unsupported or does not fit its partner."""


class ContextOverflowError(DflashError, ValueError):
    """The tokens asked for do not fit the context window."""


class ConfigError(DflashError, ValueError):
    """An option has a value that cannot be honoured."""


class DeviceError(DflashError, RuntimeError):
    """A backend could not be opened, or a buffer could not be allocated on it."""
