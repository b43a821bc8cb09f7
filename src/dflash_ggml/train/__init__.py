"""Training of drafts for targets given as GGUF or transformers checkpoint. The only package that needs torch."""
