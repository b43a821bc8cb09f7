"""Text to token ids and back, rebuilt from a GGUF file's metadata on the `tokenizers` package.

The model is byte-level BPE with one of `PRE_TOKENIZERS`, or SentencePiece's BPE. Like llama.cpp, no Unicode normalisation is
applied, which the reference tokenizer of the Qwen models does.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from ..errors import ConfigError
from ..files.gguf import GGUFFile
from .json_text import well_formed
from .pieces import PIECE, pieces, uncuttable
from .tokenizer_sentencepiece import SentencePiece

# How the models' own tokenizer.json splits text before BPE: qwen35 counts combining marks as part of a word, llama-bpe takes
# three digits at a time.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{word}]+|\p{{N}}{digits}"
    r"| ?[^\s{word}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# a capital begins a new word
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LETTERS = r"\p{L}"
# Applied in sequence: laguna splits lines first, smollm digits.
PRE_TOKENIZERS = {
    "qwen2": (_SPLIT.format(word=_LETTERS, digits=""),),
    "qwen35": (_SPLIT.format(word=r"\p{L}\p{M}", digits=""),),
    "laguna": (r"[^\n]+|[\n]+", _SPLIT.format(word=_LETTERS, digits="")),
    "llama-bpe": (_SPLIT.format(word=_LETTERS, digits="{1,3}"),),
    "smollm": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "tekken": (_CASED % ("", "", ""),),
    "gpt-4o": (_CASED % (_CONTRACTED, _CONTRACTED, "{1,3}"),),
}
# aliases in files
_ALIASES = {
    **dict.fromkeys(("llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3", "pixtral"), "llama-bpe"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), "smollm"),
}
# vocabularies with words that no merge produces, and BOS by default
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Control tokens that end a generation even if the file does not declare them.
END_TEXTS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "</assistant>",
    "<EOT>",
    "[EOT]",
    "<end_of_utterance>",
    "<reponame>",
)
# Keys `tokenizer.ggml.<name>_token_id`.
END_NAMES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
SPECIAL_NAMES = ("bos", "padding", "mask", *END_NAMES)


def _byte_alphabet() -> dict[int, int]:
    """Code point -> byte: printable Latin-1 is unchanged, U+0100 onwards are the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: b for b in printable} | {0x100 + i: b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


class TooManyTokens(Exception):
    """A text has more tokens than allowed: at least `found`."""

    def __init__(self, found: int) -> None:
        super().__init__(found)
        self.found = found


class Tokenizer:
    """The vocabulary of a model.

    Attributes:
        tokens: The texts by id, as stored.
        special_ids: Name ("bos", "eos", "mask", ...) -> id, as far as declared.
        eog_ids: Ids that end a generation.
        chat_template: The file's default chat template, or None.
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
        sentencepiece: SentencePiece | None = None,
    ) -> None:
        """Build the tokenizer from the parts of a vocabulary.

        Args:
            tokens: The texts by id, as stored.
            types: Type of each token as in GGUF (1 normal to 6 byte).
            merges: Pairs with a space between, best first; unused with `sentencepiece`.
            pre: A key of `PRE_TOKENIZERS`; unused with `sentencepiece`.
            special_ids: Name -> id.
            add_bos: Whether a prompt begins with BOS.
            chat_template: The file's default chat template.
            sentencepiece: The model of a SentencePiece vocabulary.

        Raises:
            ConfigError: The parts are inconsistent.
        """
        self.tokens, self.n_vocab = list(tokens), len(tokens)
        self._types = bytes(types)
        self.special_ids = dict(special_ids or {})
        self.add_bos, self.chat_template = add_bos, chat_template
        self._ids = {text: i for i, text in enumerate(self.tokens)}
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        # most bytes of a token; 0 if encoding can drop bytes, so that their number is no bound
        self._sentencepiece = sentencepiece
        alphabet = (f"<0x{byte:02X}>" if sentencepiece else chr(code) for code, byte in _BYTES.items())
        lossless = all(text in self._ids for text in alphabet)
        self._longest = max(len(text.encode()) for text in self.tokens) if lossless else 0
        marked = (text for text, kind in zip(self.tokens, self._types) if kind in (CONTROL, USER_DEFINED))
        self._whole = sentencepiece is not None or uncuttable(marked)
        for name, i in self.special_ids.items():
            if not 0 <= i < self.n_vocab:
                raise ConfigError(f"{name} token id {i} is outside the vocabulary of {self.n_vocab}")
        listed = {self._ids[text] for text in END_TEXTS if text in self._ids}
        declared = {self.special_ids[name] for name in END_NAMES if name in self.special_ids}
        ends = declared | {i for i in listed if self._types[i] in (CONTROL, USER_DEFINED)}
        if {self._ids.get(text) for text in ("<|return|>", "<|call|>")} <= ends:
            ends.discard(self._ids.get("<|end|>"))  # harmony: ends a message, not the turn
        self.eog_ids = frozenset(ends)
        model = self._model(merges, pre)
        # Whether control tokens are parsed is a property of the object, hence two on one model.
        self._with_special, self._plain = self._engine(model, pre), self._engine(model, pre)
        self._plain.encode_special_tokens = True

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """Build from the `tokenizer.*` keys.

        Raises:
            ModelFileError: A key is missing, damaged or unknown.
        """
        kind = file.require("tokenizer.ggml.model", str)
        if kind not in ("gpt2", "llama", "gemma4"):
            raise file.error(
                f"key 'tokenizer.ggml.model': {kind!r} is not supported (expected 'gpt2', 'llama' or 'gemma4')"
            )
        pre = file.require("tokenizer.ggml.pre", str) if kind == "gpt2" else ""
        if pre and _ALIASES.get(pre, pre) not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            raise file.error(f"key 'tokenizer.ggml.pre': {pre!r} is not supported (expected one of {known})")
        tokens = file.require_array("tokenizer.ggml.tokens", str)
        types = file.require_array("tokenizer.ggml.token_type", int)
        merges = file.require_array("tokenizer.ggml.merges", str) if kind != "llama" else ()
        if not tokens or len(types) != len(tokens):
            raise file.error(f"key 'tokenizer.ggml.token_type': {len(types)} types for {len(tokens)} tokens")
        if min(types) < 0 or max(types) > BYTE:
            raise file.error("key 'tokenizer.ggml.token_type': a value is outside 0..6")
        sentencepiece = None
        if kind == "llama":
            scores = file.require_array("tokenizer.ggml.scores", float)
            if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
                raise file.error(f"key 'tokenizer.ggml.scores': expected {len(tokens)} finite numbers")
            prefix = file.get("tokenizer.ggml.add_space_prefix", bool)
            sentencepiece = SentencePiece(scores, prefix is not False)
        elif kind == "gemma4":
            sentencepiece = SentencePiece((), False, merges)
        special = {name: file.get(f"tokenizer.ggml.{name}_token_id", int) for name in SPECIAL_NAMES}
        if kind == "llama":  # as SentencePiece numbers them
            special |= {
                name: i for name, i in (("bos", 1), ("eos", 2)) if special[name] is None and i < len(tokens)
            }
        add_bos = file.get("tokenizer.ggml.add_bos_token", bool)
        try:
            return cls(
                tokens,
                types,
                merges,
                pre,
                special_ids={name: i for name, i in special.items() if i is not None},
                add_bos=kind != "gpt2" or pre in _WHOLE_WORDS if add_bos is None else add_bos,
                chat_template=file.get("tokenizer.chat_template", str),
                sentencepiece=sentencepiece,
            )
        except ConfigError as reason:
            raise file.error(f"tokenizer: {reason}") from None

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-sequence token, if the file declares one."""
        return self.special_ids.get("bos")

    @property
    def bos_ids(self) -> list[int]:
        """Ids at the start of a prompt: the begin-of-sequence token if the model uses one, else none."""
        return [self.bos_id] if self.add_bos and self.bos_id is not None else []

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token, if the file declares one."""
        return self.special_ids.get("eos")

    def id_of(self, text: str) -> int | None:
        """The id of the token stored as `text`, e.g. `<think>`; None without one."""
        return self._ids.get(text)

    def kind(self, token: int) -> int:
        """The token's type, 1 normal to 6 byte, as in GGUF."""
        return self._types[token]

    def is_control(self, token: int) -> bool:
        """Whether it is a control token, which is decoded only on request."""
        return self._types[token] in (CONTROL, UNKNOWN)

    def encode(self, text: str, special: bool = True, most: int | None = None) -> list[int]:
        """Token ids of `text`, without BOS; lone surrogates count as U+FFFD.

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
        """The bytes of a token; a control token's name, nothing for an unused entry."""
        if not 0 <= token < self.n_vocab:
            raise ConfigError(f"token id {token} is outside the vocabulary (0 to {self.n_vocab - 1})")
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self._bytes_of(self.tokens[token], self._types[token])
        return piece

    def piece(self, token: int) -> bytes:
        """As token_bytes; b"" for padding ids beyond the vocabulary."""
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

    def _model(self, merges: Sequence[str], pre: str) -> models.BPE:
        pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
        bad = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
        if self._sentencepiece is None and bad is not None:
            raise ConfigError(f"merge {bad} ({merges[bad]!r}) is not two tokens with a space between")
        joinable = [kind in (NORMAL, USER_DEFINED) for kind in self._types]
        unknown = next((text for text, kind in zip(self.tokens, self._types) if kind == UNKNOWN), None)
        try:
            if self._sentencepiece is not None:
                return self._sentencepiece.model(self._ids, joinable, unknown)
            return models.BPE(self._ids, pairs, ignore_merges=pre in _WHOLE_WORDS)
        except Exception as reason:  # noqa: BLE001 - the package raises nothing narrower
            raise ConfigError(f"the merges do not fit the vocabulary ({reason})") from None

    def _engine(self, model: models.BPE, pre: str) -> Engine:
        engine = Engine(model)
        if self._sentencepiece is not None:
            engine.normalizer = self._sentencepiece.normalizer()
            normal = [text for text, kind in zip(self.tokens, self._types) if kind == NORMAL]
            if (splitter := self._sentencepiece.splitter(normal)) is not None:
                engine.pre_tokenizer = splitter
        else:
            patterns = PRE_TOKENIZERS[_ALIASES.get(pre, pre)]
            engine.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        for kind in (CONTROL, USER_DEFINED):
            texts = [self.tokens[i] for i, t in enumerate(self._types) if t == kind and self.tokens[i]]
            if (
                kind == USER_DEFINED
                and self._sentencepiece is not None
                and self._sentencepiece.merges is not None
            ):
                # no merge produces them
                texts += [text for text in self.tokens if text and not text.strip("\n")]
            engine.add_tokens([AddedToken(text, special=kind == CONTROL, normalized=False) for text in texts])
        return engine

    def _bytes_of(self, text: str, kind: int) -> bytes:
        if kind == UNUSED:
            return b""
        if kind == BYTE and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)):
            return bytes.fromhex(byte[1])
        if kind == NORMAL and self._sentencepiece is not None:
            return self._sentencepiece.bytes_of(text)
        if kind == NORMAL:
            try:
                return text.translate(_BYTES).encode("latin-1")
            except UnicodeEncodeError:
                pass  # not in the byte alphabet: plain text
        return text.encode()


class Detokenizer:
    """Incremental decoder: turns tokens into text, and holds back incomplete characters.

    The concatenated pieces, `flush` included, equal the decoding of all tokens at once.

    Args:
        special: Show control tokens by name instead of leaving them out.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def in_character(self) -> bool:
        """Whether an incomplete character is held back."""
        return bool(self._decoder.getstate()[0])

    def feed(self, tokens: Iterable[int]) -> str:
        """Text completed by `tokens`."""
        return self._decoder.decode(self._tokenizer.decode_bytes(tokens, self._special))

    def flush(self) -> str:
        """Ends the stream: U+FFFD if an unfinished character is waiting, else nothing."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
