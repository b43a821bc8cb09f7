"""Embeddings with the signatures of llama-cpp-python."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, ContextOverflowError
from ..session.embedding import Pooling, embed, normalised
from .core import LlamaCore

# LLAMA_POOLING_TYPE_*; unspecified is the mean, where llama.cpp would give such a model's states token by token
POOLINGS: dict[int, Pooling] = {-1: "mean", 0: "none", 1: "mean", 2: "first", 3: "last"}


class LlamaEmbeddings(LlamaCore):
    """The part of Llama that makes vectors. They leave the context as it is, and need no `embedding=True`."""

    def pooling_type(self) -> int:
        """How a text's states become one vector: 0 not at all, 1 mean (also -1), 2 first, 3 last."""
        return self._options.pooling_type

    def create_embedding(self, input: str | list[str], model: str | None = None) -> dict[str, Any]:
        """Normalised vectors in OpenAI's shape; pooling 0 gives a list of vectors, one per token.

        Texts beyond the context are cut. Raises ConfigError for an empty text.
        """
        texts = [input] if isinstance(input, str) else list(input)
        vectors, n_tokens = self._vectors(texts, normalize=True, truncate=True)
        data = [{"object": "embedding", "embedding": v.tolist(), "index": i} for i, v in enumerate(vectors)]
        return {
            "object": "list",
            "data": data,
            "model": self.model_path if model is None else model,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    def embed(
        self,
        input: str | list[str],
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """The vector of a text, or a list of them; with return_count also how many tokens they have.

        truncate: cut texts beyond the context, else ContextOverflowError. Raises ConfigError for an empty text.
        """
        vectors, n_tokens = self._vectors([input] if isinstance(input, str) else input, normalize, truncate)
        lists = [vector.tolist() for vector in vectors]
        output = lists[0] if isinstance(input, str) else lists
        return (output, n_tokens) if return_count else output

    def _vectors(
        self, texts: list[str], normalize: bool, truncate: bool
    ) -> tuple[list[NDArray[np.float32]], int]:
        vectors, n_tokens = [], 0
        for i, text in enumerate(texts):
            ids = self.tokenize(text.encode("utf-8"))
            if not ids:
                raise ConfigError(f"input[{i}]: it is empty, there is nothing to embed")
            if len(ids) > self._n_ctx and not truncate:
                raise ContextOverflowError(
                    f"Requested tokens ({len(ids)}) exceed context window of {self._n_ctx}"
                )
            vector = embed(self.session, ids[: self._n_ctx], pooling=POOLINGS[self._options.pooling_type])
            vectors.append(normalised(vector) if normalize else vector)
            n_tokens += min(len(ids), self._n_ctx)
        return vectors, n_tokens
