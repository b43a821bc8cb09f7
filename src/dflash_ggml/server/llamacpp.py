"""llama.cpp's own endpoints: /completion, /infill, and those about the model and its vocabulary.

Names and formats follow its server's documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ..session.requests import CompletionRequest
from ..text.grammar_spec import response_format_spec
from ..text.tokenizer import Tokenizer, TooManyTokens
from .choices import check_choices
from .constraint_fields import ConstraintFields
from .dialect import ApiCall, Settings, opened, speculation
from .errors import ApiError, bad_request
from .limits import check_count
from .llamacpp_encoder import LlamaEncoder, sampling_settings
from .notes import Notes
from .runner import FILL_MARKS, Runner
from .schema import Body, Count, LogitPair, SamplingFields, Speculation, Token, TokenList, Whole, parse, whole

MAX_ALTERNATIVES = 256

Parts = Annotated[list[str | Token], Field(fail_fast=True), BeforeValidator(whole)]


class LlamaBody(SamplingFields, ConstraintFields):
    """Common fields of /completion and /infill."""

    model: str | None = None
    n_predict: Whole | None = None
    max_tokens: Whole | None = None
    n_probs: Count | None = None
    n: Whole | None = None
    n_cmpl: Whole | None = None
    stream: bool | None = None
    logit_bias: dict[str, float] | list[LogitPair] | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    response_fields: list[str] | None = None
    timings_per_token: bool | None = None
    dflash: Speculation | None = None


class CompletionBody(LlamaBody):
    """The request to /completion."""

    prompt: str | list[Any] | dict[str, Any]


class ExtraFile(Body):
    """A further file in front of the one to fill in."""

    filename: str = "file"
    text: str


class InfillBody(LlamaBody):
    """The request to /infill.

    Attributes:
        prompt: Text at the start of the gap.
    """

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] = []
    prompt: str | None = None


class TokenizeBody(Body):
    """The request to /tokenize; in vLLM's form the text is `prompt`, with special tokens."""

    content: str | Parts | None = None
    prompt: str | None = None
    model: str | None = None
    add_special: bool = False
    add_special_tokens: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    """The request to /detokenize."""

    tokens: TokenList


def read_completion(data: dict[str, Any], settings: Settings, tokenizer: Tokenizer) -> ApiCall:
    """Validate a request to /completion.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    body, notes = opened(CompletionBody, data, settings)
    prompts = [_prompt(p, f"prompt[{i}]") for i, p in enumerate(_split(body.prompt))]
    check_count(prompts, 128, "prompt")
    requests = [CompletionRequest(prompt=p, **_options(body, settings, tokenizer)) for p in prompts]
    return _call(body, settings, requests, notes)


def read_infill(data: dict[str, Any], settings: Settings, tokenizer: Tokenizer) -> ApiCall:
    """Validate a request to /infill.

    Raises:
        ApiError: A field is wrong; 501 for a vocabulary without the marks that infilling needs.
    """
    missing = next((mark for mark in FILL_MARKS if tokenizer.id_of(mark) is None), None)
    if missing is not None:
        raise ApiError(
            501, f"this model cannot fill in: its vocabulary has no {missing}", code="not_supported"
        )
    body, notes = opened(InfillBody, data, settings)
    request = CompletionRequest(
        prompt=body.input_prefix + (body.prompt or ""),
        suffix=body.input_suffix,
        files=tuple({"filename": f.filename, "text": f.text} for f in body.input_extra),
        **_options(body, settings, tokenizer),
    )
    return _call(body, settings, [request], notes)


def _call(
    body: LlamaBody, settings: Settings, requests: Sequence[CompletionRequest], notes: Notes
) -> ApiCall:
    n = check_choices(body.n_cmpl if body.n is None else body.n, len(requests))
    encoder = LlamaEncoder(
        settings.model(body.model),
        request=requests[0],
        prompts=len(requests),
        n=n,
        stream=bool(body.stream),
        tokens=bool(body.return_tokens or body.stream),
        progress=bool(body.return_progress),
        timings=bool(body.timings_per_token),
        fields=body.response_fields or (),
    )
    return ApiCall(requests[0], encoder, bool(body.stream), notes, tuple(requests[1:]), n)


def _options(body: LlamaBody, settings: Settings, tokenizer: Tokenizer) -> dict[str, Any]:
    """The arguments of a CompletionRequest beside its prompt."""
    if body.n_probs is not None and body.n_probs > MAX_ALTERNATIVES:
        raise bad_request(f"n_probs: {body.n_probs} is above {MAX_ALTERNATIVES}", "n_probs", "invalid_value")
    limit = body.max_tokens if body.n_predict is None else body.n_predict
    if limit is None:
        limit = -1 if settings.max_tokens is None else settings.max_tokens
    response_format, grammar = body.constraint()
    arguments = body.arguments(settings.sampling, settings.limits, encode=tokenizer.encode)
    sampling = arguments["sampling"]
    bias = {**settings.sampling.logit_bias, **sampling.logit_bias}
    return {
        **arguments,
        "sampling": replace(sampling, logit_bias=bias),
        "max_tokens": None if limit < 0 else limit,
        "grammar": grammar or response_format_spec(response_format),
        "logprobs": body.n_probs or None,
        "return_tokens": True,
        **speculation(body.dflash),
    }


def _split(prompt: str | list[Any] | dict[str, Any]) -> list[Any]:
    """The prompts of a request; a list with a number at its top level is one prompt of tokens and texts."""
    prompt = whole(prompt)
    if not isinstance(prompt, list) or any(isinstance(part, int) for part in prompt):
        return [prompt]
    if not prompt:
        raise bad_request("prompt: it is empty, there is nothing to continue", "prompt", "invalid_value")
    return prompt


def _prompt(prompt: Any, where: str) -> str | list[int | str]:
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_string")
    prompt = whole(prompt)
    if isinstance(prompt, str):
        return prompt
    is_prompt = isinstance(prompt, list) and all(
        isinstance(part, str) or (isinstance(part, int) and not isinstance(part, bool)) for part in prompt
    )
    if not is_prompt:
        raise bad_request(f"{where}: expected a text, or a list of tokens and texts", where, "invalid_value")
    return prompt


def read_tokenize(data: dict[str, Any], settings: Settings) -> tuple[TokenizeBody, int]:
    """Validate a request to /tokenize; also returns the most tokens, if the context is smaller."""
    body = parse(TokenizeBody, data, Notes(settings.strict))
    if body.content is None and body.prompt is None:
        raise bad_request("content: this field is missing", "content", "missing_required_parameter")
    return body, settings.limits.tokens


def tokenize(runner: Runner, asked: tuple[TokenizeBody, int]) -> dict[str, Any]:
    """The answer of /tokenize.

    Raises:
        ApiError: The text has too many tokens.
    """
    body, most = asked
    most = max(most, runner.n_ctx)
    tokenizer = runner.tokenizer
    given = body.prompt or "" if body.content is None else body.content
    parts = [given] if isinstance(given, str) else given
    tokens = tokenizer.bos_ids if body.add_special or body.add_special_tokens else []
    try:
        for part in parts:
            if isinstance(part, str):
                tokens += tokenizer.encode(part, special=body.parse_special, most=most)
            else:
                tokens.append(part)
            if len(tokens) > most:
                raise TooManyTokens(len(tokens))
    except TooManyTokens:
        raise bad_request(f"content: more than {most} tokens; send it in parts", "content") from None
    if body.with_pieces:
        pieces = tokenizer.pieces(tokens)
        return {"tokens": [{"id": t, "piece": _piece(p)} for t, p in zip(tokens, pieces, strict=True)]}
    if body.content is not None:
        return {"tokens": tokens}
    return {"tokens": tokens, "count": len(tokens), "max_model_len": runner.n_ctx}


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def read_detokenize(data: dict[str, Any], settings: Settings) -> DetokenizeBody:
    """Validate a request to /detokenize."""
    return parse(DetokenizeBody, data, Notes(settings.strict))


def detokenize(runner: Runner, body: DetokenizeBody) -> dict[str, Any]:
    """The answer of /detokenize.

    Raises:
        ApiError: A token is beyond the vocabulary.
    """
    tokenizer = runner.tokenizer
    for i, token in enumerate(body.tokens):
        if token >= tokenizer.n_vocab:
            raise bad_request(f"{token} is not a token of this model", f"tokens[{i}]", "invalid_value")
    text = tokenizer.decode_bytes(body.tokens, special=True).decode("utf-8", "replace")
    return {"content": text, "prompt": text}  # the second is vLLM's name


def apply_template(runner: Runner, call: ApiCall) -> dict[str, Any]:
    """The answer of /apply-template: a chat request's rendered conversation."""
    return {"prompt": runner.render(call.request)}


def props(runner: Runner, settings: Settings) -> dict[str, Any]:
    """The answer of /props."""
    info = runner.info()
    params = sampling_settings(settings.sampling, settings.max_tokens)
    return {
        "default_generation_settings": {"n_ctx": info["n_ctx"], "params": params},
        "total_slots": runner.parallel,
        "model_alias": settings.names[0],
        "modalities": {"vision": False, "audio": False},
        "is_sleeping": False,
        **info,
    }


def slots(runner: Runner, settings: Settings, running: int) -> list[dict[str, Any]]:
    """The answer of /slots: one entry per slot, busy ones first."""
    params = props(runner, settings)["default_generation_settings"]["params"]
    slot = {"id_task": -1, "n_ctx": runner.n_ctx, "speculative": runner.info()["has_draft"]}
    return [{"id": i, **slot, "is_processing": i < running, "params": params} for i in range(runner.parallel)]
