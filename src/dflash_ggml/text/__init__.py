"""Text and tokens: tokenizer, chat template, parsing, tools, grammars, stop strings. No model, no device."""
