"""The metrics of a run in a cluster: their ports, who collects them, and probes.

The port is that of the program, which is the host, or under Pathways the head. A pod
with a supervisor has several: of each of its hosts, and of the supervisor, which has
the metrics of the run while it leads.
"""

from __future__ import annotations

from elastic_ckpt.deploy import program, settings, template
from elastic_ckpt.deploy.template import Object
from elastic_ckpt.training import schema

_ACTIONS = ("exec", "httpGet", "tcpSocket", "grpc")


def ports(config: schema.Config) -> dict[str, int]:
    """The port of each process of a pod that serves metrics, by its name."""
    first, names = config.metrics.prometheus_port, ["metrics"]
    if program.has_supervisors(config):
        hosts = config.world.hosts // config.world.slices
        names += [f"metrics-{host}" for host in range(1, hosts)]
        names.append("metrics-run")
    return {name: first + number for number, name in enumerate(names) if first}


def probe(config: schema.Config, name: str) -> Object:
    """The probe of the key `pod_NAME_probe`; empty if the program has none."""
    key = f"pod_{name}_probe"
    chosen = settings.mapping(key, getattr(config.pods, key))
    if not reads_metrics(config, name):
        return chosen
    port = config.metrics.prometheus_port
    return {"httpGet": {"path": "/metrics", "port": port}, **chosen}


def reads_metrics(config: schema.Config, name: str) -> bool:
    """Whether that probe reads metrics, because its key says nothing else."""
    key = f"pod_{name}_probe"
    value = getattr(config.pods, key)
    return bool(value) and not {*_ACTIONS} & settings.mapping(key, value).keys()


def documents(config: schema.Config, job: str) -> list[Object]:
    """What has the metrics of the pods of the replicated `job` collected."""
    named = ports(config).items()
    endpoints = [{"port": name, "interval": "30s"} for name, _ in named]
    monitors = template.read("templates/monitoring.yaml")
    filled: list[Object] = template.fill(
        monitors[config.deploy.metrics_monitor],
        {
            "run_name": config.run.run_name,
            "namespace": config.deploy.namespace,
            "program_job": job,
            "endpoints": endpoints,
            "endpoints_with_path": [{**e, "path": "/metrics"} for e in endpoints],
            "service_ports": [
                {"name": name, "port": port, "targetPort": name} for name, port in named
            ],
        },
    )
    return filled
