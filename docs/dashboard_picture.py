r"""Draws the dashboard of a run from what a real Prometheus answers to its queries.

uv run --group dev python docs/dashboard_picture.py record docs/dashboard.json
uv run --group docs python docs/dashboard_picture.py draw docs/dashboard.json \\
  docs/pages/dashboard.svg

`record` trains configs/demo_cpu.yml, has Prometheus scrape it, and keeps the answers to
the queries of the dashboard's first panels. `draw` needs nothing else.
"""

from __future__ import annotations

import datetime
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

from elastic_ckpt.deploy import alerts, dashboard
from elastic_ckpt.inspect import plot

ROOT = pathlib.Path(__file__).parent.parent
# Between two points, and what `$__rate_interval` stands for: some scrapes.
STEP_SECS = 2.0
RATE_SECS = 5
_SIGNIFICANT = 4
WIDTH = 1100
# Of axes, by unit, as Grafana shows them.
_LABELS = {
    "percentunit": "round(100 * datum.value) + ' %'",
    "percent": "datum.value + ' %'",
    "s": "datum.value + ' s'",
    "bytes": "format(datum.value / 1048576, '.3~g') + ' MiB'",
}


def record(answers: str) -> None:
    """Trains the demo, and writes the answers of Prometheus to this file."""
    sys.path.insert(0, str(ROOT))
    from tests import prometheus_server

    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        # Four hosts, and their supervisor.
        port = prometheus_server.free_ports(5)
        scraped = {"demo_cpu": range(port, port + 5)}
        with prometheus_server.running(root / "scraped", alerts.rules(), scraped) as it:
            start = time.time()
            train = [sys.executable, "-m", "elastic_ckpt.cli.main", "train"]
            settings = {
                "base_output_directory": root / "runs",
                "local_checkpoint_directory": root / "ram",
                "grain_train_files": root / "python_stdlib.array_record",
                "prometheus_port": port,
            }
            subprocess.run(
                [
                    *train,
                    "configs/demo_cpu.yml",
                    *(f"{key}={value}" for key, value in settings.items()),
                ],
                cwd=ROOT,
                check=True,
            )
            end = time.time()
            panels = [
                {"title": panel.title, "queries": _answers(it, panel, start, end)}
                for panel in dashboard.PANELS
            ]
            version = it.get("api/v1/status/buildinfo")["version"]
    recorded = {
        "run": "configs/demo_cpu.yml",
        "date": datetime.date.today().isoformat(),
        "prometheus": version,
        "panels": panels,
    }
    pathlib.Path(answers).write_text(_text(recorded))


def _answers(
    server: Any, panel: dashboard.Panel, start: float, end: float
) -> list[dict[str, Any]]:
    answered = []
    for query, legend in panel.queries:
        asked = query.replace("$job", "demo_cpu")
        asked = asked.replace("$__rate_interval", f"{RATE_SECS}s")
        series = [
            {
                "legend": _legend(legend, each["metric"]),
                "points": [
                    [round(at - start), _rounded(float(value))]
                    for at, value in each["values"]
                    if math.isfinite(float(value))
                ],
            }
            for each in server.points(asked, start=start, end=end, step=STEP_SECS)
        ]
        answered.append({"query": query, "series": series})
    return answered


def _legend(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels[match[1]], legend)


def _rounded(value: float) -> float:
    rounded = float(f"{value:.{_SIGNIFICANT}g}")
    return int(rounded) if rounded.is_integer() else rounded


def _text(recorded: dict[str, Any]) -> str:
    # A line for each series.
    text = json.dumps(recorded, indent=1)
    return (
        re.sub(r"\[[\s\d.,e\[\]+-]*\]", lambda m: re.sub(r"\s+", "", m[0]), text) + "\n"
    )


def draw(answers: str, picture: str) -> None:
    """Draws the panels at their places, with the answers in this file."""
    recorded = json.loads(pathlib.Path(answers).read_text())
    placed = [p for p in json.loads(dashboard.dashboard())["panels"] if "targets" in p]
    # Panels at one height are a row.
    rows: dict[int, list[plot.Spec]] = {}
    for panel, drawn in zip(placed, recorded["panels"], strict=True):
        rows.setdefault(panel["gridPos"]["y"], []).append(
            _panel(panel, drawn["queries"])
        )
    text = (
        f"{recorded['run']}, {recorded['date']}: drawn from the answers of Prometheus"
        f" {recorded['prometheus']}; not a screenshot of Grafana"
    )
    spec = {
        "title": {"text": text, "anchor": "start", "fontSize": 11, "offset": 12},
        "vconcat": [
            {"hconcat": row, "resolve": {"scale": {"color": "independent"}}}
            for row in rows.values()
        ],
        "resolve": {"scale": {"color": "independent"}},
        "padding": 10,
    }
    drawn = plot.svg(spec, title="The dashboard of a run", width=None)
    pathlib.Path(picture).write_text(plot.standalone(drawn) + "\n")


def _panel(panel: dict[str, Any], queries: list[dict[str, Any]]) -> plot.Spec:
    series = [each for query in queries for each in query["series"] if each["points"]]
    unit = panel["fieldConfig"]["defaults"]["unit"]
    width = panel["gridPos"]["w"] / 24 * WIDTH - 70
    title = {"text": panel["title"], "anchor": "start", "fontSize": 12}
    if panel["type"] == "stat":
        value = _shown(series[0]["points"][-1][1], unit) if series else "no data"
        mark = {
            **{"type": "text", "fontSize": 20, "align": "left"},
            "color": "var(--c0)",
        }
        return {
            **{"title": title, "width": width, "height": 34},
            **{"data": {"values": [{}]}, "mark": mark},
            "encoding": {"text": {"value": value}, "x": {"value": 0}},
        }
    points = [
        {"at": at, "value": value, "legend": each["legend"]}
        for each in series
        for at, value in _with_gaps(each["points"])
    ]
    custom = panel["fieldConfig"]["defaults"]["custom"]
    is_stacked = custom["stacking"]["mode"] == "normal"
    names = [each["legend"] for each in series]
    columns = max(1, int(width // (40 + 7 * max(map(len, names), default=0))))
    return {
        **{"title": title, "width": width, "height": 110},
        "data": {"values": points},
        "mark": "area" if is_stacked else {"type": "line", "strokeWidth": 1.25},
        "encoding": {
            "x": {
                **{"field": "at", "type": "quantitative", "title": None},
                "scale": {"nice": False, "zero": False},
            },
            "y": {
                **{"field": "value", "type": "quantitative", "title": None},
                **{"stack": "zero" if is_stacked else None, "scale": {"zero": False}},
                "axis": {"labelExpr": _LABELS.get(unit, "datum.label")},
            },
            "color": {
                **{"field": "legend", "type": "nominal"},
                "scale": {
                    "domain": names,
                    "range": list(plot.coloured(names).values()),
                },
                "legend": {"columns": columns, "symbolSize": 40},
            },
        },
    }


def _with_gaps(points: list[list[float]]) -> list[tuple[float, float | None]]:
    # Where the answer has no value the line has none.
    shown: list[tuple[float, float | None]] = []
    for at, value in points:
        if shown and at - shown[-1][0] > 1.5 * STEP_SECS:
            shown.append((at - STEP_SECS, None))
        shown.append((at, value))
    return shown


def _shown(value: float, unit: str) -> str:
    match unit:
        case "percentunit":
            return f"{100 * value:.0f} %"
        case "percent":
            return f"{value:.0f} %"
        case "s":
            return f"{value:.3g} s"
        case "bytes":
            return f"{value / 2**20:.3g} MiB"
    return f"{value:.4g}"


if __name__ == "__main__":
    {"record": record, "draw": draw}[sys.argv[1]](*sys.argv[2:])
