"""The DaemonSet of the nodes' agents, with the permission to read their nodes.

It is no part of a run: one serves all runs on the nodes of a kind, and is upgraded
separately. Its pods use the network of the node, so that an upgrade changes no address.
"""

from __future__ import annotations

import re

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import (
    addition,
    environment,
    job,
    labels,
    machine,
    names,
    quantity,
    scheduling,
    volumes,
)
from elastic_ckpt.deploy.addition import Object

NAME = "elastic-ckpt-node-agent"
_RBAC = "rbac.authorization.k8s.io"
_CONTAINER = "agent"
_VOLUME = "runs"
_NODE_NAME = "NODE_NAME"
# The memory of the agent itself: RAM disks count as that of the pods that write them.
_MEMORY = "512Mi"
# The largest value of classes that are not Kubernetes' own, which not every namespace
# may use.
_PRIORITY_CLASS: Object = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    # It belongs to no namespace.
    "metadata": {"name": NAME},
    "value": 10**9,
    "description": "Agents of nodes, which serve the memory of runs.",
}


def documents(config: schema.Config) -> list[Object]:
    """The objects of the nodes' agents, in the order in which they are to be created.

    Raises:
      ConfigError: if a value is invalid.
    """
    deploy = config.deploy
    host = job.check(config)
    names.check_image("node_agent_image", _image(config))
    if deploy.node_agent_size_limit:
        names.check_size("node_agent_size_limit", deploy.node_agent_size_limit)
        run_limit = config.tiers.local_checkpoint_size_limit
        if quantity.to_bytes(deploy.node_agent_size_limit) < quantity.to_bytes(
            run_limit
        ):
            raise errors.ConfigError(
                f"node_agent_size_limit={deploy.node_agent_size_limit} is below"
                f" local_checkpoint_size_limit={run_limit}, and holds for all runs on a"
                " node together; raise it, or lower that of the run"
            )
    if deploy.node_agent_priority_class:
        name = deploy.node_agent_priority_class
        names.check_name("node_agent_priority_class", name, dots=True)
        return [*_access(config), _daemon_set(config, host)]
    return [*_access(config), _PRIORITY_CLASS, _daemon_set(config, host)]


def _image(config: schema.Config) -> str:
    return config.deploy.node_agent_image or config.deploy.docker_image


def _name(host: machine.Machine) -> str:
    """The name of the agents on nodes of one kind; others are other objects."""
    kind = re.sub(r"[^a-z0-9]+", "-", "-".join(host.node_selector.values()).lower())
    return f"{NAME}-{kind}" if kind else NAME


def _labels(host: machine.Machine) -> dict[str, str]:
    return {"app.kubernetes.io/name": NAME, "app.kubernetes.io/instance": _name(host)}


def _access(config: schema.Config) -> list[Object]:
    """The account of the agents, which may read the labels of their nodes."""
    namespace = config.deploy.namespace
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": namespace}
    rule = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}
    # Nodes belong to no namespace.
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": NAME, "namespace": namespace},
        },
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": NAME},
            "rules": [rule],
        },
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": NAME},
            "subjects": [subject],
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": NAME},
        },
    ]


def _daemon_set(config: schema.Config, host: machine.Machine) -> Object:
    path = config.deploy.node_agent_directory
    pod: Object = {
        "serviceAccountName": NAME,
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": dict(host.node_selector),
        "containers": [_container(config)],
        "volumes": [
            {
                "name": _VOLUME,
                "hostPath": {"path": path, "type": "DirectoryOrCreate"},
            }
        ],
    }
    added: Object = dict(scheduling.addition_for(config, "host").spec)
    # The agent runs wherever pods of runs do, whatever the nodes are reserved for.
    added["tolerations"] = [{"operator": "Exists"}]
    added["priorityClassName"] = config.deploy.node_agent_priority_class or NAME
    for field in ("imagePullSecrets", "securityContext"):
        # The agent runs as the user of the pods, to whom the files of runs belong.
        if value := labels.addition_for(config).spec.get(field):
            added[field] = value
    addition.merge(pod, added)
    template: Object = {"metadata": {"labels": _labels(host)}, "spec": pod}
    if config.tiers.peer_tls_certificate:
        # The files of the certificate are in volumes of the user.
        pods = addition.Pods(
            role="host", job={}, template=template, container=_CONTAINER
        )
        pods.add(volumes.addition_for(config, pods))
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": _name(host), "namespace": config.deploy.namespace},
        "spec": {
            "selector": {"matchLabels": _labels(host)},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": template,
        },
    }


def _container(config: schema.Config) -> Object:
    directory = config.tiers.local_checkpoint_directory
    node_name = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    address = [
        variable
        for variable in environment.place_variables()
        if variable["name"] == "POD_IP"
    ]
    return {
        "name": _CONTAINER,
        "image": _image(config),
        "command": ["elastic-ckpt", "agent", "--node", directory, *_options(config)],
        "env": [*address, {"name": _NODE_NAME, "valueFrom": node_name}],
        "terminationMessagePolicy": job.TERMINATION_MESSAGE_POLICY,
        "resources": {"requests": {"memory": _MEMORY}},
        "volumeMounts": [{"name": _VOLUME, "mountPath": directory}],
    } | (
        {"ports": [{"containerPort": config.deploy.node_agent_port}]}
        if config.deploy.node_agent_port
        else {}
    )


def _options(config: schema.Config) -> list[str]:
    deploy = config.deploy
    secs = round(deploy.node_agent_hours_unused * 3600)
    limit = deploy.node_agent_size_limit
    options = {
        "--interface": "$(POD_IP)",
        "--port": str(deploy.node_agent_port or ""),
        "--kubernetes-node": f"$({_NODE_NAME})",
        "--domain-labels": deploy.node_agent_domain_labels,
        "--remove-unused-after": str(secs) if secs else "",
        "--max-bytes": str(quantity.to_bytes(limit)) if limit else "",
        "--tls-certificate": config.tiers.peer_tls_certificate,
        "--tls-key": config.tiers.peer_tls_key,
    }
    return [word for pair in options.items() if pair[1] for word in pair]
