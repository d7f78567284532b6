"""A Grafana dashboard of a run, written from the list of metrics.

`configs/monitoring/dashboard.json` is what `dashboard` returns. Its first panels are
chosen by hand and answer what a person asks first. Below, folded rows show every metric
of every process, so that a new metric needs no work here.

Source: Grafana's classic JSON model of dashboards, schema version 39 (Grafana 11).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

from elastic_ckpt.core import metrics
from elastic_ckpt.deploy import alerts

_SCHEMA = 39
_WIDTH = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# The run that the reader has chosen.
_RUN = '{job="$job"}'
_ALERTS = (
    f'ALERTS{{job="$job", alertname=~"{"|".join(a.name for a in alerts.ALERTS)}"}}'
)
# The names of units in Grafana, by those of metrics.
_UNITS = {"secs": "s", "bytes": "bytes", "percent": "percent"}
_INTERVAL = "$__rate_interval"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of the first rows.

    Attributes:
      title: in a few words.
      description: what a reader sees in it.
      queries: in PromQL, each with the legend of its series.
      unit: of the values, by Grafana's name of it.
      kind: `stat` shows the last values, `timeseries` lines.
      is_stacked: whether the lines add up to something.
      width: of 24.
      height: in Grafana's rows of 30 pixels.
    """

    title: str
    description: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    is_stacked: bool = False
    width: int = 8
    height: int = 7


def dashboard() -> str:
    """The dashboard, to be imported into Grafana."""
    numbers = itertools.count(1)
    panels, top = _placed(PANELS, 0, numbers)
    for room, listed in itertools.groupby(metrics.METRICS.values(), key=_room):
        row = _row(f"All metrics: {room}", top, numbers)
        row["panels"], _ = _placed(
            [_of_metric(each) for each in listed], top + 1, numbers
        )
        panels.append(row)
        # What is folded takes no place.
        top += 1
    return json.dumps(_model(panels), indent=1) + "\n"


def queries() -> list[tuple[str, str]]:
    """The title of the panel of each query, and the query."""
    shown = [*PANELS, *map(_of_metric, metrics.METRICS.values())]
    return [(panel.title, query) for panel in shown for query, _ in panel.queries]


def _room(metric: metrics.Metric) -> str:
    return metric.name.split("/")[2]


def _of_metric(metric: metrics.Metric) -> Panel:
    name, by = metric.name.removeprefix("/elastic_ckpt/"), "sum by (instance)"
    unit, rate = _UNITS.get(metric.unit, "short"), f"{_RUN}[{_INTERVAL}]"
    if metric.kind == "gauge":
        query, what = f"{alerts.series(metric)}{_RUN}", "The last value"
    elif metric.kind == "counter":
        query, what = f"{by} (increase({alerts.series(metric)}{rate}))", "The increase"
    else:
        total, count = (alerts.series(metric, part) for part in ("sum", "count"))
        query = f"{by} (rate({total}{rate})) / {by} (rate({count}{rate}))"
        what = "The mean"
    return Panel(
        title=name,
        description=f"{what} of each process: {metric.meaning} ({metric.unit}).",
        queries=[(query, "{{instance}}")],
        unit=unit,
    )


def _placed(
    panels: Sequence[Panel], top: int, numbers: itertools.count[int]
) -> tuple[list[dict[str, Any]], int]:
    # From left to right, a new line where the next one does not fit; and the next line.
    left, height, placed = 0, 0, []
    for panel in panels:
        if left + panel.width > _WIDTH:
            left, top, height = 0, top + height, 0
        at = {"x": left, "y": top, "w": panel.width, "h": panel.height}
        placed.append(_panel(panel, at, next(numbers)))
        left, height = left + panel.width, max(height, panel.height)
    return placed, top + height


def _panel(panel: Panel, at: dict[str, int], number: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any] = {}
    if panel.kind == "stat":
        options["reduceOptions"] = {
            "calcs": ["lastNotNull"],
            "fields": "",
            "values": False,
        }
    else:
        stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 60 if panel.is_stacked else 0,
            "stacking": stacking,
        }
        options["legend"] = {"displayMode": "list", "placement": "bottom"}
        options["tooltip"] = {"mode": "multi", "sort": "desc"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _DATASOURCE,
                "expr": query,
                "legendFormat": legend,
                "range": True,
            }
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }


def _row(title: str, top: int, numbers: itertools.count[int]) -> dict[str, Any]:
    return {
        "id": next(numbers),
        "type": "row",
        "title": title,
        "collapsed": True,
        "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1},
    }


def _model(panels: list[dict[str, Any]]) -> dict[str, Any]:
    steps = alerts.series(metrics.TRAIN_STEP, "count")
    jobs = f"label_values({steps}, job)"
    variables = [
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
        },
        {
            "name": "job",
            "label": "Run",
            "type": "query",
            "datasource": _DATASOURCE,
            "definition": jobs,
            "query": {"query": jobs, "refId": "jobs"},
            # When the time range changes, too: old runs are found there.
            "refresh": 2,
            "sort": 1,
        },
    ]
    return {
        "uid": "elastic-ckpt",
        "title": "elastic_ckpt",
        "description": "A training run: its steps, its goodput, its slices and saves.",
        "tags": ["elastic_ckpt", "training"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": variables},
        "panels": panels,
    }


def _gauge(metric: metrics.Metric) -> str:
    return f"max({alerts.series(metric)}{_RUN})"


def _rate(metric: metrics.Metric, part: str = "", how: str = "sum") -> str:
    return f"{how}(rate({alerts.series(metric, part)}{_RUN}[{_INTERVAL}]))"


def _increase(metric: metrics.Metric) -> str:
    return f"sum(increase({alerts.series(metric)}{_RUN}[{_INTERVAL}]))"


def _quantile(metric: metrics.Metric, quantile: float) -> str:
    buckets = _rate(metric, "bucket", "sum by (le) ")
    return f"histogram_quantile({quantile}, {buckets})"


def _stat(title: str, query: str, description: str, unit: str = "short") -> Panel:
    return Panel(
        title=title,
        description=description,
        queries=[(query, "")],
        unit=unit,
        kind="stat",
        width=4,
        height=4,
    )


_STEPS = _gauge(metrics.TRAIN_STEPS)

PANELS = (
    _stat("Steps done", _STEPS, "By the step log."),
    _stat(
        "Time left",
        f"({_gauge(metrics.TRAIN_PLANNED)} - {_STEPS})"
        f" / {_gauge(metrics.TRAIN_STEP_RATE)}",
        "At the pace of the newest step.",
        "s",
    ),
    _stat(
        "Goodput",
        _gauge(metrics.GOODPUT),
        "The part of the time since this start that trained new steps.",
        "percent",
    ),
    _stat("Slices", _gauge(metrics.SLICES), "Of the world."),
    _stat(
        "Steps not saved",
        f"{_STEPS} - {_gauge(metrics.SAVED_STEPS)}",
        "Steps since the newest complete save: what a failure costs.",
    ),
    _stat(
        "Steps not in storage",
        f"{_STEPS} - {_gauge(metrics.STORED_STEPS)}",
        "Steps since the newest save in persistent storage: what the loss of all"
        " machines costs.",
    ),
    Panel(
        title="Steps",
        description="A line that falls is steps that were lost and trained again.",
        queries=[
            (_STEPS, "done"),
            (_gauge(metrics.SAVED_STEPS), "saved"),
            (_gauge(metrics.STORED_STEPS), "in storage"),
        ],
    ),
    Panel(
        title="Loss",
        description="Of the newest step.",
        queries=[(_gauge(metrics.TRAIN_LOSS), "loss")],
        unit="none",
    ),
    Panel(
        title="Tokens per second",
        description="Targets that were trained on, without padding.",
        queries=[(_rate(metrics.TRAIN_TOKENS), "tokens per second")],
    ),
    Panel(
        title="Where the time goes",
        description="The part of the time by its cause; productive is goodput. A long"
        " part counts when it ends, and so can show as more than 100 %.",
        queries=[
            (_rate(metric, "sum"), cause)
            for cause, metric in metrics.GOODPUT_SECS.items()
        ],
        unit="percentunit",
        is_stacked=True,
        width=16,
    ),
    Panel(
        title="Slices",
        description="Those of the world, and those that were lost and are not back.",
        queries=[
            (_gauge(metrics.SLICES), "in the world"),
            (_gauge(metrics.MISSING_SLICES), "missing"),
        ],
    ),
    Panel(
        title="Time of a step",
        description="Waits included; half of the steps, and all but one in a hundred,"
        " took no longer.",
        queries=[
            (_quantile(metrics.TRAIN_STEP, 0.5), "median"),
            (_quantile(metrics.TRAIN_STEP, 0.99), "99 %"),
        ],
        unit="s",
    ),
    Panel(
        title="The loop waits",
        description="The part of the time that the slowest host waits.",
        queries=[
            (_rate(metrics.DATA_WAIT, "sum", "max"), "for data"),
            (_rate(metrics.CHECKPOINT_SAVE_BLOCK, "sum", "max"), "for saves"),
        ],
        unit="percentunit",
    ),
    Panel(
        title="Batches ready",
        description="On the host that has the fewest. At 0 it waits for data.",
        queries=[
            (f"min({alerts.series(metrics.DATA_READ_AHEAD)}{_RUN})", "read ahead")
        ],
    ),
    Panel(
        title="Time of a save",
        description="Until a step is complete, has its copies, and is in storage; 99 %"
        " took no longer.",
        queries=[
            (_quantile(metrics.CHECKPOINT_SAVE, 0.99), "complete"),
            (_quantile(metrics.CHECKPOINT_COPY_SECS, 0.99), "copied"),
            (_quantile(metrics.CHECKPOINT_BACKUP_SECS, 0.99), "in storage"),
        ],
        unit="s",
    ),
    Panel(
        title="Saves that fail",
        description="Times that a tier did not take a step, and steps that storage"
        " lacks.",
        queries=[
            (_increase(metrics.CHECKPOINT_FAILURES), "failures"),
            (_gauge(metrics.CHECKPOINT_BACKLOG), "storage lacks"),
        ],
    ),
    Panel(
        title="Restores read",
        description="From where the bytes of restores came.",
        queries=[
            (_increase(metric), near)
            for near, metric in metrics.CHECKPOINT_READ.items()
        ],
        unit="bytes",
        is_stacked=True,
    ),
    Panel(
        title="Losses",
        description="Hosts whose loss ended a world, lost slices, and steps that have"
        " to be trained again.",
        queries=[
            (_increase(metrics.LOST_HOSTS), "hosts"),
            (_increase(metrics.LOST_SLICES), "slices"),
            (_increase(metrics.LOST_STEPS), "steps"),
        ],
    ),
    Panel(
        title="Wrong values",
        description="Divergences, parts of the state whose copies differ, and damaged"
        " copies that a restore read.",
        queries=[
            (_increase(metrics.FINDINGS), "divergences"),
            (_increase(metrics.VALIDATION_FINDINGS), "copies that differ"),
            (_increase(metrics.CHECKPOINT_BAD_COPIES), "damaged copies"),
        ],
    ),
    Panel(
        title="Alerts",
        description="Those of configs/monitoring/alerts.yaml, pending or firing.",
        queries=[
            (
                f"count by (alertname, alertstate) ({_ALERTS})",
                "{{alertname}} {{alertstate}}",
            )
        ],
        unit="none",
    ),
)
