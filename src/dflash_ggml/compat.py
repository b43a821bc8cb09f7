"""Run code written for llama-cpp-python unchanged: `dflash_ggml.compat.install()` before it imports `llama_cpp`."""

from __future__ import annotations

from .llama.compat import VERSION, LlamaDraftModel, install, uninstall

__all__ = ["VERSION", "LlamaDraftModel", "install", "uninstall"]
