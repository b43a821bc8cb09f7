"""Targets and their drafts: the embedded pair, the published pairs, and parsing of model names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_DATA = Path(__file__).parents[1] / "data"
EMBEDDED_TARGET = _DATA / "demo-target-q8_0.gguf"
EMBEDDED_DRAFT = _DATA / "demo-draft-q8_0.gguf"
SMOLLM2_DRAFT = _DATA / "smollm2-draft-q8_0.gguf"
# default context: a coding agent's first prompt exceeds the 4,096 tokens that the pair was trained for
EMBEDDED_CONTEXT = 32768

LIST_PAIRS = "dflash-run --list-pairs shows which draft belongs to which target"


@dataclass(frozen=True, slots=True)
class ModelName:
    """Family with version ("Qwen3.6") and size ("27B" or "35B-A3B") from a model's name; None where they are missing.

    Coder-Next has its name as size."""

    family: str | None = None
    size: str | None = None

    @classmethod
    def of(cls, *texts: str) -> ModelName:
        """Parse file names, repositories or titles, in order of reliability: each field is from the first text with it."""
        if laguna := next((m for m in map(_LAGUNA.search, texts) if m), None):
            size, version = laguna[1].upper(), laguna[2]
            return cls("Laguna", f"{size}.2" if version == "2" else f"{size}-{version}")
        if oss := next((m for m in map(_GPT_OSS.search, texts) if m), None):
            return cls("gpt-oss", f"{oss[1]}B")
        family = next((m for m in map(_FAMILY.search, texts) if m), None)
        named = f"{family[1].capitalize()}{family[2]}" if family else None
        if named and (other := next((m for m in map(_NO_CHAT.search, texts) if m), None)):
            named += f"-{_NO_CHATS[other[1].lower()]}"
        if any(map(_CODER_NEXT.search, texts)):
            return cls(named, "Coder-Next")
        size = next((m for m in map(_SIZE.search, texts) if m), None)
        coder = "-Coder" if family and family[3] else ""
        return cls(
            f"{named}{coder}" if named else None, re.sub(r"[-_ ]", "-", size[1]).upper() if size else None
        )

    @property
    def is_whole(self) -> bool:
        """Whether both family and size are known."""
        return self.family is not None and self.size is not None

    def contradicts(self, other: ModelName) -> bool:
        """Whether the two cannot be the same model."""
        return any(a and b and a != b for a, b in ((self.family, other.family), (self.size, other.size)))

    def __str__(self) -> str:
        return "-".join(part for part in (self.family, self.size) if part) or "a model without a telling name"


_FAMILY = re.compile(
    r"(?<![a-z])(qwen|gemma|llama)[-_ ]?(\d+(?:\.\d+)?)(?![\d.]*b(?![a-z]))([-_ ]coder)?", re.IGNORECASE
)
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?B(?:[-_ ]A\d+B)?)(?![a-z0-9])", re.IGNORECASE)
_CODER_NEXT = re.compile(r"(?<![a-z0-9])coder[-_ ]next(?![a-z0-9])", re.IGNORECASE)
_LAGUNA = re.compile(r"laguna[-_ ]?(XS|S)[-_ .]?(2(?:\.1)?)(?!\.?[0-9]|[a-z])", re.IGNORECASE)
_GPT_OSS = re.compile(r"(?<![a-z])gpt[-_ ]?oss[-_ ]?(20|120)b(?![a-z0-9])", re.IGNORECASE)
# variants of a family that are not chat models: drafts of chat models do not fit them
_NO_CHATS = {"embedding": "Embedding", "reranker": "Reranker", "vl": "VL"}
_NO_CHAT = re.compile(rf"(?<![a-z])({'|'.join(_NO_CHATS)})(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Pair:
    """A published target and its drafts.

    Attributes:
        draft: The draft to fetch, `user/repo[:quant]`; None if there is no usable one, for the reason in `note`.
            also: Other repositories with the target.
            window: Window of all layers of the draft but the last, if documented.
            loads: Whether the target's architecture is supported.
    """

    family: str
    size: str
    draft: str | None = None
    also: tuple[str, ...] = ()
    window: int | None = None
    note: str = ""
    loads: bool = True

    @property
    def name(self) -> str:
        """Family and size, as in Qwen3.6-27B."""
        return f"{self.family}-{self.size}"


PAIRS = (
    Pair(
        "Qwen3.6",
        "27B",
        "spiritbuun/Qwen3.6-27B-DFlash-GGUF:Q8_0",
        ("z-lab/Qwen3.6-27B-DFlash",),
        window=2048,
    ),
    Pair("Qwen3.5", "27B", "z-lab/Qwen3.5-27B-DFlash"),
    Pair("Qwen3.5", "9B", "z-lab/Qwen3.5-9B-DFlash"),
    Pair("Qwen3.5", "4B", "z-lab/Qwen3.5-4B-DFlash"),
    Pair("Qwen3.5", "2B", note="no draft is published for it"),
    Pair("Qwen3.5", "0.8B", note="no draft is published for it"),
    Pair(
        "Qwen3.8",
        "27B",
        "z-lab/Qwen3.8-27B-DFlash2",
        ("RadixArk/Qwen3.8-27B-DSpark",),
    ),
    Pair("Qwen3", "8B", "z-lab/Qwen3-8B-DFlash-b16", ("deepseek-ai/dspark_qwen3_8b_block7",)),
    Pair("Qwen3", "4B", "z-lab/Qwen3-4B-DFlash-b16", ("deepseek-ai/dspark_qwen3_4b_block7",)),
    Pair("Qwen3", "14B", "deepseek-ai/dspark_qwen3_14b_block7"),
    Pair("Qwen3-Coder", "30B-A3B", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
    Pair("Qwen3.6", "35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash"),
    Pair("Qwen3.5", "35B-A3B", "z-lab/Qwen3.5-35B-A3B-DFlash"),
    Pair("Qwen3.5", "122B-A10B", "z-lab/Qwen3.5-122B-A10B-DFlash"),
    Pair("Qwen3.5", "397B-A17B", "z-lab/Qwen3.5-397B-A17B-DFlash"),
    Pair("Qwen3", "Coder-Next", "z-lab/Qwen3-Coder-Next-DFlash"),
    Pair("Llama3.1", "8B", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    Pair("gpt-oss", "20B", "z-lab/gpt-oss-20b-DFlash"),
    Pair("gpt-oss", "120B", "z-lab/gpt-oss-120b-DFlash"),
    Pair("Laguna", "XS.2", "poolside/Laguna-XS.2-speculator.dflash"),
    Pair("Laguna", "XS-2.1", "poolside/Laguna-XS-2.1-DFlash"),
    Pair("Laguna", "S-2.1", "poolside/Laguna-S-2.1-DFlash"),
)


def find_pair(*texts: str) -> Pair | None:
    """The published pair that matches these names of a target or draft, in order of reliability."""
    name = ModelName.of(*texts)
    return next((pair for pair in PAIRS if (pair.family, pair.size) == (name.family, name.size)), None)


def replacement(*texts: str) -> str:
    """Replacement for an unusable draft, by its names `texts` in order of reliability."""
    pair = find_pair(*texts)
    if pair is None:
        return LIST_PAIRS
    if pair.draft is None or not pair.loads:
        return f"{pair.name} has no draft that can be used today, leave it out (--mode plain)"
    other = "".join(f" or {repo}" for repo in pair.also)
    return f"for {pair.name} use {pair.draft}{other} (-hfd)"


def pairs_table() -> str:
    """Table of all published pairs as text, one line each."""
    rows = [("target", "draft", "")]
    for pair in PAIRS:
        drafts = [pair.draft, *pair.also] if pair.draft else ["none"]
        rows.append((pair.name, ", ".join(drafts), pair.note))
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    lines = [f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip() for row in rows]
    hint = "-hf with any repository of a target fetches the first draft of its line; -hfd names another one."
    return "\n".join([*lines, "", hint])
