"""Request fields that are accepted without effect.

Two lists: names whose value never affects the answer, and names with the values at which they have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_Idle = Mapping[str, tuple[Any, ...]]

# the caller's labels, cache hints, routing information, and Open WebUI's chat metadata
_LABELS = """
user metadata safety_identifier client_metadata session_id request_id rid trace_id
prompt_cache_key prompt_cache_retention prompt_cache_options cache_salt keep_alive service_tier priority provider route
chat_id folder_id id parent_id parent_message user_message background_tasks features variables model_item tool_ids tool_servers
filter_ids skill_ids terminal_id
"""
# parameters of samplers that are off unless another field enables them
_SAMPLING = """
cache_prompt id_slot n_cache_reuse prediction usage min_keep n_discard
dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold dynatemp_exponent adaptive_decay
"""
_MESSAGES = "metadata cache_control service_tier inference_geo betas diagnostics user_profile_id"
QUIET_LABELS = frozenset(_LABELS.split())
QUIET_SAMPLING = QUIET_LABELS | set(_SAMPLING.split())
QUIET_MESSAGES = frozenset(_MESSAGES.split())

LLAMA_SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]

IDLE_SAMPLING: _Idle = {
    # llama.cpp's server
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "dynatemp_range": (0, 0.0),
    "adaptive_target": (-1, -1.0),
    "samplers": (LLAMA_SAMPLERS, []),
    "penalize_nl": (False,),
    "n_keep": (0, -1),
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "lora": ([],),
    "timings_per_token": (False,),
    "post_sampling_probs": (False,),
    # vLLM's and SGLang's servers, whose routers send every field
    "no_stop_trim": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True, False),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "use_beam_search": (False,),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "stream_reasoning": (True,),
    "min_new_tokens": (0,),
    "bad_words": ([],),
    "prompt_logprobs": (0,),
}

IDLE_CHAT: _Idle = {
    **IDLE_SAMPLING,
    "store": (False,),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "parse_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("auto", "none"),  # without functions
    "reasoning_in_content": (False,),
    "thinking_forced_open": (False,),
}

IDLE_RESPONSES: _Idle = {
    "truncation": ("disabled",),
    "background": (False,),
    "context_management": ([],),
}

# max_tool_calls limits tools run by the service itself; there are none here
QUIET_RESPONSES = QUIET_LABELS | {"max_tool_calls"}

IDLE_MESSAGES: _Idle = {
    "container": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
}
