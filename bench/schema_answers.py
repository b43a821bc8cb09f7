"""Share of schema-constrained answers that end within a number of tokens and are valid.

    python bench/schema_answers.py [--answers 20] [--tokens 120] [--temp 1] [--json FILE]

The embedded pair knows Python and nothing of these questions: what ends its answers is the grammar.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from typing import Any

import jsonschema
from common import header, save

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling_params import SamplingParams
from dflash_ggml.engine.engine import Engine
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET
from dflash_ggml.session.events import Finish, TextDelta, Usage
from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import Session, run_chat

SCHEMAS: dict[str, dict[str, Any]] = {
    "enum, integer and boolean": {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green", "blue"]},
            "count": {"type": "integer"},
            "ready": {"type": "boolean"},
        },
        "required": ["colour", "count", "ready"],
    },
    "nested objects": {
        "type": "object",
        "properties": {
            "owner": {
                "type": "object",
                "properties": {"age": {"type": "integer"}, "home": {"$ref": "#/$defs/place"}},
                "required": ["age", "home"],
            },
            "weight": {"type": "number"},
        },
        "required": ["owner", "weight"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"floor": {"type": "integer"}, "garden": {"type": "boolean"}},
                "required": ["floor", "garden"],
            }
        },
    },
    "an array of at most three": {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 1,
        "maxItems": 3,
    },
    "strings with maxLength": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "unit": {"type": "string", "maxLength": 8},
        },
        "required": ["name", "unit"],
    },
}
UNBOUNDED: dict[str, dict[str, Any]] = {
    "strings without maxLength": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "unit": {"type": "string"}},
        "required": ["name", "unit"],
    },
}


def answers(
    session: Session, schema: dict[str, Any], n: int, tokens: int, temperature: float
) -> Iterator[dict[str, Any]]:
    """n answers with the seeds 0 to n - 1: their text, number of tokens, whether they ended and are valid."""
    for seed in range(n):
        request = ChatRequest(
            messages=[{"role": "user", "content": "Write the record of this as JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "record", "schema": schema}},
            sampling=SamplingParams(temperature=temperature, seed=seed),
            max_tokens=tokens,
            enable_thinking=False,
        )
        text, used, reason = "", 0, ""
        for event in run_chat(session, request):
            if isinstance(event, TextDelta):
                text += event.text
            elif isinstance(event, Usage):
                used = event.predicted_n
            elif isinstance(event, Finish):
                reason = event.reason
        yield {"text": text, "tokens": used, "ended": reason == "stop", "valid": valid(text, schema)}


def valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON that fits the schema as it was given."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=20, help="per schema")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--temp", type=float, default=1.0)
    parser.add_argument("-t", type=int, default=1, help="threads")
    parser.add_argument("--json", help="file for the result")
    args = parser.parse_args()
    config = EngineConfig(
        EMBEDDED_TARGET, EMBEDDED_DRAFT, n_ctx=512, n_threads=args.t, n_gpu_layers=0, calibrate="never"
    )
    facts = header(model=EMBEDDED_TARGET.name, tokens=args.tokens, temperature=args.temp)
    print(f"commit {facts['commit']}, {facts['cpu']}, {args.tokens} tokens, temperature {args.temp:g}\n")
    print("| schema | complete and valid | valid once ended | tokens, median |\n|---|---|---|---|")
    rows = []
    with Engine.load(config) as engine:
        session = Session(engine)
        for name, schema in {**SCHEMAS, **UNBOUNDED}.items():
            found = list(answers(session, schema, args.answers, args.tokens, args.temp))
            ended = [a for a in found if a["ended"]]
            row = {
                "schema": name,
                "answers": len(found),
                "complete": sum(a["valid"] for a in ended),
                "ended": len(ended),
                "tokens_median": statistics.median(a["tokens"] for a in found),
            }
            rows.append(row)
            print(
                f"| {name} | {row['complete']} of {row['answers']} | {row['complete']} of {row['ended']} |"
                f" {row['tokens_median']:g} |",
                flush=True,
            )
    save(args.json, {**facts, "rows": rows})


if __name__ == "__main__":
    main()
