"""Draft models: their common contract, and one file or folder per kind."""
