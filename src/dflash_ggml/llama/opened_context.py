"""llama-cpp-python's inner LlamaContext as users make one: from a LlamaModel and parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .context import LlamaContext
from .llama import Llama
from .model import LlamaModel


def llama_model_default_params() -> SimpleNamespace:
    """Parameters of a LlamaModel; n_gpu_layers and main_gpu have an effect, others can be set and have none."""
    return SimpleNamespace(n_gpu_layers=0, main_gpu=0)


def llama_context_default_params() -> SimpleNamespace:
    """Parameters of a LlamaContext, those that have an effect; others can be set and have none."""
    return SimpleNamespace(n_ctx=512, n_batch=2048, n_ubatch=512, n_threads=None)


class OpenedContext(LlamaContext):
    """A context with an engine of its own, that decodes plainly; it ends with its model."""

    def __init__(self, *, model: LlamaModel, params: Any, verbose: bool = True) -> None:
        served = model.params if model.params is not None else llama_model_default_params()
        self._own: Llama | None = Llama(
            model.path_model,
            n_ctx=params.n_ctx,
            n_batch=params.n_batch,
            n_threads=params.n_threads,
            n_gpu_layers=getattr(served, "n_gpu_layers", 0),
            main_gpu=getattr(served, "main_gpu", 0),
            draft_model=False,
            verbose=False,
        )
        self._bind(self._own)
        self.model, self.params, self.verbose = model, params, verbose
        model.on_close.append(self.close)

    @staticmethod
    def default_params() -> SimpleNamespace:
        """As llama_context_default_params."""
        return llama_context_default_params()

    def close(self) -> None:
        """Free the engine; a second call does nothing."""
        own, self._own, self.ctx = self._own, None, None
        if own is not None:
            own.close()


FUNCTIONS = {
    "llama_model_default_params": llama_model_default_params,
    "llama_context_default_params": llama_context_default_params,
}
