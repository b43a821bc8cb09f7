"""Chat, printing the answer as it comes.

Usage:

    python chat.py [MODEL.gguf]
"""

import sys

from dflash_ggml import Llama
from dflash_ggml.files.pairs import EMBEDDED_TARGET

model = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_TARGET  # it has seen code only: do not expect sense
messages = [{"role": "system", "content": "You answer in Python."}]

with Llama(str(model), n_ctx=1024, verbose=False) as llm:
    for question in ("Write a function that adds two numbers.", "Now one that multiplies them."):
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        text = ""
        # A chunk is what one verified step gave, often several tokens at once.
        for chunk in llm.create_chat_completion(messages, max_tokens=48, seed=1, stream=True):
            piece = chunk["choices"][0]["delta"].get("content") or ""
            print(piece, end="", flush=True)
            text += piece
        print("\n")
        # The second turn is cheap: the state of the first one is still there.
        messages.append({"role": "assistant", "content": text})
