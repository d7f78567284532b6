"""A page with plots: HTML, style and drawings in one file, without scripts.

It follows the reader's choice of light or dark, fits narrow windows and paper, and each
plot has its numbers in a table. A content security policy forbids any request.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import Literal

from elastic_ckpt.inspect import plot

# How good a thing is, by the class of its colour.
Mood = Literal["", "good", "bad"]


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


_STYLE = (
    f"""
:root {{ color-scheme: light dark; {_variables(plot.LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(plot.DARK)} }} }}
"""
    + """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; color: var(--ink);
  background: var(--paper); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 0 0 .15rem; }
p { margin: .1rem 0 .6rem; color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr));
  gap: .6rem; margin: 1rem 0; }
dl div, section { background: var(--card); border: 1px solid var(--line);
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
.narrow { display: none; }
@media (max-width: 33rem) { .wide { display: none; } .narrow { display: block; } }
.good { color: var(--good); } .bad { color: var(--bad); }
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
    """A number that is shown first.

    Attributes:
      name: of it.
      value: as text.
      mood: whether it is good or bad news.
    """

    name: str
    value: str
    mood: Mood = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
      title: of the section.
      text: one or two sentences.
      spec: its plot; None if there is nothing to plot.
      verdict: a word in front, such as PASSED; empty for none.
      mood: of the verdict.
      columns: the heads of the table.
      rows: of the table; none leaves it out.
      is_table: whether the table is what the section shows; else it is folded away.
    """

    title: str
    text: str
    spec: plot.Spec | None = None
    verdict: str = ""
    mood: Mood = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    is_table: bool = False


def page(
    title: str, subtitle: str, facts: Sequence[Fact], sections: Sequence[Section]
) -> str:
    """The page.

    Args:
      title: the heading.
      subtitle: below it.
      facts: that are shown first.
      sections: below them.

    Raises:
      ConfigError: if the extra that draws plots is not installed.
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
    verdict = ""
    if part.verdict:
        verdict = f'<strong class="{part.mood}">{html.escape(part.verdict)}</strong> '
    figure = ""
    if part.spec is not None:
        drawn = [
            f'<div class="{name}">'
            f"{plot.svg(part.spec, title=part.title, width=width)}</div>"
            for name, width in (("wide", plot.WIDE), ("narrow", plot.NARROW))
        ]
        figure = f"<figure>{''.join(drawn)}</figure>"
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
