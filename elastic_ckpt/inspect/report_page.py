"""The page of a report: HTML and style in one file, without scripts or other files.

It follows the reader's choice of light or dark, fits narrow windows and paper, and each
plot has its numbers in a table. A content security policy forbids any request.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6570; --paper: #fff;
  --card: #f6f7f9; --line: #dde1e6; --good: #1a7f4b; --bad: #c0392b;
  --c0: #0b66c3; --c1: #c75000; --c2: #1a7f4b; --c3: #8e44ad; --c4: #b58900;
  --c5: #00798c; --c6: #b0286a; --c7: #6b7683; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa5b1;
  --paper: #14171a; --card: #1d2125; --line: #343b42; --good: #4cc38a; --bad: #ff7b6b;
  --c0: #6cb2ff; --c1: #ff9d57; --c2: #4cc38a; --c3: #c89bf0; --c4: #e5c04b;
  --c5: #4fc3d4; --c6: #f47fb4; --c7: #9aa5b1; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 58rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 0 0 .25rem; }
p { margin: .25rem 0 .75rem; color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.2rem, 1fr));
  gap: .75rem; margin: 1.25rem 0 2rem; }
dl div { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .6rem .8rem; }
dt { font-size: .8rem; color: var(--soft); }
dd { margin: 0; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
section { margin: 0 0 1.5rem; padding: 1rem 1.1rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; break-inside: avoid; }
figure { margin: 0; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 34rem; height: auto; }
svg path { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .mark { stroke: var(--bad); stroke-width: 1; stroke-dasharray: 2 3; }
svg .label { fill: var(--soft); font-size: 12px; }
svg .area { stroke: none; opacity: .18; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; margin: .25rem 0 .5rem;
  padding: 0; list-style: none; font-size: .875rem; }
.key { display: inline-block; width: 1.4em; margin-right: .45em; vertical-align: middle;
  border-top: 3px solid; }
.key.dashed { border-top-style: dashed; }
.key.dots { width: .55em; height: .55em; border: 0; border-radius: 50%;
  background: currentColor; }
.key.bar { width: .9em; height: .9em; border: 0; border-radius: 2px;
  background: currentColor; }
.good { color: var(--good); } .bad { color: var(--bad); }
details { margin-top: .5rem; font-size: .875rem; } summary { cursor: pointer; }
.wide { overflow-x: auto; max-height: 24rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); }
""" + "".join(
    f"svg path.s{n} {{ stroke: var(--c{n}); }} svg .f{n} {{ fill: var(--c{n}); }}"
    f" .k{n} {{ color: var(--c{n}); }}\n"
    for n in range(8)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
      title: of the section.
      text: one or two sentences.
      svg: its plot; empty if there is nothing to plot.
      verdict: a word in front, such as PASSED; empty for none.
      is_good: whether the verdict is a good one.
      columns: the heads of the table.
      rows: of the table; none leaves it out.
    """

    title: str
    text: str
    svg: str = ""
    verdict: str = ""
    is_good: bool = True
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def page(
    title: str,
    subtitle: str,
    facts: Sequence[tuple[str, str]],
    parts: Sequence[Section],
) -> str:
    """The page.

    Args:
      title: the heading.
      subtitle: below it.
      facts: names and values that are shown first.
      parts: the sections.
    """
    shown = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in facts
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><header><h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p>"
        f"</header>\n<main><dl>{shown}</dl>\n"
        + "\n".join(map(_section, parts))
        + "\n</main></body></html>\n"
    )


def _section(part: Section) -> str:
    verdict = ""
    if part.verdict:
        kind = "good" if part.is_good else "bad"
        verdict = f'<strong class="{kind}">{html.escape(part.verdict)}</strong> '
    figure = f"<figure>{part.svg}</figure>" if part.svg else ""
    return (
        f"<section><h2>{html.escape(part.title)}</h2>"
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
    return (
        '<details><summary>Numbers</summary><div class="wide"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )
