"""DFlash drafts and DDTree speculative decoding on a vendored, patched ggml."""

__version__ = "0.1.0"
