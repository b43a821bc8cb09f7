"""Complete a text with a model and its draft.

Usage:

    python complete.py [MODEL.gguf]
"""

import sys

from dflash_ggml import Llama
from dflash_ggml.files.pairs import EMBEDDED_TARGET

model = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_TARGET  # a small pair that is part of the package
prompt = "class Stack:\n    def __init__(self):\n"

# The draft is the file beside the model that has "dflash" in its name; draft_model= names another one.
with Llama(str(model), n_ctx=1024, verbose=False) as llm:
    answer = llm(prompt, max_tokens=96, temperature=0.5, seed=1)

print(prompt + answer["choices"][0]["text"])
timings = answer["timings"]
print(
    f"-- {timings['tokens_per_step']:.2f} tokens per pass of the model, {timings['predicted_per_second']:.0f} per second"
)
