"""Alerts, dashboard and runbook: what ships is what the code writes, and it works.

`test_observed_runs.py` has the alerts of real runs.
"""

import inspect
import itertools
import json
import pathlib
import re
import subprocess

import pytest
import yaml

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.deploy import alerts, dashboard, runbook
from elastic_ckpt.elastic import verdict
from tests import prometheus_server

ROOT = pathlib.Path(__file__).parents[2]
SHIPPED = ROOT / "configs" / "monitoring"
PARTS = {"gauge": [""], "counter": [""], "duration": ["sum", "count", "bucket"]}
# The series that a run serves.
SERVED = {
    alerts.series(metric, part)
    for metric in metrics.METRICS.values()
    for part in PARTS[metric.kind]
}
# The series of a run of two hosts and a supervisor, minute by minute, and when faults
# begin in it.
MINUTES, FAULT = range(181), 60
HOSTS, RUN = ("10.0.0.1:9400", "10.0.0.2:9400"), "10.0.0.1:9401"


def name_of(metric, part=""):
    return alerts.series(metric, part)


def healthy():
    """By name and instance, the values of a run that makes a step in a second."""
    served = {}
    for instance in (*HOSTS, RUN):
        served["up", instance] = [1 for _ in MINUTES]
        served[name_of(metrics.TRAIN_CLAIM), instance] = [3 for _ in MINUTES]
        for metric in metrics.METRICS.values():
            if metric.kind == "counter":
                served[name_of(metric), instance] = [0 for _ in MINUTES]
        steps = [0 if instance in HOSTS else 60 * minute for minute in MINUTES]
        served[name_of(metrics.TRAIN_STEP, "count"), instance] = steps
    for host in HOSTS:
        for metric in (metrics.DATA_WAIT, metrics.CHECKPOINT_SAVE_BLOCK):
            served[name_of(metric, "sum"), host] = [0.6 * minute for minute in MINUTES]
        served[name_of(metrics.DATA_SAVE_BLOCK, "count"), host] = [*MINUTES]
        saves = [*MINUTES] if host == HOSTS[0] else [0 for _ in MINUTES]
        served[name_of(metrics.CHECKPOINT_SAVE, "count"), host] = saves
    productive = metrics.GOODPUT_SECS["productive"]
    of_run = {
        name_of(metrics.TRAIN_STEPS): [60 * minute for minute in MINUTES],
        name_of(metrics.TRAIN_PLANNED): [1_000_000 for _ in MINUTES],
        name_of(metrics.TRAIN_STEP_RATE): [1 for _ in MINUTES],
        name_of(metrics.TRAIN_LOSS): [2 for _ in MINUTES],
        name_of(metrics.MISSING_SLICES): [0 for _ in MINUTES],
        name_of(metrics.STORED_STEPS): [minute // 10 * 600 for minute in MINUTES],
        name_of(productive, "sum"): [57 * minute for minute in MINUTES],
    }
    served |= {(name, RUN): values for name, values in of_run.items()}
    # A backup is in progress for most of the time.
    backlog = [int(minute % 10 < 8) for minute in MINUTES]
    served[name_of(metrics.CHECKPOINT_BACKLOG), HOSTS[0]] = backlog
    return served


def since(metric, after, *, part="", instances=(RUN,)):
    """From the fault on, other values: one, or a function of minutes and the last."""

    def change(served):
        name = name_of(metric, part)
        for instance in instances:
            before = served.get((name, instance), ["_" for _ in MINUTES])
            served[name, instance] = before[:FAULT] + [
                after(minute, before[FAULT]) if callable(after) else after
                for minute in range(len(MINUTES) - FAULT)
            ]

    return change


def stays(minutes, last):
    del minutes
    return last


def grows(rate):
    """By so many seconds a second."""
    return lambda minutes, last: last + rate * 60 * minutes


def ends(*instances):
    def change(served):
        for name, instance in served:
            if instance in instances:
                after = ["stale", *("_" for _ in MINUTES[FAULT + 1 :])]
                if name == "up":
                    after = [0 for _ in MINUTES[FAULT:]]
                served[name, instance] = served[name, instance][:FAULT] + after

    return change


def before(metric, value):
    """What the supervisor serves until the fault."""

    def change(served):
        place = name_of(metric), RUN
        served[place] = [value for _ in MINUTES[:FAULT]] + served[place][FAULT:]

    return change


PRODUCTIVE = metrics.GOODPUT_SECS["productive"]
FIRST, SECOND = HOSTS[:1], HOSTS[1:]
# What happens, and at which minutes which alerts fire.
FAULTS = {
    "nothing": ([], {30: [], 60: [], 120: [], 180: []}),
    "it dies": (
        [ends(*HOSTS, RUN)],
        {63: [], 66: ["RunEndedEarly"], 118: ["RunEndedEarly"], 130: []},
    ),
    "it is done": (
        [before(metrics.TRAIN_PLANNED, 60 * FAULT), ends(*HOSTS, RUN)],
        {61: [], 70: [], 100: [], 118: [], 150: []},
    ),
    "it hangs": (
        [
            since(metrics.TRAIN_STEP, stays, part="count"),
            since(PRODUCTIVE, stays, part="sum"),
        ],
        {70: [], 77: ["RunMakesNoSteps"], 150: ["RunGoodputLow", "RunMakesNoSteps"]},
    ),
    "it trains little": (
        [since(PRODUCTIVE, grows(0.3), part="sum")],
        {150: ["RunGoodputLow"]},
    ),
    "a slice is lost": (
        [since(metrics.MISSING_SLICES, 1)],
        {74: [], 76: ["RunLacksSlices"]},
    ),
    "a host is gone": ([ends(HOSTS[1])], {64: [], 66: ["RunTargetDown"], 130: []}),
    "the loss is NaN": ([since(metrics.TRAIN_LOSS, "NaN")], {60: ["RunLossNotFinite"]}),
    "the loss is infinite": (
        [since(metrics.TRAIN_LOSS, "Inf")],
        {60: ["RunLossNotFinite"]},
    ),
    "a divergence": (
        [since(metrics.FINDINGS, 1)],
        {59: [], 61: ["RunDiverged"], 118: ["RunDiverged"], 121: []},
    ),
    "a divergence at the start": (
        [before(metrics.FINDINGS, "_"), since(metrics.FINDINGS, 2)],
        {60: ["RunDiverged"], 121: []},
    ),
    "wrong values": (
        [since(metrics.VALIDATION_FINDINGS, 4, instances=FIRST)],
        {59: [], 61: ["RunReplicasDiffer"]},
    ),
    "damaged copies": (
        [since(metrics.CHECKPOINT_BAD_COPIES, 2, instances=FIRST)],
        {59: [], 61: ["RunReadBadCopies"]},
    ),
    "all copies in RAM are lost": (
        [since(metrics.CHECKPOINT_READ["persistent"], 10**9, instances=FIRST)],
        {59: [], 61: ["RunRestoredFromStorage"], 77: []},
    ),
    "a full disk": (
        [since(metrics.CHECKPOINT_FAILURES, 1, instances=FIRST)],
        {59: [], 61: ["RunSavesFail"], 77: []},
    ),
    "no save is complete": (
        [since(metrics.CHECKPOINT_SAVE, stays, part="count", instances=HOSTS)],
        {119: [], 151: ["RunSavesNothing"]},
    ),
    "storage takes nothing": (
        [
            since(metrics.CHECKPOINT_BACKLOG, 3, instances=FIRST),
            since(metrics.STORED_STEPS, stays),
        ],
        {89: [], 121: ["RunBackupsBehind"]},
    ),
    "saves are slow": (
        [since(metrics.CHECKPOINT_SAVE_BLOCK, grows(0.3), part="sum", instances=HOSTS)],
        {68: [], 85: ["RunBlockedBySaves"]},
    ),
    "the data are slow on one host": (
        [since(metrics.DATA_WAIT, grows(0.3), part="sum", instances=SECOND)],
        {68: [], 85: ["RunWaitsForData"]},
    ),
    "it is started twice": (
        [since(metrics.TRAIN_CLAIM, 4)],
        {64: [], 66: ["RunClaimsDisagree"]},
    ),
}


def unit_test(changes, firing):
    """A group of promtool's tests of rules: which alerts fire, and no others."""
    served = healthy()
    for change in changes:
        change(served)
    labels = 'namespace="research",job="llama"'
    severities = {alert.name: alert.severity for alert in alerts.ALERTS}

    def sample(name):
        also = f',instance="{HOSTS[1]}"' if name == "RunTargetDown" else ""
        return (
            f'ALERTS{{alertname="{name}",alertstate="firing",'
            f'severity="{severities[name]}",{labels}{also}}}'
        )

    return {
        "interval": "1m",
        "input_series": [
            {
                "series": f'{name}{{{labels},instance="{instance}"}}',
                "values": " ".join(map(str, values)),
            }
            for (name, instance), values in served.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'ALERTS{alertstate="firing"}',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": sample(name), "value": 1} for name in names],
            }
            for minute, names in firing.items()
        ],
    }


def promtool(*arguments):
    program = prometheus_server.program("promtool")
    ran = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_what_ships_is_what_the_list_of_metrics_makes(golden):
    golden(SHIPPED / "alerts.yaml", alerts.rules())
    golden(SHIPPED / "dashboard.json", dashboard.dashboard())


def test_rules_and_queries_use_series_that_a_run_serves():
    exprs = [rule["expr"] for rule in rules_of(alerts.rules())]
    for query in [*exprs, *(query for _, query in dashboard.queries())]:
        assert set(re.findall(r"\belastic_ckpt_\w+", query)) <= SERVED, query


def rules_of(text):
    (group,) = yaml.safe_load(text)["groups"]
    return group["rules"]


def test_every_alert_leads_to_its_entry_of_the_runbook():
    rules = rules_of(alerts.rules(site="https://docs.example.com/"))
    # As the site names its headings.
    headings = re.findall(r"^### (\w+)$", runbook.page().lower(), re.MULTILINE)
    page = "https://docs.example.com/reference/runbook/#"
    urls = [rule["annotations"]["runbook_url"] for rule in rules]
    assert len({*urls}) == len(urls)
    assert {*urls} <= {page + heading for heading in headings}
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "$labels.job" in rule["annotations"]["summary"]


def test_the_runbook_has_one_entry_for_each_alert_verdict_and_class_of_errors():
    listed = [entry.name for entries in runbook.SECTIONS.values() for entry in entries]
    assert len(listed) == len(set(listed))
    assert [entry.name for entry in runbook.ALERTS] == [a.name for a in alerts.ALERTS]
    assert [entry.name for entry in runbook.VERDICTS] == [k.name for k in verdict.KINDS]
    assert {entry.name for entry in runbook.ERRORS} == classes_of_errors()


def classes_of_errors():
    """The classes that derive from ElasticCkptError, found in the code."""
    found = re.compile(r"^class (\w+Error)\(\s*([^)]*)\)", re.MULTILINE)
    files = [*(ROOT / "elastic_ckpt").rglob("*.py"), *(ROOT / "sidecar").rglob("*.py")]
    bases = [
        (name, set(re.findall(r"\w+Error\b", of)))
        for file in files
        for name, of in found.findall(file.read_text())
    ]
    ours = {name for name, _ in inspect.getmembers(errors) if name.endswith("Error")}
    while more := {name for name, of in bases if of & ours} - ours:
        ours |= more
    return ours


def test_the_panels_of_the_dashboard_lie_side_by_side_and_show_every_metric():
    top = json.loads(dashboard.dashboard())["panels"]
    rows = [panel for panel in top if panel["type"] == "row"]
    folded = [panel for row in rows for panel in row["panels"]]
    for panels in (top, *(row["panels"] for row in rows)):
        taken = [place for panel in panels for place in places(**panel["gridPos"])]
        assert len({*taken}) == len(taken)
        assert max(x for x, _ in taken) < 24
    numbers = [panel["id"] for panel in (*top, *folded)]
    assert len({*numbers}) == len(numbers)
    assert [panel["title"] for panel in folded] == [
        name.removeprefix("/elastic_ckpt/") for name in metrics.METRICS
    ]


def places(x, y, w, h):
    return itertools.product(range(x, x + w), range(y, y + h))


def test_the_picture_of_the_pages_has_the_answers_to_the_queries_of_the_dashboard():
    recorded = json.loads((ROOT / "docs" / "dashboard.json").read_text())["panels"]
    for panel, kept in zip(dashboard.PANELS, recorded, strict=True):
        asked = [query for query, _ in panel.queries]
        assert [each["query"] for each in kept["queries"]] == asked, panel.title
        assert any(each["series"] for each in kept["queries"]), panel.title


def test_the_times_of_all_rules_are_scaled_together():
    shipped, fast = alerts.rules(), alerts.rules(scale=1 / 60)
    secs = {"h": 3600, "m": 60, "s": 1}

    def times(text):
        rules = " ".join(f"{r.get('for')} {r['expr']}" for r in rules_of(text))
        return [int(n) * secs[u] for n, u in re.findall(r"\b(\d+)([hms])\b", rules)]

    assert times(shipped) == [60 * each for each in times(fast)]


@pytest.mark.slow
def test_promtool_accepts_the_rules():
    promtool("check", "rules", SHIPPED / "alerts.yaml")


@pytest.mark.slow
def test_alerts_fire_on_their_faults_and_no_others_do(tmp_path):
    groups = [
        {"name": fault, **unit_test(*happens)} for fault, happens in FAULTS.items()
    ]
    fired = {name for _, f in FAULTS.values() for names in f.values() for name in names}
    assert fired == {alert.name for alert in alerts.ALERTS}
    path = tmp_path / "test.yml"
    rules = str(SHIPPED / "alerts.yaml")
    path.write_text(yaml.safe_dump({"rule_files": [rules], "tests": groups}))
    promtool("test", "rules", path)
