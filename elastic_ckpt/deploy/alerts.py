"""Alert rules for Prometheus, written from the list of metrics.

`configs/monitoring/alerts.yaml` is what `rules` returns. An alert is about a run: all
targets that share the labels of `RUN`, which is how `manifest` and the operators of
Prometheus label the pods of a job. Each alert has an entry of its name in the runbook.

Source: the format of rule files of Prometheus 2, "Alerting rules".
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import yaml

from elastic_ckpt.core import metrics
from elastic_ckpt.monitoring import prometheus

# The labels that the targets of a run share, and no other run has.
RUN = "namespace, job"
# Where `mkdocs serve` shows the pages.
SITE = "http://127.0.0.1:8000"
# How long a target that is gone is remembered.
_MEMORY = "{memory}"
_MEMORY_SECS = 3600.0

_HEAD = """\
# Alerts on the runs of elastic_ckpt, written from the list of metrics: change them in
# elastic_ckpt/deploy/alerts.py. Copy this file to where Prometheus reads its rules, and
# replace http://127.0.0.1:8000 by the place of your copy of the documentation.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alert:
    """A rule, and what it says when it fires.

    Attributes:
      name: in Prometheus, and of the entry of the runbook.
      severity: `critical` if somebody has to act now, else `warning`, or `info` if
        nobody has to.
      expr: in PromQL; `{over}` and `{over_secs}` stand for `over_secs`.
      over_secs: the time that the expression looks back.
      hold_secs: how long the expression has to hold before the alert fires.
      summary: one line for a pager.
      description: what it means; may contain `{{ $value }}` and `{{ $labels }}`.
    """

    name: str
    severity: Literal["critical", "warning", "info"]
    expr: str
    over_secs: float = 0.0
    hold_secs: float = 0.0
    summary: str
    description: str


def series(metric: metrics.Metric, part: str = "") -> str:
    """The name of a metric's series.

    Args:
      metric: the metric.
      part: of the histogram of a duration: `sum`, `count` or `bucket`.
    """
    name = prometheus.spelling(metric)
    if metric.kind == "counter":
        return f"{name}_total"
    return f"{name}_{part}" if part else name


def rules(*, site: str = SITE) -> str:
    """The rule file.

    Args:
      site: where the pages are, for `runbook_url`.
    """
    group = {
        "name": "elastic-ckpt",
        "rules": [_rule(alert, site.rstrip("/")) for alert in ALERTS],
    }
    text = yaml.safe_dump({"groups": [group]}, sort_keys=False, width=1000)
    return _HEAD + text


def _rule(alert: Alert, site: str) -> dict[str, Any]:
    expr = alert.expr.format(
        over=_duration(alert.over_secs),
        over_secs=f"{alert.over_secs:g}",
        memory=_duration(_MEMORY_SECS),
    )
    rule: dict[str, Any] = {"alert": alert.name, "expr": expr}
    if alert.hold_secs:
        rule["for"] = _duration(alert.hold_secs)
    rule["labels"] = {"severity": alert.severity}
    rule["annotations"] = {
        "summary": alert.summary,
        "description": alert.description,
        "runbook_url": f"{site}/reference/runbook/#{alert.name.lower()}",
    }
    return rule


def _duration(secs: float) -> str:
    # Prometheus takes whole numbers only.
    unit, size = next(
        each for each in (("h", 3600), ("m", 60), ("s", 1)) if secs % each[1] == 0
    )
    return f"{secs / size:.0f}{unit}"


def _most(expr: str) -> str:
    # The process that knows it best: the first host, or the supervisor.
    return f"max by ({RUN}) ({expr})"


def _sum(expr: str) -> str:
    return f"sum by ({RUN}) ({expr})"


def _share(metric: metrics.Metric) -> str:
    # Of the time, that the slowest host spends so.
    return _most(f"rate({series(metric, 'sum')}[{{over}}])")


def _grew(metric: metrics.Metric) -> str:
    # `increase` does not see the first value of a process that has just started.
    name = series(metric)
    new = f"({name} > 0 unless {name} offset {{over}})"
    return _sum(f"increase({name}[{{over}}]) > 0 or {new}")


def _last(metric: metrics.Metric) -> str:
    return _most(f"last_over_time({series(metric)}[{_MEMORY}])")


_MINUTE, _HOUR = 60.0, 3600.0
_STEPS = series(metrics.TRAIN_STEP, "count")
_PRODUCTIVE = series(metrics.GOODPUT_SECS["productive"], "sum")
_LOSS = series(metrics.TRAIN_LOSS)
_CLAIM = series(metrics.TRAIN_CLAIM)
_RUN_LABEL = "Run {{ $labels.job }}"

ALERTS = (
    Alert(
        name="RunEndedEarly",
        severity="critical",
        # What is left to train, by the last that was seen of the run. Without its last
        # minutes: the last steps of a run that has finished are scraped by nobody.
        expr=f"({_last(metrics.TRAIN_PLANNED)} - {_last(metrics.TRAIN_STEPS)})"
        f" / {_last(metrics.TRAIN_STEP_RATE)} > {{over_secs}}"
        f" unless {_most(series(metrics.TRAIN_STEPS))}",
        over_secs=2 * _MINUTE,
        hold_secs=5 * _MINUTE,
        summary=f"{_RUN_LABEL} has ended before its last step",
        description="No process of the run has done a step since it was last seen, when"
        " {{ $value | humanizeDuration }} of training were left. It has failed, was"
        " stopped, or is started again and again.",
    ),
    Alert(
        name="RunMakesNoSteps",
        severity="critical",
        expr=_sum(f"increase({_STEPS}[{{over}}])") + " == 0",
        over_secs=10 * _MINUTE,
        hold_secs=5 * _MINUTE,
        summary=f"{_RUN_LABEL} makes no steps",
        description="Its processes live, and no step was logged for a quarter of an"
        " hour: it starts, compiles, restores, waits for slices, or hangs.",
    ),
    Alert(
        name="RunGoodputLow",
        severity="warning",
        # Of a run that lives: the last hour of one that has ended is lower.
        expr=_sum(f"rate({_PRODUCTIVE}[{{over}}])") + f" < 0.5 and {_sum(_STEPS)} >= 0",
        over_secs=_HOUR,
        hold_secs=30 * _MINUTE,
        summary=f"{_RUN_LABEL} spends less than half of its time on new steps",
        description="Goodput of the last hour: {{ $value | humanizePercentage }}.",
    ),
    Alert(
        name="RunLacksSlices",
        severity="warning",
        expr=_most(series(metrics.MISSING_SLICES)) + " > 0",
        hold_secs=15 * _MINUTE,
        summary=f"{_RUN_LABEL} trains without {{{{ $value }}}} of its slices",
        description="They were lost, or failed their check, and have not come back.",
    ),
    Alert(
        name="RunTargetDown",
        severity="warning",
        # A process that served metrics of a run whose other processes still do.
        expr=f"up == 0 and last_over_time({_STEPS}[{_MEMORY}]) >= 0"
        f" and on ({RUN}) ({_most('up')} == 1)",
        hold_secs=5 * _MINUTE,
        summary=f"{_RUN_LABEL}: {{{{ $labels.instance }}}} serves no metrics",
        description="The process is gone, or cannot be reached. Other processes of the"
        " run serve theirs.",
    ),
    Alert(
        name="RunLossNotFinite",
        severity="critical",
        expr=f"count by ({RUN}) ({_LOSS} != {_LOSS} or abs({_LOSS}) == Inf) > 0",
        summary=f"{_RUN_LABEL}: the loss is not finite",
        description="The loss of the newest step is NaN or infinite.",
    ),
    Alert(
        name="RunDiverged",
        severity="warning",
        expr=_grew(metrics.FINDINGS),
        over_secs=_HOUR,
        summary=f"{_RUN_LABEL}: a divergence was found",
        description="A detector or a callback has found something in the numbers of a"
        " step; the event divergence_found has it.",
    ),
    Alert(
        name="RunReplicasDiffer",
        severity="critical",
        expr=_grew(metrics.VALIDATION_FINDINGS),
        over_secs=_HOUR,
        summary=f"{_RUN_LABEL}: copies of the state differ",
        description="{{ $value }} parts of the state were not equal on all devices that"
        " should have the same. A device or its memory computes wrong values.",
    ),
    Alert(
        name="RunReadBadCopies",
        severity="warning",
        expr=_grew(metrics.CHECKPOINT_BAD_COPIES),
        over_secs=_HOUR,
        summary=f"{_RUN_LABEL}: damaged copies of a step were read",
        description="A restore has found {{ $value }} damaged copies and used good"
        " ones. A disk or memory is failing.",
    ),
    Alert(
        name="RunRestoredFromStorage",
        severity="info",
        expr=_sum(
            f"increase({series(metrics.CHECKPOINT_READ['persistent'])}[{{over}}])"
        )
        + " > 0",
        over_secs=15 * _MINUTE,
        summary=f"{_RUN_LABEL} was restored from storage instead of RAM",
        description="{{ $value | humanize1024 }}B came from persistent storage: no RAM"
        " that could be reached had a complete step that is as new.",
    ),
    Alert(
        name="RunSavesFail",
        severity="warning",
        expr=_grew(metrics.CHECKPOINT_FAILURES),
        over_secs=15 * _MINUTE,
        summary=f"{_RUN_LABEL}: a tier did not take a step",
        description="It is tried again with a later step. The event degraded names the"
        " tier and the cause.",
    ),
    Alert(
        name="RunSavesNothing",
        severity="critical",
        # The state of the data is captured when a save begins.
        expr=_sum(f"increase({series(metrics.DATA_SAVE_BLOCK, 'count')}[{{over}}])")
        + " > 0 and "
        + _sum(f"increase({series(metrics.CHECKPOINT_SAVE, 'count')}[{{over}}])")
        + " == 0",
        over_secs=_HOUR,
        hold_secs=30 * _MINUTE,
        summary=f"{_RUN_LABEL} begins saves and completes none",
        description="No save was completed for more than an hour. What is trained now"
        " is lost with the run.",
    ),
    Alert(
        name="RunBackupsBehind",
        severity="warning",
        expr=_most(series(metrics.CHECKPOINT_BACKLOG))
        + " > 0 unless "
        + _most(f"changes({series(metrics.STORED_STEPS)}[{{over}}])")
        + " > 0",
        over_secs=30 * _MINUTE,
        hold_secs=30 * _MINUTE,
        summary=f"{_RUN_LABEL}: storage lacks {{{{ $value }}}} steps",
        description="They were due in persistent storage, and it has taken no other"
        " step for an hour. The loss of all machines costs all steps since.",
    ),
    Alert(
        name="RunBlockedBySaves",
        severity="warning",
        expr=_share(metrics.CHECKPOINT_SAVE_BLOCK) + " > 0.1",
        over_secs=10 * _MINUTE,
        hold_secs=10 * _MINUTE,
        summary=f"{_RUN_LABEL} is blocked by its saves",
        description="{{ $value | humanizePercentage }} of the time the loop waits for a"
        " save.",
    ),
    Alert(
        name="RunWaitsForData",
        severity="warning",
        expr=_share(metrics.DATA_WAIT) + " > 0.1",
        over_secs=10 * _MINUTE,
        hold_secs=10 * _MINUTE,
        summary=f"{_RUN_LABEL} waits for its data",
        description="{{ $value | humanizePercentage }} of the time the slowest host"
        " waits for a batch.",
    ),
    Alert(
        name="RunClaimsDisagree",
        severity="critical",
        expr=f"{_most(_CLAIM)} != min by ({RUN}) ({_CLAIM})",
        hold_secs=5 * _MINUTE,
        summary=f"{_RUN_LABEL} has been started twice",
        description="Processes of two starts of the run live. Only world"
        " {{ $value }} counts; what the others save is ignored.",
    ),
)
