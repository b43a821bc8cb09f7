"""Tests of the chat page's files: nothing is loaded from elsewhere, and vendored libraries are unmodified."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
from starlette.testclient import TestClient

from dflash_ggml.server.page import STATIC
from reference.server_kit import ScriptedRunner, application

ROOT = Path(__file__).resolve().parents[2]
VENDOR = STATIC / "vendor"
OWN = sorted(p for p in STATIC.iterdir() if p.is_file())
MANIFEST: list[dict[str, Any]] = json.loads((VENDOR / "manifest.json").read_text())


@pytest.mark.parametrize("file", OWN, ids=lambda p: p.name)
def test_own_files_name_no_other_host_and_make_no_markup(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in text and "https://" not in text
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval("):
        assert sink not in text
    assert not re.search(
        r"""["'`]/\w""", text.replace("image/svg+xml", "")
    )  # a reverse proxy may add a path before ours
    assert len(text.splitlines()) <= 400


def test_every_import_and_address_is_a_file_of_the_page() -> None:
    for file in OWN:
        text = file.read_text(encoding="utf-8")
        for name in re.findall(r'(?:from|import) "\./([^"]+)"', text):
            assert (STATIC / name).is_file(), f"{file.name}: {name}"
        for name in re.findall(r'(?:src|href)="([^"#]+)"', text):
            assert (STATIC.parent / name).is_file(), f"{file.name}: {name}"


def test_vendored_libraries_are_the_pinned_ones() -> None:
    assert {p.name for p in VENDOR.iterdir()} == {"manifest.json", *(one["file"] for one in MANIFEST)}
    for one in MANIFEST:
        assert hashlib.sha256((VENDOR / one["file"]).read_bytes()).hexdigest() == one["sha256"], one["file"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", one["version"])
        assert one["version"] in (VENDOR / one["file"]).read_text()
        assert "copyright" in (ROOT / one["licence_file"]).read_text().lower()


def test_headers_of_the_page_and_its_files() -> None:
    with TestClient(application(ScriptedRunner())) as client:
        page, script = client.get("/"), client.get("/static/page.js")
        policy = dict(
            part.strip().partition(" ")[::2] for part in page.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert policy["style-src"] == "'self'" and policy["trusted-types"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        for response in (page, script, client.get("/static/vendor/marked.esm.js")):
            assert response.status_code == 200
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["content-security-policy"] == page.headers["content-security-policy"]
        assert script.headers["content-type"].startswith("text/javascript")
        again = client.get("/static/page.js", headers={"if-none-match": script.headers["etag"]})
        assert again.status_code == 304 and again.headers["cache-control"] == "no-cache"
