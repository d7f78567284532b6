"""The metrics of a run in a cluster: their port, who collects them, and probes.

The port is that of the program, which is the host, or under Pathways the head.
"""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import addition, program, settings

PORT = "metrics"
_PATH = "/metrics"
_INTERVAL = "30s"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ACTIONS = ("exec", "httpGet", "tcpSocket", "grpc")
_PROBES = {
    "startupProbe": "pod_startup_probe",
    "livenessProbe": "pod_liveness_probe",
}
# JobSet labels its pods with its name, and with that of their replicated job.
_JOBSET = "jobset.sigs.k8s.io/jobset-name"
_REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"


def check(config: schema.Config) -> None:
    """Raises a ConfigError if the metrics that are read cannot be reached."""
    metrics, deploy = config.metrics, config.deploy
    wanted = [] if deploy.metrics_monitor == "none" else ["metrics_monitor"]
    wanted += [
        key
        for key in _PROBES.values()
        if _reads_metrics(key, getattr(config.pods, key))
    ]
    if not wanted:
        return
    if not metrics.prometheus_port:
        raise errors.ConfigError(
            f"{wanted[0]} reads metrics at prometheus_port, which is 0; set it, for"
            " example prometheus_port=9400"
        )
    if program.is_train(config) and metrics.prometheus_interface in _LOOPBACK:
        raise errors.ConfigError(
            f"{wanted[0]} reads metrics from outside of the pod, but they are served at"
            f" prometheus_interface={metrics.prometheus_interface}; set"
            " prometheus_interface=0.0.0.0"
        )


def addition_for(config: schema.Config, role: addition.Role) -> addition.Addition:
    """The port and the probes of the program; workers have none."""
    port = config.metrics.prometheus_port
    container: addition.Object = {}
    if role == "worker":
        return addition.Addition()
    if port:
        container["ports"] = [{"name": PORT, "containerPort": port}]
    for field, key in _PROBES.items():
        value = getattr(config.pods, key)
        if not value:
            continue
        probe = settings.mapping(key, value)
        if _reads_metrics(key, value):
            probe = {"httpGet": {"path": _PATH, "port": port}, **probe}
        container[field] = probe
    return addition.Addition(container=container)


def documents(config: schema.Config, job: str) -> list[addition.Object]:
    """The object that has the metrics of the pods of the replicated `job` collected.

    The fields are those of prometheus-engine 0.17 (PodMonitoring, v1) and
    prometheus-operator 0.89 (PodMonitor, v1).
    """
    kind = config.deploy.metrics_monitor
    if kind == "none":
        return []
    name = config.run.run_name
    selector = {"matchLabels": {_JOBSET: name, _REPLICATED_JOB: job}}
    metadata = {"name": name, "namespace": config.deploy.namespace}
    endpoint = {"port": PORT, "interval": _INTERVAL}
    if kind == "pod_monitoring":
        return [
            {
                "apiVersion": "monitoring.googleapis.com/v1",
                "kind": "PodMonitoring",
                "metadata": metadata,
                "spec": {"selector": selector, "endpoints": [endpoint]},
            }
        ]
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PodMonitor",
            "metadata": metadata,
            "spec": {
                "selector": selector,
                "podMetricsEndpoints": [{**endpoint, "path": _PATH}],
            },
        }
    ]


def _reads_metrics(key: str, value: str) -> bool:
    return bool(value) and not any(
        action in settings.mapping(key, value) for action in _ACTIONS
    )
