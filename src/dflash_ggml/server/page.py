"""The chat page: its files and their headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        # model output must not become markup or code
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # always revalidate: parts of two versions must not be mixed
}


class PageFiles(StaticFiles):
    """What the page consists of besides its document."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """A file with the page's headers."""
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


async def _document(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers=HEADERS)


def page_routes() -> list[Route | Mount]:
    """Routes `/` and `/static`, without authentication: the page itself prompts for a key."""
    return [Route("/", _document), Mount("/static", PageFiles(directory=STATIC))]
