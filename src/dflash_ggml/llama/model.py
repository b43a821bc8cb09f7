"""`Llama._model`: llama-cpp-python's inner model object, from the file's header and the tokenizer."""

from __future__ import annotations

import math
import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..files.gguf import GGUFFile
from ..text.tokenizer import BYTE, CONTROL, END_TEXTS, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Tokenizer
from .constants import CONSTANTS
from .handles import handle_for

_ATTRIBUTES = {
    kind: CONSTANTS[f"LLAMA_TOKEN_ATTR_{name}"]
    for name, kind in {
        "NORMAL": NORMAL,
        "UNKNOWN": UNKNOWN,
        "CONTROL": CONTROL,
        "USER_DEFINED": USER_DEFINED,
        "UNUSED": UNUSED,
        "BYTE": BYTE,
    }.items()
}
# special token -> texts by which it is known where the file does not declare it
_KNOWN_TEXTS = {
    "bos": ("<|endoftext|>",),  # no file of this family declares one, and some libraries cannot do without
    "eot": END_TEXTS,
    **{
        f"fim_{name}": (f"<|fim_{text}|>",)
        for name, text in zip(["pre", "suf", "mid", "pad"], ["prefix", "suffix", "middle", "pad"])
    },
    "fim_rep": ("<|repo_name|>",),
    "fim_sep": ("<|file_sep|>",),
}
_DECLARED = {"pad": "padding", "cls": "bos"}  # the file's name of a special token where llama.h has another


SPECIAL = (
    "bos",
    "eos",
    "cls",
    "sep",
    "pad",
    "mask",
    "eot",
    *(f"fim_{n}" for n in ["pre", "suf", "mid", "pad", "rep", "sep"]),
)


def _token(name: str) -> Callable[[LlamaModel], int]:
    return lambda self: self.special(name)


def _size(name: str) -> Callable[[LlamaModel], int]:
    return lambda self: getattr(self.target, name)


class LlamaModel:
    """A model by its header: sizes, metadata, vocabulary. `model` and `vocab` are handles for the `llama_*` functions.

    Opened with a path it reads the header alone, without weights.

    Raises:
        ValueError: The file is missing.
        ModelFileError: It is damaged.
    """

    def __init__(self, *, path_model: str, params: Any = None, verbose: bool = True) -> None:
        if not os.path.exists(path_model):
            raise ValueError(f"Model path does not exist: {path_model}")
        from ..models.registry import read_target

        with GGUFFile(Path(path_model)) as file:
            self._fill(path_model, Tokenizer.from_gguf(file), read_target(file), file.metadata)
        self.params, self.verbose = params, verbose

    @classmethod
    def of(cls, path: str, tokenizer: Tokenizer, target: Any, metadata: Mapping[str, Any]) -> LlamaModel:
        """The model that an engine has opened."""
        self = cls.__new__(cls)
        self._fill(path, tokenizer, target, metadata)
        self.params, self.verbose = None, False
        return self

    def _fill(self, path: str, tokenizer: Tokenizer, target: Any, metadata: Mapping[str, Any]) -> None:
        self.path_model = path
        self.tokenizer = tokenizer
        self.target = target
        self._texts = text_metadata(metadata)
        self.model: int | None = handle_for(self)
        self.vocab: int | None = self.model
        self.contexts: weakref.WeakSet[Any] = weakref.WeakSet()

    def close(self) -> None:
        """Forget the handles, and end the contexts made of it."""
        for context in list(self.contexts):
            context.close()
        self.model = self.vocab = None

    # --- sizes

    def vocab_type(self) -> int:
        """SentencePiece with scores, or BPE."""
        kind = "SPM" if self._texts.get("tokenizer.ggml.model") == "llama" else "BPE"
        return CONSTANTS[f"LLAMA_VOCAB_TYPE_{kind}"]

    n_vocab, n_ctx_train, n_embd, n_layer = map(_size, ("n_vocab", "n_ctx_train", "n_embd", "n_layers"))

    def n_params(self) -> int:
        """Number of weights of the tensors that are used."""
        return sum(math.prod(shape) for shape in self.target.tensors().values())

    def size(self) -> int:
        """Bytes of the file."""
        return os.path.getsize(self.path_model)

    def rope_freq_scale_train(self) -> float:
        """Factor that positions are scaled by; always 1."""
        return 1.0

    def desc(self) -> str:
        """Architecture and name."""
        found = (self._texts.get(key) for key in ("general.architecture", "general.name"))
        return " ".join(part for part in found if part)

    def metadata(self) -> dict[str, str]:
        """The file's metadata as texts."""
        return dict(self._texts)

    # --- vocabulary

    def token_get_text(self, token: int) -> str:
        """The token as it is stored; "" for padding ids."""
        return self.tokenizer.tokens[token] if 0 <= token < self.tokenizer.n_vocab else ""

    def token_get_score(self, token: int) -> float:
        """0: byte-level BPE has ranks of merges instead."""
        return 0.0

    def token_get_attr(self, token: int) -> int:
        """One of `LLAMA_TOKEN_ATTR_*`."""
        known = 0 <= token < self.tokenizer.n_vocab
        return _ATTRIBUTES.get(self.tokenizer.kind(token) if known else UNUSED, 0)

    def special(self, name: str) -> int:
        """Id of a special token by llama.h's name ("eot", "fim_pre", ...), -1 if there is none."""
        declared = self.tokenizer.special_ids.get(_DECLARED.get(name, name))
        if declared is not None:
            return declared
        found = (self.tokenizer.id_of(text) for text in _KNOWN_TEXTS.get(name, ()))
        return next((i for i in found if i is not None), -1)

    def token_nl(self) -> int:
        """Id of a line feed."""
        return self.tokenizer.encode("\n")[-1]

    token_bos, token_eos, token_cls, token_sep, token_eot = map(_token, ("bos", "eos", "cls", "sep", "eot"))
    token_prefix, token_middle, token_suffix = map(_token, ("fim_pre", "fim_mid", "fim_suf"))

    def add_bos_token(self) -> bool:
        """Whether the model wants BOS before a prompt."""
        return self.tokenizer.add_bos

    def add_eos_token(self) -> bool:
        """Whether the model wants EOS behind a text; never."""
        return False

    # --- text

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Ids of UTF-8 text, each byte that is none read as U+FFFD; BOS only if the model wants one."""
        bos = self.tokenizer.bos_ids if add_bos else []
        return bos + self.tokenizer.encode(lossy_text(text), special=special)

    def token_to_piece(self, token: int, special: bool = False) -> bytes:
        """Bytes of a token; nothing for a control token unless special, and for padding ids."""
        tokenizer = self.tokenizer
        hidden = not special and token < tokenizer.n_vocab and tokenizer.is_control(token)
        return b"" if hidden else tokenizer.piece(token)

    def detokenize(self, tokens: Iterable[int], special: bool = False) -> bytes:
        """Bytes of ids; control tokens are left out unless special."""
        return b"".join(self.token_to_piece(int(t), special) for t in tokens)


def lossy_text(text: bytes) -> str:
    """Text of UTF-8 bytes; every byte that is none becomes one U+FFFD, as in llama.cpp."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return re.sub("[\udc80-\udcff]", "\ufffd", text.decode("utf-8", "surrogateescape"))


def text_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Metadata as texts: arrays left out, booleans true/false, floats with six decimals."""
    out = {}
    for key, value in metadata.items():
        if isinstance(value, (bool, np.bool_)):
            out[key] = "true" if value else "false"
        elif isinstance(value, (float, np.floating)):
            out[key] = f"{value:f}"
        elif isinstance(value, (str, int, np.integer)):
            out[key] = str(value)
    return out
