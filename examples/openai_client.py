"""Ask a running `dflash-serve` through OpenAI's own client.

Usage:

    dflash-serve &
    pip install openai
    python openai_client.py [http://127.0.0.1:8080/v1]
"""

import sys

from openai import OpenAI

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
client = OpenAI(base_url=address, api_key="none")  # any key, unless the server was given one
model = client.models.list().data[0].id  # the server has one model

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Write a loop in Python."}],
    max_tokens=48,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n-- {chunk.usage.completion_tokens} tokens from {model}")
