"""Model files and where they come from: GGUF, safetensors, typed keys, the hub, pairs."""
