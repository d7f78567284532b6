"""The report of a run as sections of a page: plots, and the numbers behind them.

Everything here is a pure function of what the run has written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from elastic_ckpt.core import metrics
from elastic_ckpt.inspect import plot, replica_findings
from elastic_ckpt.inspect.report_page import Section, page
from elastic_ckpt.inspect.run_record import MOST_ROWS, Record
from elastic_ckpt.inspect.status import Event

# Events that end the training of a world.
_ENDS = (
    *("slice_lost", "host_lost", "world_left"),
    *("run_finished", "run_stopped", "run_failed"),
)
# Phases of a change by the field of the event `recovered`.
_PHASES = {
    "end_secs": "end of the world",
    "decide_secs": "decide",
    "start_secs": "start and join",
    "prepare_secs": "prepare",
    "restore_secs": "restore",
    "compile_secs": "load or compile",
    "step_secs": "first step",
}


def report(record: Record) -> str:
    """The page, as HTML."""
    replicas = replica_findings.section(record.events, most_rows=MOST_ROWS)
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.made_secs))
    return page(
        f"Run {record.run}",
        f"{record.directory}, as of {made}",
        _facts(record),
        [
            _slices(record),
            _loss(record),
            _step_time(record),
            _goodput(record),
            _verdicts(record),
            _recoveries(record),
            _tiers(record),
            *([_mixture(record)] if record.mixtures else []),
            *([replicas] if replicas else []),
            _audit(record),
        ],
    )


def _facts(record: Record) -> list[tuple[str, str]]:
    steps = {each.start_step + len(each.losses) for each in record.attempts}
    losses: dict[int, float] = {}
    for each in record.attempts:
        losses |= record.losses(each)
    recoveries = record.named("recovered")
    spent = record.goodput_secs()
    total = sum(spent.values())
    return [
        ("steps", plot.number(max(steps, default=0))),
        ("loss", f"{losses[max(losses)]:.4f}" if losses else "none"),
        ("goodput", f"{100 * spent['productive'] / total:.1f} %" if total else "none"),
        ("changes of slices", str(len(recoveries))),
        ("steps lost", str(sum(e["steps_lost"] for e in recoveries))),
        (
            "bad copies read",
            str(sum(e["bad_copies"] for e in record.named("restored_from"))),
        ),
        ("restores distrusted", str(len(record.named("restore_distrusted")))),
    ]


def _slices(record: Record) -> Section:
    began = record.began_secs
    chosen: list[plot.Point] = []
    training: list[plot.Point] = [(0.0, 0.0)]
    slices = 0
    for event in record.events:
        minutes = (event["time"] - began) / 60
        name = event["event"]
        if name == "world_started":
            chosen.append((minutes, len(event["slices"])))
        elif name == "run_started":
            slices = event["slices"]
            if not record.named("world_started"):
                chosen.append((minutes, slices))
        elif name in ("compiled", "executable_loaded") and not training[-1][1]:
            training.append((minutes, slices))
        elif name in _ENDS and training[-1][1]:
            training.append((minutes, 0.0))
    end = (record.events[-1]["time"] - began) / 60 if record.events else 0.0
    training.append((end, training[-1][1]))
    chosen += [(end, chosen[-1][1])] if chosen else []
    lines = plot.Lines(
        title="Slices over time",
        description="The slices of each world, and those that train.",
        x_label="minutes since the first event",
        y_label="slices",
        series=[
            plot.Series(name="training", points=training, kind="area"),
            plot.Series(
                name="chosen", points=chosen, kind="steps", is_dashed=True, colour=1
            ),
        ],
        marks=_marks(record),
        from_zero=True,
    )
    return Section(
        title="Slices over time",
        text="The filled part trains; gaps are starts and changes. A dotted vertical"
        " line is the loss of a slice or host.",
        svg=lines.svg(),
        columns=("minute", "event", "details"),
        rows=[
            (f"{(e['time'] - began) / 60:.2f}", e["event"], _details(e))
            for e in record.events
            if e["event"] in ("world_started", "slice_returned", "run_started", *_ENDS)
        ][-MOST_ROWS:],
    )


def _loss(record: Record) -> Section:
    counted: list[plot.Point] = []
    lost: list[plot.Point] = []
    for attempt, num_counted in record.attempts_with_counted():
        for step, loss in record.losses(attempt).items():
            counts = step < attempt.start_step + num_counted
            (counted if counts else lost).append((float(step + 1), loss))
    series = [plot.Series(name="steps that count", points=counted)]
    if lost:
        again = plot.Series(
            name="lost, and trained again", points=lost, kind="dots", colour=1
        )
        series.append(again)
    return _lines_section(
        plot.Lines(
            title="Loss",
            description="The loss of each step before its update.",
            x_label="step",
            y_label="loss",
            series=series,
        ),
        text="Over the global batch, from the step log."
        + (
            f" {len(lost)} steps were lost in changes and trained again."
            if lost
            else ""
        ),
        columns=("step", "loss"),
    )


def _step_time(record: Record) -> Section:
    points: dict[float, float] = {}
    for line in record.lines(metrics.TRAIN_STEP):
        points[float(line["step"])] = 1000 * line["sum"] / line["count"]
    return _lines_section(
        plot.Lines(
            title="Step time",
            description="The milliseconds of each step, on a logarithmic axis.",
            x_label="step",
            y_label="ms a step",
            series=[plot.Series(name="step", points=sorted(points.items()))],
            is_log=True,
        ),
        text="From one logged step to the next, with waits for data and saves; the"
        " first step of a world includes compiling.",
        columns=("step", "ms"),
    )


def _goodput(record: Record) -> Section:
    spent = {cause: secs for cause, secs in record.goodput_secs().items() if secs}
    total = sum(spent.values())
    if not total:
        return Section(title="Goodput", text="No metrics of goodput were recorded.")
    texts = {
        metric.name.split("/")[-1].removesuffix("_secs"): metric.meaning
        for metric in metrics.GOODPUT_SECS.values()
    }
    bars = plot.Bars(
        title="Goodput",
        description="The seconds of the run by cause.",
        rows=[
            (
                cause.replace("_", " "),
                [secs, 0.0] if cause == "productive" else [0.0, secs],
            )
            for cause, secs in spent.items()
        ],
        parts=[("trained new steps", 2), ("lost", 1)],
        unit="s",
        totals=[
            f"{plot.number(secs)} s, {100 * secs / total:.1f} %"
            for secs in spent.values()
        ],
    )
    return Section(
        title="Goodput",
        text=f"{100 * spent.get('productive', 0) / total:.1f} % of {total:,.0f} s"
        " trained new steps. Times in which no process of the run lived do not count.",
        svg=bars.svg(),
        columns=("cause", "seconds", "meaning"),
        rows=[(cause, f"{secs:.2f}", texts[cause]) for cause, secs in spent.items()],
    )


def _verdicts(record: Record) -> Section:
    judged = record.named("verdict")[-MOST_ROWS:]
    if not judged:
        return Section(title="Verdicts", text="Nothing failed.")
    began = record.began_secs
    return Section(
        title="Verdicts",
        text="What failed in each interruption, by which evidence, and what was to be"
        " done.",
        columns=(
            *("minute", "kind", "what failed", "phase", "step", "since"),
            *("action", "verdict", "evidence"),
        ),
        rows=[
            (
                f"{(each['time'] - began) / 60:.2f}",
                each["kind"],
                f"{each['what']} {each['which']}".rstrip(),
                each["phase"],
                str(each["step"]),
                time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(each["since"])),
                each["action"],
                each["why"],
                "; ".join(each["evidence"]),
            )
            for each in judged
        ],
    )


def _recoveries(record: Record) -> Section:
    changes = record.named("recovered")[-MOST_ROWS:]
    if not changes:
        return Section(title="Recoveries", text="The slices did not change.")
    bars = plot.Bars(
        title="Phases of each change",
        description="The seconds of each change of slices, by phase.",
        rows=[
            (f"to world {each['world']}", [each[phase] for phase in _PHASES])
            for each in changes[-20:]
        ],
        parts=[(name, place) for place, name in enumerate(_PHASES.values())],
        unit="s",
    )
    return Section(
        title="Recoveries",
        text="From the failure, or the request to leave, to the first step of the next"
        " world.",
        svg=bars.svg(),
        columns=("world", "steps lost", "seconds", *_PHASES.values()),
        rows=[
            (
                str(each["world"]),
                str(each["steps_lost"]),
                f"{each['secs']:.2f}",
                *(f"{each[phase]:.2f}" for phase in _PHASES),
            )
            for each in changes
        ],
    )


def _tiers(record: Record) -> Section:
    began = record.began_secs
    kinds = {
        "saved": "complete",
        "replicated": "copied to peers",
        "backed_up": "in storage",
    }
    trained = [
        ((line["time"] - began) / 60, float(line["step"]))
        for line in record.lines(metrics.TRAIN_LOSS)
    ]
    series = [plot.Series(name="trained", points=trained, kind="steps", is_dashed=True)]
    for event, name in kinds.items():
        points = [
            ((each["time"] - began) / 60, float(each["step"]))
            for each in record.named(event)
        ]
        if points:
            series.append(
                plot.Series(name=name, points=points, kind="steps", colour=len(series))
            )
    return _lines_section(
        plot.Lines(
            title="Newest step of each tier",
            description="The newest step in RAM, at peers and in storage over time.",
            x_label="minutes since the first event",
            y_label="step",
            series=series,
            marks=_marks(record),
        ),
        text="The distance to the trained step is what a loss would cost.",
        columns=("minute", "step"),
        of_series=len(series) - 1,
    )


def _mixture(record: Record) -> Section:
    names = sorted({name for each in record.mixtures for name in each.weights})
    series = []
    for place, name in enumerate(names):
        colour = place % plot.COLOURS
        consumed, weights = [], []
        for each in record.mixtures:
            total, weight = sum(each.taken.values()), sum(each.weights.values())
            if total:
                share = 100 * each.taken.get(name, 0) / total
                consumed.append((float(each.step), share))
            weights.append((float(each.step), 100 * each.weights.get(name, 0) / weight))
        series += [
            plot.Series(name=f"{name}: consumed", points=consumed, colour=colour),
            plot.Series(
                name=f"{name}: weight", points=weights, is_dashed=True, colour=colour
            ),
        ]
    newest = record.mixtures[-1]
    return _lines_section(
        plot.Lines(
            title="Mixture",
            description="The share of each dataset, consumed and by weight.",
            x_label="step in storage",
            y_label="% of documents",
            series=series,
            from_zero=True,
        ),
        text=f"Documents that the cursors of each stored step have taken;"
        f" {sum(newest.taken.values()):,} by step {newest.step:,}. A shard takes whole"
        " documents, so shares of few documents are far from the weights.",
        columns=("step", "% consumed"),
    )


def _audit(record: Record) -> Section:
    rows = [
        (
            f"{each.number}: {each.hosts} hosts",
            [
                float(each.start_step),
                float(num_counted),
                float(len(each.losses) - num_counted),
            ],
        )
        for each, num_counted in record.attempts_with_counted()
    ]
    bars = plot.Bars(
        title="Steps of each attempt",
        description="Which steps each world trained, and which of them were lost.",
        rows=rows[-20:],
        parts=[("before it", 7), ("count", 2), ("lost, and trained again", 1)],
        unit="steps",
        totals=[
            f"{each.start_step + 1:,} to {each.start_step + len(each.losses):,}"
            if each.losses
            else "none"
            for each in record.attempts
        ][-20:],
    )
    audit = record.audit
    if isinstance(audit, str):
        return Section(title="Sample order", text=audit, svg=bars.svg() if rows else "")
    problem = audit["first_difference"] or audit["missing_checkpoint"]
    return Section(
        title="Sample order",
        verdict="PASSED" if audit["passed"] else "FAILED",
        is_good=audit["passed"],
        text=problem
        or f"Each of the {audit['num_steps']:,} steps used the examples and tokens of"
        f" the one-host run's batch; {audit['num_row_identical_steps']:,} have its"
        f" order of rows, promised for {audit['num_row_promised_steps']:,}. No example"
        " was lost or repeated.",
        svg=bars.svg() if rows else "",
        columns=("figure of the audit", "value"),
        rows=[(key, str(value)) for key, value in audit.items()],
    )


def _lines_section(
    lines: plot.Lines, *, text: str, columns: Sequence[str], of_series: int = 0
) -> Section:
    # A plot with the numbers of one of its lines.
    if not any(each.points for each in lines.series):
        return Section(title=lines.title, text="Nothing was recorded.")
    points = lines.series[of_series].points
    every = max(1, -(-len(points) // MOST_ROWS))
    return Section(
        title=lines.title,
        text=text,
        svg=lines.svg(),
        columns=columns,
        rows=[(f"{x:,.6g}", f"{y:,.6g}") for x, y in points[::every]],
    )


def _marks(record: Record) -> list[tuple[float, str]]:
    began = record.began_secs
    return [
        ((e["time"] - began) / 60, f"{e['event']}: {_details(e)}")
        for e in record.events
        if e["event"] in ("slice_lost", "host_lost", "slow_host", "run_failed")
    ]


def _details(event: Event) -> str:
    fields = {key: event[key] for key in event if key not in ("time", "event")}
    return ", ".join(f"{key}: {value}" for key, value in fields.items())
