"""Tests of starting a command: Ctrl-C is handled from the first line on, without a traceback."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_ggml
from reference.terminal import Terminal

COMMANDS = ["run", "chat", "serve", "bench", "doctor"]

# Ctrl-C arrives while this module is imported, by Python itself or from inside a C module
AT_IMPORT = """if True:
    import os, signal, sys
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == {name!r}:
                os.kill(os.getpid(), signal.SIGINT)
    sys.meta_path.insert(0, Finder())
    from dflash_ggml import start
    sys.exit(start.{command}())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_can_be_written_in_any_locale(command: str) -> None:
    pytest.importorskip("dflash_ggml.ggml.bindings")
    code = (
        f"import sys; from dflash_ggml import start; sys.argv[1:] = ['--help']; sys.exit(start.{command}())"
    )
    done = python(f"import sys; sys.stdout.reconfigure(encoding='ascii'); {code}")
    assert done.returncode == 0 and "usage:" in done.stdout and done.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["logging", "numpy", "dflash_ggml.config"])
def test_interrupted_imports(command: str, name: str) -> None:
    done = python(AT_IMPORT.format(name=name, command=command))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_nothing_slow_is_imported_before_ctrl_c_is_answered() -> None:
    """The file and its package need nothing that Python has not loaded by then; an editable install's finder may."""
    code = """if True:
        import dflash_ggml, sys
        before = set(sys.modules)
        import dflash_ggml.start
        print(*(set(sys.modules) - before))
    """
    assert set(python(code).stdout.split()) == {"dflash_ggml.start"}
    source = (Path(dflash_ggml.__file__).parent / "__init__.py").read_text(encoding="utf-8")
    at_start = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [getattr(node, "module", "") for node in at_start] == ["__future__"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("found", ["None", "types.SimpleNamespace(ffi=None, lib=types.SimpleNamespace())"])
def test_a_checkout_that_was_not_rebuilt(command: str, found: str) -> None:
    """A line with the build command, where the compiled part is missing and where it is of other sources."""
    code = f"""if True:
        import sys, types
        sys.modules["dflash_ggml.decode.native._native"] = {found}
        from dflash_ggml import start
        sys.argv[1:] = ["-t", "1", "-ngl", "0"]
        sys.exit(start.{command}())
    """
    done = python(code)
    assert done.returncode == 1
    if command == "doctor":
        assert done.stdout.startswith("bad   build     the compiled binding does not load: ")
        assert "make build" in done.stdout and done.stderr == ""
    else:
        message = f"dflash-{command}: the compiled part of dflash_ggml.decode is missing or of other sources: make build"
        assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


@pytest.mark.parametrize("where", ["main", "end"])
def test_interrupted_elsewhere(where: str) -> None:
    """In `main` wherever it may be, and while the interpreter ends."""
    interrupt = "os.kill(os.getpid(), signal.SIGINT)"
    body = interrupt if where == "main" else f"atexit.register(lambda: {interrupt})"
    code = f"""if True:
        import atexit, os, signal, sys, types
        def main():
            print("written")
            {body}
            return 0
        sys.modules["dflash_ggml.cli.run"] = types.SimpleNamespace(main=main)
        from dflash_ggml import start
        sys.exit(start.run())
    """
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "written\n", "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    code = AT_IMPORT.format(name="numpy", command="run").replace(
        "from dflash", "signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv[1:] = ['--bogus']; from dflash"
    )
    done = python(code)
    assert done.returncode == 2 and "--bogus" in done.stderr


def test_ctrl_c_typed_while_a_model_loads(demo_target: Path) -> None:
    """On a real terminal, as soon as anything is shown: exit code 130 and no traceback."""
    pytest.importorskip("dflash_ggml.ggml.bindings")
    code = "import sys; from dflash_ggml import start; sys.exit(start.run())"
    with Terminal(sys.executable, "-c", code, "-t", "1", "-ngl", "0", "-p", "x", "-n", "-1") as terminal:
        terminal.more()
        terminal.type("\x03")
        shown = terminal.rest()
        assert terminal.process.wait(60) == 130 and "Traceback" not in shown
