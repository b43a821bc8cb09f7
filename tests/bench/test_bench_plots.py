"""Tests of the plots and of the page that contains them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="the bench extra is not installed")

from dflash_ggml.bench.page import html
from dflash_ggml.bench.plots import COLOURS, css, gallery, svg
from dflash_ggml.bench.sections import Column, Plot, Section, Series

LINES = Plot(
    "budget",
    "Speed by budget",
    "tree nodes",
    "tokens/s",
    [Series("trees", [3, 7, 15], [100.0, 150.0, 120.0], [90.0, 140.0, 100.0], [110.0, 160.0, 130.0])],
    [("plain", 80.0), ("auto", 145.0)],
    ("chosen by auto: 7", 7, 150.0),
    log_x=True,
)
BARS = Plot(
    "step", "Where a step's time goes", "", "ms", [Series("draft", [0, 1], [0.0, 2.0]), Series("verify", [0, 1], [3.0, 4.5])],
    bars=["plain", "tree 7"],
)  # fmt: skip


def words(picture: str) -> list[str]:
    return [t.strip() for t in ET.fromstring(picture).itertext() if t.strip()]


def test_the_text_in_a_plot() -> None:
    shown = words(svg(LINES))
    assert {"Speed by budget", "tree nodes", "tokens/s", "3", "7", "15"} <= set(shown)
    assert {"plain: 80", "auto: 145", "chosen by auto: 7", "trees"} <= set(shown)
    shown = words(svg(BARS))
    assert {"plain", "tree 7", "draft", "verify", "ms", "3.00", "6.50", "Where a step's time goes"} <= set(
        shown
    )


def test_a_picture_takes_its_colours_from_the_page() -> None:
    """No colour but variables, so that light and dark both work; nothing that is not in the file."""
    for plot in (LINES, BARS, replace(LINES, mark=None, levels=())):
        picture = svg(plot)
        assert not re.findall(r"#[0-9a-f]{6}", picture)
        names = set(re.findall(r"var\(--(\w+)\)", picture))
        assert {"ink", "faint"} <= names <= set(COLOURS)
        assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", picture)
        assert svg(plot) == picture


@pytest.mark.parametrize("dark", [False, True])
def test_every_colour_can_be_read(dark: bool) -> None:
    """Contrast against the background as WCAG counts it: 3 for lines, 7 for letters; but for the grid."""

    def light(code: str) -> float:
        parts = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    found = dict(re.findall(r"--(\w+):(#\w+);", css(dark)))
    assert found.keys() == COLOURS.keys()
    for name, code in found.items():
        low, high = sorted((light(code), light(found["paper"])))
        least = 1 if name in ("paper", "faint") else 7 if name == "ink" else 3
        assert (high + 0.05) / (low + 0.05) >= least, name


def test_a_page_needs_nothing_else() -> None:
    columns = [Column("name", "mode"), Column("speed", "tokens/s", 1)]
    sections = [
        Section(
            "a", "Speed <b>", columns, [{"name": "plain & simple", "speed": 12.34}], ["a note"], [LINES, BARS]
        ),
        Section("b", "Cost", columns, [{"name": "auto", "speed": 3.0}], forced="2.0 in the mean"),
    ]
    page = html([("pair", "a < b")], sections, "Cut short.")
    assert page.count("<svg ") == 2 and page.startswith("<!doctype html>")
    for expected in (
        "Speed &lt;b&gt;",
        "plain &amp; simple",
        ">12.3<",
        "a note",
        "a &lt; b",
        "Cut short.",
        "FORCED ACCEPTANCE",
    ):
        assert expected in page
    bare = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert not re.search(r"https?:|<script|<link|src=|@import", bare)
    assert "prefers-color-scheme:dark" in page


def test_a_gallery_is_one_picture() -> None:
    facts = [("pair", "a & b"), ("device", "one CPU"), ("dflash-ggml", "1.0, commit abc"), ("when", "today")]
    whole = gallery(facts, [svg(LINES), svg(BARS), svg(LINES)])
    root = ET.fromstring(whole)
    inner = [e for e in root if e.tag.endswith("}svg")]
    assert [(e.get("x"), e.get("y")) for e in inner] == [("12", "12"), ("485", "12"), ("12", "305")]
    assert root.get("viewBox") == "0 0 958 624" and "--paper" in whole
    shown = words(whole)
    assert shown[-1] == "a & b; one CPU; 1.0, commit abc" and "when: today" in shown[0]


def test_dollars_in_names_are_dollars() -> None:
    lines = [Series(name, [1, 2], [1, 2]) for name in ("a $x_{ b$", "c")]
    assert "a $x_{ b$" in svg(Plot("x", "A title", "x", "y", lines))
