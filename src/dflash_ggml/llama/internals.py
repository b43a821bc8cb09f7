"""Names of llama-cpp-python's internal modules that users import: `_internals`, `_utils`, `_logger`."""

from __future__ import annotations

import contextlib
import logging
import os
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from typing import Any, TextIO

import numpy as np

from ..errors import ConfigError

logger = logging.getLogger("llama-cpp-python")
# ggml's log levels, from none to debug and "continued", as levels of `logging`
GGML_LOG_LEVEL_TO_LOGGING_LEVEL = dict(
    enumerate((logging.CRITICAL, logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG, logging.DEBUG))
)

# wrappers of libllama's objects without counterpart here, with reason and advice
ABSENT = {
    "CustomSampler": "there is no libllama here; pass a logits_processor",
    "LlamaSamplingContext": "there is no libllama here; pass the sampling keywords to Llama's methods",
    "LlamaTokenDataArray": "there is no libllama here; pass a logits_processor, which sees the whole row",
}


def set_verbose(verbose: bool) -> None:
    """The level of llama-cpp-python's logger, to which this package writes nothing."""
    logger.setLevel(logging.DEBUG if verbose else logging.ERROR)


def normalize_embedding(embedding: Sequence[float]) -> Sequence[float]:
    """A vector of length 1; a vector of zeros stays as it is."""
    norm = float(np.linalg.norm(embedding))
    return embedding if norm == 0 else [float(v) / norm for v in embedding]


# sampling options under llama.cpp's older names; nothing here reads them
_OLDER = """n_prev=64 n_probs=0 top_k=40 top_p=0.95 min_p=0.05 tfs_z=1.0 typical_p=1.0 temp=0.8 penalty_last_n=64
    penalty_repeat=1.0 penalty_freq=0.0 penalty_present=0.0 mirostat=0 mirostat_tau=5.0 mirostat_eta=0.1 penalize_nl=True
    grammar="" cfg_negative_prompt="" cfg_scale=1.0"""
_FIELDS = [(name, Any, literal_eval(value)) for name, value in (word.split("=") for word in _OLDER.split())]
_BIAS: Any = ("logit_bias", dict[int, float], field(default_factory=dict))
LlamaSamplingParams = make_dataclass(
    "LlamaSamplingParams", [*_FIELDS, _BIAS], namespace={"__module__": __name__}
)


class suppress_stdout_stderr:
    """A context manager in which nothing is printed.

    Args:
        disable: Change nothing.
    """

    def __init__(self, disable: bool = True) -> None:
        self.disable = disable
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> suppress_stdout_stderr:
        if not self.disable:
            sink: TextIO = self._stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            self._stack.enter_context(contextlib.redirect_stdout(sink))
            self._stack.enter_context(contextlib.redirect_stderr(sink))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


class MetaSingleton(type):
    """The type of classes of which there is one object."""

    _instances: dict[type, Any] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]


class Singleton(metaclass=MetaSingleton):
    """A base for classes of which there is one object."""


def absent(name: str, why: str) -> type:
    """A class whose construction, also by `from_pretrained`, raises an explanation."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"{name}: {why}")

    doc = f"Cannot be constructed: {why}."
    return type(name, (), {"__init__": refuse, "from_pretrained": staticmethod(refuse), "__doc__": doc})
