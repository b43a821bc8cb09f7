"""Parts of OpenAI-shaped answers: usage, timings and finish reasons; log-probabilities are in `logprobs`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .answer import Block
from .events import Usage


def usage_dict(usage: Usage) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "prompt_tokens": usage.prompt_n,
        "completion_tokens": usage.predicted_n,
        "total_tokens": usage.prompt_n + usage.predicted_n,
        "prompt_tokens_details": {"cached_tokens": usage.cached_n},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_n},
    }


def _speed(usage: Usage) -> dict[str, Any]:
    """Counts and times as llama.cpp's server names them."""
    kept = {} if usage.prompt_kept_n is None else {"prompt_kept_n": usage.prompt_kept_n}
    return {
        "cache_n": usage.cached_n,
        "prompt_n": usage.prefilled_n,
        **({**kept, "score_ms": round(usage.score_ms, 3)} if kept else {}),
        **({"prefill_fp8": True} if usage.prefill_fp8 else {}),
        "prompt_ms": round(usage.prompt_ms, 3),
        "prompt_per_second": round(usage.prompt_per_second, 2),
        "predicted_n": usage.predicted_n,
        "predicted_ms": round(usage.predicted_ms, 3),
        "predicted_per_second": round(usage.predicted_per_second, 2),
    }


def usage_timings(usage: Usage) -> dict[str, Any]:
    """Counts and times for a server's `usage`: by llama.cpp's names, and by those that Luce's benchmarks read."""
    speed = _speed(usage)
    return {
        **speed,
        "prompt_n_cached": speed["cache_n"],
        "prefill_ms": speed["prompt_ms"],
        "prefill_tokens_per_sec": speed["prompt_per_second"],
        "decode_ms": speed["predicted_ms"],
        "decode_tokens_per_sec": speed["predicted_per_second"],
    }


def timings_dict(usage: Usage) -> dict[str, Any]:
    """Speed and acceptance, by the names of llama.cpp's server where it has one."""
    return {
        **_speed(usage),
        "draft_n": usage.draft_n,
        "draft_n_accepted": usage.draft_n_accepted,
        "sources": [asdict(source) for source in usage.sources],
        "steps": usage.steps,
        "tokens_per_step": round(usage.tokens_per_step, 3),
        "mode": usage.mode,
        "budget": usage.budget,
        "widths": [
            {
                "nodes": use.nodes,
                "steps": use.steps,
                "tokens_per_step": round(use.tokens / use.steps, 3),
                "step_ms": round(use.ms / use.steps, 3),
                "predicted_ms": None if use.predicted_ms is None else round(use.predicted_ms, 3),
            }
            for use in usage.widths
        ],
    }


def usage_line(usage: Usage) -> str:
    """A one-line summary of a run."""
    return (
        f"dflash-ggml: prompt {usage.prompt_n} tokens ({usage.cached_n} cached, {usage.prompt_per_second:.0f}/s), "
        f"{usage.predicted_n} tokens at {usage.predicted_per_second:.1f}/s, {usage.steps} {usage.mode} steps, "
        f"{usage.tokens_per_step:.2f} tokens per step"
    )


def finish_reason(reason: str) -> str:
    """OpenAI's name of a finish reason; a cancelled answer is "stop"."""
    return "stop" if reason == "cancelled" else reason


def call_object(block: Block, name: str | None = None) -> dict[str, Any]:
    """A tool call of a chat message.

    Args:
        name: The client's name of the tool, if the model knows it by another.
    """
    function = {"name": block.name if name is None else name, "arguments": block.text}
    return {"id": block.id, "type": "function", "function": function}
