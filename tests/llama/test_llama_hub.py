"""Tests of Llama.from_pretrained: which files are downloaded, and the error when a pattern does not match. No network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.errors import ConfigError, ModelFileError
from dflash_ggml.files import pairs
from dflash_ggml.files.hub import HubError
from dflash_ggml.llama import pretrained as llama_hub
from dflash_ggml.llama.llama import Llama
from reference.toy_llama import ToyLlama

FILES = ["README.md", "dflash-model-Q8_0.gguf", "model-Q4_K_M.gguf", "model-Q8_0.gguf", "sub/other.gguf"]


class StandIn:
    """A hub with one repository; fetched files land in `folder`."""

    folder: Path
    fetched: list[str]

    def __init__(self, cache_dir: Path | None = None) -> None:
        self.cache_dir = cache_dir

    def files(self, repo: str) -> list[str]:
        assert repo == "maker/model"
        return FILES

    def fetch(self, repo: str, name: str) -> Path:
        path = (self.cache_dir or self.folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.fetched.append(name)
        return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    StandIn.folder, StandIn.fetched = tmp_path, []
    monkeypatch.setattr(llama_hub, "Hub", StandIn)
    return StandIn


def test_a_glob_that_matches_one_file_and_the_draft_beside_it(hub: type[StandIn], tmp_path: Path) -> None:
    llm = ToyLlama.from_pretrained("maker/model", "model-Q8*", n_ctx=128)
    assert llm.model_path == str(tmp_path / "model-Q8_0.gguf") and llm.n_ctx() == 128
    assert llm.draft_model == str(tmp_path / "dflash-model-Q8_0.gguf")


def test_all_parts_of_a_draft_and_none_that_cannot_be_used(
    hub: type[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of which no draft is known, one beside it is not even fetched."""
    parts = ["dflash-model-00001-of-00002.gguf", "dflash-model-00002-of-00002.gguf"]
    calls = []
    monkeypatch.setattr(StandIn, "draft_for", lambda *args: calls.append(args[2]), raising=False)
    monkeypatch.setattr(StandIn, "files", lambda self, repo: ["model.gguf", *parts])
    ToyLlama.from_pretrained("maker/model", "model.gguf")
    assert hub.fetched == ["model.gguf", *parts]
    monkeypatch.setattr(
        StandIn, "files", lambda self, repo: ["Qwen3.5-2B-Q4_K_M.gguf", "dflash-Qwen3.5-2B.gguf"]
    )
    hub.fetched.clear()
    llm = ToyLlama.from_pretrained("maker/model", "Qwen3.5-2B*")
    assert hub.fetched == calls == ["Qwen3.5-2B-Q4_K_M.gguf"] and llm.draft_model is None
    later = pairs.Pair("Gemma4", "31B", note="comes in a later version", loads=False)
    monkeypatch.setattr(pairs, "PAIRS", (*pairs.PAIRS, later))
    monkeypatch.setattr(StandIn, "files", lambda self, repo: ["gemma-4-31B-it-Q4_K_M.gguf"])
    with pytest.raises(HubError, match="comes in a later version"):
        ToyLlama.from_pretrained("maker/model", "*.gguf")


def test_a_draft_that_came_along_stops_no_start(
    hub: type[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy_pair: tuple[Path, Path]
) -> None:
    """It was found, not requested: an error in it is a warning."""
    (tmp_path / "toy.gguf").symlink_to(toy_pair[0])
    draft = tmp_path / "dflash-broken.gguf"
    draft.write_bytes(b"GGUFnonsense")
    monkeypatch.setattr(StandIn, "files", lambda self, repo: ["toy.gguf", draft.name])
    with (
        pytest.warns(UserWarning, match="decoding without a draft model: .*dflash-broken"),
        Llama.from_pretrained("maker/model", "toy*", n_ctx=64, n_threads=1, verbose=False) as llm,
    ):
        assert not llm.engine.has_draft
    with pytest.raises(ModelFileError, match="dflash-broken"):
        Llama.from_pretrained("maker/model", "toy*", draft_model=str(draft), verbose=False)


def test_no_draft_when_one_is_named_or_refused(hub: type[StandIn]) -> None:
    for draft in (False, "elsewhere.gguf"):
        ToyLlama.from_pretrained("maker/model", "model-Q4*", draft_model=draft, local_dir_use_symlinks="auto")
    ToyLlama.from_pretrained("maker/model", "model-Q4*", mode="plain")
    assert hub.fetched == ["model-Q4_K_M.gguf"] * 3


def test_cache_dir_and_additional_files(hub: type[StandIn], tmp_path: Path) -> None:
    llm = ToyLlama.from_pretrained(
        "maker/model", "model-Q4*", additional_files=["sub/*"], cache_dir=tmp_path / "c", draft_model=False
    )
    assert llm.model_path == str(tmp_path / "c" / "model-Q4_K_M.gguf")
    assert hub.fetched == ["model-Q4_K_M.gguf", "sub/other.gguf"]


def test_local_dir(hub: type[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls: list[dict[str, Any]] = []

    def download(**kwargs: Any) -> str:
        calls.append(kwargs)
        path = tmp_path / kwargs["filename"]
        path.touch()
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    ToyLlama.from_pretrained("maker/model", "sub/other.gguf", local_dir=tmp_path, draft_model=False)
    assert calls == [
        {"repo_id": "maker/model", "filename": "other.gguf", "subfolder": "sub", "local_dir": tmp_path}
    ]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("*.safetensors", "No file found in maker/model matching .*available: README.md"),
        ("model-*", "Multiple files found in maker/model matching .*model-Q4_K_M.gguf, model-Q8_0.gguf"),
    ],
)
def test_patterns_that_do_not_fit(hub: type[StandIn], pattern: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ToyLlama.from_pretrained("maker/model", pattern)
    assert hub.fetched == []
