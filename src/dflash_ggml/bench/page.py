"""A report as one HTML page that needs nothing else: tables, notes, plots; light or dark as the reader has it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .plots import css, svg
from .sections import Section, with_details

STYLE = """
body{margin:0 auto;max-width:1180px;padding:1.5rem;font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.5rem;margin:0 0 .5rem}h2{font-size:1.15rem;margin:2.2rem 0 .5rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.25rem .8rem .25rem 0;text-align:left;border-bottom:1px solid var(--faint);white-space:nowrap}
th{font-weight:600}.n{text-align:right}.facts td{white-space:normal}
.facts td:first-child{color:var(--grey)}p{margin:.5rem 0;color:var(--grey)}.warn{color:var(--red);font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1rem;margin:1rem 0}
.plots svg{width:100%;height:auto;max-width:44rem}
"""


def html(facts: Sequence[tuple[str, str]], sections: Sequence[Section], state: str) -> str:
    """The page. state: the first line, such as that the run was cut short."""
    pictures = [svg(plot) for section in sections for plot in section.plots]
    parts = ["<h1>dflash-bench</h1>", f'<p class="warn">{escape(state)}</p>' if state else ""]
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts)
    parts += [f'<table class="facts">{rows}</table>', f'<div class="plots">{"".join(pictures)}</div>']
    parts += [_section(section) for section in with_details(sections)]
    style = f":root{{color-scheme:light dark;{css(False)}}}"
    style += f"@media(prefers-color-scheme:dark){{:root{{{css(True)}}}}}{STYLE}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>dflash-bench</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{style}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _section(section: Section) -> str:
    cells, right = section.cells(), section.aligned()
    kinds = [' class="n"' if r else "" for r in right]
    head = "".join(f"<th{kind}>{escape(title)}</th>" for title, kind in zip(cells[0], kinds))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds)) + "</tr>"
        for row in cells[1:]
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in section.notes)
    warn = ' class="warn"' if section.forced else ""
    return (
        f"<h2{warn}>{escape(section.heading)}</h2>"
        f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>{notes}'
    )
