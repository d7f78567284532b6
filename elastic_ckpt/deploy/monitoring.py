"""The metrics of a run in a cluster: their port, who collects them, and probes.

The port is that of the program, which is the host, or under Pathways the head. A pod
with a supervisor has several: of each of its hosts, and of the supervisor, which has
the metrics of the run while it leads.
"""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import addition, program, settings, supervisors

PORT = "metrics"
_PATH = "/metrics"
_INTERVAL = "30s"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ACTIONS = ("exec", "httpGet", "tcpSocket", "grpc")
_PROBES = {
    "startupProbe": "pod_startup_probe",
    "livenessProbe": "pod_liveness_probe",
}
_GOOGLE, _OPERATOR = "monitoring.googleapis.com", "monitoring.coreos.com"
# JobSet labels its pods with its name, and with that of their replicated job.
_JOBSET = "jobset.sigs.k8s.io/jobset-name"
_REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"


def check(config: schema.Config) -> None:
    """Raises a ConfigError if the metrics that are read cannot be reached."""
    metrics, deploy = config.metrics, config.deploy
    wanted = [] if deploy.metrics_monitor == "none" else ["metrics_monitor"]
    probes = [
        key
        for key in _PROBES.values()
        if _reads_metrics(key, getattr(config.pods, key))
    ]
    if probes and supervisors.are_used(config):
        raise errors.ConfigError(
            f"{probes[0]} reads metrics, which hosts serve; with elastic_enabled=true"
            " the hosts of a pod come and go while the pod stays; write a check of"
            " yours, such as {exec: {command: [test, -e, /tmp/ready]}}"
        )
    wanted += probes
    if not wanted:
        return
    missing = []
    if not metrics.prometheus_port:
        missing.append("prometheus_port=9400")
    if program.is_train(config) and metrics.prometheus_interface in _LOOPBACK:
        missing.append("prometheus_interface=0.0.0.0")
    if missing:
        raise errors.ConfigError(
            f"{wanted[0]} reads metrics from outside of the pod, which serves none"
            f" there; set {' and '.join(missing)}"
        )


def addition_for(config: schema.Config, role: addition.Role) -> addition.Addition:
    """The port and the probes of the program; other pods have none."""
    port = config.metrics.prometheus_port
    container: addition.Object = {}
    if role not in ("host", "head"):
        return addition.Addition()
    if port:
        container["ports"] = [
            {"name": name, "containerPort": each}
            for name, each in ports(config).items()
        ]
    for field, key in _PROBES.items():
        value = getattr(config.pods, key)
        if not value:
            continue
        probe = settings.mapping(key, value)
        if _reads_metrics(key, value):
            probe = {"httpGet": {"path": _PATH, "port": port}, **probe}
        container[field] = probe
    return addition.Addition(container=container)


def ports(config: schema.Config) -> dict[str, int]:
    """The port of each process of a pod that serves metrics, by its name."""
    first = config.metrics.prometheus_port
    if not supervisors.are_used(config):
        return {PORT: first}
    hosts = config.world.hosts // config.world.slices
    further = [f"{PORT}-{host}" for host in range(1, hosts)]
    names = [PORT, *further, f"{PORT}-run"]
    return {name: first + number for number, name in enumerate(names)}


def documents(config: schema.Config, job: str) -> list[addition.Object]:
    """The objects that have the metrics of the pods of the replicated `job` collected.

    The fields are those of prometheus-engine 0.17 (PodMonitoring, v1) and
    prometheus-operator 0.89 (PodMonitor and ServiceMonitor, v1).
    """
    pods = {_JOBSET: config.run.run_name, _REPLICATED_JOB: job}
    selector = {"matchLabels": pods}
    endpoints = [{"port": name, "interval": _INTERVAL} for name in ports(config)]
    with_path = [{**endpoint, "path": _PATH} for endpoint in endpoints]
    match config.deploy.metrics_monitor:
        case "pod_monitoring":
            spec = {"selector": selector, "endpoints": endpoints}
            return [_object(config, f"{_GOOGLE}/v1", "PodMonitoring", spec)]
        case "pod_monitor":
            spec = {
                "selector": selector,
                "podMetricsEndpoints": with_path,
            }
            return [_object(config, f"{_OPERATOR}/v1", "PodMonitor", spec)]
        case "service_monitor":
            spec = {"selector": selector, "endpoints": with_path}
            return [
                _service(config, pods),
                _object(config, f"{_OPERATOR}/v1", "ServiceMonitor", spec),
            ]
    return []


def _service(config: schema.Config, pods: dict[str, str]) -> addition.Object:
    # A ServiceMonitor finds services, by their labels, and these find the pods.
    listed = [
        {"name": name, "port": port, "targetPort": name}
        for name, port in ports(config).items()
    ]
    spec = {"clusterIP": "None", "selector": pods, "ports": listed}
    service = _object(config, "v1", "Service", spec)
    # The name of the run is that of JobSet's service.
    metadata = {"name": f"{config.run.run_name}-{PORT}", "labels": pods}
    return {**service, "metadata": service["metadata"] | metadata}


def _object(
    config: schema.Config, version: str, kind: str, spec: addition.Object
) -> addition.Object:
    metadata = {"name": config.run.run_name, "namespace": config.deploy.namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _reads_metrics(key: str, value: str) -> bool:
    return bool(value) and not any(
        action in settings.mapping(key, value) for action in _ACTIONS
    )
