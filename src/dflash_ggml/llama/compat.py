"""Compatibility with llama-cpp-python: after `dflash_ggml.compat.install()`, code that imports `llama_cpp` runs unchanged.

The facade has the public Python interface (Llama, grammars, caches, tokenizers, processors, chat formats and handlers, types,
constants) and the functions of llama.h that do not need libllama. Others raise an AttributeError with an explanation.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..errors import ConfigError
from ..text import grammar
from ..text.chat_formats import FORMATS
from . import cache as llama_cache
from . import (
    chat_from_text,
    chat_handlers,
    formatter,
    functions,
    internals,
    llama,
    served,
    speculative,
)
from . import state as llama_state
from . import tokenizer as llama_tokenizer
from . import types as llama_types
from .batch import LlamaBatch
from .constants import CONSTANTS
from .context import LlamaContext
from .distribution import DistributionFinder
from .model import LlamaModel
from .sampler_chain import LlamaSampler
from .speculative import LlamaDraftModel

__all__ = ["VERSION", "LlamaDraftModel", "install", "uninstall"]

VERSION = "0.3.36"  # modules of the facade


def _of(module: ModuleType, names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names.split()}


_STATE = _of(
    llama_state,
    "LlamaState LogitsProcessor LogitsProcessorList StoppingCriteria StoppingCriteriaList MinTokensLogitsProcessor",
)
_CACHE = _of(llama_cache, "BaseLlamaCache LlamaCache LlamaRAMCache LlamaDiskCache")
_TOKENIZER = _of(llama_tokenizer, "BaseLlamaTokenizer LlamaTokenizer LlamaHFTokenizer")
_NOT_TYPES = ("TYPE_CHECKING", "TypedDict", "Any", "Literal", "Union")
_TYPES = {n: value for n, value in vars(llama_types).items() if n[0].isupper() and n not in _NOT_TYPES}
_INTERNALS = {
    **{kind.__name__: kind for kind in (LlamaModel, LlamaContext, LlamaSampler, LlamaBatch)},
    **_of(internals, "LlamaSamplingParams normalize_embedding"),
    **{name: internals.absent(name, why) for name, why in internals.ABSENT.items()},
}
_TEMPLATES = {"CHATML": "chatml", "LLAMA3_INSTRUCT": "llama-3"}
_TEMPLATES |= dict.fromkeys(("MISTRAL_INSTRUCT", "MIXTRAL_INSTRUCT"), "mistral-instruct")
_HANDLERS = {
    "functionary_chat_handler": "functionary",
    "functionary_v1_v2_chat_handler": "functionary-v2",
    "chatml_function_calling": "chatml-function-calling",
}
_CHAT = {
    **_of(
        formatter,
        "ChatFormatter ChatFormatterResponse Jinja2ChatFormatter chat_formatter_to_chat_completion_handler "
        "hf_autotokenizer_to_chat_completion_handler hf_autotokenizer_to_chat_formatter "
        "hf_tokenizer_config_to_chat_completion_handler hf_tokenizer_config_to_chat_formatter",
    ),
    **_of(
        chat_handlers,
        "LlamaChatCompletionHandlerNotFoundException LlamaChatCompletionHandlerRegistry get_chat_completion_handler "
        "guess_chat_format_from_gguf_metadata register_chat_completion_handler register_chat_format",
    ),
    **chat_from_text.NAMES,
    **chat_handlers.VISION,
    **formatter.FUNCTION_NAMES,
    "LlamaChatCompletionHandler": chat_handlers.ChatHandler,
    **{name: chat_handlers.get_chat_completion_handler(form) for name, form in _HANDLERS.items()},
    **{f"{name}_CHAT_TEMPLATE": FORMATS[form].template for name, form in _TEMPLATES.items()},
    **dict.fromkeys(("CHATML_BOS_TOKEN", "MISTRAL_INSTRUCT_BOS_TOKEN"), "<s>"),
    "CHATML_EOS_TOKEN": "<|im_end|>",
    "MISTRAL_INSTRUCT_EOS_TOKEN": "</s>",
}
_SETTINGS = _of(served, "Settings ServerSettings ModelSettings")
_C_NAMES = {**CONSTANTS, **functions.FUNCTIONS}
_finder = DistributionFinder(VERSION)


class _Facade(ModuleType):
    """A module whose missing attributes raise an explanation."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"module {self.__name__!r} (the facade of dflash-ggml) has no {name!r}: libllama's functions are not there"
        )


def install() -> ModuleType:
    """Put the facade into sys.modules as `llama_cpp` and return it; a second call has no effect.

    Package metadata reports its version under the name llama-cpp-python.

    Raises:
        ConfigError: The real llama_cpp has already been imported.
    """
    present = sys.modules.get("llama_cpp")
    if isinstance(present, _Facade):
        return present
    if present is not None:
        raise ConfigError(
            "llama_cpp is already imported: call dflash_ggml.compat.install() before anything imports it"
        )
    public = {"Llama": llama.Llama, "LlamaGrammar": grammar.LlamaGrammar, **_STATE, **_CACHE, **_TOKENIZER}
    draft = _of(speculative, "LlamaDraftModel")
    grammars = {**_of(grammar, "LlamaGrammar"), **_of(chat_from_text, "JSON_GBNF JSON_ARR_GBNF")}
    silence = _of(internals, "suppress_stdout_stderr")
    parts = {
        "llama": {**public, **_TYPES, **draft},
        "llama_grammar": {**grammars, "LLAMA_GRAMMAR_DEFAULT_ROOT": "root"},
        "llama_cache": _CACHE,
        "llama_tokenizer": _TOKENIZER,
        "llama_chat_format": _CHAT,
        "llama_speculative": {**draft, **_of(speculative, "LlamaPromptLookupDecoding")},
        "llama_cpp": {**_C_NAMES, "_lib": functions.Library},
        "llama_types": _TYPES,
        "_internals": _INTERNALS,
        "_utils": {**silence, **_of(internals, "Singleton MetaSingleton")},
        "_logger": _of(internals, "logger set_verbose GGML_LOG_LEVEL_TO_LOGGING_LEVEL"),
        "server": {},
        "server.settings": _SETTINGS,
        "server.app": {**_SETTINGS, **_of(served, "create_app")},
    }
    top = {**_C_NAMES, **public, **_TYPES, **draft, **silence, "__version__": VERSION}
    top |= _of(internals, "set_verbose")
    package = _module("llama_cpp", top, package=True)
    sys.modules["llama_cpp"] = package
    for name, content in parts.items():
        module = _module(f"llama_cpp.{name}", content, package=name == "server")
        sys.modules[module.__name__] = module
        above, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[above], last, module)
    for name in ("llama", "llama_cpp", "llama_types", "llama_grammar"):  # names expected by its handlers
        sys.modules["llama_cpp.llama_chat_format"].__dict__[name] = sys.modules[f"llama_cpp.{name}"]
    package.__dict__["internals"] = sys.modules["llama_cpp._internals"]
    sys.meta_path.insert(0, _finder)
    return package


def uninstall() -> None:
    """Remove the facade, so that the real llama_cpp can be imported."""
    if isinstance(sys.modules.get("llama_cpp"), _Facade):
        for name in [n for n in sys.modules if n == "llama_cpp" or n.startswith("llama_cpp.")]:
            del sys.modules[name]
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _finder]


def _module(name: str, content: dict[str, Any], package: bool) -> _Facade:
    module = _Facade(name, __doc__)
    module.__dict__.update(content)
    module.__spec__ = ModuleSpec(name, None, is_package=package)
    if package:
        module.__path__ = []
    return module
