"""Plots as SVG (matplotlib, the extra `bench`). Their colours are CSS variables, so that a page can be light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from ..errors import ConfigError
from .sections import Plot

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator
except ImportError as error:  # the bench extra is optional
    raise ConfigError(f"plots need {error.name}: pip install 'dflash-ggml[bench]'") from None

# matplotlib writes these colours, which nothing else has, and we write variables for them: light and dark value
COLOURS = {
    "ink": ("#010101", "#1f2328", "#e6edf3"),
    "faint": ("#020202", "#d0d7de", "#3d444d"),
    "paper": ("#030303", "#ffffff", "#0d1117"),
    "grey": ("#040404", "#6e7781", "#9198a1"),
    "blue": ("#050505", "#0969da", "#4ea1ff"),
    "orange": ("#060606", "#bc4c00", "#ff9b50"),
    "green": ("#070707", "#1a7f37", "#3fb950"),
    "purple": ("#080808", "#8250df", "#c49bff"),
    "red": ("#090909", "#cf222e", "#ff7b72"),
    "yellow": ("#0a0a0a", "#9a6700", "#e3b341"),
}
MARK = {name: code for name, (code, _, _) in COLOURS.items()}
OWN_COLOUR = {"plain": "grey", "auto": "orange", "chain": "green"}
OTHERS = ("blue", "purple", "red", "yellow", "green", "orange")
SHAPES = ("o", "s", "^", "D", "v", "P")
WIDTH, HEIGHT = 6.4, 3.9  # inches of 72 units
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters: small files, the reader's own font
    "text.parse_math": False,  # names of servers and files may have dollars
    "font.size": 11,
    "font.family": "DejaVu Sans",
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), MARK["ink"]),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), MARK["faint"]),
    "axes.facecolor": "none",
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.axisbelow": True,
    "grid.linewidth": 0.7,
    "legend.fontsize": 10,
}


def css(dark: bool) -> str:
    """The variables of one of the two looks."""
    return "".join(f"--{name}:{values[2 if dark else 1]};" for name, values in COLOURS.items())


def svg(plot: Plot) -> str:
    """A picture as one `<svg>` element that needs the variables of `css`."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": plot.name}):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
        axes = figure.add_subplot()
        _bars(axes, plot) if plot.bars is not None else _lines(axes, plot)
        handles, labels = axes.get_legend_handles_labels()
        columns = 5 if plot.bars is not None else 2 if max(map(len, labels)) > 24 else 4
        if len(labels) == 1:  # a name for the only line says nothing that the title does not
            handles, labels = [], []
        # the layout makes room for a legend beside the axes, but not for it and a title: so the title is the legend's
        named: Any = {"title": plot.title, "title_fontproperties": {"size": 13, "weight": "bold"}}
        at: Any = {
            "alignment": "left",
            "loc": "outside upper left",
            "ncols": max(1, min(columns, len(labels))),
        }
        figure.legend(handles, labels, **named, **at)
        out, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # nothing refers to them, and a page has several pictures
    text = re.sub(r'<(g|text) id="[^"]*"', r"<\1", text)
    text = re.sub(r'(width|height)="[\d.]+pt" ', "", text, count=2)
    text = re.sub(r"(\d\.\d\d)\d+(?![\de])", r"\1", text)  # a hundredth of a unit is below a pixel
    text = text.replace("'DejaVu Sans'", "system-ui, sans-serif").replace("\n", " ")
    text = re.sub(r" +", " ", text).replace("> <", "><")
    for name, code in MARK.items():
        text = text.replace(code, f"var(--{name})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(plot.title)}" ', 1)


def _lines(axes: Axes, plot: Plot) -> None:
    colours = iter(OTHERS)
    for series, shape in zip(plot.series, SHAPES * len(plot.series)):
        colour = MARK[OWN_COLOUR.get(series.name) or next(colours, "blue")]
        if series.low and series.high and len(plot.series) <= 3:  # more of them would hide each other
            axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.13, linewidth=0)
        look: Any = {"color": colour, "marker": shape, "markersize": 5, "linewidth": 1.8}
        axes.plot(series.x, series.y, **look, label=series.name)
    for name, y in plot.levels:
        colour = MARK[OWN_COLOUR.get(name, "grey")]
        axes.axhline(y, color=colour, linewidth=1.6, linestyle=(0, (5, 3)), label=f"{name}: {_number(y)}")
    if plot.mark:
        name, x, y = plot.mark
        ring: Any = {"markersize": 14, "fillstyle": "none", "markeredgewidth": 2, "color": MARK["orange"]}
        axes.plot([x], [y], "o", **ring, label=name)
    points = sorted({x for series in plot.series for x in series.x})
    if plot.log_x:
        axes.set_xscale("log", base=2)
    if len(points) <= 12:
        axes.xaxis.set_major_locator(FixedLocator(points))
        axes.xaxis.set_major_formatter(FixedFormatter([_number(x) for x in points]))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, at: _number(y)))
    axes.grid(axis="y")
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)


def _bars(axes: Axes, plot: Plot) -> None:
    names = list(plot.bars or ())
    positions = list(range(len(names)))[::-1]  # the first one on top
    ends: list[float] = [0.0] * len(names)
    for series, colour in zip(plot.series, ("purple", "yellow", "blue", "green", "grey")):
        axes.barh(positions, series.y, left=ends, height=0.62, color=MARK[colour], label=series.name)
        ends = [end + y for end, y in zip(ends, series.y)]
    for position, end in zip(positions, ends):
        beside: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{end:.2f}", (end, position), **beside, fontsize=10)
    axes.set_xlim(0, 1.12 * max(ends))
    axes.set_yticks(positions, names)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_xlabel(plot.y_label)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"


def gallery(facts: Sequence[tuple[str, str]], pictures: Sequence[str]) -> str:
    """Pictures in a grid of two columns, as one file with its own background; the facts are its description, and below."""
    width, height, gap, foot = round(72 * WIDTH), round(72 * HEIGHT), 12, 26
    columns = min(2, len(pictures))
    whole = gap + columns * (width + gap), gap + -(-len(pictures) // columns) * (height + gap) + foot
    parts = []
    for i, picture in enumerate(pictures):
        x, y = gap + i % columns * (width + gap), gap + i // columns * (height + gap)
        parts.append(picture.replace("<svg ", f'<svg x="{x}" y="{y}" width="{width}" height="{height}" ', 1))
    style = f":root{{{css(False)}}}@media(prefers-color-scheme:dark){{:root{{{css(True)}}}}}"
    about = escape("\n".join(f"{name}: {value}" for name, value in facts))
    shown = dict(facts)
    caption = "; ".join(shown[name] for name in ("pair", "device", "dflash-ggml") if name in shown)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {whole[0]} {whole[1]}"><desc>{about}</desc><style>{style}</style>'
        f'<rect width="100%" height="100%" style="fill:var(--paper)"/>{"".join(parts)}'
        f'<text x="{2 * gap}" y="{whole[1] - gap}" style="font:10px system-ui,sans-serif;fill:var(--grey)">'
        f"{escape(caption)}</text></svg>\n"
    )
