"""Parts of OpenAI-shaped answers: usage, timings, finish reasons and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .events import TokenLogprob, Usage


def usage_dict(usage: Usage) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "prompt_tokens": usage.prompt_n,
        "completion_tokens": usage.predicted_n,
        "total_tokens": usage.prompt_n + usage.predicted_n,
        "prompt_tokens_details": {"cached_tokens": usage.cached_n},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_n},
    }


def timings_dict(usage: Usage) -> dict[str, Any]:
    """Speed and acceptance, named as llama.cpp's server names them where it has a name."""
    return {
        "cache_n": usage.cached_n,
        "prompt_n": usage.prompt_n - usage.cached_n,
        "prompt_ms": round(usage.prompt_ms, 3),
        "prompt_per_second": round(usage.prompt_per_second, 2),
        "predicted_n": usage.predicted_n,
        "predicted_ms": round(usage.predicted_ms, 3),
        "predicted_per_second": round(usage.predicted_per_second, 2),
        "draft_n": usage.draft_n,
        "draft_n_accepted": usage.draft_n_accepted,
        "steps": usage.steps,
        "tokens_per_step": round(usage.tokens_per_step, 3),
        "mode": usage.mode,
        "budget": usage.budget,
    }


def usage_line(usage: Usage) -> str:
    """One line about a run, for people."""
    return (
        f"dflash-ggml: prompt {usage.prompt_n} tokens ({usage.cached_n} cached, {usage.prompt_per_second:.0f}/s), "
        f"{usage.predicted_n} tokens at {usage.predicted_per_second:.1f}/s, {usage.steps} {usage.mode} steps, "
        f"{usage.tokens_per_step:.2f} tokens per step"
    )


def finish_reason(reason: str) -> str:
    """OpenAI's name of a finish reason: a cancelled answer just stopped."""
    return "stop" if reason == "cancelled" else reason


def completion_logprobs(entries: Sequence[TokenLogprob], base: int) -> dict[str, Any] | None:
    """The `logprobs` object of a text completion; base: characters of text before the entries' own offset 0."""
    if not entries:
        return None
    top = [
        None if e.logprob is None else {_text(t.data): t.logprob for t in e.top} | {_text(e.data): e.logprob}
        for e in entries
    ]
    return {
        "tokens": [_text(e.data) for e in entries],
        "text_offset": [base + e.offset for e in entries],
        "token_logprobs": [e.logprob for e in entries],
        "top_logprobs": top,
    }


def logprob_entry(token: TokenLogprob) -> dict[str, Any]:
    """One entry of a chat's log-probabilities."""
    return {
        "token": _text(token.data),
        "bytes": list(token.data),
        "logprob": token.logprob,
        "top_logprobs": [
            {"token": _text(t.data), "bytes": list(t.data), "logprob": t.logprob} for t in token.top
        ],
    }


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """The `logprobs` object of a chat choice."""
    if not entries:
        return None
    return {"content": [logprob_entry(e) for e in entries], "refusal": None}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
