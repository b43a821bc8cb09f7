"""Constrained output: JSON schema, regex, GBNF and Lark through `llguidance`, as a logits processor.

The processor is called once per emitted token with the true history, on the logits of the visited tree node. Its state
follows from that history alone, independent of drafts: new tokens are consumed, removed ones rolled back.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DflashError
from .bounded_schema import bounded_lark, bounded_schema
from .grammar_limits import check_text
from .grammar_spec import GrammarSpec, dump_schema, json_schema_spec, load_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from .tokenizer import Tokenizer

# Limits of the compiler and the parser: a tenth of a second to compile, some tens of milliseconds for a mask.
PARSER_LIMITS = {
    "initial_lexer_fuel": 5_000_000,
    "step_lexer_fuel": 200_000,
    "max_items_in_row": 5_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
_LIMIT = re.compile(r"too many|max is|limit|fuel", re.IGNORECASE)
COMPILED = 16  # compiled grammars to cache; chats repeat theirs


def json_options() -> dict[str, Any]:
    """llguidance's options for JSON: white space between tokens is a space, or a line break with its indent, so that it must end.

    Versions before 1.8 ignore such a pattern: with them no white space is allowed.
    """
    try:
        version = [int(part) for part in re.findall(r"\d+", metadata.version("llguidance"))]
    except metadata.PackageNotFoundError:
        version = [1, 8]
    if version[:2] < [1, 8]:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": r" |\n( {0,12}|\t{0,6})"}


JSON_OPTIONS = json_options()


class LlamaGrammar:
    """llama-cpp-python's grammar class, plus `from_regex` and `from_lark`.

    Compiled for a vocabulary at the first use, where errors in the grammar appear.
    """

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """From GBNF text."""
        return cls(GrammarSpec("gbnf", grammar))

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> LlamaGrammar:
        """From a GBNF file.

        Raises:
            ConfigError: It is empty.
            OSError: It cannot be read.
        """
        text = Path(file).read_text(encoding="utf-8")
        if not text.strip():
            raise ConfigError(f"{file}: the grammar file is empty")
        return cls.from_string(text, verbose=verbose)

    @classmethod
    def from_json_schema(cls, json_schema: str | Mapping[str, Any], verbose: bool = True) -> LlamaGrammar:
        """From a JSON schema, as text or as a mapping; an empty text is none."""
        if isinstance(json_schema, str) and not json_schema.strip():
            return cls(GrammarSpec("json_schema"))
        return cls(json_schema_spec(json_schema))

    @classmethod
    def from_regex(cls, pattern: str) -> LlamaGrammar:
        """From a regular expression that the whole output must match."""
        return cls(GrammarSpec("regex", pattern))

    @classmethod
    def from_lark(cls, grammar: str) -> LlamaGrammar:
        """From a Lark grammar in llguidance's dialect."""
        return cls(GrammarSpec("lark", grammar))


class GrammarCompiler:
    """Compiles grammars for one vocabulary, with a cache; thread-safe.

    Args:
        n_vocab: Width of a logits row (at least the tokenizer's).
        vet: Called before a grammar is compiled; raises ConfigError to refuse it.

    Raises:
        ConfigError: Llguidance is not installed.
    """

    def __init__(
        self, tokenizer: Tokenizer, n_vocab: int, vet: Callable[[GrammarSpec], None] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.n_vocab = n_vocab
        self._vet = vet
        self._library = _load_llguidance()
        self._vocabulary: LLTokenizer | None = None
        self._compiled = lru_cache(COMPILED)(self._compile)
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Prepare the vocabulary now: half a second for a large one, holding the interpreter lock."""
        self._tokens()

    def matcher(self, spec: GrammarSpec) -> LLMatcher:
        """A fresh matcher.

        Raises:
            ConfigError: The grammar is invalid or exceeds a limit.
        """
        made = self._compiled(spec)
        with self._lock:
            return made.deep_copy()

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        lib = self._library
        check_text(spec.kind, spec.text)
        if self._vet is not None:
            self._vet(spec)
        try:
            if spec.kind in ("json_schema", "json_object"):
                schema = load_schema(spec.text) if spec.kind == "json_schema" else {"type": "object"}
                text = dump_schema(bounded_schema(schema))
                grammar = lib.LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
            elif spec.kind == "regex":
                grammar = lib.LLMatcher.grammar_from_regex(spec.text)
            elif spec.kind == "gbnf":
                lark = lib.grammar_from("gbnf", spec.text)  # accepts Lark as well
                if lark.startswith("{"):  # older versions need JSON
                    lark = json.loads(lark)["grammars"][0]["lark_grammar"]
                check_text("lark", lark)
                grammar = lib.LLMatcher.grammar_from_lark(bounded_lark(lark, JSON_OPTIONS))
            else:
                grammar = lib.LLMatcher.grammar_from_lark(bounded_lark(spec.text, JSON_OPTIONS))
        except ValueError as error:
            raise ConfigError(f"grammar ({spec.kind}): {_one_line(error)}") from None
        limits = lib.LLParserLimits(**PARSER_LIMITS)
        matcher = lib.LLMatcher(self._tokens(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ConfigError(f"grammar ({spec.kind}): {_one_line(matcher.get_error())}")
        return matcher

    def refusal(self, schema: Any, root: Any = None) -> str:
        """The reason why a JSON schema does not compile; empty if it does.

        Args:
            root: Document of its references.
        """
        lib = self._library
        try:
            text = dump_schema(bounded_schema(schema, root))
            if self._vet is not None:
                self._vet(GrammarSpec("json_schema", text))
            grammar = lib.LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
        except ValueError as error:
            return _one_line(error).removeprefix("json schema: ")
        return _one_line(lib.LLMatcher.validate_grammar(grammar, None))

    def processor(
        self, spec: GrammarSpec, n_prompt: int, after: Sequence[str] = (), repeat: bool = False
    ) -> GrammarProcessor:
        """A logits processor for one generation; arguments as in `GrammarProcessor`."""
        return GrammarProcessor(self.matcher(spec), self.tokenizer, n_prompt, after, repeat)

    def _tokens(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                lib, known = self._library, _Vocabulary(self.tokenizer)
                wrapper, ends = lib.TokenizerWrapper(known), sorted(self.tokenizer.eog_ids)
                try:
                    self._vocabulary = lib.LLTokenizer(wrapper, n_vocab=self.n_vocab, eos_token=ends)
                except TypeError:  # older versions accept only one
                    self._vocabulary = lib.LLTokenizer(
                        wrapper, n_vocab=self.n_vocab, eos_token=known.eos_token_id
                    )
            return self._vocabulary


class GrammarProcessor:
    """(history int32 [n], scores float32 [V]) -> scores with -inf where the grammar forbids the token.

    Applies after the first n_prompt tokens; with `after`, after these texts in sequence; with `repeat`, again after each
    further occurrence of the last one once the grammar is complete.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: Tokenizer,
        n_prompt: int,
        after: Sequence[str] = (),
        repeat: bool = False,
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._n_prompt = n_prompt
        self._after = [text.encode() for text in after]
        self._repeat = repeat
        self._seen = np.empty(0, np.int32)
        self._restart()

    def __call__(self, history: NDArray[np.int32], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Mask the scores of forbidden tokens.

        Raises:
            DflashError: The history violates the grammar.
            ConfigError: The grammar exceeds its limits.
        """
        bits = self._bits(history)
        if bits is None:
            return scores
        allowed = np.unpackbits(bits, bitorder="little", count=len(scores)).astype(bool)
        return np.where(allowed, scores, np.float32(-np.inf))

    def allows(self, history: NDArray[np.int32], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of these tokens is allowed now.

        Raises:
            DflashError, ConfigError: As a call does.
        """
        bits = self._bits(history)
        if bits is None:
            return np.ones(len(ids), bool)
        return (bits[ids >> 3] >> (ids & 7).astype(np.uint8) & 1).astype(bool)

    def _bits(self, history: NDArray[np.int32]) -> NDArray[np.uint8] | None:
        """Bits of the tokens allowed after this history; None if the grammar does not apply yet."""
        self._follow(np.asarray(history[self._n_prompt :], np.int32))
        if self._start is None:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._error()
        return bits

    def _restart(self, found: int = 0) -> None:
        """Search for the remaining texts of `after`."""
        self._matcher.reset()
        self._found = found
        # index in _seen of the first constrained token
        self._start: int | None = None if self._after else 0
        self._tail = b""  # start of the text to search for the next one

    def _follow(self, new: NDArray[np.int32]) -> None:
        """Advance the matcher from the last call's history to this one."""
        n = min(len(self._seen), len(new))
        if not np.array_equal(self._seen[:n], new[:n]):
            n = int(np.flatnonzero(self._seen[:n] != new[:n])[0])
        if n < len(self._seen):
            if self._start is not None and n >= self._start:
                self._matcher.rollback(len(self._seen) - n)
            else:
                self._restart()
                n = 0
        for i, token in enumerate(new[n:].tolist(), n):
            if self._start is None:
                self._look(token, i)
            elif not self._matcher.consume_token(token):
                if not self._repeat:
                    raise self._error(f"token {token} does not match it: ")
                self._restart(len(self._after) - 1)  # reasoning was force-closed within a call
            elif self._repeat and self._matcher.is_stopped():
                self._restart(len(self._after) - 1)
        self._seen = new.copy()

    def _look(self, token: int, index: int) -> None:
        after = self._after[self._found]
        self._tail = self._tail[-len(after) :] + self._tokenizer.piece(token)
        if after in self._tail:
            self._found, self._tail = self._found + 1, self._tail.partition(after)[2]
            if self._found == len(self._after):
                self._start = index + 1

    def _error(self, what: str = "") -> DflashError:
        words = _one_line(self._matcher.get_error())
        if _LIMIT.search(words):  # the grammar's author can change this
            return ConfigError(f"grammar: it is too large: {words}")
        return DflashError(f"grammar: {what}{words}")


class _Vocabulary:
    """A vocabulary in the interface that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = range(tokenizer.n_vocab)
        self.eos_token_id = (
            min(tokenizer.eog_ids, default=0) if tokenizer.eos_id is None else tokenizer.eos_id
        )
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_control(i)]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), special=False)


def _load_llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "grammars, JSON schemas and forced tool calls need llguidance: pip install 'dflash-ggml[grammar]'"
        ) from None
    return llguidance


def _one_line(error: object) -> str:
    if "oneOf constraints are not supported" in str(error):
        return "oneOf: its alternatives do not exclude each other by a required field; use anyOf"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " / ".join(lines[:3])
