"""Embeddings of texts, with llama.h's pooling types."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError, ContextOverflowError
from ..session.embedding import Pooling, embed, normalised
from .context import LlamaContext

# LLAMA_POOLING_TYPE_*; unspecified means mean, where llama.cpp would return states per token
POOLINGS: dict[int, Pooling] = {-1: "mean", 0: "none", 1: "mean", 2: "first", 3: "last"}


def vectors(
    ctx: LlamaContext, texts: list[list[int]], normalize: bool, truncate: bool
) -> tuple[list[Any], int]:
    """Embed texts; the context stays unchanged.

    Args:
        ctx: The context, with its pooling type.
        texts: Token ids of each text.
        normalize: Scale vectors to length 1.
        truncate: Cut texts beyond the context.

    Returns:
        A vector for each text, or without pooling a list of vectors; and the number of ids.

    Raises:
        ConfigError: A text is empty.
        ContextOverflowError: A text exceeds the context, without `truncate`.
    """
    found, n_tokens, room = [], 0, ctx.n_ctx()
    for i, ids in enumerate(texts):
        if not ids:
            raise ConfigError(f"input[{i}]: it is empty, there is nothing to embed")
        if len(ids) > room and not truncate:
            raise ContextOverflowError(f"Requested tokens ({len(ids)}) exceed context window of {room}")
        vector = embed(ctx.session, ids[:room], pooling=POOLINGS[ctx.pooling_type()])
        found.append((normalised(vector) if normalize else vector).tolist())
        n_tokens += min(len(ids), room)
    return found, n_tokens
