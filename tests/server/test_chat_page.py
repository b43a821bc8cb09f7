"""Tests of the chat page in headless Chromium, against a scripted runner on loopback: answers, the tree, errors, small
screens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("selenium", reason="selenium is not installed: the chat page is not tested")
pytest.importorskip("starlette", reason="the server extra is not installed")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from dflash_ggml.errors import ConfigError
from dflash_ggml.session.events import Begin, Finish, ReasoningDelta, TextDelta
from reference.page_kit import Page, contents
from reference.server_kit import USAGE, ScriptedRunner, plain, wait_until


def test_answer_reasoning_and_tree(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    page = open_page()
    assert page.find("#model").text == "toy" and page.find("#status").text == "auto 15"
    page.ask("What is it?")
    page.until(page.idle)
    assert page.texts(".message.user .text") == ["What is it?"]
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


def test_answers_that_are_cut(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    page = open_page()
    runner.script = lambda request: plain("Cut", "length")
    page.answered("One")
    assert page.texts(".facts")[-1].endswith("; cut at the longest answer")
    assert len(page.texts(".tools .wanted")) == 1  # the button to continue stands out
    runner.script = lambda request: [Begin(12, 5), ReasoningDelta("Hm"), USAGE, Finish("length")]
    page.answered("Two")
    assert page.texts(".facts")[-1].endswith("; cut at the longest answer, while it was thinking")
    full = replace(USAGE, prompt_n=250, predicted_n=6)
    runner.script = lambda request: [Begin(250, 0), TextDelta("Full"), full, Finish("length")]
    page.answered("Three")
    assert page.texts(".facts")[-1].endswith("; the context is full")
    assert page.texts(".tools .wanted") == [] and page.find("#context-text").text == "256 / 256"


def test_stop(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    runner.script, runner.pace = lambda request: None, 0.01
    page = open_page()
    streaming = lambda: "word" in "".join(page.texts(".message.assistant:last-child .text"))  # noqa: E731
    page.ask("Go on for ever")
    page.until(streaming)
    page.find("#stop").click()
    page.until(page.idle)
    wait_until(lambda: runner.cancelled == 1)
    assert page.texts(".facts")[0].endswith("stopped")
    page.ask("And again")
    page.until(streaming)
    page.find("#prompt").send_keys("typed meanwhile", Keys.ENTER, Keys.ESCAPE)
    page.until(page.idle)
    wait_until(lambda: runner.cancelled == 2)
    assert page.find("#prompt").get_property("value") == "typed meanwhile"


def test_model_text_is_never_markup(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    evil = "<img src=x onerror=alert(1)>\n\n```html\n<b>code</b>\n```\n\nand `<i>`"
    evil += "\n\n[a](javascript:alert(3)) [b](data:text/html,x) ![c](https://example.org/c.png) <b onclick=alert(4)>d</b>"
    runner.script = lambda request: plain(evil)
    page = open_page()
    page.answered("<script>alert(2)</script>")
    assert page.texts(".message.user .text") == ["<script>alert(2)</script>"]
    assert page.texts(".text p")[:2] == ["<img src=x onerror=alert(1)>", "and <i>"]
    assert page.texts(".text pre") == ["<b>code</b>"]
    unwanted = ".message img, .message script, .message b, .message [onclick], .message iframe"
    assert page.browser.find_elements(By.CSS_SELECTOR, unwanted) == []
    links = page.browser.find_elements(By.CSS_SELECTOR, ".message a")
    assert [a.get_attribute("href") for a in links] == ["https://example.org/c.png"]
    assert page.errors() == []  # nothing was fetched either


RICH = r"""# Title

A *word* with `code`, a [link](https://example.org/a_b) and H<sub>2</sub>O &amp; \(x_1\).

- one
- two
  1. deep

     ```python
     def f(x):
         return x  # same
     ```
  2. deeper
- [x] done

| a | b |
|---|--:|
| 1 | 2 |

> said
> - so
"""


def test_markdown_and_copying(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    runner.script = lambda request: plain(RICH)
    page = open_page()
    page.answered("Show all")
    assert page.texts(".text > h1") == ["Title"]
    assert page.texts(".text > p em") == ["word"] and page.texts(".text > p sub") == ["2"]
    assert "H2O & " in page.texts(".text > p")[0]
    assert page.texts(".text > p .formula math msub > *") == ["x", "1"]
    assert page.texts(".text > ul > li > ol > li > p") == ["deep", "deeper"]
    assert page.texts(".text th") == ["a", "b"] and page.texts(".text td") == ["1", "2"]
    assert page.texts(".text blockquote li") == ["so"]
    assert page.find(".text input[type=checkbox]").get_property("checked") is True
    assert page.texts(".code .hljs-keyword") == ["def", "return"] and page.texts(".code .hljs-comment") == [
        "# same"
    ]
    link = page.find(".text a")
    assert (link.get_attribute("href"), link.get_attribute("rel")) == (
        "https://example.org/a_b",
        "noopener noreferrer",
    )
    page.script(
        "window.copied = []; navigator.clipboard.writeText = async (text) => { window.copied.push(text); };"
    )
    page.press("Copy code")
    page.press("Copy")
    copied = page.script("return window.copied;")
    assert copied == ["def f(x):\n    return x  # same", RICH]


FORMULAS = r"""Of $x^2$ and \(y_1\), not $5 or $10, nor $HOME/$USER, nor `$z$`.

$$
\frac{a}{b}
$$

\[ \sum_i i \]

This $\nothing{x}$ and $\href{javascript:alert(1)}{x}$ are none.
"""


def test_formulas(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    runner.script = lambda request: plain(FORMULAS)
    page = open_page()
    page.answered("Mathematics, please")
    assert page.texts(".text > p:first-child math") == ["x2", "y1"]
    assert page.texts(".text > p:first-child")[0].endswith(", not $5 or $10, nor $HOME/$USER, nor $z$.")
    assert page.texts(".text > p.formula mfrac > *") == ["a", "b"]
    assert len(page.texts(".text > p.formula math[display=block]")) == 2
    assert page.texts(".formula.raw") == [r"$\nothing{x}$", r"$\href{javascript:alert(1)}{x}$"]
    assert page.browser.find_elements(By.CSS_SELECTOR, ".text [href]") == [] and page.errors() == []


def test_streaming_leaves_finished_parts_untouched(open_page: Callable[..., Page]) -> None:
    """Any pieces give the same page as the whole, and blocks that are complete are not made again."""
    page = open_page()
    text = RICH + "\n```js\nlet a = 1;\n\nlet b;\n```\n\n$$\nx\n$$\n\n[x] y\n\n[x]: https://example.org/\n"
    assert page.script(
        """
        const { Markdown } = await import("/static/markdown.js");
        const text = TEXT;
        const whole = document.createElement("div");
        new Markdown(whole).update(text, true);
        return [1, 3, 40].map((size) => {
          const box = document.createElement("div"), growing = new Markdown(box);
          for (let i = 0; i < text.length; i += size) growing.update(text.slice(0, i + size));
          growing.update(text, true);
          return box.innerHTML === whole.innerHTML;
        });
        """.replace("TEXT", json.dumps(text))
    ) == [True, True, True]
    added, same, other, deep = page.script(
        """
        const { Markdown } = await import("/static/markdown.js");
        const box = document.createElement("div"), growing = new Markdown(box);
        let added = 0, text = "First.\\n\\n```python\\n";
        const seen = new MutationObserver((list) => list.forEach((one) => { added += one.addedNodes.length; }));
        growing.update(text);
        const [first, code] = box.children;
        seen.observe(box, { childList: true, subtree: true });
        for (let line = 0; line < 300; line += 1) growing.update(text += "plain words in a line\\n");
        growing.update(text += "```\\n\\nLast.");
        await new Promise((resolve) => setTimeout(resolve));
        const kept = first === box.children[0] && code === box.children[1];
        growing.update("Another text", true);
        const deep = document.createElement("div");
        new Markdown(deep).update(">".repeat(30000), true);
        return [added, kept, box.textContent, deep.textContent.length];
        """
    )
    assert other == "Another text" and deep == 30000
    assert same and added < 1500  # 300 lines appended once each; made anew each time it would be 45,000


def test_errors_are_shown_and_tried_again(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    page = open_page(keys=["sesame"])
    assert page.find("#status").text == "needs a key"
    page.find("#key").send_keys("sesame", Keys.TAB)
    page.until(lambda: page.find("#status").text == "auto 15")
    page.find("#accept-settings").click()
    runner.script = lambda request: [*plain()[:2], RuntimeError("broken")]
    page.answered("Fail, please")
    assert "internal error" in page.texts(".message .error p")[0]
    assert page.texts(".facts")[0].endswith("failed")
    runner.script = lambda request: ConfigError("the template refused it")
    page.answered("And this")
    assert "the template refused it" in page.texts(".message .error p")[-1]
    runner.script = lambda request: plain("Now it works")
    page.browser.find_elements(By.CSS_SELECTOR, ".message .error button")[-1].click()
    page.until(lambda: page.idle() and page.texts(".message.assistant .text")[-1] == "Now it works")
    assert len(page.texts(".message .error")) == 1
    # a question whose answer failed without a word is not sent again with the next one
    runner.script = lambda request: ConfigError("no")
    page.answered("Lost")
    runner.script = lambda request: plain("Fine")
    page.answered("Last")
    assert ("user", "Lost") not in contents(runner.requests[-1])
    assert contents(runner.requests[-1])[-2:] == [("assistant", "Now it works"), ("user", "Last")]


def test_the_tree_shows_the_step_reports(open_page: Callable[..., Page]) -> None:
    """Small drops in wide trees, no overlaps, and no token of the model's own where none came."""
    page = open_page()
    rows = page.script(
        """
        const { draw, layout } = await import("/static/tree.js");
        const steps = [31, 60].map((size) => grown(size));
        return steps.map((step) => {
          const { depth, row } = layout(step);
          const places = new Set(row.map((r, i) => `${depth[i]},${r}`));
          const straight = step.path.every((node) => row[node] === row[0]);
          const drops = step.parents.map((parent, node) => parent === 0 ? Math.abs(row[node] - row[0]) : 0);
          return [places.size === row.length && straight, Math.max(...drops), Math.max(...row) + 1];
        });

        // best first, every node with children of 0.6, 0.25 and 0.1
        function grown(size) {
          const step = { tokens: [0], parents: [-1], texts: ["x"], log_probs: [0], path: [0], emitted: [], times: {} };
          const open = [[0, 0, -1]];
          const add = (node) => [0.6, 0.25, 0.1].forEach((p) => open.push([step.log_probs[node] + Math.log(p), node]));
          open.length = 0;
          add(0);
          while (step.tokens.length <= size) {
            open.sort((a, b) => b[0] - a[0]);
            const [log_prob, parent] = open.shift();
            step.tokens.push(step.tokens.length);
            step.parents.push(parent);
            step.texts.push("word");
            step.log_probs.push(log_prob);
            if (parent === step.path.at(-1)) step.path.push(step.tokens.length - 1);
            add(step.tokens.length - 1);
          }
          return step;
        }
        """
    )
    for (fair, drop, height), (drop_limit, height_limit) in zip(rows, [(6, 14), (9, 24)]):
        assert fair and drop <= drop_limit and height <= height_limit
    kinds = page.script(
        """
        const { draw } = await import("/static/tree.js");
        const box = document.createElement("div");
        const step = { tokens: [5, 6, 7], parents: [-1, 0, 0], texts: ["a", "b", "c"], log_probs: [0, -0.1, -2],
          path: [0, 1], accepted: 1, emitted: ["b"], mode: "tree", times: {} };
        draw(box, step);
        return [...box.querySelectorAll(".node")].map((node) => node.getAttribute("class"));
        """
    )
    assert kinds == ["node kept", "node kept", "node rejected"]
    nodes = page.script(
        """
        const { draw } = await import("/static/tree.js");
        const box = document.createElement("div");
        const step = { tokens: [5, 6, 7, 8], parents: [-1, 0, 0, 0], texts: ["a", "b", "c", "d"], log_probs: [0, -0.1, -2, -3],
          path: [0, 1], accepted: 1, emitted: ["b", "z"], mode: "tree", times: {}, sources: [0, 3, 2, 1] };
        draw(box, step);
        return [...box.querySelectorAll(".node")].map((node) => [
          node.getAttribute("class"), node.querySelector("title").textContent,
        ]);
        """
    )
    assert [kind for kind, _ in nodes] == [
        "node kept", "node kept lookup", "node rejected lookup", "node rejected", "node bonus",
    ]  # fmt: skip
    sources = [title.partition("%")[2] for _, title in nodes]
    assert sources == ["", ", drafted and prompt lookup", ", prompt lookup", ", drafted", ""]
    alone = page.script(
        """
        const { draw } = await import("/static/tree.js");
        const box = document.createElement("div");
        const empty = { tokens: [], parents: [], texts: [], log_probs: [], path: [], accepted: 0, times: {} };
        draw(box, { ...empty, emitted: ["a"], mode: "plain" });
        return [...box.querySelectorAll(".node")].map((node) => node.getAttribute("class"));
        """
    )
    assert alone == ["node bonus"]


def test_phone(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    wide = "| " + " | ".join(f"column {i}" for i in range(12)) + " |\n|" + "---|" * 12 + "\n\n"
    runner.script = lambda request: plain(wide + "```\n" + "long " * 60 + "\n```\n\n" + "W" * 300)
    page = open_page()
    page.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 700, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        page.browser.refresh()
        page.until(page.connected)
        assert not page.find("#panel").is_displayed() and not page.find("#list").is_displayed()
        page.answered("W" * 200)
        fits = "return document.documentElement.scrollWidth <= 360 && document.querySelector('#messages').scrollWidth <= 360;"
        assert page.script(fits)
        for toggle, side in (("#toggle-tree", "#panel"), ("#toggle-list", "#list")):
            page.find(toggle).click()
            assert page.find(side).is_displayed() and page.script(fits)
            page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
            page.until(lambda side=side: not page.find(side).is_displayed())
            assert page.browser.switch_to.active_element.get_attribute("id") == toggle[1:]
        page.find("#open-settings").click()
        assert page.script(fits)
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_sides_stay_closed(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.find("#toggle-tree").click()
    page.find("#toggle-list").click()
    page.browser.refresh()
    page.until(page.connected)
    assert not page.find("#panel").is_displayed() and not page.find("#list").is_displayed()
    assert page.find("#toggle-tree").get_attribute("aria-expanded") == "false"


def test_the_tree_panel_can_be_made_wider(open_page: Callable[..., Page]) -> None:
    page = open_page()
    width = lambda: page.find("#panel").size["width"]  # noqa: E731
    before = width()
    page.find("#edge").send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    wider = width()
    assert wider > before + 50
    page.find("#edge").send_keys(Keys.ARROW_LEFT * 20)
    assert page.find("#talk").size["width"] >= 320
    wider = width()
    page.browser.refresh()
    page.until(page.connected)
    assert abs(width() - wider) <= 2


def test_every_control_has_a_name(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.answered("Hello")
    page.find("#open-settings").click()
    nameless = page.script(
        """
        const controls = [...document.querySelectorAll("button, input, select, textarea, progress, meter")];
        return controls.filter((c) => !(c.getAttribute("aria-label") || c.textContent.trim() || c.labels?.length || c.hidden))
          .map((c) => c.outerHTML);
        """
    )
    assert nameless == []


def test_theme(open_page: Callable[..., Page]) -> None:
    page = open_page()
    ground = lambda: page.find("body").value_of_css_property("background-color")  # noqa: E731
    wanted = [
        {"name": "prefers-color-scheme", "value": "dark"},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    light = ground()
    moves = """
        const dot = document.body.appendChild(document.createElement("i"));
        dot.className = "busy";
        return getComputedStyle(dot).animationName;
        """
    assert page.script(moves) == "pulse"
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
    try:
        dark = ground()
        assert dark != light and page.script(moves) == "none"
        page.find("#theme").click()
        assert ground() == light
        page.browser.refresh()
        assert ground() == light
    finally:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    page.find("#theme").click()
    assert ground() == dark
    page.browser.refresh()
    assert ground() == dark


@pytest.mark.parametrize("facts", [{"chat_template": None}, {"model_path": "demo-target-q8_0.gguf"}])
def test_models_without_a_template_continue_the_text(
    open_page: Callable[..., Page], runner: ScriptedRunner, facts: dict[str, Any]
) -> None:
    known = runner.info()
    runner.info = lambda: {**known, **facts}  # type: ignore[method-assign]
    runner.script = lambda request: plain("  return *x*")
    page = open_page()
    page.answered("def f(x):")
    assert runner.requests[0].prompt == "def f(x):" and runner.requests[0].max_tokens == 256
    assert page.texts(".message.continued .text") == ["def f(x):", "  return *x*"]
    page.press("Continue")
    page.until(lambda: len(runner.requests) == 2 and page.idle())
    assert runner.requests[1].prompt == "def f(x):  return *x*"
    assert page.texts(".message.assistant .text") == ["  return *x*  return *x*"]


def test_no_tree_panel_without_a_draft(open_page: Callable[..., Page], runner: ScriptedRunner) -> None:
    facts = runner.info()
    runner.info = lambda: {**facts, "has_draft": False}  # type: ignore[method-assign]
    page = open_page()
    assert page.find("#status").text == "no draft" and not page.find("#panel").is_displayed()
    page.find("#toggle-tree").click()
    page.browser.refresh()
    page.until(page.connected)
    assert page.find("#panel").is_displayed()
