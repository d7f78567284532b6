"""Metrics of a run in a cluster."""

import json

import pytest

from elastic_ckpt.core import errors
from tests.deploy import jobsets, manifest_check

SERVED = ["prometheus_port=9400", "prometheus_interface=0.0.0.0"]


@pytest.mark.parametrize("name", [jobsets.GPU, jobsets.TPU, jobsets.PATHWAYS])
@pytest.mark.parametrize(
    ("monitor", "kind", "endpoints"),
    [
        ("pod_monitoring", "PodMonitoring", "endpoints"),
        ("pod_monitor", "PodMonitor", "podMetricsEndpoints"),
    ],
)
def test_the_metrics_of_every_program_are_collected(name, monitor, kind, endpoints):
    built = jobsets.documents(name, *SERVED, f"metrics_monitor={monitor}")
    assert manifest_check.problems(built) == []
    spec = jobsets.only(kind, built)["spec"]
    labels = spec["selector"]["matchLabels"]
    job = labels["jobset.sigs.k8s.io/replicatedjob-name"]
    jobset = jobsets.only("JobSet", built)
    assert labels["jobset.sigs.k8s.io/jobset-name"] == jobset["metadata"]["name"]
    container = jobsets.container(jobsets.pods(built)[job], "train")
    (endpoint,) = spec[endpoints]
    ports = {port.get("name"): port["containerPort"] for port in container["ports"]}
    assert ports[endpoint["port"]] == 9400


@pytest.mark.parametrize("name", [jobsets.GPU, jobsets.PATHWAYS])
def test_a_service_monitor_finds_the_service_that_finds_the_programs(name):
    built = jobsets.documents(name, *SERVED, "metrics_monitor=service_monitor")
    assert manifest_check.problems(built) == []
    service = jobsets.only("Service", built)
    jobset = jobsets.only("JobSet", built)
    # JobSet makes a service of its name for the network.
    assert service["metadata"]["name"] != jobset["metadata"]["name"]
    spec = jobsets.only("ServiceMonitor", built)["spec"]
    assert spec["selector"]["matchLabels"] == service["metadata"]["labels"]
    (endpoint,), (port,) = spec["endpoints"], service["spec"]["ports"]
    assert endpoint["port"] == port["name"]
    job = service["spec"]["selector"]["jobset.sigs.k8s.io/replicatedjob-name"]
    container = jobsets.container(jobsets.pods(built)[job], "train")
    assert port["targetPort"] in [each.get("name") for each in container["ports"]]


def test_a_probe_without_an_action_reads_the_metrics():
    setting = "pod_liveness_probe={periodSeconds: 30}"
    for name in (jobsets.GPU, jobsets.PATHWAYS):
        roles = jobsets.roles(name, *SERVED, setting)
        _, container = roles.get("host") or roles["head"]
        assert container["livenessProbe"] == {
            "httpGet": {"path": "/metrics", "port": 9400},
            "periodSeconds": 30,
        }


@pytest.mark.parametrize(
    "setting",
    ["metrics_monitor=pod_monitor", "pod_startup_probe={periodSeconds: 3}"],
)
def test_metrics_that_nobody_can_read_are_refused(setting):
    key = setting.partition("=")[0]
    both = r"set prometheus_port=9400 and prometheus_interface=0\.0\.0\.0"
    with pytest.raises(errors.ConfigError, match=f"{key} reads .*{both}"):
        jobsets.documents(jobsets.GPU, setting)
    with pytest.raises(
        errors.ConfigError, match=r"set prometheus_interface=0\.0\.0\.0"
    ):
        jobsets.documents(jobsets.GPU, setting, "prometheus_port=9400")
    # A program of the user serves them as it likes.
    assert jobsets.documents(jobsets.GPU, setting, "prometheus_port=1", "command=a")


def test_a_probe_with_an_action_needs_no_metrics():
    probe = json.dumps({"tcpSocket": {"port": 8471}})
    assert jobsets.documents(jobsets.GPU, f"pod_startup_probe={probe}")
