"""Speculative decoding of GGUF models with DFlash drafts and DDTree, on a vendored and patched ggml.

    from dflash_ggml import Llama

The names below are loaded when first used, so that importing the package costs nothing and its pure parts
work without the compiled binding.
"""

from __future__ import annotations

TYPE_CHECKING = (
    False  # importing typing takes longer than all the rest, and Ctrl-C is only handled after this file
)

_HOME = {
    "Llama": "llama",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "Step": "engine.step",
    "Sampler": "decode.sampling",
    "SamplingParams": "decode.sampling",
    "GGUFFile": "files.gguf",
    "Tokenizer": "text.tokenizer",
    "DflashError": "errors",
    "ModelFileError": "errors",
    "ContextOverflowError": "errors",
    "ConfigError": "errors",
    "DeviceError": "errors",
}

__all__ = [
    "ConfigError",
    "ContextOverflowError",
    "DeviceError",
    "DflashError",
    "Engine",
    "EngineConfig",
    "GGUFFile",
    "Llama",
    "ModelFileError",
    "Sampler",
    "SamplingParams",
    "Step",
    "Tokenizer",
    "__version__",
]

if TYPE_CHECKING:
    __version__: str
    from dflash_ggml.config import EngineConfig
    from dflash_ggml.decode.sampling import Sampler, SamplingParams
    from dflash_ggml.engine.engine import Engine
    from dflash_ggml.engine.step import Step
    from dflash_ggml.errors import ConfigError, ContextOverflowError, DeviceError, DflashError, ModelFileError
    from dflash_ggml.files.gguf import GGUFFile
    from dflash_ggml.llama.llama import Llama
    from dflash_ggml.text.tokenizer import Tokenizer


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib import metadata

        value: object = metadata.version("dflash-ggml")
    elif name in _HOME:
        from importlib import import_module

        value = getattr(import_module(f"dflash_ggml.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'dflash_ggml' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
