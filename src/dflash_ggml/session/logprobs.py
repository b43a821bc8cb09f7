"""Log-probabilities of emitted tokens: from a row of logits to an event's entry, and from there to OpenAI's two shapes.

Both shapes follow OpenAI and llama-cpp-python: a text completion's `top_logprobs` always has the chosen token, besides
the n best; a chat's list has exactly the n best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decode.sampling import token_log_probs
from ..text.tokenizer import Tokenizer
from .events import TokenLogprob, TopLogprob


def token_logprob(
    tokenizer: Tokenizer, row: NDArray[np.float32], token: int, n_top: int, offset: int = 0
) -> TokenLogprob:
    """The log-probability of `token` under a raw row float32 [V], with the n_top best alternatives."""
    logprob, best = token_log_probs(row, token, n_top)
    top = tuple(TopLogprob(i, tokenizer.piece(i), p) for i, p in best)
    return TokenLogprob(token, tokenizer.piece(token), logprob, top, offset)


def token_text(data: bytes) -> str:
    """A token's text; bytes that are not UTF-8 on their own as OpenAI shows them, `bytes:` and then `\\xe4\\xb8`.

    In that form printable ASCII but the backslash stands for itself, so that different bytes never look the same.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        shown = (chr(b) if 0x20 <= b < 0x7F and b != 0x5C else f"\\x{b:02x}" for b in data)
        return "bytes:" + "".join(shown)


def completion_logprobs(entries: Sequence[TokenLogprob], *, asked: bool = False) -> dict[str, Any] | None:
    """The `logprobs` object of a text completion; None without entries, unless requested."""
    if not entries and not asked:
        return None
    return {
        "tokens": [token_text(e.data) for e in entries],
        "text_offset": [e.offset for e in entries],
        "token_logprobs": [e.logprob for e in entries],
        "top_logprobs": [_best_and_chosen(e) for e in entries],
    }


def chat_logprob(entry: TokenLogprob) -> dict[str, Any]:
    """One entry of a chat's log-probabilities."""
    return {**_chat_token(entry), "top_logprobs": [_chat_token(t) for t in entry.top]}


def _chat_token(entry: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": token_text(entry.data), "bytes": list(entry.data), "logprob": entry.logprob}


def chat_logprobs(entries: Sequence[TokenLogprob], *, asked: bool = False) -> dict[str, Any] | None:
    """The `logprobs` object of a chat choice; None without entries, unless requested."""
    return {"content": [chat_logprob(e) for e in entries], "refusal": None} if entries or asked else None


def _best_and_chosen(entry: TokenLogprob) -> dict[str, float] | None:
    """None for a prompt's first token, which nothing predicts."""
    if entry.logprob is None:
        return None
    return {token_text(t.data): t.logprob for t in entry.top} | {token_text(entry.data): entry.logprob}
