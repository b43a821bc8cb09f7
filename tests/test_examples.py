"""Tests of the example scripts that users copy: they run unchanged, on the embedded pair."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    """What an example prints, run away from the checkout."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_complete() -> None:
    text = run("complete.py")
    assert text.startswith("class Stack:\n    def __init__(self):\n")
    assert re.search(r"\n-- \d+\.\d\d tokens per pass of the model, \d+ per second\n$", text)


def test_chat() -> None:
    first, second = run("chat.py").split("> ")[1:]
    for turn, question in ((first, "Write a function"), (second, "Now one that")):
        asked, _, answer = turn.partition("\n")
        assert asked.startswith(question) and answer.strip()


def test_json_schema() -> None:
    library = json.loads(run("json_schema.py"))
    assert list(library) == ["name", "language", "stars"]
    assert library["language"] in ("Python", "C", "Rust") and library["stars"] in range(6)


def test_draft_tree() -> None:
    text = run("draft_tree.py")
    total = 0
    for part in re.split(r"^step ", text, flags=re.MULTILINE)[1:]:
        title, *nodes = [line for line in part.splitlines() if "per pass" not in line]
        _, accepted, drafted = map(int, re.findall(r"\d+", title))
        assert len(nodes) == 1 + drafted  # the root is not a draft
        starred = [line for line in nodes if line[0] == "*"]
        # the accepted path goes down one level at a time
        assert [len(line[2:]) - len(line[2:].lstrip(" ")) for line in starred] == [
            *range(0, 2 * len(starred), 2)
        ]
        assert len(starred) == 1 + accepted
        total += accepted + 1
    # the last step may end with a drafted token, and then has none of the model's own
    assert re.search(rf"^({total}|{total - 1}) tokens in \d+ steps: ", text, re.MULTILINE)


def test_openai_client() -> None:
    command = [
        sys.executable,
        "-m",
        "dflash_ggml.server.cli",
        "-c",
        "512",
        "-t",
        "1",
        "-ngl",
        "0",
        "--port",
        "0",
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        ready = re.search(r"ready at (http://\S+)/", line)
        assert ready, line
        text = run("openai_client.py", f"{ready[1]}/v1")
    finally:
        server.kill()
        server.communicate()
    assert re.search(r"\n-- \d+ tokens from \S+\n$", text) and len(text) > 40
