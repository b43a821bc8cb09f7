"""The chat page in headless Chromium, against a scripted runner on loopback."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("selenium", reason="selenium is not installed: the chat page is not tested")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip(
        "chromium or chromedriver is not installed: the chat page is not tested", allow_module_level=True
    )

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from reference.server_kit import (
    ScriptedRunner,
    application,
    plain,
    serving,
    thoughtful,
    wait_until,
)

# without these a closed network fills the log with refused connections
QUIET = (
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "disable-quic",
    "no-first-run",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    profile = tmp_path_factory.mktemp("profile")
    for flag in ("headless=new", "no-sandbox", "disable-gpu", f"user-data-dir={profile}", *QUIET):
        options.add_argument(f"--{flag}")
    options.add_argument("--window-size=1280,800")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    yield driver
    driver.quit()


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner(lambda request: thoughtful())


class Page:
    """The open page."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser = browser

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return [e.get_attribute("textContent") for e in self.browser.find_elements(By.CSS_SELECTOR, selector)]

    def until(self, condition: Callable[[], Any]) -> None:
        wait_until(lambda: bool(condition()))

    def ask(self, text: str) -> None:
        self.find("#prompt").send_keys(text)
        self.find("#send").click()

    def idle(self) -> bool:
        return bool(self.find("#send").is_displayed())

    def errors(self) -> list[str]:
        return [e["message"] for e in self.browser.get_log("browser") if e["level"] == "SEVERE"]


@pytest.fixture
def open_page(browser: webdriver.Chrome, runner: ScriptedRunner) -> Iterator[Callable[..., Page]]:
    stack = []

    def make(**options: Any) -> Page:
        context = serving(application(runner, **options))
        port = context.__enter__()
        stack.append(context)
        browser.get(f"http://127.0.0.1:{port}/")
        page = Page(browser)
        page.until(lambda: page.find("#status").text not in ("", "connecting"))
        return page

    yield make
    browser.get("about:blank")
    for context in stack:
        context.__exit__(None, None, None)


def test_answer_reasoning_and_tree(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    page = open_page()
    assert page.find("#model").text == "toy" and page.find("#status").text == "auto 15"
    page.ask("What is it?")
    page.until(page.idle)
    assert page.texts(".message.user") == ["What is it?"]
    assert page.texts(".message.assistant .text") == ["Answer: 42"]
    fold = page.find(".reasoning")
    assert fold.get_attribute("open") is None
    assert (
        page.texts(".reasoning div") == ["Let me think."]
        and "Thought for" in page.texts(".reasoning summary")[0]
    )
    facts = page.texts(".facts")[0]
    assert "9 tokens, 225.0 tokens/s" in facts and "tokens per step" in facts and "5 of 60" in facts
    # the scripted step has four nodes, of which the path takes root, first child and grandchild
    assert page.texts("#tree .node.kept text") == ["H", "e", "l"]
    assert page.texts("#tree .node.rejected text") == ["i"]
    assert page.texts("#tree .node.bonus text") == ["l"]
    assert len(page.browser.find_elements(By.CSS_SELECTOR, "#tree .edge.kept")) == 2
    assert "Step 2 of 2 (tree): 3 candidates, 2 accepted" in page.find("#about").text
    page.find("#before").click()
    assert "Step 1 of 2" in page.find("#about").text
    assert runner.requests[0].return_steps is True and page.errors() == []


def test_history_settings_and_new_chat(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    page = open_page()
    page.find("#settings summary").click()
    page.find("#system").send_keys("Be brief")
    page.find("#temperature").send_keys("0.3")
    page.ask("One")
    page.until(page.idle)
    page.find("#prompt").send_keys("Two", Keys.SHIFT + Keys.ENTER)
    page.find("#prompt").send_keys("lines", Keys.ENTER)
    page.until(lambda: len(runner.requests) == 2 and page.idle())
    said = [(m["role"], m["content"]) for m in runner.requests[1].messages]
    assert said == [
        ("system", "Be brief"),
        ("user", "One"),
        ("assistant", "Answer: 42"),
        ("user", "Two\nlines"),
    ]
    assert runner.requests[1].sampling.temperature == 0.3
    page.find("#fresh").click()
    page.ask("Three")
    page.until(lambda: len(runner.requests) == 3 and page.idle())
    assert [m["content"] for m in runner.requests[2].messages] == ["Be brief", "Three"]


def test_stop(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    runner.script, runner.pace = lambda request: None, 0.01
    page = open_page()
    page.ask("Go on for ever")
    page.until(
        lambda: page.texts(".message.assistant .text") and "word" in page.texts(".message.assistant .text")[0]
    )
    page.find("#stop").click()
    page.until(page.idle)
    wait_until(lambda: runner.cancelled == 1)
    assert page.texts(".facts")[0].endswith("stopped")


def test_model_text_is_never_markup(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    evil = "<img src=x onerror=alert(1)>\n\n```html\n<b>code</b>\n```\n\nand `<i>`"
    runner.script = lambda request: plain(evil)
    page = open_page()
    page.ask("<script>alert(2)</script>")
    page.until(page.idle)
    assert page.texts(".message.user") == ["<script>alert(2)</script>"]
    assert page.texts(".text p") == ["<img src=x onerror=alert(1)>", "and <i>"]
    assert page.texts(".text pre") == ["<b>code</b>\n"]
    assert page.browser.find_elements(By.CSS_SELECTOR, ".message img, .message script, .message b") == []


def test_errors_and_key(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    page = open_page(keys=["sesame"])
    assert page.find("#status").text == "needs a key"
    page.find("#key").send_keys("sesame", Keys.TAB)
    page.until(lambda: page.find("#status").text == "auto 15")
    runner.script = lambda request: [*plain()[:2], RuntimeError("broken")]
    page.ask("Fail, please")
    page.until(page.idle)
    assert "internal error" in page.texts(".message.error")[0]


def test_theme(open_page: Callable[..., Page]) -> None:
    page = open_page()
    ground = lambda: page.find("body").value_of_css_property("background-color")  # noqa: E731
    before = ground()
    page.find("#theme").click()
    assert ground() != before
    page.browser.refresh()
    assert ground() != before


def test_the_files_are_self_contained() -> None:
    from dflash_ggml.server.page import STATIC

    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, file.name
        assert "innerHTML" not in text, file.name
