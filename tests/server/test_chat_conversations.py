"""Tests of the chat page's conversations: what is sent, stored, listed, exported and changed. In headless Chromium."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="selenium is not installed: the chat page is not tested")
pytest.importorskip("starlette", reason="the server extra is not installed")
from selenium.webdriver.common.keys import Keys

from reference.page_kit import Page, contents
from reference.server_kit import ScriptedRunner, plain, wait_until


def test_history_settings_and_new_chat(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    page = open_page()
    page.find("#open-settings").click()
    assert page.find("#temperature").get_attribute("placeholder") == "0.8"
    page.find("#system").send_keys("Be brief")
    for name, value in {
        "temperature": "0.3",
        "top_p": "0.9",
        "top_k": "7",
        "min_p": "0.1",
        "seed": "5",
    }.items():
        page.find(f"#{name}").send_keys(value)
    page.find("#limit").send_keys("99")
    page.find("#thinking").send_keys("off")
    page.find("#accept-settings").click()
    page.answered("One")
    page.find("#prompt").send_keys("Two", Keys.SHIFT + Keys.ENTER)
    page.find("#prompt").send_keys("lines", Keys.ENTER)
    page.until(lambda: len(runner.requests) == 2 and page.idle())
    request = runner.requests[1]
    assert contents(request) == [
        ("system", "Be brief"),
        ("user", "One"),
        ("assistant", "Answer: 42"),
        ("user", "Two\nlines"),
    ]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.3, 0.9, 7)
    assert (sampling.min_p, sampling.seed, request.max_tokens) == (0.1, 5, 99)
    assert request.enable_thinking is False
    page.find("#fresh").click()
    page.answered("Three")
    assert [m["content"] for m in runner.requests[2].messages] == ["Be brief", "Three"]
    page.browser.refresh()
    page.until(page.connected)
    page.answered("Four")
    assert runner.requests[3].sampling.temperature == 0.3
    page.find("#open-settings").click()
    page.find("#reset").click()
    page.find("#accept-settings").click()
    page.answered("Five")
    assert runner.requests[4].sampling.temperature == 0.8 and runner.requests[4].enable_thinking is None


def test_a_new_chat_while_an_answer_streams_begins_empty(
    open_page: Callable[..., Page], runner: ScriptedRunner
) -> None:
    runner.script, runner.pace = lambda request: None, 0.01
    page = open_page()
    page.ask("Go on for ever")
    page.until(lambda: "word" in "".join(page.texts(".message.assistant .text")))
    page.find("#prompt").send_keys(Keys.CONTROL + Keys.SHIFT + "o")
    wait_until(lambda: runner.cancelled == 1)
    assert page.texts(".message") == []
    runner.script = lambda request: plain("Fresh")
    page.answered("Who are you?")
    assert contents(runner.requests[1]) == [("user", "Who are you?")]
    assert page.texts("#conversations .entry") == ["Who are you?", "Go on for ever"]
    page.click("#conversations .entry[title='Go on for ever']")
    page.until(lambda: page.texts(".message.user .text") == ["Go on for ever"])
    assert (
        "word" in page.texts(".message.assistant .text")[0]
    )  # the partial answer is stored in its own conversation
    assert page.texts(".facts")[0].endswith("stopped")


def test_roles_alternate_after_an_answer_that_was_stopped_before_its_first_word(
    open_page: Callable[..., Page], runner: ScriptedRunner
) -> None:
    runner.script, runner.pace, runner.word = lambda request: None, 0.01, ""
    page = open_page()
    page.ask("First")
    wait_until(lambda: len(runner.requests) == 1)
    page.click("#stop")
    page.until(page.idle)
    runner.script = lambda request: plain()
    page.answered("Second")
    assert contents(runner.requests[-1]) == [("user", "First"), ("assistant", ""), ("user", "Second")]


def test_an_answer_goes_on_while_another_conversation_is_open(
    open_page: Callable[..., Page], runner: ScriptedRunner
) -> None:
    page = open_page()
    page.answered("First")
    page.find("#fresh").click()
    runner.script, runner.pace = lambda request: plain("one two three"), 0.2
    page.ask("Second")
    page.click("#conversations .entry[title='First']")
    page.until(lambda: page.texts(".message.user .text") == ["First"])
    assert page.idle() and page.texts(".message.assistant .text") == ["Answer: 42"]
    page.click("#conversations .entry[title='Second']")
    page.until(lambda: page.texts(".message.assistant .text") == ["one two three"] and page.idle())


def test_conversations_are_kept(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    page = open_page()
    page.answered("Erste Frage")
    page.find("#fresh").click()
    page.answered("Second question")
    page.browser.refresh()
    page.until(lambda: page.texts(".message.user .text") == ["Second question"])
    assert (
        page.texts(".message.assistant .text") == ["Answer: 42"]
        and "225.0 tokens/s" in page.texts(".facts")[0]
    )
    assert page.texts("#conversations .entry") == ["Second question", "Erste Frage"]
    page.find("#prompt").send_keys(Keys.CONTROL + "k")
    assert page.browser.switch_to.active_element.get_attribute("id") == "search"
    page.find("#search").send_keys("FRAGE")
    assert page.texts("#conversations .entry") == ["Erste Frage"]
    page.click("#conversations .entry")
    page.until(lambda: page.texts(".message.user .text") == ["Erste Frage"])
    page.until(page.connected)
    page.answered("More")
    assert contents(runner.requests[-1])[:2] == [("user", "Erste Frage"), ("assistant", "Answer: 42")]
    page.press("More for Erste Frage")
    page.click(".entry-menu button:nth-child(1)")
    field = page.find("input.entry")
    field.send_keys("Better title", Keys.ENTER)
    page.until(lambda: page.texts("#conversations .entry") == [])  # the search has not that
    page.find("#search").send_keys(Keys.CONTROL + "a", Keys.DELETE)
    page.until(lambda: "Better title" in page.texts("#conversations .entry"))
    page.press("More for Better title")
    page.click(".entry-menu button:nth-child(4)")
    page.until(lambda: page.texts("#conversations .entry") == ["Second question"])
    assert page.texts(".message") == []
    page.click("#toast button")
    page.until(lambda: len(page.texts("#conversations .entry")) == 2)
    page.click("#remove-all")
    page.until(lambda: page.texts("#conversations .entry") == [])
    assert page.find("#toast").text.startswith("2 conversations deleted")
    page.click("#toast button")
    page.until(lambda: len(page.texts("#conversations .entry")) == 2)


def test_a_reload_in_the_middle_of_an_answer(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    runner.script, runner.pace = lambda request: None, 0.01
    page = open_page()
    page.ask("Go on for ever")
    page.until(lambda: "word" in "".join(page.texts(".message.assistant .text")))
    page.browser.refresh()
    wait_until(lambda: runner.cancelled == 1)
    page.until(lambda: page.texts(".facts") == ["interrupted"])
    assert page.texts(".message.user .text") == ["Go on for ever"] and page.idle()


def test_export_and_import(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page()
    page.answered("Keep this")
    page.script(
        """
        window.saved = [];
        URL.createObjectURL = (blob) => { window.saved.push(blob.text()); return "blob:none"; };
        HTMLAnchorElement.prototype.click = function () { window.saved.push(this.download); };
        """
    )
    for i in (2, 3):
        page.press("More for Keep this")
        page.click(f".entry-menu button:nth-child({i})")
    page.until(lambda: page.script("return window.saved.length;") == 4)
    markdown, first, exported, second = page.script("return Promise.all(window.saved);")
    assert (first, second) == ("Keep this.md", "Keep this.json")
    assert "Keep this" in markdown and "Answer: 42" in markdown
    held = json.loads(exported)
    assert [n["content"] for n in held["nodes"].values()] == ["Keep this", "Answer: 42"]
    (tmp_path / "kept.json").write_text(exported)
    page.find("#import-file").send_keys(str(tmp_path / "kept.json"))
    page.until(lambda: page.texts("#conversations .entry") == ["Keep this", "Keep this"])
    circle = {"m1": {"id": "m1", "parent": "m1", "role": "user", "content": "x"}}
    for i, wrong in enumerate([{"title": 1}, [], None, {"title": "x", "head": "m1", "nodes": circle}]):
        (tmp_path / f"{i}.json").write_text(json.dumps(wrong))
        page.find("#import-file").send_keys(str(tmp_path / f"{i}.json"))
        page.until(
            lambda i=i: page.find("#toast").text.startswith(f"{i}.json: this file holds no conversation")
        )
    assert len(page.texts("#conversations .entry")) == 2


def test_answer_again_edit_continue_and_delete(
    open_page: Callable[..., Page], runner: ScriptedRunner
) -> None:
    page = open_page()
    answer = ".message.assistant:last-child .text"
    page.answered("Question")
    runner.script = lambda request: plain("Another\n\none\n\nin parts")
    page.press("Regenerate")
    page.until(lambda: page.texts(answer) == ["Anotheronein parts"] and page.idle())
    assert contents(runner.requests[1]) == [("user", "Question")]
    assert page.texts(".versions") == ["2/2"]
    page.press("Earlier version")
    page.until(lambda: page.texts(answer) == ["Answer: 42"])
    page.press("Later version")
    page.until(lambda: page.texts(answer) == ["Anotheronein parts"])
    # an edited question is a new branch, and the old one stays
    page.press("Edit", 0)
    page.find(".editing textarea").send_keys(Keys.CONTROL + "a")
    page.find(".editing textarea").send_keys("Better question", Keys.ENTER)
    page.until(lambda: len(runner.requests) == 3 and page.idle())
    assert contents(runner.requests[2]) == [("user", "Better question")]
    assert page.texts(".message.user .text") == ["Better question"]
    # an edited answer is changed in place, and sent to the model as its own
    page.press("Edit")
    page.find(".editing textarea").send_keys(Keys.CONTROL + "a")
    page.find(".editing textarea").send_keys("Edited")
    page.find(".editing button.primary").click()
    page.until(lambda: page.texts(answer) == ["Edited"])
    runner.script = lambda request: plain(" and more")
    page.press("Continue")
    page.until(lambda: page.texts(answer) == ["Edited and more"] and page.idle())
    assert runner.requests[3].continue_final_message is True
    assert contents(runner.requests[3])[-1] == ("assistant", "Edited")
    page.press("Delete")
    page.until(lambda: page.texts(".message.assistant") == [])
    page.click("#toast button")
    page.until(lambda: page.texts(answer) == ["Edited and more"])


def test_attached_files(open_page: Callable[..., Page], runner: ScriptedRunner, tmp_path: Path) -> None:
    page = open_page()
    (tmp_path / "a.md").write_text("some\n```\ncode\n```\n")
    (tmp_path / "b.bin").write_bytes(b"\x00\xff")
    (tmp_path / "c.txt").write_bytes(b"x" * (513 << 10))
    page.find("#attach-file").send_keys("\n".join(str(tmp_path / n) for n in ("a.md", "b.bin", "c.txt")))
    page.until(lambda: page.texts("#chips .name") == ["a.md"])
    refusal = page.find("#toast").text
    assert "b.bin is not a text file" in refusal and "c.txt is larger than 512 KiB" in refusal
    for event in ("drop", "paste"):
        page.script(
            """
            const data = new DataTransfer();
            data.items.add(new File(["let x;"], EVENT + ".js"));
            const event = EVENT === "drop" ? new DragEvent("drop", { dataTransfer: data, bubbles: true })
              : new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
            document.querySelector("#prompt").dispatchEvent(event);
            """.replace("EVENT", json.dumps(event))
        )
    page.until(lambda: page.texts("#chips .name") == ["a.md", "drop.js", "paste.js"])
    page.press("Remove drop.js")
    page.answered("Explain")
    wanted = "File: a.md\n````\nsome\n```\ncode\n```\n````\n\nFile: paste.js\n```\nlet x;\n```\n\nExplain"
    assert contents(runner.requests[0]) == [("user", wanted)]
    assert (
        page.texts(".message.user .chip .name") == ["a.md", "paste.js"] and page.texts("#chips .name") == []
    )
    assert page.find("#context-text").text == "21 / 256"
