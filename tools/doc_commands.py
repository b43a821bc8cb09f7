"""Runner of the commands in README and docs, as a reader would run them: in an empty folder, with what the page itself
installs.

    python tools/doc_commands.py [PAGE...] [--list] [--python PYTHON]

Every fenced block of `sh`, and of `python` behind `<!-- runs: -->`, is run in its page's order, in one folder and one new
environment per page; `.` in `pip install` is a wheel that is built once from this checkout. A block behind
`<!-- needs: SOMETHING -->` is named and skipped. One whose last command is `dflash-serve` keeps running until the page
ends; what follows waits until it answers. Prints a line per block and exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"(?:<!-- (needs|runs): ?(.*?) ?-->\n)?```(sh|python)\n(.*?)```", re.DOTALL)
SECONDS = 900  # that a block may take


@dataclass(frozen=True)
class Block:
    """Commands of a page. needs: what a machine may lack, "" for nothing; line: of the page."""

    page: Path
    line: int
    kind: str
    text: str
    needs: str

    @property
    def server(self) -> int:
        """The port of the server that it leaves running, 0 without one."""
        last = self.text.strip().splitlines()[-1] if self.kind == "sh" else ""
        words = shlex.split(last, comments=True)
        if words[:1] != ["dflash-serve"]:
            return 0
        return int(words[words.index("--port") + 1]) if "--port" in words else 8080


def pages() -> list[Path]:
    """README and all pages of the docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page that are commands."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        mark, about, kind, commands = found.groups()
        if kind == "python" and mark != "runs":
            continue
        yield Block(
            page, text[: found.start(4)].count("\n"), kind, commands, about if mark == "needs" else ""
        )


def build_wheel(folder: Path, python: str) -> Path:
    """Build this checkout's wheel as `pip install .` would, into `folder`."""
    command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def run_page(page: Path, python: str, wheel: Path) -> bool:
    """Run a page's blocks. Returns whether none failed."""
    todo, servers, fine = list(blocks(page)), list[subprocess.Popen[bytes]](), True
    if not any(not block.needs for block in todo):
        for block in todo:
            _say(block, f"skipped: needs {block.needs}")
        return True
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        subprocess.run([python, "-m", "venv", home / "env"], check=True)
        here = home / "here"
        here.mkdir()
        path = f"{home / 'env' / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        environment = {
            "PATH": path,
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        if error := _sh(f"pip install -q {shlex.quote(str(wheel))}", here, environment):
            print(f"{page.relative_to(ROOT)}: {error}", flush=True)
            return False
        try:
            for block in todo:
                if block.needs:
                    _say(block, f"skipped: needs {block.needs}")
                    continue
                began = time.monotonic()
                if block.server:
                    *before, last = block.text.strip().splitlines()
                    # in the shell's place, so that to end the one ends the other
                    command = "\n".join([*before, f"exec {last}"])
                    servers.append(subprocess.Popen(["sh", "-ec", command], cwd=here, env=environment))
                    error = _answers(block.server, servers[-1])
                else:
                    error = _run(block, here, environment, wheel)
                fine &= not error
                _say(block, error or f"ok, {time.monotonic() - began:.1f} s")
        finally:
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait(60)
    return fine


def _run(block: Block, here: Path, environment: dict[str, str], wheel: Path) -> str:
    """Run a block; what went wrong, "" for nothing."""
    if block.kind == "python":
        (here / "block.py").write_text(block.text)
    command = "python block.py" if block.kind == "python" else block.text
    command = re.sub(r"pip install ('?)\.(?=[\s'\[])", rf"pip install -q \g<1>{wheel}", command)
    return _sh(command, here, environment)


def _sh(command: str, here: Path, environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            ["sh", "-ec", command], cwd=here, env=environment, capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"FAILED: still running after {SECONDS} s"
    printed = (done.stdout + done.stderr).decode(errors="replace")
    return "" if not done.returncode else f"FAILED with {done.returncode}:\n{printed[-2000:]}"


def _answers(port: int, server: subprocess.Popen[bytes]) -> str:
    """Wait until a server is ready."""
    for _ in range(600):
        if server.poll() is not None:
            return f"FAILED: the server ended with {server.returncode}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return ""
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return "FAILED: the server does not answer"


def _say(block: Block, what: str) -> None:
    print(f"{block.page.relative_to(ROOT)}:{block.line}: {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--list", action="store_true", help="print the blocks, run nothing")
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    wanted = [page.resolve() for page in args.pages] or pages()
    if args.list:
        for block in (block for page in wanted for block in blocks(page)):
            _say(block, f"needs {block.needs}" if block.needs else block.kind)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder), args.python)
        failed = [page for page in wanted if not run_page(page, args.python, wheel)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
