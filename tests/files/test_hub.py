"""Tests of models by hub name, against a fake hub on loopback: no network."""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="the hub extra is not installed")

from dflash_ggml.errors import ConfigError
from dflash_ggml.files import pairs
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
    "maker/parts": {
        "m-Q8_0-00001-of-00002.gguf": b"GGUF one",
        "m-Q8_0-00002-of-00002.gguf": b"GGUF two",
        "dflash-m-00001-of-00002.gguf": b"GGUF half a draft",
    },
    "unsloth/Qwen3.6-27B-GGUF": {"Qwen3.6-27B-Q4_K_M.gguf": b"GGUF 27", "mmproj-F16.gguf": b"GGUF eyes"},
    "spiritbuun/Qwen3.6-27B-DFlash-GGUF": {
        "dflash-draft-3.6-q4_k_m.gguf": b"GGUF small",
        "dflash-draft-3.6-q8_0.gguf": b"GGUF its draft",
    },
    "ggml-org/Qwen3.5-2B-GGUF": {
        "Qwen3.5-2B-Q4_K_M.gguf": b"GGUF 2",
        "dflash-Qwen3.5-2B-Q8_0.gguf": b"GGUF of somebody",
    },
    "unsloth/gemma-4-31B-it-GGUF": {"gemma-4-31B-it-Q4_K_M.gguf": b"GGUF later"},
    "unsloth/Qwen3.5-9B-GGUF": {"Qwen3.5-9B-Q4_K_M.gguf": b"GGUF 9"},
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


def test_the_known_draft_of_a_target(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """Fetched where the repository has none itself, and named."""
    target, draft = hub.target(RepoSpec.parse("unsloth/Qwen3.6-27B-GGUF:Q4_K_M"))
    assert target.read_bytes() == b"GGUF 27"
    assert draft is not None and draft.read_bytes() == b"GGUF its draft"
    message = "Qwen3.6-27B-Q4_K_M.gguf: its draft is spiritbuun/Qwen3.6-27B-DFlash-GGUF:Q8_0"
    assert message in caplog.text


@pytest.mark.parametrize(
    ("repo", "reason"),
    [
        ("ggml-org/Qwen3.5-2B-GGUF", "no draft for Qwen3.5-2B: no draft is published for it"),
        (
            "unsloth/Qwen3.5-9B-GGUF",
            "no draft for Qwen3.5-9B-Q4_K_M.gguf: z-lab/Qwen3.5-9B-DFlash is not on the hub",
        ),
        (
            "maker/parts",
            "no draft for m-Q8_0-00001-of-00002.gguf: maker/parts lacks dflash-m-00002-of-00002.gguf",
        ),
    ],
)
def test_a_draft_that_cannot_be_had_stops_nothing(
    hub: Hub, repo: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = hub.target(RepoSpec.parse(repo))
    assert target.exists() and draft is None
    assert reason in caplog.text and caplog.text.count("decoding without a draft model") == 1


def test_an_unknown_target_has_no_draft(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    assert (
        hub.target(RepoSpec.parse("maker/parts"), "m-Q8_0-00001-of-00002.gguf", want_draft=False)[1] is None
    )
    assert not caplog.text
    assert hub.draft_for("maker/model", "elsewhere/model.gguf", []) is None
    assert (
        "no draft is known for model.gguf, decoding without a draft model; name one with -md or -hfd"
        in caplog.text
    )


def test_a_model_that_comes_later_is_not_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = pairs.Pair("Gemma4", "31B", note="comes in a later version", loads=False)
    monkeypatch.setattr(pairs, "PAIRS", (*pairs.PAIRS, later))
    with pytest.raises(HubError, match="Gemma4-31B comes in a later version"):
        hub.target(RepoSpec.parse("unsloth/gemma-4-31B-it-GGUF"))
    assert not list(tmp_path.rglob("*.gguf"))


def test_all_parts_of_a_model(hub: Hub) -> None:
    for name in (None, "m-Q8_0-00002-of-00002.gguf"):
        target, _ = hub.target(RepoSpec.parse("maker/parts"), name, want_draft=False)
        assert target.name == name or (name is None and target.name == "m-Q8_0-00001-of-00002.gguf")
        assert sorted(f.read_bytes() for f in target.parent.glob("m-*.gguf")) == [b"GGUF one", b"GGUF two"]


def test_plain_decoding_fetches_no_draft(
    hub: Hub, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_ggml.cli import arguments

    fetched: list[str] = []
    fetch = Hub.fetch
    monkeypatch.setattr(arguments, "Hub", lambda **_: hub)
    monkeypatch.setattr(
        Hub, "fetch", lambda self, repo, file, *a: fetched.append(file) or fetch(self, repo, file, *a)
    )
    parser = argparse.ArgumentParser()
    arguments.add_model_options(parser)
    model = ["-hf", "maker/model", "--mode"]
    drafts = ["-hfd", "spiritbuun/Qwen3.6-27B-DFlash-GGUF"]
    for flags, files in (
        ([*model, "plain"], ["model-Q4_K_M.gguf"]),
        ([*model, "plain", *drafts], ["model-Q4_K_M.gguf"]),
        ([*model, "auto", *drafts], ["model-Q4_K_M.gguf", "dflash-draft-3.6-q8_0.gguf"]),
        ([*model, "auto"], ["model-Q4_K_M.gguf", "dflash-model-Q8_0.gguf"]),
        (
            ["-hf", "unsloth/Qwen3.6-27B-GGUF:Q4_K_M"],
            ["Qwen3.6-27B-Q4_K_M.gguf", "dflash-draft-3.6-q8_0.gguf"],
        ),
    ):
        fetched.clear()
        config = arguments.engine_config(parser.parse_args(flags))
        assert fetched == files
        assert config.draft_found == ("-hfd" not in flags)
        assert (config.draft is None) == ("plain" in flags)


def test_draft_as_safetensors_folder(hub: Hub) -> None:
    folder = hub.draft(RepoSpec.parse("maker/draft"))
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_draft_from_a_mixed_repository(hub: Hub) -> None:
    assert hub.draft(RepoSpec.parse("maker/model")).name == "dflash-model-Q8_0.gguf"


def test_a_data_set(hub: Hub) -> None:
    hub.silence_retries()
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
def test_error_messages(hub: Hub, repo: str, words: str) -> None:
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
    parts = ["x-Q4_K_M-00001-of-00002.gguf", "x-Q4_K_M-00002-of-00002.gguf"]
    assert pick_target(parts, spec) == pick_target(parts, RepoSpec("a/b", "Q4_K_M")) == parts[0]
    folders = ["BF16/x-BF16-00001-of-00002.gguf", "BF16/x-BF16-00002-of-00002.gguf", "x-Q8_0.gguf"]
    assert pick_target(folders, RepoSpec("a/b", "bf16")) == folders[0]
    assert pick_draft(["x-DFlash-Q8_0.gguf", "x-Q8_0.gguf"], spec) == "x-DFlash-Q8_0.gguf"
    assert pick_draft(["mmproj-DFlash-Q8_0.gguf", "x-DFlash-Q4_K_M.gguf"], spec) == "x-DFlash-Q4_K_M.gguf"
    assert pick_draft(["config.json", "model.safetensors"], spec) is None
    assert pick_sidecar(["q/dflash-x.gguf", "x.gguf"], "x.gguf") is None
    assert pick_sidecar(["q/dflash-x.gguf", "q/x.gguf"], "q/x.gguf") == "q/dflash-x.gguf"
    several = ["Qwen3.6-27B-DFlash-F16.gguf", "Qwen3.5-9B-DFlash-Q8_0.gguf", "mmproj-dflash-Q8_0.gguf"]
    assert pick_sidecar(several, "Qwen3.6-27B-Q4_K_M.gguf") == several[0]
    assert pick_sidecar(several, "Qwen3.5-4B-Q4_K_M.gguf") is None


def test_the_order_of_drafts() -> None:
    """Q8_0, BF16, F16, then the larger ones, in a repository of drafts and beside a target; an asked one is that one."""
    quants = ["Q8_0", "BF16", "F16", "F32", "Q6_K", "Q5_K_M", "IQ4_XS", "Q4_K_M", "UD-Q3_K_XL", "Q2_K"]
    for i in range(len(quants)):
        drafts = [f"dflash-x-{quant}.gguf" for quant in reversed(quants[i:])]
        assert pick_draft(drafts, RepoSpec("a/b")) == drafts[-1]
        assert pick_sidecar([*drafts, "x-Q4_K_M.gguf"], "x-Q4_K_M.gguf") == drafts[-1]
    assert pick_draft(drafts, RepoSpec("a/b", "Q2_K")) == "dflash-x-Q2_K.gguf"
