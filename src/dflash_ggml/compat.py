"""Compatibility with llama-cpp-python: after `dflash_ggml.compat.install()`, code that imports `llama_cpp` runs unchanged."""

from __future__ import annotations

from .llama.compat import VERSION, LlamaDraftModel, install, uninstall

__all__ = ["VERSION", "LlamaDraftModel", "install", "uninstall"]
