"""Validation shared by the request dialects: strict types, unknown fields reported, one clear message.

pydantic does the work: it is maintained, both official clients depend on it already, and its errors carry
the path of the offending field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..decode.sampling_params import OPTIONS, SamplingParams
from ..text.schema_reading import is_same
from .errors import ApiError, bad_request
from .ignored_fields import IDLE_SAMPLING, QUIET_SAMPLING
from .limits import Limits, check_stops
from .notes import Notes

M = TypeVar("M", bound="Body")


def whole(value: Any) -> Any:
    """A whole number as an int, also 5.0, which some languages write for 5; also all numbers in a list."""
    if isinstance(value, list) and float in set(map(type, value)):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Temperature = Annotated[float, Field(ge=0.0, le=5.0)]
Count = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]
Seed = Annotated[Whole, Field(ge=-1, lt=1 << 64)]
Alternatives = Annotated[Count, Field(le=20)]
Token = Annotated[int, Field(ge=0)]  # the numbers of a list are converted at once
TokenList = Annotated[list[Token], Field(fail_fast=True), BeforeValidator(whole)]
Tokens = Annotated[TokenList, Field(min_length=1)]
Texts = str | Tokens | Annotated[list[str | Tokens], Field(min_length=1, fail_fast=True)]
LogitPair = Annotated[list[Any], Field(min_length=2, max_length=2)]
Encode = Callable[[str], list[int]]
# the names of options in requests, where they are not the field's own
_BY_FIELD = {"penalty_last_n": "repeat_last_n", "mirostat_mode": "mirostat"}


class Body(BaseModel):
    """Base of all request objects: no coercion between types. For unknown fields see `parse`.

    Attributes:
        quiet: Known fields that never affect the answer.
        idle: Unsupported fields, with the values that have no effect.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    quiet: ClassVar[frozenset[str]] = frozenset()
    idle: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class Echoed(Body):
    """An object of the conversation, which clients send back with additional keys; those are never noted."""


class Speculation(Body):
    """Our own options of every generating request, under the key `dflash`."""

    mode: Literal["auto", "plain", "chain", "tree"] | None = None
    budget: Annotated[Whole, Field(ge=1, le=256)] | None = None
    prompt_keep: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    prompt_scorer: Literal["lexical"] | None = None


class Options(Speculation):
    """For answers that support it, also a report of every decoding step."""

    return_steps: bool = False


class SamplingFields(Body):
    """Sampling fields of OpenAI's endpoints, and of llama.cpp's and vLLM's servers, by the same names."""

    quiet = QUIET_SAMPLING
    idle = IDLE_SAMPLING
    temperature: Temperature | None = None
    top_p: Probability | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | list[LogitPair] | None = None
    top_k: Whole | None = None
    min_p: Probability | None = None
    typical_p: Probability | None = None
    repeat_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1)] | None = None
    mirostat: Annotated[Literal[0, 1, 2], BeforeValidator(whole)] | None = None
    mirostat_tau: Annotated[float, Field(gt=0.0)] | None = None
    mirostat_eta: Annotated[float, Field(gt=0.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[TokenList, Field(max_length=64)] | None = None
    stop: str | list[str] | None = None

    def sampling(self, defaults: SamplingParams, encode: Encode | None = None) -> SamplingParams:
        """The sampler's options: the given fields, else the server's defaults. encode: see `arguments`."""
        given = {name: getattr(self, _BY_FIELD.get(name, name)) for name in OPTIONS}
        if self.seed == -1:
            given["seed"] = None
        if self.logit_bias is not None:
            given["logit_bias"] = _token_biases(self.logit_bias, encode)
        if self.repetition_penalty is not None and self.repeat_penalty is None:
            # vLLM's name, which counts the prompt too
            given["repeat_penalty"] = self.repetition_penalty
            if self.repeat_last_n is None:
                given["penalty_last_n"] = -1
        return sampling_params(defaults, **given)

    def arguments(
        self, defaults: SamplingParams, limits: Limits, param: str = "stop", encode: Encode | None = None
    ) -> dict[str, Any]:
        """The arguments of a request for sampling and stopping.

        Args:
            defaults: The server's options.
            limits: Limits of stop strings.
            param: Path of the stop strings in the request.
            encode: The tokens of a text, if texts may have biases.

        Raises:
            ApiError: There are too many stop strings, one is too long, or a bias is invalid.
        """
        return {
            "sampling": self.sampling(defaults, encode),
            "stop": check_stops(self.stop, limits, param),
            "ignore_eos": bool(self.ignore_eos),
            "min_tokens": self.min_tokens or 0,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
        }


def sampling_params(defaults: SamplingParams, **given: Any) -> SamplingParams:
    """`defaults`, overridden by the options in `given` that are not None."""
    values = {name: getattr(defaults, name) for name in OPTIONS}
    values.update((name, value) for name, value in given.items() if value is not None)
    return SamplingParams(**values)


def _token_biases(given: dict[str, float] | list[list[Any]], encode: Encode | None) -> dict[int, float]:
    """Biases by token id, from OpenAI's mapping or llama.cpp's list of pairs, where false is a ban.

    Args:
        encode: The tokens of a text, each of which gets its bias; None: texts are refused.
    """
    biases: dict[int, float] = {}
    for key, value in given.items() if isinstance(given, dict) else given:
        token = str(whole(key))
        is_id = not isinstance(key, bool) and token.isascii() and token.isdigit() and len(token) < 20
        if isinstance(key, str) and encode is not None and not (is_id and isinstance(given, dict)):
            tokens = encode(key)
        elif is_id:
            tokens = [int(token)]
        else:
            raise bad_request(f"{key!r:.40} is not a token", "logit_bias", "invalid_value")
        if value is not False and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise bad_request(f"{value!r:.40} is not a number", "logit_bias", "invalid_value")
        if abs(value) > 1e38:  # integers may overflow a float
            raise bad_request(f"{value!r:.40} is too large", "logit_bias", "invalid_value")
        # OpenAI documents -100 as a ban, which a finite bias cannot guarantee.
        is_ban = value is False or (value == -100 and encode is None)
        biases |= dict.fromkeys(tokens, float("-inf") if is_ban else float(value))
    return biases


def parse(model: type[M], data: Any, notes: Notes, where: str = "") -> M:
    """Validate `data`.

    Args:
        notes: Receives unknown fields.
        where: Path of `data` in the request.

    Raises:
        ApiError: 400 that names the innermost wrong field, or an unknown one on a strict server.
    """
    try:
        body = model.model_validate(data)
    except ValidationError as error:
        raise _problem(error, data, where) from None
    for path, asks in _unknown(body, where):
        if asks or notes.strict:
            notes.ignore(path)
    return body


def _unknown(body: Body, where: str) -> Iterator[tuple[str, bool]]:
    """The paths of unknown fields in `body`, and whether their values would have an effect."""
    if isinstance(body, Echoed):
        return
    for name, value in (body.model_extra or {}).items():
        path = f"{where}.{name}" if where else name
        if name in body.idle:
            if value is not None and not any(is_same(value, v) for v in body.idle[name]):
                yield path, True
        elif name not in body.quiet:
            yield path, value is not None and value is not False and value not in ("", [], {})
    for name, field in type(body).model_fields.items():
        path = f"{where}.{field.alias or name}" if where else field.alias or name
        value = getattr(body, name)
        for i, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(item, Body):
                yield from _unknown(item, path if i is None else f"{path}[{i}]")


def _problem(error: ValidationError, data: Any, where: str) -> ApiError:
    problems = error.errors(include_url=False, include_input=False)
    # A union reports every failed alternative; the deepest one is most likely the intended one.
    problem = max(problems, key=lambda p: len(p["loc"]))
    path = _path(problem["loc"], data)
    path = f"{where}.{path}" if where and path else where or path
    if problem["type"] == "missing":
        message, code = "this field is missing", "missing_required_parameter"
    else:
        message, code = str(problem["msg"]).removeprefix("Value error, "), "invalid_value"
    return bad_request(f"{path}: {message}" if path else message, path or None, code)


def _path(loc: Sequence[int | str], data: Any) -> str:
    """The field's path in the request: `loc` without the names of union members."""
    path = ""
    for i, part in enumerate(loc):
        if isinstance(part, int) and isinstance(data, list):
            path += f"[{part}]"
            data = data[part] if part < len(data) else None
        elif isinstance(data, dict) and (part in data or i == len(loc) - 1):
            path += f".{part}" if path else str(part)
            data = data.get(str(part))
    return path


def unsupported(param: str, why: str) -> ApiError:
    """400 for an unsupported feature of the API."""
    return bad_request(f"{param}: {why}", param, "unsupported_value")


class JsonSchema(Body):
    """`json_schema` of a response format. `strict` changes nothing: the grammar is always enforced."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's response_format; also llama.cpp's form with a `schema` beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    def plain(self, param: str) -> dict[str, Any] | None:
        """The format for ChatRequest.response_format; None for plain text."""
        named = self.json_schema or JsonSchema()
        schema = named.schema_ if named.schema_ is not None else self.schema_
        kind = "json_schema" if self.type == "json_object" and schema is not None else self.type
        return plain_format(kind, named.name, schema, f"{param}.json_schema.schema")


def plain_format(
    kind: str, name: str | None, schema: dict[str, Any] | None, param: str
) -> dict[str, Any] | None:
    """A response format in the session's form, None for text; ApiError that names `param` for a missing schema."""
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if schema is None:
        raise bad_request("a schema is needed", param, "missing_required_parameter")
    return {"type": "json_schema", "json_schema": {"name": name or "response", "schema": schema}}
