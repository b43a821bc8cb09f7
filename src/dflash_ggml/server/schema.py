"""Validation shared by the request dialects: strict types, unknown fields refused, one clear message.

pydantic does the work: it is maintained, both official clients depend on it already, and its errors carry
the path of the offending field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..decode.sampling_params import OPTIONS, SamplingParams
from ..session.requests import GrammarSpec
from .errors import ApiError, bad_request

M = TypeVar("M", bound="Body")

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Temperature = Annotated[float, Field(ge=0.0, le=5.0)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=-1, lt=1 << 64)]


class Body(BaseModel):
    """Base of all request objects: no coercion between types, and a field we do not know is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Speculation(Body):
    """Our own additions to every generating request, under the key `dflash`."""

    mode: Literal["auto", "plain", "chain", "tree"] | None = None
    budget: Annotated[int, Field(ge=1, le=256)] | None = None


class Options(Speculation):
    """Where the answer has room for it, also a view of every decoding step."""

    return_steps: bool = False


class SamplingFields(Body):
    """Sampling fields of OpenAI's endpoints, and those that llama.cpp's server adds, under the same names."""

    temperature: Temperature | None = None
    top_p: Probability | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    top_k: int | None = None
    min_p: Probability | None = None
    typical_p: Probability | None = None
    repeat_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, Field(gt=0.0)] | None = None
    mirostat_eta: Annotated[float, Field(gt=0.0)] | None = None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The sampler's options: the fields given, the server's defaults for the rest."""
        given = {name: getattr(self, option.request or name) for name, option in OPTIONS.items()}
        if self.seed == -1:
            given["seed"] = None
        if self.logit_bias is not None:
            given["logit_bias"] = _token_keys(self.logit_bias)
        return sampling_params(defaults, **given)


def sampling_params(defaults: SamplingParams, **given: Any) -> SamplingParams:
    """`defaults` with every option in `given` that is not None."""
    values = {name: getattr(defaults, name) for name in OPTIONS}
    values.update((name, value) for name, value in given.items() if value is not None)
    return SamplingParams(**values)


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    tokens: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit()):
            raise bad_request(f"{key!r} is not a token id", "logit_bias")
        # OpenAI documents -100 as a ban, which a finite bias cannot promise.
        tokens[int(key)] = float("-inf") if value == -100 else float(value)
    return tokens


def parse(model: type[M], data: dict[str, Any]) -> M:
    """Validate `data`; raises ApiError 400 that names the field furthest down the request that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
    # A union reports every alternative that failed; the deepest one is what the client meant.
    problem = max(problems, key=lambda p: len(p["loc"]))
    path = _path(problem["loc"], data)
    if problem["type"] == "extra_forbidden":
        message, code = "this field is not supported here", "unsupported_parameter"
    elif problem["type"] == "missing":
        message, code = "this field is missing", "missing_required_parameter"
    else:
        message, code = str(problem["msg"]).removeprefix("Value error, "), "invalid_value"
    raise bad_request(f"{path}: {message}" if path else message, path or None, code)


def _path(loc: Sequence[int | str], data: Any) -> str:
    """The field's path as the client wrote it: the parts of `loc` that name union members are left out."""
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
    """400 for something the API knows and this server does not do."""
    return bad_request(f"{param}: {why}", param, "unsupported_value")


class JsonSchema(Body):
    """`json_schema` of a response format. `strict` changes nothing: the grammar is always enforced."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def plain(self, param: str) -> dict[str, Any] | None:
        """As the mapping that ChatRequest.response_format takes; None for plain text."""
        named = self.json_schema or JsonSchema()
        return plain_format(self.type, named.name, named.schema_, f"{param}.json_schema.schema")


def plain_format(
    kind: str, name: str | None, schema: dict[str, Any] | None, param: str
) -> dict[str, Any] | None:
    """A response format as the session takes it, None for text; ApiError naming `param` for a missing schema."""
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if schema is None:
        raise bad_request("a schema is needed", param, "missing_required_parameter")
    return {"type": "json_schema", "json_schema": {"name": name or "response", "schema": schema}}


def gbnf(text: str | None) -> GrammarSpec | None:
    """llama.cpp's `grammar` field."""
    return None if text is None else GrammarSpec("gbnf", text)
