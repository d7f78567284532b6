"""Simulated settings side by side: as a table, as JSON, and as a page with plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from elastic_ckpt.core import metrics
from elastic_ckpt.inspect import page
from elastic_ckpt.inspect.page import Fact, Section
from elastic_ckpt.simulation.study import Result
from elastic_ckpt.steps import read_plan

_GIB = 2**30
_TIERS = (*read_plan.NEARNESS, "none")
_HEAD = (
    *("setting", "goodput %", "steps", "rows"),
    *("lost steps", "losses", "planned", "restarts"),
)
_MOVES = {
    "saved": "to RAM",
    "copied": "to peers",
    "backed_up": "to storage",
    **{f"read_{name}": f"from {name}" for name in read_plan.NEARNESS},
}


def table(results: Sequence[Result]) -> str:
    """The settings as lines for people."""
    causes = _causes(results)
    parts = [
        (
            _HEAD,
            [(each.name, *_numbers(each)) for each in results],
        ),
        (
            ("% of the time", *causes),
            [(each.name, *_percents(each, causes)) for each in results],
        ),
        (
            ("restores from", *_TIERS),
            [
                (each.name, *(str(each.outcome.restores.get(t, 0)) for t in _TIERS))
                for each in results
            ],
        ),
        (
            ("GiB", *_MOVES.values()),
            [(each.name, *_moved(each)) for each in results],
        ),
    ]
    return "\n\n".join(_aligned([head, *rows]) for head, rows in parts)


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The settings as JSON values."""
    return [
        {
            "setting": dict(each.values),
            "hosts": each.hardware.hosts,
            "slices": each.hardware.slices,
            **dataclasses.asdict(each.outcome),
        }
        for each in results
    ]


def to_page(results: Sequence[Result], *, subtitle: str) -> str:
    """The settings as an HTML page with plots."""
    best = max(results, key=lambda each: each.outcome.goodput_percent)
    size = results[0].hardware
    return page.to_html(
        "Simulated run",
        subtitle,
        [
            Fact(name="hosts", value=f"{size.hosts:,}"),
            Fact(name="slices", value=f"{size.slices:,}"),
            Fact(name="settings", value=str(len(results))),
            Fact(name="best goodput", value=f"{best.outcome.goodput_percent:.2f} %"),
        ],
        [_losses(results), _restores(results), _bytes(results)],
    )


def _losses(results: Sequence[Result]) -> Section:
    causes = _causes(results)[1:]
    bars = page.bars(
        [(each.name, [_percent(each, cause) for cause in causes]) for each in results],
        page.coloured(causes),
        unit="%",
        totals=[f"{each.outcome.goodput_percent:.2f} %" for each in results],
    )
    meanings = {cause: metric.meaning for cause, metric in metrics.GOODPUT_SECS.items()}
    return Section(
        title="Time that was lost",
        text="By cause; behind each bar the goodput, which is the rest. "
        + "; ".join(f"{cause}: {meanings[cause]}" for cause in causes)
        + ".",
        spec=bars,
        columns=(*_HEAD, *causes),
        rows=[
            (each.name, *_numbers(each), *_percents(each, causes)) for each in results
        ],
    )


def _restores(results: Sequence[Result]) -> Section:
    bars = page.bars(
        [
            (each.name, [each.outcome.restores.get(tier, 0) for tier in _TIERS])
            for each in results
        ],
        page.coloured(_TIERS),
        unit="restores",
    )
    return Section(
        title="Restores",
        text="By the farthest kind of place from which a host read a part: its own RAM"
        " (local), RAM in its failure domain (close), other RAM (distant), storage"
        " (persistent), or none: the run began anew.",
        spec=bars,
        columns=("setting", *_TIERS),
        rows=[
            (each.name, *(str(each.outcome.restores.get(t, 0)) for t in _TIERS))
            for each in results
        ],
    )


def _bytes(results: Sequence[Result]) -> Section:
    names = list(_MOVES)[1:]
    bars = page.bars(
        [
            (each.name, [each.outcome.bytes.get(name, 0) / _GIB for name in names])
            for each in results
        ],
        page.coloured([_MOVES[name] for name in names]),
        unit="GiB",
    )
    return Section(
        title="Bytes moved",
        text="By all hosts, in all the time, without what they write to their own RAM.",
        spec=bars,
        columns=("setting", *(f"GiB {name}" for name in _MOVES.values())),
        rows=[(each.name, *_moved(each)) for each in results],
    )


def _causes(results: Sequence[Result]) -> list[str]:
    # Those that took any time, `productive` first.
    return [
        cause
        for cause in metrics.GOODPUT_SECS
        if cause == "productive" or any(each.outcome.secs[cause] for each in results)
    ]


def _numbers(result: Result) -> list[str]:
    outcome = result.outcome
    counts = (
        *(outcome.steps, outcome.rows, outcome.steps_lost),
        *(outcome.losses, outcome.planned, outcome.restarts),
    )
    return [f"{outcome.goodput_percent:.2f}", *(f"{each:,}" for each in counts)]


def _percent(result: Result, cause: str) -> float:
    secs = result.outcome.secs
    return 100 * secs[cause] / max(sum(secs.values()), 1e-9)


def _percents(result: Result, causes: Sequence[str]) -> list[str]:
    return [f"{_percent(result, cause):.3f}" for cause in causes]


def _moved(result: Result) -> list[str]:
    sizes = (result.outcome.bytes.get(name, 0) for name in _MOVES)
    return [f"{size / _GIB:,.1f}" for size in sizes]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
