"""A self-contained HTML page with plots and without scripts.

Plots are Vega-Lite specifications that vl-convert (the `report` extra) draws as SVG,
each with its numbers in a table. A content security policy forbids any request.
https://vega.github.io/vega-lite/docs/
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from elastic_ckpt.core import extras

Point = tuple[float, float]
Spec = dict[str, Any]
# Good or bad news; the name is a CSS class that sets the color.
Mood = Literal["", "good", "bad"]

_INK, _SOFT, _LINE = "#1c2024", "#5b6570", "#dde1e6"
_GOOD, _BAD = "#1a7f4b", "#c0392b"
# Eight colors that color-blind people can distinguish (Okabe and Ito, adapted).
COLORS = (
    *("#0b66c3", "#c75000", "#1a7f4b", "#8e44ad"),
    *("#b58900", "#00798c", "#b0286a", "#6b7683"),
)
GOOD, LOST = COLORS[2], COLORS[1]

# Pixels.
WIDTH = 520
_HEIGHT = 190
_BAR = 22
# Maximum number of points in a series; thinning keeps the extremes.
_MOST_POINTS = 800
# With more marks, their names would overlap.
_MOST_NAMED = 6
_CONFIG: Spec = {
    "aria": False,
    "background": "#fff",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "title": {"color": _INK},
    "axis": {
        **{"labelColor": _SOFT, "titleColor": _SOFT},
        **{"gridColor": _LINE, "domain": False, "ticks": False},
        **{"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
        **{"labelPadding": 6, "tickCount": 5},
    },
    "legend": {
        **{"orient": "top", "title": None, "labelColor": _INK},
        **{"labelFontSize": 12, "symbolType": "square", "symbolStrokeWidth": 3},
        **{"columnPadding": 24, "offset": 8, "columns": 3, "labelLimit": 130},
    },
    "text": {"color": _SOFT, "fontSize": 12},
}
_LINE_MARK: Spec = {"type": "line", "strokeWidth": 1.75, "clip": True}
_STEPS_MARK: Spec = {**_LINE_MARK, "interpolate": "step-after"}
_MARKS: dict[str, Spec] = {
    "line": _LINE_MARK,
    "steps": _STEPS_MARK,
    "area": {
        **{**_STEPS_MARK, "type": "area", "fillOpacity": 0.25},
        "line": {"strokeWidth": 1.5},
    },
    "dots": {"type": "point", "filled": True, "size": 20, "opacity": 1},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a plot.

    Attributes:
      points: the x and y of each point, in ascending order of x.
      kind: how to draw the line; with `steps` and `area`, each value lasts until the
        next point.
      color: one of `COLORS`.
    """

    name: str
    points: Sequence[Point]
    kind: Literal["line", "steps", "area", "dots"] = "line"
    is_dashed: bool = False
    color: str = COLORS[0]


def lines(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    marks: Sequence[tuple[float, str]] = (),
    is_log: bool = False,
    from_zero: bool = False,
) -> Spec:
    """A line plot.

    Args:
      series: at least one series, with at least one point in total.
      x: the title of the horizontal axis, with its unit.
      y: the title of the vertical axis, with its unit.
      marks: the x and name of each vertical line.
      is_log: whether the vertical axis is logarithmic.
      from_zero: whether the vertical axis begins at 0.
    """
    drawn = [each for each in series if each.points]
    scale: Spec = {"type": "log"} if is_log else {"zero": from_zero}
    color: Spec = {
        "scale": {
            "domain": [each.name for each in drawn],
            "range": [each.color for each in drawn],
        },
        "legend": {} if len(drawn) > 1 else None,
    }
    layers: list[Spec] = [
        {
            "data": {"values": [{"x": at, "y": v} for at, v in thinned(each.points)]},
            "mark": _mark(each),
            "encoding": {
                "x": {
                    **{"field": "x", "type": "quantitative", "title": x},
                    "scale": {"zero": False, "nice": False},
                },
                "y": {
                    **{"field": "y", "type": "quantitative", "title": y},
                    "scale": scale,
                },
                "color": {"datum": each.name, **color},
            },
        }
        for each in drawn
    ]
    moments = {"values": [{"x": at, "name": name} for at, name in marks]}
    at: Spec = {"x": {"field": "x", "type": "quantitative"}}
    if marks:
        rule = {"type": "rule", "color": _BAD, "strokeDash": [3, 3]}
        layers.append({"data": moments, "mark": rule, "encoding": at})
    if 0 < len(marks) <= _MOST_NAMED:
        mark = {
            **{"type": "text", "color": _BAD, "align": "left"},
            **{"baseline": "top", "dx": 4, "fontSize": 11},
        }
        named = {**at, "text": {"field": "name"}, "y": {"value": 2}}
        layers.append({"data": moments, "mark": mark, "encoding": named})
    return {"layer": layers, "height": _HEIGHT}


def _mark(series: Series) -> Spec:
    kind = "dots" if len(series.points) == 1 else series.kind
    return {**_MARKS[kind], **({"strokeDash": [5, 4]} if series.is_dashed else {})}


def bars(
    rows: Sequence[tuple[str, Sequence[float]]],
    parts: Mapping[str, str],
    *,
    unit: str,
    totals: Sequence[str] = (),
) -> Spec:
    """Stacked horizontal bars.

    Args:
      rows: the name of each bar, in which `, ` separates lines, and the bar's values.
      parts: the color of each part, keyed by part name.
      unit: the unit of the values.
      totals: the text after each bar; by default the sum of its values.
    """
    names = list(parts)
    values = [
        {"row": row, "part": part, "value": value, "place": place}
        for row, (_, of_row) in enumerate(rows)
        for place, (part, value) in enumerate(zip(names, of_row, strict=True))
        if value
    ]
    sums = [sum(of_row) for _, of_row in rows]
    texts = totals or [f"{number(each)} {unit}" for each in sums]
    # Names may repeat, so bars are identified by index.
    order = list(range(len(rows)))
    labels = [name.split(", ") for name, _ in rows]
    num_lines = max(map(len, labels), default=1)
    y: Spec = {
        **{"field": "row", "type": "ordinal", "scale": {"domain": order}},
        **{"title": None, "sort": None},
        "axis": {
            **{"labelColor": _INK, "labelLimit": 150, "grid": False},
            "labelExpr": f"{json.dumps(labels)}[datum.value]",
            "labelOffset": -7 * (num_lines - 1),
        },
    }
    # Leaves room for the text after the bars.
    x: Spec = {
        **{"type": "quantitative", "axis": None},
        "scale": {"domain": [0, (max(sums, default=0) or 1) * 1.45], "nice": False},
    }
    return {
        "layer": [
            {
                "data": {"values": values},
                "mark": "bar",
                "encoding": {
                    "y": y,
                    "x": {"field": "value", "stack": "zero", **x},
                    "color": {
                        **{"field": "part", "type": "nominal"},
                        "scale": {"domain": names, "range": list(parts.values())},
                        "legend": {} if len(parts) > 1 else None,
                    },
                    "order": {"field": "place"},
                },
            },
            {
                "data": {
                    "values": [
                        {"row": row, "sum": each, "text": text}
                        for row, each, text in zip(order, sums, texts, strict=True)
                    ]
                },
                "mark": {"type": "text", "align": "left", "dx": 6},
                "encoding": {
                    "y": y,
                    "x": {"field": "sum", **x},
                    "text": {"field": "text"},
                },
            },
        ],
        "height": {"step": max(_BAR, 15 * num_lines) + 6},
    }


def coloured(names: Sequence[str]) -> dict[str, str]:
    """A color for each name."""
    return dict(zip(names, itertools.cycle(COLORS), strict=False))


def number(value: float) -> str:
    """A human-readable number, with three or four significant digits."""
    if value and abs(value) < 0.001:
        return f"{value:.2g}"
    if abs(value) >= 1000 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def svg(spec: Spec, *, title: str, width: int | None = WIDTH) -> str:
    """The plot as an HTML element.

    Args:
      spec: a Vega-Lite specification.
      title: the title for screen readers.
      width: the total width in pixels; None if `spec` sets it.

    Raises:
      ConfigError: if the `report` extra is not installed.
    """
    # All plots get the same width and font size.
    fit: Spec = {"width": width, "autosize": {"type": "fit-x", "contains": "padding"}}
    whole = {"config": _CONFIG, **({} if width is None else fit), **spec}
    drawn = library().vegalite_to_svg(whole)
    label = f'<svg role="img" aria-label="{html.escape(title)}" '
    return drawn.replace("<svg ", label, 1)


def library() -> Any:
    """Imports `vl_convert`.

    Raises:
      ConfigError: if the package is not installed.
    """
    return extras.module(
        "vl_convert",
        extra="report",
        otherwise="use `status`, which draws nothing",
    )


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `_MOST_POINTS` points: the minimum and maximum of each run of points."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size, of_y = math.ceil(2 * len(points) / _MOST_POINTS), operator.itemgetter(1)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        point
        for run in runs
        for point in sorted({min(run, key=of_y), max(run, key=of_y)})
    ]


_STYLE = (
    f"""
:root {{ --ink: {_INK}; --soft: {_SOFT}; --line: {_LINE}; }}
.good {{ color: {_GOOD}; }} .bad {{ color: {_BAD}; }}
"""
    + """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; color: var(--ink);
  background: #f6f7f9; font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 0 0 .15rem; }
p { margin: .1rem 0 .6rem; color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr));
  gap: .6rem; margin: 1rem 0; }
dl div, section { background: #fff; border: 1px solid var(--line);
  border-radius: 8px; padding: .5rem .75rem; }
dt { font-size: .8rem; color: var(--soft); }
dd { margin: 0; font-size: 1.15rem; font-weight: 600;
  font-variant-numeric: tabular-nums; }
main { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 29rem), 1fr)); }
section { padding: .8rem 1rem; break-inside: avoid; min-width: 0; }
section.whole { grid-column: 1 / -1; }
figure { margin: 0; }
svg { display: block; width: 100%; max-width: 36rem; height: auto; overflow: visible; }
details { margin-top: .5rem; font-size: .875rem; } summary { cursor: pointer; }
.table { overflow-x: auto; max-height: 24rem; font-size: .875rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); }
td { min-width: 3rem; max-width: 34rem; }
.whole td:nth-child(3), .whole td:nth-child(4) { min-width: 13rem; }
"""
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact:
    """A named value at the top of the page."""

    name: str
    value: str
    mood: Mood = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page.

    Attributes:
      text: one or two sentences.
      spec: the section's plot, if any.
      verdict: a word before the text, such as PASSED; may be empty.
      mood: whether the verdict is good or bad news.
      columns: the column headings of the table.
      is_table: whether the table is shown; otherwise it is collapsed.
    """

    title: str
    text: str
    spec: Spec | None = None
    verdict: str = ""
    mood: Mood = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    is_table: bool = False


def to_html(
    title: str, subtitle: str, facts: Sequence[Fact], sections: Sequence[Section]
) -> str:
    """Renders the page: the facts first, then the sections.

    Raises:
      ConfigError: if the `report` extra, which draws plots, is not installed.
    """
    shown = "".join(
        f'<div><dt>{html.escape(each.name)}</dt><dd class="{each.mood}">'
        f"{html.escape(each.value)}</dd></div>"
        for each in facts
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><header><h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p>"
        f"<dl>{shown}</dl></header>\n<main>"
        + "\n".join(map(_section, sections))
        + "\n</main></body></html>\n"
    )


def _section(part: Section) -> str:
    verdict = figure = ""
    if part.verdict:
        verdict = f'<strong class="{part.mood}">{html.escape(part.verdict)}</strong> '
    if part.spec is not None:
        figure = f"<figure>{svg(part.spec, title=part.title)}</figure>"
    whole = ' class="whole"' if part.is_table else ""
    return (
        f"<section{whole}><h2>{html.escape(part.title)}</h2>"
        f"<p>{verdict}{html.escape(part.text)}</p>{figure}{_table(part)}</section>"
    )


def _table(part: Section) -> str:
    if not part.rows:
        return ""
    head = "".join(f'<th scope="col">{html.escape(each)}</th>' for each in part.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in part.rows
    )
    table = (
        f'<div class="table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    if part.is_table:
        return table
    return f"<details><summary>Numbers</summary>{table}</details>"
