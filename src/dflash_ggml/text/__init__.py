"""Text processing without model or device: tokenizer, chat template, parsing, tools, grammars, stop strings."""
