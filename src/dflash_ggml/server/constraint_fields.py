"""Constraint fields of all clients (grammars, schemas, regular expressions, choices), as one constraint."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field

from ..errors import ConfigError
from ..session.binding import unbound
from ..session.requests import GrammarSpec
from ..text.grammar_spec import json_schema_spec, spec_of
from .dialect import ApiCall
from .errors import bad_request
from .schema import Body, ResponseFormat

Schema = dict[str, Any] | str
Choices = Annotated[list[str], Field(max_length=1024)]


class StructuredOutputs(Body):
    """vLLM's structured_outputs: one of them."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ConstraintFields(Body):
    """OpenAI's response_format, and the equivalent fields of llama.cpp's, vLLM's and SGLang's servers."""

    response_format: ResponseFormat | None = None
    grammar: str | None = None
    json_schema: Schema | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def constraint(self) -> tuple[dict[str, Any] | None, GrammarSpec | None]:
        """The response format or the grammar; ApiError names a field that contradicts another."""
        plain = self.response_format.plain("response_format") if self.response_format else None
        inner = self.structured_outputs or StructuredOutputs()
        asked = {
            "grammar": spec_of("gbnf", self.grammar),
            "json_schema": _schema(self.json_schema),
            "guided_json": _schema(self.guided_json),
            "guided_regex": spec_of("regex", self.guided_regex),
            "guided_choice": _choice(self.guided_choice),
            "guided_grammar": _grammar(self.guided_grammar),
            "regex": spec_of("regex", self.regex),
            "ebnf": _grammar(self.ebnf),
            "structured_outputs.json": _schema(inner.json_),
            "structured_outputs.regex": spec_of("regex", inner.regex),
            "structured_outputs.choice": _choice(inner.choice),
            "structured_outputs.grammar": _grammar(inner.grammar),
            "structured_outputs.json_object": GrammarSpec("json_object") if inner.json_object else None,
        }
        given = {name: spec for name, spec in asked.items() if spec is not None}
        if len(given) + (plain is not None) > 1:
            name = list(given)[-1]
            other = "response_format" if plain is not None else next(iter(given))
            raise bad_request(f"{name}: cannot be combined with {other}", name)
        return plain, next(iter(given.values()), None)


def note_unbound(call: Any) -> Any:
    """Note the parts of the call's schemas that are not enforced, and return the call."""
    if isinstance(call, ApiCall):
        with suppress(ConfigError):  # refused later, when the request is prepared
            for label, what in unbound(call.request):
                field, _, tool = label.partition(": ")
                call.notes.weaken(field, f"{f'{tool}: ' if tool else ''}{what} (not enforced)")
    return call


def _schema(schema: Schema | None) -> GrammarSpec | None:
    if schema is None or (isinstance(schema, str) and not schema.strip()):
        return None
    return json_schema_spec(schema)


def _choice(choices: list[str] | None) -> GrammarSpec | None:
    words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices or ())
    return spec_of("lark", f"start: {words}\n" if words else None)


def _grammar(text: str | None) -> GrammarSpec | None:
    """A grammar of undeclared dialect: GBNF if it has `::=`, else Lark."""
    return spec_of("gbnf" if "::=" in (text or "") else "lark", text)
