"""Drop-in replacement for llama-cpp-python: the interface of llama_cpp.Llama on this engine."""

from __future__ import annotations

from .llama import Llama, LlamaGrammar, LlamaState, LogitsProcessorList, StoppingCriteriaList

__all__ = ["Llama", "LlamaGrammar", "LlamaState", "LogitsProcessorList", "StoppingCriteriaList"]
