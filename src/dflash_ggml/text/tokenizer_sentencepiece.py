"""SentencePiece's BPE (`tokenizer.ggml.model` = `llama`): scored pieces, a mark for spaces, byte fallback.

A pair is merged if the result is a piece, the best score first. In the `tokenizers` package that is BPE with all pairs that form
a piece as merges, ordered by the piece's score. Files of `gemma4` list the merges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Regex, models, normalizers, pre_tokenizers

SPACE = "\u2581"  # mark for a space


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """Parameters of a SentencePiece vocabulary.

    Attributes:
        scores: Score of each token.
        space_prefix: Whether a space is prepended to a text, also after a special token.
        merges: Pairs with a space between, best first, instead of the scores; none of them has a line end.
    """

    scores: Sequence[float]
    space_prefix: bool = True
    merges: Sequence[str] | None = None

    def model(self, ids: Mapping[str, int], joinable: Sequence[bool], unknown: str | None) -> models.BPE:
        """The model over tokens `ids`.

        Args:
            joinable: Whether each token may result from merges; control tokens may not.
        """
        if self.merges is not None:
            listed = [(first, second) for first, _, second in (merge.partition(" ") for merge in self.merges)]
            return models.BPE(dict(ids), listed, unk_token=unknown, byte_fallback=True)
        merges = []
        for text, i in ids.items():
            if joinable[i]:
                for cut in range(1, len(text)):
                    if (left := ids.get(text[:cut])) is None or (right := ids.get(text[cut:])) is None:
                        continue
                    if joinable[left] and joinable[right]:
                        merges.append((-self.scores[i], i, left, right, cut))
        merges.sort()
        texts = {i: text for text, i in ids.items()}
        pairs = [(texts[left], texts[right]) for _, _, left, right, _ in merges]
        return models.BPE(dict(ids), pairs, unk_token=unknown, byte_fallback=True)

    def normalizer(self) -> normalizers.Normalizer:
        """Normalizer that replaces spaces by their mark."""
        marked = normalizers.Replace(" ", SPACE)
        return normalizers.Sequence([normalizers.Prepend(SPACE), marked]) if self.space_prefix else marked

    def splitter(self, texts: Sequence[str]) -> pre_tokenizers.PreTokenizer | None:
        """Pre-tokenizer into words, if no token spans two words; a long text as a single word is slow."""
        if self.merges is not None:
            return pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
        if any(SPACE in text.lstrip(SPACE) for text in texts):
            return None
        return pre_tokenizers.Split(Regex(f"{SPACE}*[^{SPACE}]+|{SPACE}+"), "isolated")

    @staticmethod
    def bytes_of(text: str) -> bytes:
        """The bytes of a normal token."""
        return text.replace(SPACE, " ").encode()
