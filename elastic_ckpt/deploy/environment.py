"""The variables of programs and sidecars.

`ec.batches`, `ec.Checkpointer` and `ec.elastic.run` read some of them; programs of
users find the others by these names.
"""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.deploy import addition, names, program, settings
from elastic_ckpt.steps import failure_domains


def place_variables() -> list[addition.Object]:
    """The variables of every container of ours: its address and its failure domains.

    Since version 1.35 Kubernetes labels pods with the zone of their node (KEP 4742);
    in older versions the variable is empty and defines no domain.
    """
    fields = {
        "POD_IP": "status.podIP",
        "NODE_ZONE": "metadata.labels['topology.kubernetes.io/zone']",
    }
    from_pod: list[addition.Object] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    domains = {"name": failure_domains.VARIABLE, "value": "zone=$(NODE_ZONE)"}
    return [*from_pod, domains]


def addition_for(config: schema.Config, role: addition.Role) -> addition.Addition:
    """The variables of the configuration, and those that programs of users need."""
    variables: list[addition.Object] = []
    if role in ("host", "head"):
        variables += [
            {"name": name, "value": value}
            for name, value in program.variables(config).items()
        ]
    env = settings.mapping("pod_env", config.pods.pod_env)
    for name, value in env.items():
        if isinstance(value, dict):
            variables.append({"name": name, "valueFrom": value})
        else:
            variables.append({"name": name, "value": settings.text(value)})
    container: addition.Object = {"env": variables} if variables else {}
    secrets = settings.names("pod_env_secrets", config.pods.pod_env_secrets)
    for secret in secrets:
        names.check_name("pod_env_secrets", secret, dots=True)
    if secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in secrets]
    return addition.Addition(container=container)
