"""Run code written for llama-cpp-python unchanged: `dflash_ggml.compat.install()` before it imports `llama_cpp`.

The facade has the public Python surface (Llama, grammars, caches, tokenizers, processors, chat handlers). It has none
of libllama's C functions: code that reaches for those gets an AttributeError that says so.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..errors import ConfigError
from ..text import grammar
from . import cache as llama_cache
from . import chat_handlers, llama
from . import state as llama_state
from . import tokenizer as llama_tokenizer
from . import types as llama_types
from .options import LLAMA_DEFAULT_SEED

VERSION = "0.3.36"  # of the surface that the facade has

_GRAMMAR = {"LlamaGrammar": grammar.LlamaGrammar}
_STATE = {
    name: getattr(llama_state, name)
    for name in (
        "LlamaState",
        "LogitsProcessor",
        "LogitsProcessorList",
        "StoppingCriteria",
        "StoppingCriteriaList",
        "MinTokensLogitsProcessor",
    )
}
_CACHE = {
    name: getattr(llama_cache, name)
    for name in ("BaseLlamaCache", "LlamaCache", "LlamaRAMCache", "LlamaDiskCache")
}
_TOKENIZER = {
    name: getattr(llama_tokenizer, name)
    for name in ("BaseLlamaTokenizer", "LlamaTokenizer", "LlamaHFTokenizer")
}
_CHAT = {
    name: getattr(chat_handlers, name)
    for name in ("register_chat_completion_handler", "get_chat_completion_handler")
} | {"LlamaChatCompletionHandler": chat_handlers.ChatHandler}
_CONSTANTS = {
    "LLAMA_DEFAULT_SEED": LLAMA_DEFAULT_SEED,
    "LLAMA_SPLIT_MODE_NONE": 0,
    "LLAMA_SPLIT_MODE_LAYER": 1,
    "LLAMA_SPLIT_MODE_ROW": 2,
    "LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED": -1,
    "LLAMA_POOLING_TYPE_UNSPECIFIED": -1,
    "LLAMA_ATTENTION_TYPE_UNSPECIFIED": -1,
    "GGML_TYPE_F32": 0,
    "GGML_TYPE_F16": 1,
}


class LlamaDraftModel:
    """Base class of llama-cpp-python's Python drafters. Accepted by Llama(draft_model=...), which then decodes plainly."""

    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
        raise NotImplementedError


class _Facade(ModuleType):
    """A module that explains what it lacks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"module {self.__name__!r} (the facade of dflash-ggml) has no {name!r}: libllama's functions are not there"
        )


def install() -> ModuleType:
    """Put the facade into sys.modules as `llama_cpp` and return it; a second call changes nothing.

    Raises ConfigError if the real llama_cpp has already been imported.
    """
    present = sys.modules.get("llama_cpp")
    if isinstance(present, _Facade):
        return present
    if present is not None:
        raise ConfigError(
            "llama_cpp is already imported: call dflash_ggml.compat.install() before anything imports it"
        )
    public = {"Llama": llama.Llama, **_GRAMMAR, **_STATE, **_CACHE, **_TOKENIZER}
    draft = {"LlamaDraftModel": LlamaDraftModel}
    parts = {
        "llama": public,
        "llama_grammar": _GRAMMAR,
        "llama_cache": _CACHE,
        "llama_tokenizer": _TOKENIZER,
        "llama_chat_format": _CHAT,
        "llama_speculative": draft,
        "llama_cpp": _CONSTANTS,
        "llama_types": {k: v for k, v in vars(llama_types).items() if not k.startswith("_")},
    }
    package = _module("llama_cpp", {**_CONSTANTS, **public, "__version__": VERSION}, package=True)
    sys.modules["llama_cpp"] = package
    for name, content in parts.items():
        module = _module(f"llama_cpp.{name}", content, package=False)
        sys.modules[module.__name__] = module
        setattr(package, name, module)
    return package


def uninstall() -> None:
    """Take the facade out again; the real llama_cpp can then be imported."""
    if isinstance(sys.modules.get("llama_cpp"), _Facade):
        for name in [n for n in sys.modules if n == "llama_cpp" or n.startswith("llama_cpp.")]:
            del sys.modules[name]


def _module(name: str, content: dict[str, Any], package: bool) -> _Facade:
    module = _Facade(name, __doc__)
    module.__dict__.update(content)
    module.__spec__ = ModuleSpec(name, None, is_package=package)
    if package:
        module.__path__ = []
    return module
