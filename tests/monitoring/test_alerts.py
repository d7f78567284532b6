"""The alerts and the dashboard in `configs/monitoring`, and their runbook."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest
import yaml

from elastic_ckpt.core import metrics
from elastic_ckpt.monitoring import prometheus

ROOT = pathlib.Path(__file__).parents[2]
SHIPPED = ROOT / "configs" / "monitoring"
PARTS = {"gauge": [""], "counter": [""], "duration": ["sum", "count", "bucket"]}


def name_of(metric, part=""):
    """The name of a metric's series, or of a part of a histogram."""
    ending = "total" if metric.kind == "counter" else part
    return "_".join(filter(None, [prometheus.spelling(metric), ending]))


# The series that a run serves.
SERVED = {
    name_of(metric, part)
    for metric in metrics.METRICS.values()
    for part in PARTS[metric.kind]
}
(GROUP,) = yaml.safe_load((SHIPPED / "alerts.yaml").read_text())["groups"]
RULES = {rule["alert"]: rule for rule in GROUP["rules"]}
# The series of a run of two hosts and a supervisor, minute by minute, and when faults
# begin in it.
MINUTES, FAULT = range(181), 60
HOSTS, RUN = ("10.0.0.1:9400", "10.0.0.2:9400"), "10.0.0.1:9401"


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

    def sample(name):
        also = f',instance="{HOSTS[1]}"' if name == "RunTargetDown" else ""
        return (
            f'ALERTS{{alertname="{name}",alertstate="firing",'
            f'severity="{RULES[name]["labels"]["severity"]}",{labels}{also}}}'
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


def test_rules_and_queries_use_series_that_a_run_serves():
    dashboard = json.loads((SHIPPED / "dashboard.json").read_text())
    targets = [each for panel in dashboard["panels"] for each in panel["targets"]]
    for query in [*(r["expr"] for r in RULES.values()), *(t["expr"] for t in targets)]:
        assert set(re.findall(r"\belastic_ckpt_\w+", query)) <= SERVED, query


def test_each_alert_leads_to_its_entry_in_the_runbook():
    for name, rule in RULES.items():
        url = rule["annotations"]["runbook_url"]
        assert url.endswith(f"/reference/runbook/#{name.lower()}")


@pytest.mark.night
def test_alerts_fire_on_their_faults_and_no_others_do(tmp_path):
    groups = [
        {"name": fault, **unit_test(*happens)} for fault, happens in FAULTS.items()
    ]
    fired = {name for _, f in FAULTS.values() for names in f.values() for name in names}
    assert fired == RULES.keys()
    path = tmp_path / "test.yml"
    rules = str(SHIPPED / "alerts.yaml")
    path.write_text(yaml.safe_dump({"rule_files": [rules], "tests": groups}))
    program = shutil.which("promtool")
    assert program, "no promtool: apt-get install -y prometheus"
    for words in (("check", "rules", rules), ("test", "rules", str(path))):
        ran = subprocess.run([program, *words], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
