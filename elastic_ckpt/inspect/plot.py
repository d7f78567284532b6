"""Plots as inline SVG: lines over numbers, and stacked horizontal bars.

A plot has a title and a description for screen readers, colours from CSS variables, so
that it follows a light or dark page, and dashes and marks, so that colour is not the
only difference.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Sequence
from typing import Literal

Kind = Literal["line", "steps", "area", "dots"]
Point = tuple[float, float]

_WIDTH, _HEIGHT = 760, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 12, 44
_BAR, _BAR_GAP, _BAR_LEFT, _BAR_RIGHT = 22, 10, 150, 96
_TICKS = 5
# A series has at most this many points; extremes are kept.
_MOST_POINTS = 800
# Numbers of the colours in the page's style.
COLOURS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a plot.

    Attributes:
      name: for the legend.
      points: x and y, ascending in x.
      kind: how it is drawn; `steps` and `area` keep each value until the next point.
      is_dashed: whether the line is.
      colour: its number, below `COLOURS`.
    """

    name: str
    points: Sequence[Point]
    kind: Kind = "line"
    is_dashed: bool = False
    colour: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines:
    """A plot of lines.

    Attributes:
      title: in a few words.
      description: what a reader sees in it, for screen readers.
      x_label: of the horizontal axis, with its unit.
      y_label: of the vertical axis, with its unit.
      series: at least one, with at least one point in all.
      marks: x and a name of moments to show as vertical lines.
      is_log: whether the vertical axis is logarithmic.
      from_zero: whether the vertical axis begins at 0.
    """

    title: str
    description: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[tuple[float, str]] = ()
    is_log: bool = False
    from_zero: bool = False

    def svg(self) -> str:
        """The plot with its legend."""
        points = [point for each in self.series for point in each.points]
        xs = _Axis([x for x, _ in points], _LEFT, _WIDTH - _RIGHT)
        ys = _Axis(
            [y for _, y in points] + [0.0] * self.from_zero,
            _HEIGHT - _BOTTOM,
            _TOP,
            is_log=self.is_log,
        )
        drawn = [
            *(_x_tick(xs, x) for x in xs.ticks()),
            *(_y_tick(ys, y) for y in ys.ticks()),
            *(_mark(xs, x, name) for x, name in self.marks),
            *(_drawn(each, xs, ys) for each in self.series if each.points),
            _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, self.x_label, "middle"),
            f'<text class="label" transform="translate(14 {(_HEIGHT - _BOTTOM) / 2})'
            f' rotate(-90)" text-anchor="middle">{html.escape(self.y_label)}</text>',
        ]
        svg = _svg(self.title, self.description, _HEIGHT, drawn)
        if len(self.series) == 1:
            return svg
        keys = [
            (each.name, "dashed" if each.is_dashed else each.kind, each.colour)
            for each in self.series
        ]
        return _legend(keys) + svg


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bars:
    """Stacked horizontal bars.

    Attributes:
      title: in a few words.
      description: what a reader sees in it, for screen readers.
      rows: by the name of each bar, at least one, its parts.
      parts: the names of the parts, in their order, with the number of its colour.
      unit: of the values.
      totals: the text behind each bar; None for its sum.
    """

    title: str
    description: str
    rows: Sequence[tuple[str, Sequence[float]]]
    parts: Sequence[tuple[str, int]]
    unit: str
    totals: Sequence[str] | None = None

    def svg(self) -> str:
        """The bars with their legend."""
        sums = [sum(values) for _, values in self.rows]
        scale = (_WIDTH - _BAR_LEFT - _BAR_RIGHT) / (max(sums) or 1.0)
        totals = self.totals or [f"{number(each)} {self.unit}" for each in sums]
        drawn = []
        for place, ((name, values), total) in enumerate(
            zip(self.rows, totals, strict=True)
        ):
            top = _TOP + place * (_BAR + _BAR_GAP)
            middle = top + _BAR * 0.7
            drawn.append(_text(_BAR_LEFT - 8, middle, name, "end"))
            ends = list(itertools.accumulate(values, initial=0.0))
            for (part, colour), (start, stop) in zip(
                self.parts, itertools.pairwise(ends), strict=True
            ):
                if stop > start:
                    drawn.append(
                        f'<rect class="f{colour}" x="{_BAR_LEFT + start * scale:.1f}"'
                        f' y="{top}" width="{(stop - start) * scale:.1f}"'
                        f' height="{_BAR}"><title>{html.escape(part)}:'
                        f" {number(stop - start)} {self.unit}</title></rect>"
                    )
            right = _BAR_LEFT + ends[-1] * scale + 8
            drawn.append(_text(right, middle, total, "start"))
        height = 2 * _TOP + len(self.rows) * (_BAR + _BAR_GAP)
        svg = _svg(self.title, self.description, height, drawn)
        return _legend([(part, "bar", colour) for part, colour in self.parts]) + svg


def number(value: float) -> str:
    """A number as people write it, with three or four significant digits."""
    if value and abs(value) < 0.001:
        return f"{value:.2g}"
    if abs(value) >= 1000 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


class _Axis:
    """Maps values to places on the page.

    Args:
      values: to be shown, at least one.
      first: the place of the least value.
      last: the place of the greatest.
      is_log: whether equal distances are equal ratios; values are positive then.
    """

    def __init__(
        self,
        values: Sequence[float],
        first: float,
        last: float,
        *,
        is_log: bool = False,
    ) -> None:
        self._is_log = is_log
        self._first, self._last = first, last
        scaled = [self._scaled(value) for value in values]
        least, most = min(scaled), max(scaled)
        if least == most:
            least, most = least - 0.5, most + 0.5
        margin = 0.0 if first < last else 0.04 * (most - least)
        self._least = least if least == 0.0 else least - margin
        self._most = most + margin

    def place(self, value: float) -> float:
        part = (self._scaled(value) - self._least) / (self._most - self._least)
        return self._first + part * (self._last - self._first)

    def ticks(self) -> list[float]:
        if self._is_log:
            powers = range(math.floor(self._least), math.ceil(self._most) + 1)
            near = [m * 10.0**power for power in powers for m in (1, 2, 5)]
            shown = [v for v in near if self._least <= self._scaled(v) <= self._most]
            return shown[:: max(1, len(shown) // (2 * _TICKS))] or [10**self._least]
        rough = (self._most - self._least) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        start = math.ceil(self._least / step - 1e-9)
        stop = math.floor(self._most / step + 1e-9)
        return [place * step for place in range(start, stop + 1)]

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-9)) if self._is_log else value


def _drawn(series: Series, xs: _Axis, ys: _Axis) -> str:
    name = f"<title>{html.escape(series.name)}</title>"
    colour = series.colour
    at = [(xs.place(x), ys.place(y)) for x, y in _thinned(series.points)]
    if series.kind == "dots" or len(at) == 1:
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in at)
        return f'<g class="f{colour}">{name}{dots}</g>'
    if series.kind in ("steps", "area"):
        at = [at[0], *(p for a, b in itertools.pairwise(at) for p in ((b[0], a[1]), b))]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    dashes = ' stroke-dasharray="6 4"' if series.is_dashed else ""
    line = f'<path class="s{colour}" d="{path}"{dashes}>{name}</path>'
    if series.kind != "area":
        return line
    floor = _HEIGHT - _BOTTOM
    area = f"{path}L{at[-1][0]:.1f} {floor}L{at[0][0]:.1f} {floor}Z"
    return f'<path class="area f{colour}" d="{area}"/>{line}'


def _thinned(points: Sequence[Point]) -> list[Point]:
    # The least and the greatest of each run of points.
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    kept = [
        {min(run, key=lambda p: p[1]), max(run, key=lambda p: p[1])} for run in runs
    ]
    return [point for some in kept for point in sorted(some)]


def _x_tick(axis: _Axis, value: float) -> str:
    x = axis.place(value)
    line = f'<path class="grid" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>'
    return line + _text(x, _HEIGHT - _BOTTOM + 17, number(value), "middle")


def _y_tick(axis: _Axis, value: float) -> str:
    y = axis.place(value)
    line = f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
    return line + _text(_LEFT - 6, y + 4, number(value), "end")


def _mark(axis: _Axis, value: float, name: str) -> str:
    x = axis.place(value)
    return (
        f'<path class="mark" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}">'
        f"<title>{html.escape(name)}</title></path>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )


def _svg(title: str, description: str, height: float, drawn: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img"'
        f' aria-label="{html.escape(title)}"><title>{html.escape(title)}</title>'
        f"<desc>{html.escape(description)}</desc>{''.join(drawn)}</svg>"
    )


def _legend(entries: Sequence[tuple[str, str, int]]) -> str:
    items = "".join(
        f'<li><span class="key {kind} k{colour}"></span>{html.escape(name)}</li>'
        for name, kind, colour in entries
    )
    return f'<ul class="legend">{items}</ul>'
