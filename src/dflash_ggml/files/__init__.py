"""Model files and their sources: GGUF, safetensors, typed keys, the hub, target-draft pairs."""
