"""Training texts: files, conversations, and rows of token ids. Needs numpy and tokenizers only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

MAX_FILE = 1 << 22  # largest text in bytes; larger ones are tables or generated
Encode = Callable[[Sequence[str]], list[list[int]]]
Render = Callable[[list[dict[str, Any]], bool], str]  # (messages, whether to open an answer) -> text


@dataclass(frozen=True, slots=True)
class Texts:
    """Training texts from files.

    Attributes:
        documents: Whole texts.
        prompts: Beginnings for the target to continue.
        answered: (prompt, answer) pairs.
    """

    documents: list[str]
    prompts: list[str]
    answered: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Rows:
    """ids int32 [n, T]; in row i the tokens from start[i] to stop[i] are learnt, earlier ones are context."""

    ids: NDArray[np.int32]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def n_tokens(self) -> int:
        """Number of tokens to learn."""
        return int((self.stop - self.start).sum())

    def take(self, rows: Any) -> Rows:
        """A selection of rows."""
        return Rows(self.ids[rows], self.start[rows], self.stop[rows])

    def cut(self, length: int) -> Rows:
        """The rows truncated to `length`, without those with nothing left to learn."""
        stop = np.minimum(self.stop, length)
        kept = stop - self.start >= 2
        return Rows(self.ids[kept, :length], self.start[kept], stop[kept])

    def save(self, path: Path) -> None:
        """Write the rows to an .npz file, atomically."""
        beside = path.with_name(f"{path.name}.part")
        with beside.open("wb") as file:
            np.savez_compressed(file, ids=self.ids, start=self.start, stop=self.stop)
        beside.replace(path)


def load_rows(path: Path) -> Rows:
    """Rows from a file of `Rows.save`.

    Raises:
        ConfigError: The file holds no rows.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            rows = Rows(*(file[name] for name in ("ids", "start", "stop")))
    except (OSError, ValueError, KeyError) as reason:
        raise ConfigError(f"{path}: no rows of tokens as dflash-train writes them ({reason})") from None
    if rows.ids.ndim != 2 or rows.start.shape != rows.stop.shape or len(rows.start) != len(rows.ids):
        raise ConfigError(f"{path}: ids, start and stop do not fit each other")
    return rows


def joined(parts: Iterable[Rows]) -> Rows:
    """All rows in one table, padded to the longest."""
    parts = list(parts)
    width = max(p.ids.shape[1] for p in parts)
    ids = np.concatenate([np.pad(p.ids, ((0, 0), (0, width - p.ids.shape[1]))) for p in parts])
    return Rows(ids, np.concatenate([p.start for p in parts]), np.concatenate([p.stop for p in parts]))


def read_texts(
    paths: Sequence[Path], max_bytes: int, render: Render | None, suffixes: Sequence[str] = ()
) -> Texts:
    """Texts of files and folders, ordered by hashes of their names, so that a limit takes a mixed sample.

    A .jsonl file has an object per line: `text`, a document; `prompt`, a beginning; or `messages`, which `render` converts to
    the target's chat format, with the assistant's last answer to learn. Every other UTF-8 file is a document.

    Args:
        paths: Files and folders.
        max_bytes: Limit of all texts.
        render: Renders messages in the chat format; None if the target has none.
        suffixes: File name suffixes to take from folders; empty for all.

    Raises:
        ConfigError: A line has another form, or nothing was found.
    """
    found = Texts([], [], [])
    seen: set[bytes] = set()
    total = 0
    for path in _files(paths, tuple(suffixes)):
        if total > max_bytes:
            break
        if path.suffix == ".jsonl":
            total += _conversations(path, found, render)
            continue
        text = _document(path)
        digest = hashlib.sha1(text.encode(), usedforsecurity=False).digest()
        if text and digest not in seen:
            seen.add(digest)
            found.documents.append(text)
            total += len(text)
    if not (found.documents or found.prompts or found.answered):
        raise ConfigError(f"{', '.join(map(str, paths))}: no text found (UTF-8 files, or .jsonl)")
    return found


def _files(paths: Sequence[Path], suffixes: tuple[str, ...]) -> Iterator[Path]:
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder")
        inside = (
            (p for p in path.rglob("*") if not suffixes or p.name.endswith(suffixes))
            if path.is_dir()
            else [path]
        )
        files += [p for p in inside if p.is_file()]
    return iter(sorted(files, key=lambda p: hashlib.sha1(str(p).encode(), usedforsecurity=False).digest()))


def _document(path: Path) -> str:
    """A file's text; empty if it is not UTF-8 or too large."""
    try:
        if not 200 <= path.stat().st_size <= MAX_FILE:
            return ""
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if "\0" in text else text


def _conversations(path: Path, found: Texts, render: Render | None) -> int:
    total = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                total += len(line)
                if "messages" in entry:
                    _conversation(entry["messages"], found, render, f"{path}, line {number}")
                elif "prompt" in entry:
                    found.prompts.append(str(entry["prompt"]))
                else:
                    found.documents.append(str(entry["text"]))
            except ConfigError:
                raise
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{path}, line {number}: expected an object with text, prompt or messages"
                ) from None
    return total


def _conversation(messages: list[dict[str, Any]], found: Texts, render: Render | None, where: str) -> None:
    if render is None:
        raise ConfigError(f"{where}: messages need a chat template, and the target's tokenizer has none")
    if messages[-1]["role"] == "assistant":
        prompt = render(messages[:-1], True)
        whole = render(messages, False)
        answer = whole[len(prompt) :] if whole.startswith(prompt) else str(messages[-1]["content"])
        found.answered.append((prompt, answer))
    else:
        found.prompts.append(render(messages, True))


def document_rows(texts: Sequence[str], encode: Encode, length: int, end: int, first: int = 8) -> Rows:
    """Concatenated documents, `end` after each, in rows of `length`; the first tokens of a row are not learnt."""
    stream: list[NDArray[np.int32]] = []
    for at in range(0, len(texts), 256):
        stream += [np.array([*ids, end], np.int32) for ids in encode(texts[at : at + 256])]
    whole = np.concatenate(stream) if stream else np.zeros(0, np.int32)
    n = len(whole) // length
    return Rows(
        whole[: n * length].reshape(n, length), np.full(n, min(first, length - 2)), np.full(n, length)
    )


def answered_rows(pairs: Sequence[tuple[str, str]], encode: Encode, length: int) -> Rows:
    """A row for each prompt and answer, with the answer to learn; prompts that fill the row are left out."""
    prompts, answers = encode([p for p, _ in pairs]), encode([a for _, a in pairs])
    kept = [(p, a) for p, a in zip(prompts, answers) if 0 < len(p) <= length - 2 and len(a) >= 2]
    ids = np.zeros((len(kept), length), np.int32)
    for row, (p, a) in zip(ids, kept):
        both = [*p, *a][:length]
        row[: len(both)] = both
    start = np.array([len(p) for p, _ in kept], np.int64)
    return Rows(ids, start, np.minimum(start + [len(a) for _, a in kept], length))


def beginnings(rows: Rows, n_prompt: int, n: int, rng: np.random.Generator) -> list[list[int]]:
    """`n` stretches of `n_prompt` tokens from random positions of document rows, for the target to go on from."""
    at = rng.integers(0, len(rows), n)
    first = rng.integers(0, max(1, rows.ids.shape[1] - n_prompt), n)
    return [rows.ids[i, j : j + n_prompt].tolist() for i, j in zip(at, first)]
