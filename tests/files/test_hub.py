"""Models by name, against a stand-in of the hub on loopback: no network."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="the hub extra is not installed")

from dflash_ggml.errors import ConfigError
from dflash_ggml.files.hub import Hub, HubError, RepoSpec, pick_draft, pick_sidecar, pick_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOS = {
    "maker/model": {
        "README.md": b"about",
        "model-Q4_K_M.gguf": b"GGUF four",
        "model-Q8_0.gguf": b"GGUF eight",
        "mmproj-model-F16.gguf": b"GGUF eyes",
        "dflash-model-Q8_0.gguf": b"GGUF draft",
    },
    "datasets/maker/set": {"data/test.jsonl": b"{}"},
    "maker/draft": {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"about"},
}


class _StandIn(BaseHTTPRequestHandler):
    """The two routes of the hub's interface that fetching a file needs."""

    def log_message(self, *args: object) -> None:
        pass

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        kind, parts = ("datasets/", parts[1:]) if parts[0] == "datasets" else ("", parts)
        api = parts[:2] == ["api", "models"]
        repo = kind + "/".join(parts[2:4] if api else parts[:2])
        if repo == "maker/busy":
            return self._fail(418, "Teapot")
        if repo == "maker/gated":
            return self._fail(403, "GatedRepo")
        if repo not in REPOS:
            return self._fail(404, "RepoNotFound")
        files = REPOS[repo]
        if api:
            about = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]}
            return self._answer(json.dumps(about).encode(), Content_Type="application/json")
        name = "/".join(parts[4:])
        if name not in files:
            return self._fail(404, "EntryNotFound")
        etag = hashlib.sha256(files[name]).hexdigest()
        self._answer(files[name], ETag=f'"{etag}"', X_Repo_Commit=COMMIT, Accept_Ranges="bytes")

    do_HEAD = do_GET


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _StandIn)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def hub(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    return Hub(endpoint=endpoint, cache_dir=tmp_path / "cache")


def test_default_quantisation_and_sidecar(hub: Hub) -> None:
    target, draft = hub.target(RepoSpec.parse("maker/model"))
    assert target.name == "model-Q4_K_M.gguf" and target.read_bytes() == b"GGUF four"
    assert draft is not None and draft.read_bytes() == b"GGUF draft"


def test_named_quantisation_ignores_case(hub: Hub) -> None:
    assert hub.target(RepoSpec.parse("maker/model:q8_0"))[0].read_bytes() == b"GGUF eight"


def test_draft_as_safetensors_folder(hub: Hub) -> None:
    folder = hub.draft(RepoSpec.parse("maker/draft"))
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_draft_from_a_mixed_repository(hub: Hub) -> None:
    assert hub.draft(RepoSpec.parse("maker/model")).name == "dflash-model-Q8_0.gguf"


def test_a_data_set(hub: Hub) -> None:
    hub.quieten()
    assert hub.fetch("maker/set", "data/test.jsonl", kind="dataset").read_bytes() == b"{}"
    with pytest.raises(HubError, match="maker/set is not on the hub"):
        hub.fetch("maker/set", "data/test.jsonl")


def test_offline_uses_the_cache_only(hub: Hub, endpoint: str, tmp_path: Path) -> None:
    fetched, _ = hub.target(RepoSpec.parse("maker/model"))
    offline = Hub(endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache", offline=True)
    assert offline.target(RepoSpec.parse("maker/model"))[0] == fetched
    with pytest.raises(HubError, match="not in the cache.*offline"):
        offline.target(RepoSpec.parse("maker/other"))
    with pytest.raises(HubError, match="not in the cache.*offline"):
        offline.fetch("maker/model", "model-Q8_0.gguf")


@pytest.mark.parametrize(
    ("repo", "words"),
    [
        ("maker/absent", "not on the hub, or it is private.*HF_TOKEN"),
        ("maker/gated", "is gated: accept its terms.*HF_TOKEN"),
        ("maker/busy", "status 418"),
    ],
)
def test_clear_words(hub: Hub, repo: str, words: str) -> None:
    with pytest.raises(HubError, match=words):
        hub.target(RepoSpec.parse(repo))


def test_missing_file_and_quantisation(hub: Hub) -> None:
    with pytest.raises(HubError, match="has no file nothing.gguf"):
        hub.fetch("maker/model", "nothing.gguf")
    with pytest.raises(HubError, match="no Q2_K file; it has: model-Q4_K_M.gguf, model-Q8_0.gguf"):
        hub.target(RepoSpec.parse("maker/model:Q2_K"))


def test_unreachable_hub(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="could not be reached.*--offline"):
        Hub(endpoint="http://127.0.0.1:9", cache_dir=tmp_path).target(RepoSpec.parse("maker/model"))


@pytest.mark.parametrize("text", ["", "model", "a/b/c", "a/b:", "../x", "a/..", "http://a/b", "a/b c"])
def test_bad_names(text: str) -> None:
    with pytest.raises(ConfigError, match="user/repo"):
        RepoSpec.parse(text)


def test_choice_rules() -> None:
    spec = RepoSpec("a/b")
    assert pick_target(["x-Q8_0.gguf", "x-IQ2_M.gguf"], spec) == "x-Q8_0.gguf"
    assert (
        pick_target(["x-Q5_K_M.gguf", "x-IQ2_M.gguf", "mtp-x.gguf", "imatrix.gguf"], spec) == "x-IQ2_M.gguf"
    )
    assert pick_target(["x-Q4_K_M.gguf", "x-Q4_K_S.gguf"], RepoSpec("a/b", "Q4_K_S")) == "x-Q4_K_S.gguf"
    assert pick_target(["x-UD-Q4_K_XL.gguf"], RepoSpec("a/b", "q4_k_xl")) == "x-UD-Q4_K_XL.gguf"
    with pytest.raises(HubError, match="no GGUF file"):
        pick_target(["mmproj-x.gguf", "dflash-x.gguf", "README.md"], spec)
    with pytest.raises(HubError, match="one part of 3"):
        pick_target(["x-Q4_K_M-00001-of-00003.gguf"], spec)
    assert pick_draft(["x-DFlash-Q8_0.gguf", "x-Q8_0.gguf"], spec) == "x-DFlash-Q8_0.gguf"
    assert pick_draft(["config.json", "model.safetensors"], spec) is None
    assert pick_sidecar(["q/dflash-x.gguf", "x.gguf"], "x.gguf") is None
    assert pick_sidecar(["q/dflash-x.gguf", "q/x.gguf"], "q/x.gguf") == "q/dflash-x.gguf"
