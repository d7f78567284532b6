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

ROOT = pathlib.Path(__file__).parent.parent
# Between two points, and what `$__rate_interval` stands for: some scrapes.
STEP_SECS = 2.0
RATE_SECS = 5
_SIGNIFICANT = 4
_COLOURS = (
    *("#2a6f97", "#e76f51", "#2a9d8f", "#8e44ad", "#b58900", "#c1121f", "#6b7683"),
    *("#90be6d", "#577590", "#f9c74f", "#7f5539", "#f78fb3", "#1c2024"),
)


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
    import matplotlib.pyplot as plt

    recorded = json.loads(pathlib.Path(answers).read_text())
    placed = [p for p in json.loads(dashboard.dashboard())["panels"] if "targets" in p]
    rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in placed)
    plt.rcParams |= {
        "svg.hashsalt": "dashboard",
        "svg.fonttype": "none",
        "font.size": 7,
    }
    figure = plt.figure(figsize=(12, rows / 4 + 0.4))
    for panel, drawn in zip(placed, recorded["panels"], strict=True):
        at = panel["gridPos"]
        bottom = 1 - (at["y"] + at["h"]) / rows
        place = (at["x"] / 24, bottom * 0.985, at["w"] / 24, at["h"] / rows * 0.985)
        _draw(figure, place, panel, drawn["queries"])
    figure.text(
        *(0.005, 0.99),
        f"{recorded['run']}, {recorded['date']}: drawn from the answers of Prometheus"
        f" {recorded['prometheus']}; not a screenshot of Grafana",
        va="center",
        color="#5b6570",
    )
    figure.savefig(picture, metadata={"Date": None})


def _draw(
    figure: Any,
    place: tuple[float, float, float, float],
    panel: dict[str, Any],
    queries: list[dict[str, Any]],
) -> None:
    left, bottom, width, height = place
    series = [each for query in queries for each in query["series"] if each["points"]]
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if panel["type"] == "stat":
        axes = figure.add_axes(
            (left + 0.004, bottom + 0.006, width - 0.008, height - 0.012)
        )
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color("#dde1e6")
        axes.text(0.04, 0.8, panel["title"], va="center", weight="bold")
        value = _shown(series[0]["points"][-1][1], unit) if series else "no data"
        axes.text(0.5, 0.35, value, va="center", ha="center", size=15, color="#2a6f97")
        return
    margin = 0.045
    axes = figure.add_axes(
        (left + margin, bottom + 0.024, width - margin - 0.012, height - 0.062)
    )
    axes.set_title(panel["title"], loc="left", weight="bold", size=8)
    is_stacked = (
        panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    )
    if is_stacked:
        times = sorted({at for each in series for at, _ in each["points"]})
        values = [[dict(each["points"]).get(at, 0) for at in times] for each in series]
        axes.stackplot(
            times, values, labels=[e["legend"] for e in series], colors=_COLOURS
        )
    else:
        for colour, each in zip(_COLOURS, series, strict=False):
            axes.plot(
                *zip(*_with_gaps(each["points"]), strict=True),
                label=each["legend"],
                color=colour,
                linewidth=1,
            )
        axes.margins(y=0.1)
    axes.yaxis.set_major_formatter(lambda value, _: _shown(value, unit))
    axes.tick_params(labelsize=6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dde1e6", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.legend(
        fontsize=5.5, frameon=False, ncols=2 if len(series) > 4 else 1, loc="upper left"
    )


def _with_gaps(points: list[list[float]]) -> list[tuple[float, float]]:
    # Where the answer has no value the line has none.
    shown: list[tuple[float, float]] = []
    for at, value in points:
        if shown and at - shown[-1][0] > 1.5 * STEP_SECS:
            shown.append((at, math.nan))
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
