"""A browser fixture for the tests of the chat page, where one is installed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for all of them; every page has an origin of its own, and so nothing kept."""
    pytest.importorskip("starlette", reason="the server extra is not installed")
    pytest.importorskip("selenium", reason="selenium is not installed: the chat page is not tested")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("chromium or chromedriver is not installed: the chat page is not tested")
    from reference.page_kit import start_browser

    driver = start_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def runner() -> Any:
    """What answers the page: a thought and an answer, unless its script is changed."""
    from reference.server_kit import ScriptedRunner, thoughtful

    return ScriptedRunner(lambda request: thoughtful())


@pytest.fixture
def open_page(browser: Any, runner: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page on a server around `runner`."""
    from reference.page_kit import Page
    from reference.server_kit import application, serving

    stack = []

    def make(**options: Any) -> Any:
        context = serving(application(runner, **options))
        port = context.__enter__()
        stack.append(context)
        origin = f"http://127.0.0.1:{port}"  # the port may have been another test's
        browser.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
        browser.get(f"{origin}/")
        page = Page(browser)
        page.until(page.connected)
        return page

    yield make
    browser.get("about:blank")
    for context in stack:
        context.__exit__(None, None, None)
