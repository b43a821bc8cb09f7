"""Tokenizer objects in the shape that llama-cpp-python users pass around: bytes in, ids out, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .model import LlamaModel


class BaseLlamaTokenizer(ABC):
    """What a replacement tokenizer must offer."""

    @abstractmethod
    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Ids of UTF-8 text."""

    @abstractmethod
    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Bytes of ids."""


class LlamaTokenizer(BaseLlamaTokenizer):
    """The model's own tokenizer."""

    def __init__(self, llama: Any) -> None:
        self._model: LlamaModel = llama._model

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Ids of UTF-8 text, each byte that is none read as U+FFFD; BOS only if the model wants one."""
        return self._model.tokenize(text, add_bos, special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Bytes of ids; control tokens are left out unless special. Byte-level pieces do not depend on prev_tokens."""
        return self._model.detokenize(tokens, special)

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """Ids of text."""
        return self.tokenize(text.encode("utf-8", "ignore"), add_bos=add_bos, special=special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids."""
        return self.detokenize(tokens).decode("utf-8", "ignore")

    @classmethod
    def from_ggml_file(cls, path: str) -> LlamaTokenizer:
        """The tokenizer of a model file, without its weights."""
        return cls(SimpleNamespace(_model=LlamaModel(path_model=path)))


class LlamaHFTokenizer(BaseLlamaTokenizer):
    """A transformers tokenizer."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf_tokenizer = hf_tokenizer

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Ids of UTF-8 text; special adds the tokenizer's own special tokens."""
        return self.hf_tokenizer.encode(text.decode("utf-8", "ignore"), add_special_tokens=special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Bytes of ids, as they read after prev_tokens."""
        before = list(prev_tokens or ())
        texts = [
            self.hf_tokenizer.decode(ids, skip_special_tokens=not special).encode("utf-8", "ignore")
            for ids in (before + list(tokens), before)
            if ids
        ]
        return texts[0][len(texts[1]) if before else 0 :] if texts else b""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str) -> LlamaHFTokenizer:
        """Load by name; needs the transformers package."""
        return cls(auto_tokenizer("LlamaHFTokenizer", pretrained_model_name_or_path))


def auto_tokenizer(who: str, name: Any) -> Any:
    """A tokenizer of the transformers package, by name.

    Args:
        who: What needs it, for the message.
        name: Name or path of the tokenizer.

    Raises:
        ImportError: The package is missing; it says what needs it.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ImportError(f"{who} needs transformers: pip install transformers") from None
    return AutoTokenizer.from_pretrained(name)
