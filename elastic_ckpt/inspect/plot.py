"""Plots: specifications of Vega-Lite, drawn by vl-convert as SVG without scripts.

A colour is a CSS variable of `LIGHT` and `DARK`, so that one drawing follows a light or
dark page; `standalone` puts in those of `LIGHT`. Needs the extra `report`.
https://vega.github.io/vega-lite/docs/
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from elastic_ckpt.core import extras

Point = tuple[float, float]
Spec = dict[str, Any]

# Eight series that differ also for people who see few colours (Okabe and Ito, adapted).
LIGHT = {
    **{"ink": "#1c2024", "soft": "#5b6570", "paper": "#fff", "card": "#f6f7f9"},
    **{"line": "#dde1e6", "good": "#1a7f4b", "bad": "#c0392b"},
    **{"c0": "#0b66c3", "c1": "#c75000", "c2": "#1a7f4b", "c3": "#8e44ad"},
    **{"c4": "#b58900", "c5": "#00798c", "c6": "#b0286a", "c7": "#6b7683"},
}
DARK = {
    **{"ink": "#e6e9ed", "soft": "#9aa5b1", "paper": "#14171a", "card": "#1d2125"},
    **{"line": "#343b42", "good": "#4cc38a", "bad": "#ff7b6b"},
    **{"c0": "#6cb2ff", "c1": "#ff9d57", "c2": "#4cc38a", "c3": "#c89bf0"},
    **{"c4": "#e5c04b", "c5": "#4fc3d4", "c6": "#f47fb4", "c7": "#9aa5b1"},
}
COLOURS = [f"var(--c{number})" for number in range(8)]
GOOD, LOST = COLOURS[2], COLOURS[1]

# Pixels, of a plot on a wide and on a narrow page.
WIDE, NARROW = 520, 300
_HEIGHT = 190
_BAR = 22
# A series has at most this many points; extremes are kept.
_MOST_POINTS = 800
# With more marks their names would lie on each other.
_MOST_NAMED = 6
_CONFIG: Spec = {
    "aria": False,
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "title": {"color": "var(--ink)"},
    "axis": {
        **{"labelColor": "var(--soft)", "titleColor": "var(--soft)"},
        **{"gridColor": "var(--line)", "domain": False, "ticks": False},
        **{"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
        **{"labelPadding": 6, "tickCount": 5},
    },
    "legend": {
        **{"orient": "top", "title": None, "labelColor": "var(--ink)"},
        **{"labelFontSize": 12, "symbolType": "square", "symbolStrokeWidth": 3},
        **{"columnPadding": 24, "offset": 8},
    },
    "text": {"color": "var(--soft)", "fontSize": 12},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a plot.

    Attributes:
      name: for the legend.
      points: x and y, ascending in x.
      kind: how it is drawn; `steps` and `area` keep each value until the next point.
      is_dashed: whether the line is.
      colour: of `COLOURS`.
    """

    name: str
    points: Sequence[Point]
    kind: Literal["line", "steps", "area", "dots"] = "line"
    is_dashed: bool = False
    colour: str = COLOURS[0]


def lines(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    marks: Sequence[tuple[float, str]] = (),
    is_log: bool = False,
    from_zero: bool = False,
) -> Spec:
    """Lines over numbers.

    Args:
      series: at least one, with at least one point in all.
      x: the title of the horizontal axis, with its unit.
      y: of the vertical axis, likewise.
      marks: x and the name of moments, as vertical lines.
      is_log: whether the vertical axis is logarithmic.
      from_zero: whether it begins at 0.
    """
    drawn = [each for each in series if each.points]
    scale: Spec = {"zero": from_zero}
    axis: Spec = {}
    if is_log:
        values = [value for each in drawn for _, value in each.points]
        scale, axis = {"type": "log"}, {"values": _log_ticks(values)}
    names = [each.name for each in drawn]
    colour: Spec = {
        "scale": {"domain": names, "range": [each.colour for each in drawn]},
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
                    **{"scale": scale, "axis": axis},
                },
                "color": {"datum": each.name, **colour},
            },
        }
        for each in drawn
    ]
    if marks:
        moments = {"values": [{"x": at, "name": name} for at, name in marks]}
        at: Spec = {"x": {"field": "x", "type": "quantitative"}}
        rule = {"type": "rule", "color": "var(--bad)", "strokeDash": [3, 3]}
        layers.append({"data": moments, "mark": rule, "encoding": at})
        if len(marks) <= _MOST_NAMED:
            name: Spec = {"text": {"field": "name"}, "y": {"value": 2}}
            mark = {
                **{"type": "text", "color": "var(--bad)", "align": "left"},
                **{"baseline": "top", "dx": 4, "fontSize": 11},
            }
            layers.append({"data": moments, "mark": mark, "encoding": {**at, **name}})
    return {"layer": layers, "height": _HEIGHT}


def _log_ticks(values: Sequence[float]) -> list[float]:
    least, most = min(values), max(values)
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    ticks = [m * 10.0**power for power in powers for m in (1, 2, 5)]
    ticks = [each for each in ticks if least <= each <= most] or [least]
    return ticks[:: max(1, len(ticks) // 5)]


def _mark(series: Series) -> Spec:
    if series.kind == "dots" or len(series.points) == 1:
        return {"type": "point", "filled": True, "size": 20, "opacity": 1}
    mark: Spec = {"type": "line", "strokeWidth": 1.75, "clip": True}
    if series.kind != "line":
        mark["interpolate"] = "step-after"
    if series.is_dashed:
        mark["strokeDash"] = [5, 4]
    if series.kind == "area":
        mark |= {"type": "area", "fillOpacity": 0.25, "line": {"strokeWidth": 1.5}}
    return mark


def bars(
    rows: Sequence[tuple[str, Sequence[float]]],
    parts: Mapping[str, str],
    *,
    unit: str,
    totals: Sequence[str] = (),
) -> Spec:
    """Stacked horizontal bars.

    Args:
      rows: the name of each bar, with `, ` between its lines, and its parts.
      parts: their names, with their colours.
      unit: of the values.
      totals: the text behind each bar; by default its sum.
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
    # Names may occur twice, so that a bar is known by its place.
    order = list(range(len(rows)))
    labels = [name.split(", ") for name, _ in rows]
    num_lines = max(map(len, labels), default=1)
    y: Spec = {
        **{"field": "row", "type": "ordinal", "scale": {"domain": order}},
        **{"title": None, "sort": None},
        "axis": {
            **{"labelColor": "var(--ink)", "labelLimit": 150, "grid": False},
            "labelExpr": f"{json.dumps(labels)}[datum.value]",
            "labelOffset": -7 * (num_lines - 1),
        },
    }
    # The texts behind the bars need some room.
    x: Spec = {
        **{"type": "quantitative", "axis": None},
        "scale": {"domain": [0, (max(sums, default=0) or 1) * 1.45], "nice": False},
    }
    colour: Spec = {
        **{"field": "part", "type": "nominal"},
        "scale": {"domain": names, "range": list(parts.values())},
        "legend": {} if len(parts) > 1 else None,
    }
    behind = [
        {"row": row, "sum": each, "text": text}
        for row, each, text in zip(order, sums, texts, strict=True)
    ]
    return {
        "layer": [
            {
                "data": {"values": values},
                "mark": "bar",
                "encoding": {
                    "y": y,
                    "x": {"field": "value", "stack": "zero", **x},
                    "color": colour,
                    "order": {"field": "place"},
                },
            },
            {
                "data": {"values": behind},
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
    """A colour for each name."""
    return dict(zip(names, itertools.cycle(COLOURS), strict=False))


def number(value: float) -> str:
    """A number as people write it, with three or four significant digits."""
    if value and abs(value) < 0.001:
        return f"{value:.2g}"
    if abs(value) >= 1000 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def svg(spec: Spec, *, title: str, width: int | None = WIDE) -> str:
    """The plot as an element of HTML.

    Args:
      spec: of Vega-Lite.
      title: for screen readers.
      width: of the whole, in pixels; None if the specification says it.

    Raises:
      ConfigError: if the extra is not installed.
    """
    config, size = _CONFIG, {}
    if width is not None:
        # All plots are as wide, and their letters as large.
        fit = {"type": "fit-x", "contains": "padding"}
        size = {"width": width, "autosize": fit}
        columns = 2 if width <= NARROW else 3
        legend = {"columns": columns, "labelLimit": width // columns - 40}
        config = {**config, "legend": {**config["legend"], **legend}}
    drawn = library().vegalite_to_svg({"config": config, **size, **spec})
    label = f'<svg role="img" aria-label="{html.escape(title)}" '
    return drawn.replace("<svg ", label, 1)


def standalone(svg: str) -> str:
    """The plot as a file of its own, on white."""
    on_white = svg.replace("<svg ", f'<svg style="background: {LIGHT["paper"]}" ', 1)
    return re.sub(r"var\(--(\w+)\)", lambda match: LIGHT[match[1]], on_white)


def library() -> Any:
    """`vl_convert`.

    Raises:
      ConfigError: if it is not installed.
    """
    return extras.module(
        "vl_convert",
        extra="report",
        otherwise="use `status`, or `simulate` without --output, which draw nothing",
    )


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `_MOST_POINTS`: the least and the greatest of each run of points."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        point
        for run in runs
        for point in sorted({min(run, key=_of_y), max(run, key=_of_y)})
    ]


def _of_y(point: Point) -> float:
    return point[1]
