"""A run's report as a page: how it went, what interrupted it, where its time went.

`collect` reads the run's files; everything else is a pure function of the result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.core import events as run_events
from elastic_ckpt.inspect import page, run_files, status
from elastic_ckpt.inspect.page import COLORS, Fact, Mood, Point, Section, Series
from elastic_ckpt.inspect.status import Event, Files
from elastic_ckpt.monitoring import goodput
from elastic_ckpt.training import audit as audit_run
from elastic_ckpt.training import step_log

# The maximum number of table lines and of bars in a plot.
_MOST_ROWS = 200
_MOST_BARS = 12
# Events that end a world's training.
_WORLD_ENDS = (
    *("slice_lost", "host_lost", "world_left"),
    *("run_finished", "run_stopped", "run_failed"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecords:
    """The records that a run has written.

    Attributes:
      phase: what the run is doing, or how it ended (`status.phase`).
      files: the metrics files.
      attempts: the attempts in the step log, in order.
      audit: the outcome of the audit; if there is none, the reason as a string.
      made_secs: the time of the report, in seconds since the epoch.
    """

    run: str
    directory: str
    phase: str
    events: Sequence[Event]
    files: Files
    attempts: Sequence[step_log.Attempt]
    audit: audit_run.Audit | str
    made_secs: float

    def named(self, *names: str) -> list[Event]:
        """The events with these names."""
        return [event for event in self.events if event["event"] in names]

    def minute(self, record: Mapping[str, Any]) -> float:
        """The minutes from the first event to an event or a metric line."""
        return (record["time"] - self.events[0]["time"]) / 60 if self.events else 0.0

    def lines(self, metric: metrics.Metric) -> list[Mapping[str, Any]]:
        """A metric's lines for the whole run, in time order."""
        lines = (
            line
            for line in itertools.chain.from_iterable(self.files.values())
            if line["metric"] == metric.name and "step" in line
        )
        return sorted(lines, key=lambda line: line["time"])

    @functools.cached_property
    def goodput_secs(self) -> dict[str, float]:
        """Seconds of all launches by cause, without zeros; productive time first."""
        lines = [*itertools.chain.from_iterable(self.files.values())]
        secs = {
            cause: sum(line["sum"] for line in lines if line["metric"] == metric.name)
            for cause, metric in metrics.GOODPUT_SECS.items()
        }
        by_secs = sorted(
            secs.items(), key=lambda each: (each[0] != "productive", -each[1])
        )
        return {cause: each for cause, each in by_secs if each}

    @functools.cached_property
    def lineage(self) -> dict[int, step_log.StepRecord]:
        """The logged steps that no later attempt retrained."""
        return step_log.lineage(self.attempts)

    def losses(self, *, is_counted: bool) -> list[Point]:
        """The known losses by step, for the steps that count or for retrained ones.

        MaxText reports a step's loss only after it has saved the step, too late for the
        step log, so these losses come from the metrics.
        """
        # If a step was retrained, its later line takes precedence.
        reported = {e["step"]: e["last"] for e in self.lines(metrics.TRAIN_LOSS)}
        points = [
            (
                float(step),
                reported.get(step, each.loss) if math.isnan(each.loss) else each.loss,
            )
            for each in itertools.chain.from_iterable(a.records for a in self.attempts)
            if (self.lineage.get(each.step) is each) == is_counted
            for step in [each.step + 1]
        ]
        return [(step, loss) for step, loss in points if math.isfinite(loss)]


def collect(directory: str) -> RunRecords:
    """Reads the records of the run in `directory`, without an audit.

    Raises:
      RunError: if there is no run in `directory`.
      DataError: if the run has trained nothing yet.
    """
    recorded, events = run_files.read(directory), run_files.read_events(directory)
    is_alive = run_files.is_alive(directory)
    return RunRecords(
        run=recorded.run,
        directory=directory,
        phase=status.phase(events, is_alive=is_alive, program=recorded.program),
        events=events,
        files=run_files.read_metrics(os.path.join(directory, run_files.METRICS)),
        attempts=step_log.read(directory),
        audit="No audit was requested.",
        made_secs=time.time(),
    )


def audit(directory: str) -> audit_run.Audit | str:
    """Audits the run by reading its data again; returns the outcome or the error."""
    try:
        return audit_run.RunAudit(directory).outcome()
    except errors.ElasticCkptError as error:
        return f"The run cannot be audited: {error}"


def report(record: RunRecords) -> str:
    """The page, as HTML.

    Raises:
      ConfigError: if the `report` extra, which draws plots, is not installed.
    """
    return page.to_html(
        f"Run {record.run}",
        f"{record.directory}, as of {_utc(record.made_secs)}",
        _facts(record),
        [
            _interruptions(record),
            _goodput(record),
            _slices(record),
            _loss(record),
            _step_time(record),
            _recoveries(record),
            _sample_order(record),
        ],
    )


def _facts(record: RunRecords) -> list[Fact]:
    moods: dict[str, Mood] = {"finished": "good", "failed": "bad", "not running": "bad"}
    phase = record.phase.partition(":")[0]
    steps = f"{1 + max(record.lineage, default=-1):,}"
    for each in record.named("run_started")[-1:]:
        steps += f" of {each['steps']:,}" if each["steps"] else ""
    losses = [loss for _, loss in record.losses(is_counted=True)]
    since, loss = (f"loss, from {losses[0]:.4f}", losses[-1]) if losses else ("loss", 0)
    changes = record.named("recovered")
    outcome, outcome_mood = _outcome(record.audit)
    facts: list[tuple[str, str, Mood]] = [
        ("the run", phase, moods.get(phase, "")),
        ("steps", steps, ""),
        (since, f"{loss:.4f}" if losses else "none", ""),
        ("goodput", _goodput_percent(record), ""),
        ("verdicts", f"{len(record.named('verdict')):,}", ""),
        ("slice changes", f"{len(changes):,}", ""),
        ("steps retrained", f"{sum(e['steps_lost'] for e in changes):,}", ""),
        ("sample order", outcome or "not audited", outcome_mood),
    ]
    # Shown only if there are any.
    bad = {
        "bad copies read": sum(e["bad_copies"] for e in record.named("restored_from")),
        "restores distrusted": len(record.named("restore_distrusted")),
        "rollbacks": len(record.named("rolled_back")),
        "copies of the state that differed": len(record.named("replicas_differ")),
    }
    return [
        *(Fact(name=name, value=value, mood=mood) for name, value, mood in facts),
        *(Fact(name=n, value=f"{c:,}", mood="bad") for n, c in bad.items() if c),
    ]


def _interruptions(record: RunRecords) -> Section:
    if not record.named("verdict"):
        text = "Nothing failed."
        if changes := len(record.named("recovered")):
            text += f" The slices changed {changes:,} times, as requested."
        return Section(title="What interrupted it", text=text, is_table=True)
    # Each verdict, with the change of slices that followed it, if any.
    told = record.named("verdict", "recovered")
    rows = [
        (
            f"{record.minute(event):.2f}",
            f"{event['what']} {event['which']}".rstrip(),
            event["why"],
            *("; ".join(event["evidence"]), event["action"]),
            *(
                (f"{after['secs']:.1f} s", str(after["steps_lost"]))
                if after is not None and after["event"] == "recovered"
                else ("", "")
            ),
            *(event["kind"], event["phase"], str(event["step"])),
            _utc(event["since"]),
        )
        for event, after in itertools.zip_longest(told, told[1:])
        if event["event"] == "verdict"
    ]
    return Section(
        title="What interrupted it",
        text="What failed, the evidence, what the run did, and how long it took until"
        " training continued.",
        columns=(
            *("minute", "what failed", "verdict", "evidence", "action", "back after"),
            *("steps lost", "kind", "phase", "step", "since"),
        ),
        rows=rows[-_MOST_ROWS:],
        is_table=True,
    )


def _goodput_percent(record: RunRecords) -> str:
    spent = record.goodput_secs
    productive = spent.get("productive", 0) / max(sum(spent.values()), 1e-9)
    return f"{100 * productive:.1f}%" if spent else "none"


def _goodput(record: RunRecords) -> Section:
    title, spent = "Where the time went", record.goodput_secs
    if not spent:
        return Section(title=title, text="No goodput metrics were recorded.")
    total = sum(spent.values())
    meanings = {cause: each.meaning for cause, each in metrics.GOODPUT_SECS.items()}
    return Section(
        title=title,
        text=f"{_goodput_percent(record)} of {total:,.0f} s trained new steps. Time"
        " when no process of the run was alive does not count.",
        spec=page.bars(
            [
                (
                    cause.replace("_", " "),
                    [secs, 0.0] if cause == "productive" else [0.0, secs],
                )
                for cause, secs in spent.items()
            ],
            {"new steps": page.GOOD, "lost": page.LOST},
            unit="s",
            totals=[
                f"{page.number(secs)} s, {100 * secs / total:.1f}%"
                for secs in spent.values()
            ],
        ),
        columns=("cause", "seconds", "meaning"),
        rows=[(cause, f"{secs:.2f}", meanings[cause]) for cause, secs in spent.items()],
    )


def _slices(record: RunRecords) -> Section:
    title, slices = "Slices over time", 0
    if not record.events:
        return Section(title=title, text="Nothing was recorded.")
    training: list[Point] = [(0.0, 0.0)]
    for event in record.events:
        begins = run_events.NAMES[event["event"]].begins
        if event["event"] == "run_started":
            slices = event["slices"]
        if begins:
            number = slices if begins == "training" else 0
            training.append((record.minute(event), number))
    training.append((record.minute(record.events[-1]), training[-1][1]))
    return Section(
        title=title,
        text="The filled area is training; the gaps are launches and slice changes.",
        spec=page.lines(
            [Series(name="training", points=training, kind="area")],
            x="minutes since the first event",
            y="slices",
            marks=_marks(record),
            from_zero=True,
        ),
        columns=("minute", "event", "details"),
        rows=[
            (f"{record.minute(e):.2f}", e["event"], _details(e))
            for e in record.named(
                "world_started", "slice_returned", "run_started", *_WORLD_ENDS
            )
        ][-_MOST_ROWS:],
    )


def _marks(record: RunRecords) -> list[tuple[float, str]]:
    # A lost slice implies its hosts.
    lost = "slice_lost" if record.named("slice_lost") else "host_lost"
    texts = {
        lost: "slice {slice} lost" if lost == "slice_lost" else "host {host} lost",
        "slow_host": "host {host} slow",
        "run_failed": "failed",
    }
    return [
        (record.minute(event), texts[event["event"]].format_map(event))
        for event in record.named(*texts)
    ]


def _loss(record: RunRecords) -> Section:
    lost = record.losses(is_counted=False)
    again = f" {len(lost)} steps were lost in slice changes and retrained."
    return _of_lines(
        [
            Series(name="counts", points=record.losses(is_counted=True)),
            Series(
                name="retrained",
                points=lost,
                kind="dots",
                color=page.LOST,
            ),
        ],
        title="Loss",
        text="Loss of the global batch, before the update." + again * bool(lost),
        axes=("step", "loss"),
    )


def _step_time(record: RunRecords) -> Section:
    points = {
        float(line["step"]): 1000 * line["sum"] / line["count"]
        for line in record.lines(metrics.TRAIN_STEP)
    }
    return _of_lines(
        [Series(name="step", points=sorted(points.items()))],
        title="Step time",
        text="Time from one logged step to the next, including waits for data and"
        " saves; a world's first step includes compilation. The axis is logarithmic.",
        axes=("step", "ms"),
        is_log=True,
    )


def _recoveries(record: RunRecords) -> Section:
    title, changes = "Time per slice change", record.named("recovered")[-_MOST_ROWS:]
    if not changes:
        return Section(title=title, text="The slices did not change.")
    fields = [f"{phase}_secs" for phase in goodput.PHASES]
    return Section(
        title=title,
        text="Time from the failure, or the request to leave, to the first step of the"
        " next world.",
        spec=page.bars(
            [
                (f"to world {each['world']}", [each[field] for field in fields])
                for each in changes[-_MOST_BARS:]
            ],
            page.coloured(goodput.PHASES),
            unit="s",
        ),
        columns=("world", "steps lost", "seconds", *goodput.PHASES),
        rows=[
            (
                *(str(each["world"]), str(each["steps_lost"])),
                *(f"{each[name]:.2f}" for name in ("secs", *fields)),
            )
            for each in changes
        ],
    )


def _sample_order(record: RunRecords) -> Section:
    attempts = [
        (each, sum(record.lineage.get(step.step) is step for step in each.records))
        for each in record.attempts[-_MOST_BARS:]
    ]
    spec = page.bars(
        [
            (
                f"{each.attempt}: {each.hosts} hosts",
                [each.start_step, num_counted, len(each.records) - num_counted],
            )
            for each, num_counted in attempts
        ],
        {
            "before it": COLORS[7],
            "counts": page.GOOD,
            "retrained": page.LOST,
        },
        unit="steps",
        totals=[
            f"{each.start_step + 1:,} to {each.records[-1].step + 1:,}"
            if each.records
            else "none"
            for each, _ in attempts
        ],
    )
    title, spec = "Sample order and steps per attempt", spec if attempts else None
    audit = record.audit
    if isinstance(audit, str):
        return Section(title=title, text=audit, spec=spec)
    verdict, mood = _outcome(audit)
    return Section(
        title=title,
        verdict=verdict,
        mood=mood,
        text=audit.first_difference
        or audit.missing_checkpoint
        or f"Each of the {audit.num_steps:,} steps used the examples and values of the"
        " one-host run's batch, in the same order. No example was lost or repeated.",
        spec=spec,
        columns=("figure of the audit", "value"),
        rows=[(key, str(value)) for key, value in vars(audit).items()],
    )


def _outcome(audit: audit_run.Audit | str) -> tuple[str, Mood]:
    if isinstance(audit, str):
        return "", ""
    return ("PASSED", "good") if audit.passed else ("FAILED", "bad")


def _of_lines(
    series: Sequence[Series],
    *,
    title: str,
    text: str,
    axes: tuple[str, str],
    **options: Any,
) -> Section:
    # A plot and a table of its values.
    if not any(each.points for each in series):
        return Section(title=title, text="Nothing was recorded.")
    points = [(each.name, x, y) for each in series for x, y in each.points]
    every = max(1, -(-len(points) // _MOST_ROWS))
    return Section(
        title=title,
        text=text,
        spec=page.lines(series, x=axes[0], y=axes[1], **options),
        columns=("line", *axes),
        rows=[(name, f"{x:,.6g}", f"{y:,.6g}") for name, x, y in points[::every]],
    )


def _details(event: Event) -> str:
    return ", ".join(
        f"{key}: {event[key]}" for key in event if key not in ("time", "event")
    )


def _utc(secs: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(secs))
