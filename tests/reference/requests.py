"""Valid requests, one for each endpoint, with as many fields as tests want to change."""

from __future__ import annotations

from typing import Any

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
THOUGHT = {"type": "thinking", "thinking": "t"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "toy",
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "u"}, {"type": "image_url", "image_url": {}}],
            },
            {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking_blocks": [THOUGHT]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
            {"role": "developer", "content": "d"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
            {
                "type": "custom",
                "custom": {"name": "g", "format": {"type": "grammar", "grammar": {"syntax": "lark"}}},
            },
        ],
        "stop_token_ids": [3],
        "reasoning": {"effort": "low"},
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["x"],
        "logit_bias": {"5": 1.5},
        "temperature": 0.5,
        "dflash": {"mode": "tree", "budget": 7, "return_steps": True},
    },
    "/v1/completions": {
        "model": "toy",
        "prompt": [1, 2],
        "max_tokens": 4,
        "logprobs": 2,
        "stop": "x",
        "seed": 3,
    },
    "/v1/responses": {
        "model": "toy",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {
                "type": "reasoning",
                "id": "r",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "t"}],
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            {"type": "local_shell_call", "call_id": "d", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "d", "output": "r"},
            {"type": "item_reference", "id": "i"},
            {"type": "additional_tools", "tools": [{"type": "local_shell"}]},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": SCHEMA, "strict": None},
            {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "g"}]},
            {"type": "web_search"},
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        "reasoning": {"effort": "low"},
        "stream": True,
    },
    "/v1/messages": {
        "model": "toy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]},
                    {"type": "document", "title": "t", "source": {"type": "text", "data": "d"}},
                    {"type": "search_result", "content": [{"type": "text", "text": "s"}]},
                ],
            },
            {"role": "system", "content": "s"},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}],
        "context_management": {"edits": []},
        "tool_choice": {"type": "any"},
        "stream": True,
    },
    "/completion": {
        "prompt": ["a", [1, 2], {"prompt_string": "b"}],
        "n_predict": 4,
        "n_probs": 2,
        "n_cmpl": 2,
        "logit_bias": [[1, 0.5], ["hello", False]],
        "response_fields": ["content", "generation_settings/n_predict"],
        "stop": ["x"],
        "timings_per_token": True,
        "samplers": ["top_k"],
    },
    "/v1/embeddings": {"model": "toy", "input": ["a", [1, 2]], "encoding_format": "base64", "dimensions": 4},
    "/api/chat": {
        "model": "toy",
        "messages": [
            {"role": "user", "content": "u", "images": ["aGk="]},
            {
                "role": "assistant",
                "content": "",
                "thinking": "t",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": "b"}}}],
            },
            {"role": "tool", "content": "r", "tool_name": "f"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "format": SCHEMA,
        "options": {"temperature": 0.5, "num_predict": 3, "stop": ["x"], "num_ctx": 100},
        "think": "low",
        "keep_alive": "5m",
        "logprobs": True,
        "top_logprobs": 1,
    },
    "/api/generate": {
        "model": "toy",
        "prompt": "a",
        "suffix": "b",
        "system": "s",
        "format": "json",
        "raw": True,
    },
    "/api/embed": {"model": "toy", "input": ["a"], "dimensions": 4, "truncate": False},
}
