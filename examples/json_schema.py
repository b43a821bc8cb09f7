"""Let a model fill in a JSON object whose shape is given: a grammar bars every token that would break it.

Usage:

    pip install "dflash-ggml[grammar]"
    python json_schema.py [MODEL.gguf]
"""

import json
import sys

from dflash_ggml import Llama
from dflash_ggml.files.pairs import EMBEDDED_TARGET

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},  # a bound, or a weak model may never close the quotes
        "language": {"enum": ["Python", "C", "Rust"]},
        "stars": {"type": "integer", "minimum": 0, "maximum": 5},
    },
    "required": ["name", "language", "stars"],
    "additionalProperties": False,
}

model = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_TARGET
with Llama(str(model), n_ctx=1024, verbose=False) as llm:
    answer = llm.create_chat_completion(
        [{"role": "user", "content": "Describe a small open-source library as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "library", "schema": SCHEMA}},
        max_tokens=128,
        seed=1,
    )
library = json.loads(answer["choices"][0]["message"]["content"])
print(json.dumps(library, indent=2))
