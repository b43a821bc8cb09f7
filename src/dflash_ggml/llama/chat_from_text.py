"""Helpers of llama-cpp-python for custom chat handlers: conversion of text completions to chat completions, grammars."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..text.grammar import LlamaGrammar
from .chat_completion import chat_chunk, chat_object
from .completion import Heading

# any JSON value, with bounded white space, so that a model cannot emit it forever
JSON_GBNF = r"""
root ::= value
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? ws "}"
array ::= "[" ws (value ("," ws value)*)? ws "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,15})? ([eE] [-+]? [0-9]{1,3})?
ws ::= " "? | "\n" [ \t]{0,20}
"""
JSON_ARR_GBNF = JSON_GBNF.replace("root ::= value", "root ::= array")


def grammar_for_json(verbose: bool = False) -> LlamaGrammar:
    """Any JSON value."""
    return LlamaGrammar.from_string(JSON_GBNF, verbose=verbose)


def grammar_for_json_schema(
    schema: str, verbose: bool = False, fallback_to_json: bool = True
) -> LlamaGrammar:
    """Grammar of a JSON schema; of any JSON if the schema is invalid and fallback_to_json."""
    try:
        return LlamaGrammar.from_json_schema(schema, verbose=verbose)
    except Exception:
        if fallback_to_json:
            return grammar_for_json(verbose=verbose)
        raise


def grammar_for_response_format(
    response_format: Mapping[str, Any], verbose: bool = False
) -> LlamaGrammar | None:
    """Grammar of a response_format of type json_object; None for other types."""
    if response_format["type"] != "json_object":
        return None
    if "schema" in response_format:
        return grammar_for_json_schema(json.dumps(response_format["schema"]), verbose=verbose)
    return grammar_for_json(verbose=verbose)


def first_system_message(messages: Sequence[Mapping[str, Any]]) -> str:
    """Text of the first system message, or nothing."""
    return next((m["content"] or "" for m in messages if m["role"] == "system"), "")


def mapped_roles(
    messages: Sequence[Mapping[str, Any]], role_map: Mapping[str, str]
) -> list[tuple[str, str | None]]:
    """(name of the role, text or None) of those messages whose role is in the map."""
    known = (m for m in messages if m["role"] in role_map)
    return [(role_map[m["role"]], m["content"] if isinstance(m["content"], str) else None) for m in known]


def chat_logprobs_of(logprobs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Log-probabilities of a text completion in the shape of a chat's."""
    if logprobs is None:
        return None
    content = []
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for token, logprob, top in rows:
        others = [{"token": t, "logprob": p, "bytes": None} for t, p in (top or {}).items()]
        content.append({"token": token, "bytes": None, "logprob": logprob, "top_logprobs": others})
    return {"content": content, "refusal": None}


def _parts(body: Mapping[str, Any]) -> tuple[Heading, str, dict[str, Any] | None, Any]:
    """Parts of a text completion or chunk: heading, text, log-probabilities and finish reason."""
    (choice,) = body["choices"]
    head = Heading(body["model"], body["id"], body["created"])
    return head, choice["text"], chat_logprobs_of(choice["logprobs"]), choice["finish_reason"]


def chat_of_completion(completion: Mapping[str, Any]) -> dict[str, Any]:
    """A text completion as a chat completion, with its text as content."""
    head, text, logprobs, reason = _parts(completion)
    return chat_object(head, {"role": "assistant", "content": text}, logprobs, reason, completion["usage"])


def chat_chunks_of(chunks: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Chunks of a text completion as chat chunks, after one with the role."""
    for i, chunk in enumerate(chunks):
        head, text, logprobs, reason = _parts(chunk)
        if i == 0:
            yield chat_chunk(head, {"role": "assistant"})
        yield chat_chunk(head, {"content": text} if reason is None else {}, logprobs, reason)


def chat_of(completion_or_chunks: Any, stream: bool = False) -> Any:
    """A text completion, or with stream its chunks, as a chat completion."""
    return (chat_chunks_of if stream else chat_of_completion)(completion_or_chunks)


# names in llama_cpp.llama_chat_format
NAMES = {
    "_convert_completion_to_chat": chat_of,
    "_convert_text_completion_to_chat": chat_of_completion,
    "_convert_text_completion_chunks_to_chat": chat_chunks_of,
    "_convert_text_completion_logprobs_to_chat": chat_logprobs_of,
    "_get_system_message": first_system_message,
    "_map_roles": mapped_roles,
    "_grammar_for_json": grammar_for_json,
    "_grammar_for_json_schema": grammar_for_json_schema,
    "_grammar_for_response_format": grammar_for_response_format,
}
