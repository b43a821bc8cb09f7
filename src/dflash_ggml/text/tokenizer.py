"""Text to token ids and back, rebuilt from a GGUF file's metadata on the `tokenizers` package.

The model is byte-level BPE with the pre-tokenizer of Qwen2, of Qwen3.5 or of Laguna. Like llama.cpp, no Unicode
normalisation is applied unless asked for (`nfc=True` does what the reference tokenizer of these models does).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from ..errors import ConfigError
from ..files.gguf import GGUFFile
from .json_text import well_formed
from .pieces import PIECE, pieces, uncuttable

# How the models' own tokenizer.json splits text before BPE: qwen35 counts combining marks as part of a word.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{word}]+|\p{{N}}"
    r"| ?[^\s{word}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Each splits what the one before has left: laguna cuts out lines first.
PRE_TOKENIZERS = {
    "qwen2": (_SPLIT.format(word=r"\p{L}"),),
    "qwen35": (_SPLIT.format(word=r"\p{L}\p{M}"),),
    "laguna": (r"[^\n]+|[\n]+", _SPLIT.format(word=r"\p{L}")),
}

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Tokens that end a generation even where the file does not declare them, if they are control tokens.
END_TEXTS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "</assistant>",
)
# Keys `tokenizer.ggml.<name>_token_id`.
END_NAMES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
SPECIAL_NAMES = ("bos", "padding", "mask", *END_NAMES)


def _byte_alphabet() -> dict[int, int]:
    """Code point -> byte: printable Latin-1 stands for itself, U+0100 onwards for the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: b for b in printable} | {0x100 + i: b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


class TooManyTokens(Exception):
    """A text has more tokens than were asked for: at least `found`."""

    def __init__(self, found: int) -> None:
        super().__init__(found)
        self.found = found


class Tokenizer:
    """The vocabulary of a model.

    tokens:        the texts by id, as stored
    special_ids:   name ("bos", "eos", "mask", ...) -> id, as far as declared
    eog_ids:       ids that end a generation
    chat_template: the file's default chat template, or None
    """

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        merges: Sequence[str],
        pre: str,
        *,
        special_ids: dict[str, int] | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
        nfc: bool = False,
    ) -> None:
        """Raises `ConfigError` when the parts do not fit together.

        `types` as in GGUF (1 normal to 6 byte); `merges`: pairs with a space between, best first; `pre`: a
        key of `PRE_TOKENIZERS`.
        """
        self.tokens, self.n_vocab = list(tokens), len(tokens)
        self._types = bytes(types)
        self.special_ids = dict(special_ids or {})
        self.add_bos, self.chat_template = add_bos, chat_template
        self._ids = {text: i for i, text in enumerate(self.tokens)}
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        # no token stands for more bytes of a text; 0 where bytes can get lost, and nothing follows from their number
        lossless = not nfc and all(chr(code) in self._ids for code in _BYTES)
        self._longest = max(len(text.encode()) for text in self.tokens) if lossless else 0
        marked = (text for text, kind in zip(self.tokens, self._types) if kind in (CONTROL, USER_DEFINED))
        self._whole = nfc or uncuttable(marked)
        for name, i in self.special_ids.items():
            if not 0 <= i < self.n_vocab:
                raise ConfigError(f"{name} token id {i} is outside the vocabulary of {self.n_vocab}")
        listed = {self._ids[text] for text in END_TEXTS if text in self._ids}
        declared = {self.special_ids[name] for name in END_NAMES if name in self.special_ids}
        self.eog_ids = frozenset(declared | {i for i in listed if self._types[i] in (CONTROL, USER_DEFINED)})
        model = self._bpe(merges)
        # Whether control tokens are parsed is a property of the object, hence two on one model.
        self._with_special, self._plain = self._engine(model, pre, nfc), self._engine(model, pre, nfc)
        self._plain.encode_special_tokens = True

    @classmethod
    def from_gguf(cls, file: GGUFFile, *, nfc: bool = False) -> Tokenizer:
        """Build from the `tokenizer.*` keys. Raises `ModelFileError` for missing, damaged or unknown ones."""
        kind, pre = file.require("tokenizer.ggml.model", str), file.require("tokenizer.ggml.pre", str)
        if kind != "gpt2":
            raise file.error(f"key 'tokenizer.ggml.model': {kind!r} is not supported (expected 'gpt2')")
        if pre not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            raise file.error(f"key 'tokenizer.ggml.pre': {pre!r} is not supported (expected one of {known})")
        tokens = file.require_array("tokenizer.ggml.tokens", str)
        types = file.require_array("tokenizer.ggml.token_type", int)
        merges = file.require_array("tokenizer.ggml.merges", str)
        if not tokens or len(types) != len(tokens):
            raise file.error(f"key 'tokenizer.ggml.token_type': {len(types)} types for {len(tokens)} tokens")
        if min(types) < 0 or max(types) > BYTE:
            raise file.error("key 'tokenizer.ggml.token_type': a value is outside 0..6")
        special = {name: file.get(f"tokenizer.ggml.{name}_token_id", int) for name in SPECIAL_NAMES}
        try:
            return cls(
                tokens,
                types,
                merges,
                pre,
                special_ids={name: i for name, i in special.items() if i is not None},
                add_bos=bool(file.get("tokenizer.ggml.add_bos_token", bool)),
                chat_template=file.get("tokenizer.chat_template", str),
                nfc=nfc,
            )
        except ConfigError as reason:
            raise file.error(f"tokenizer: {reason}") from None

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-sequence token, if the file declares one."""
        return self.special_ids.get("bos")

    @property
    def bos_ids(self) -> list[int]:
        """What a text begins with: the begin-of-sequence token where the model wants one, else nothing."""
        return [self.bos_id] if self.add_bos and self.bos_id is not None else []

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token, if the file declares one."""
        return self.special_ids.get("eos")

    def id_of(self, text: str) -> int | None:
        """The id of the token stored as `text`, e.g. `<think>`; None when there is none."""
        return self._ids.get(text)

    def kind(self, token: int) -> int:
        """The token's type, 1 normal to 6 byte, as in GGUF."""
        return self._types[token]

    def is_control(self, token: int) -> bool:
        """True for tokens that carry structure, not text; they are decoded only on request."""
        return self._types[token] in (CONTROL, UNKNOWN)

    def encode(self, text: str, special: bool = True, most: int | None = None) -> list[int]:
        """Token ids of `text`, without BOS; half a surrogate pair counts as U+FFFD.

        Control tokens spelt out in the text become their ids if `special`, else they are plain text;
        user-defined tokens always become their ids. With `most`, raises TooManyTokens for a long text as
        soon as it is certain that there are more, before the work of it is done.
        """
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            return self.encode(well_formed(text), special, most)
        if most is not None and size > max(most * self._longest, PIECE) and self._longest:
            raise TooManyTokens(-(-size // self._longest))
        engine = self._with_special if special else self._plain
        ids: list[int] = []
        for piece in [text] if self._whole else pieces(text):
            if most is not None and len(ids) > most:
                raise TooManyTokens(len(ids))
            # encode() holds the interpreter's lock all the way, the batch call does not
            ids += engine.encode_batch_fast([piece], add_special_tokens=False)[0].ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a control token gives its name, an unused entry nothing."""
        if not 0 <= token < self.n_vocab:
            raise ConfigError(f"token id {token} is outside the vocabulary (0 to {self.n_vocab - 1})")
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self._bytes_of(self.tokens[token], self._types[token])
        return piece

    def piece(self, token: int) -> bytes:
        """As token_bytes; b"" for the padding ids that a model's logits may have beyond the vocabulary."""
        return self.token_bytes(token) if token < self.n_vocab else b""

    def pieces(self, tokens: Iterable[int]) -> list[bytes]:
        """token_bytes of each."""
        return [self.token_bytes(token) for token in tokens]

    def decode_bytes(self, tokens: Iterable[int], special: bool = False) -> bytes:
        """The bytes of several tokens; control tokens are left out unless `special`."""
        pieces = ((token, self.token_bytes(token)) for token in tokens)
        return b"".join(piece for token, piece in pieces if special or not self.is_control(token))

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """The text of several tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens, special).decode(errors="replace")

    def stream(self, special: bool = False) -> Detokenizer:
        """A new incremental decoder."""
        return Detokenizer(self, special)

    def _bpe(self, merges: Sequence[str]) -> models.BPE:
        pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
        bad = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
        if bad is not None:
            raise ConfigError(f"merge {bad} ({merges[bad]!r}) is not two tokens with a space between")
        try:
            return models.BPE(self._ids, pairs)
        except Exception as reason:  # noqa: BLE001 - the package raises nothing narrower
            raise ConfigError(f"the merges do not fit the vocabulary ({reason})") from None

    def _engine(self, model: models.BPE, pre: str, nfc: bool) -> Engine:
        engine = Engine(model)
        if nfc:
            engine.normalizer = normalizers.NFC()
        engine.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for kind in (CONTROL, USER_DEFINED):
            texts = [self.tokens[i] for i, t in enumerate(self._types) if t == kind and self.tokens[i]]
            engine.add_tokens([AddedToken(text, special=kind == CONTROL, normalized=False) for text in texts])
        return engine

    @staticmethod
    def _bytes_of(text: str, kind: int) -> bytes:
        if kind == UNUSED:
            return b""
        if kind == BYTE and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)):
            return bytes.fromhex(byte[1])
        if kind == NORMAL:
            try:
                return text.translate(_BYTES).encode("latin-1")
            except UnicodeEncodeError:
                pass  # not written in the byte alphabet: the text stands for itself
        return text.encode()


class Detokenizer:
    """Turns a stream of tokens into text and never splits a character: its first bytes wait for the rest.

    The pieces joined, `flush` included, equal the decoding of all tokens at once.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        """`special`: show control tokens by name instead of leaving them out."""
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def in_character(self) -> bool:
        """Whether the first bytes of a character wait for the rest."""
        return bool(self._decoder.getstate()[0])

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` complete."""
        return self._decoder.decode(self._tokenizer.decode_bytes(tokens, self._special))

    def flush(self) -> str:
        """Ends the stream: U+FFFD if an unfinished character is waiting, else nothing."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
