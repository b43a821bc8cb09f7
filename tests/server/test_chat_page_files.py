"""The chat page's files, without a browser."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
from starlette.testclient import TestClient

from reference.server_kit import ScriptedRunner, application


def test_headers_of_the_page_and_its_files() -> None:
    with TestClient(application(ScriptedRunner())) as client:
        page, script = client.get("/"), client.get("/static/page.js")
        policy = dict(
            part.strip().partition(" ")[::2] for part in page.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert policy["style-src"] == "'self'" and policy["trusted-types"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        for response in (page, script):
            assert response.status_code == 200
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["content-security-policy"] == page.headers["content-security-policy"]
        assert script.headers["content-type"].startswith("text/javascript")
        again = client.get("/static/page.js", headers={"if-none-match": script.headers["etag"]})
        assert again.status_code == 304 and again.headers["cache-control"] == "no-cache"
