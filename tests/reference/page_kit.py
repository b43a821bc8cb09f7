"""Helpers for tests of the chat page in headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from .server_kit import wait_until

# without these a closed network fills the log with refused connections
QUIET = (
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "disable-quic",
    "no-first-run",
)


def start_browser(profile: Path) -> webdriver.Chrome:
    """A browser with an empty profile, 1280 x 800."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("headless=new", "no-sandbox", "disable-gpu", f"user-data-dir={profile}", *QUIET):
        options.add_argument(f"--{flag}")
    options.add_argument("--window-size=1280,800")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))


def contents(request: Any) -> list[tuple[str, str]]:
    """Roles and contents that a request sent."""
    return [(m["role"], m["content"]) for m in request.messages]


class Page:
    """The open page."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser = browser

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        read = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent);"
        return list(self.browser.execute_script(read, selector))

    def click(self, selector: str) -> None:
        """Click the first such element at once, whatever the page is doing meanwhile."""
        self.browser.execute_script("document.querySelector(arguments[0]).click();", selector)

    def until(self, condition: Callable[[], Any]) -> None:
        wait_until(lambda: bool(condition()))

    def connected(self) -> bool:
        return self.find("#status").text not in ("", "connecting")

    def ask(self, text: str) -> None:
        self.find("#prompt").send_keys(text)
        self.find("#send").click()

    def idle(self) -> bool:
        return bool(self.find("#send").is_displayed())

    def answered(self, text: str) -> None:
        """Ask, and wait for the end of the answer."""
        self.ask(text)
        self.until(self.idle)

    def press(self, label: str, index: int = -1) -> None:
        """Click a button by its label, the last one if there are several."""
        press = "[...document.querySelectorAll(arguments[0])].at(arguments[1]).click();"
        self.browser.execute_script(press, f"[aria-label='{label}']", index)

    def script(self, body: str, *arguments: Any) -> Any:
        """The value of an asynchronous function body on the page."""
        return self.browser.execute_async_script(
            f"const done = arguments[arguments.length - 1]; (async () => {{ {body} }})().then(done)",
            *arguments,
        )

    def errors(self) -> list[str]:
        return [e["message"] for e in self.browser.get_log("browser") if e["level"] == "SEVERE"]
