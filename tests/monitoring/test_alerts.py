"""The alerts and the dashboard in `configs/monitoring`, and their runbook."""

import fnmatch
import json
import pathlib
import re
import subprocess

import pytest
import yaml

from elastic_ckpt.core import metrics
from elastic_ckpt.monitoring import prometheus

SHIPPED = pathlib.Path(__file__).parents[2] / "configs" / "monitoring"
ENDINGS = {
    "gauge": [""],
    "counter": ["_total"],
    "duration": ["_sum", "_count", "_bucket"],
}
# The series that a run serves.
SERVED = {
    prometheus.spelling(metric) + ending
    for metric in metrics.METRICS.values()
    for ending in ENDINGS[metric.kind]
}
(GROUP,) = yaml.safe_load((SHIPPED / "alerts.yaml").read_text())["groups"]
RULES = {rule["alert"]: rule for rule in GROUP["rules"]}
# A run of two hosts and a supervisor, minute by minute, and when faults begin in it.
MINUTES, FAULT = 181, 60
FIRST, SECOND, RUN = "10.0.0.1:9400", "10.0.0.2:9400", "10.0.0.1:9401"
HOSTS, ALL = (FIRST, SECOND), (FIRST, SECOND, RUN)
OURS = "elastic_ckpt_"
# The series of a run that makes a step in a second; the last row of one counts.
HEALTHY = (
    ([1] * MINUTES, ALL, "up"),
    ([3] * MINUTES, ALL, "train_claim"),
    ([0] * MINUTES, ALL, *(name for name in SERVED if name.endswith("_total"))),
    ([0] * MINUTES, HOSTS, "train_step_seconds_count"),
    ([0] * MINUTES, HOSTS, "checkpoint_save_seconds_count"),
    ([0.6 * n for n in range(MINUTES)], HOSTS, "data_wait_seconds_sum"),
    ([0.6 * n for n in range(MINUTES)], HOSTS, "checkpoint_save_block_seconds_sum"),
    ([*range(MINUTES)], HOSTS, "data_save_block_seconds_count"),
    ([*range(MINUTES)], [FIRST], "checkpoint_save_seconds_count"),
    # A backup is in progress for most of the time.
    ([int(n % 10 < 8) for n in range(MINUTES)], [FIRST], "checkpoint_backlog_steps"),
    ([n // 10 * 600 for n in range(MINUTES)], [RUN], "run_stored_steps"),
    ([60 * n for n in range(MINUTES)], [RUN], "train_steps"),
    ([60 * n for n in range(MINUTES)], [RUN], "train_step_seconds_count"),
    ([57 * n for n in range(MINUTES)], [RUN], "goodput_productive_seconds_sum"),
    ([1_000_000] * MINUTES, [RUN], "train_planned_steps"),
    ([1] * MINUTES, [RUN], "train_steps_per_sec"),
    ([2] * MINUTES, [RUN], "train_loss"),
    ([0] * MINUTES, [RUN], "run_missing_slices"),
)


def since(value):
    return lambda values: values[:FAULT] + [value] * (MINUTES - FAULT)


def until(value):
    return lambda values: [value] * FAULT + values[FAULT:]


def grows(rate):
    """By so many seconds a second."""
    more = [rate * 60 * n for n in range(MINUTES - FAULT)]
    return lambda values: values[:FAULT] + [values[FAULT] + each for each in more]


def gone(values):
    return values[:FAULT] + ["stale"] + ["_"] * (MINUTES - FAULT - 1)


def end(*instances):
    return [(gone, f"{OURS}*", *instances), (since(0), "up", *instances)]


STEPS, PRODUCTIVE = "*_train_step_seconds_count", "*_productive_seconds_sum"
# At which minutes which alerts fire, and what happens to which series of which targets.
FAULTS = (
    ({30: "", 60: "", 120: "", 180: ""},),
    ({63: "", 66: "RunEndedEarly", 118: "RunEndedEarly", 130: ""}, *end(*ALL)),
    # A run that is done ends, too.
    (
        {61: "", 70: "", 100: "", 118: "", 150: ""},
        (until(60 * FAULT), "*_planned_steps", RUN),
        *end(*ALL),
    ),
    (
        {70: "", 77: "RunMakesNoSteps", 150: "RunGoodputLow RunMakesNoSteps"},
        (grows(0), STEPS, RUN),
        (grows(0), PRODUCTIVE, RUN),
    ),
    ({150: "RunGoodputLow"}, (grows(0.3), PRODUCTIVE, RUN)),
    ({74: "", 76: "RunLacksSlices"}, (since(1), "*_missing_slices", RUN)),
    ({64: "", 66: "RunTargetDown", 130: ""}, *end(SECOND)),
    ({60: "RunLossNotFinite"}, (since("NaN"), "*_train_loss", RUN)),
    (
        {59: "", 61: "RunDiverged", 118: "RunDiverged", 121: ""},
        (since(1), "*_run_findings_total", RUN),
    ),
    (
        {60: "RunDiverged", 121: ""},
        (until("_"), "*_run_findings_total", RUN),
        (since(2), "*_run_findings_total", RUN),
    ),
    *(
        ({59: "", 61: alert, end: ""}, (since(1), series, FIRST))
        for alert, end, series in (
            ("RunReplicasDiffer", 121, "*_validation_findings_total"),
            ("RunReadBadCopies", 121, "*_bad_copies_total"),
            ("RunRestoredFromStorage", 77, "*_read_persistent_bytes_total"),
            ("RunSavesFail", 77, "*_tier_failures_total"),
        )
    ),
    (
        {119: "", 151: "RunSavesNothing"},
        (grows(0), "*_checkpoint_save_seconds_count", *HOSTS),
    ),
    (
        {89: "", 121: "RunBackupsBehind"},
        (since(3), "*_backlog_steps", FIRST),
        (grows(0), "*_stored_steps", RUN),
    ),
    (
        {68: "", 85: "RunBlockedBySaves"},
        (grows(0.3), "*_checkpoint_save_block_seconds_sum", *HOSTS),
    ),
    ({68: "", 85: "RunWaitsForData"}, (grows(0.3), "*_data_wait_seconds_sum", SECOND)),
    # It is started twice.
    ({64: "", 66: "RunClaimsDisagree"}, (since(4), "*_train_claim", RUN)),
)


def unit_test(firing, *changes):
    """A group of promtool's tests of rules: which alerts fire, and no others."""
    served = {}
    for values, instances, *names in HEALTHY:
        for name in names:
            series = name if name == "up" else OURS + name.removeprefix(OURS)
            assert series in {*SERVED, "up"}
            served |= {(series, instance): values for instance in instances}
    for change, pattern, *instances in changes:
        changed = [
            (name, instance)
            for name, instance in served
            if instance in instances and fnmatch.fnmatch(name, pattern)
        ]
        assert changed, pattern
        served |= {place: change(served[place]) for place in changed}
    labels = 'namespace="research",job="llama"'

    def sample(name):
        also = f',instance="{SECOND}"' if name == "RunTargetDown" else ""
        return (
            f'ALERTS{{alertname="{name}",alertstate="firing",'
            f'severity="{RULES[name]["labels"]["severity"]}",{labels}{also}}}'
        )

    return {
        "name": f"{firing}",
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
                "exp_samples": [
                    {"labels": sample(name), "value": 1} for name in names.split()
                ],
            }
            for minute, names in firing.items()
        ],
    }


def test_rules_and_queries_use_series_that_a_run_serves_and_have_a_runbook_entry():
    dashboard = json.loads((SHIPPED / "dashboard.json").read_text())
    targets = [each for panel in dashboard["panels"] for each in panel["targets"]]
    for query in [*(r["expr"] for r in RULES.values()), *(t["expr"] for t in targets)]:
        assert set(re.findall(r"\belastic_ckpt_\w+", query)) <= SERVED, query
    for name, rule in RULES.items():
        url = rule["annotations"]["runbook_url"]
        assert url.endswith(f"/reference/runbook/#{name.lower()}")


@pytest.mark.night
@pytest.mark.needs("promtool")
def test_alerts_fire_on_their_faults_and_no_others_do(tmp_path):
    fired = {name for f, *_ in FAULTS for n in f.values() for name in n.split()}
    assert fired == RULES.keys()
    groups = [unit_test(*fault) for fault in FAULTS]
    path = tmp_path / "test.yml"
    rules = str(SHIPPED / "alerts.yaml")
    path.write_text(yaml.safe_dump({"rule_files": [rules], "tests": groups}))
    for words in (("check", "rules", rules), ("test", "rules", str(path))):
        ran = subprocess.run(["promtool", *words], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
