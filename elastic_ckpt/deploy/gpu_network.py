"""Direct connections of the GPUs of several hosts, as `clouds.yaml` has them.

The cluster needs the networks, and the installer and the device injector of the NCCL
plugin, which the examples named there install.
"""

from __future__ import annotations

import json

from elastic_ckpt.deploy import template
from elastic_ckpt.deploy.template import Object
from elastic_ckpt.training import schema

METHODS: dict[str, Object] = {
    machine: method
    for method in template.read("clouds.yaml")["gpu_direct"].values()
    for machine in method["machines"]
}


def networks(config: schema.Config) -> list[str]:
    """The names of the networks of a host, in the order of its interfaces."""
    chosen = config.pods.gpu_direct_networks
    if chosen:
        return [name.strip() for name in chosen.split(";")]
    return list(METHODS[config.deploy.machine_type]["networks"])


def command(config: schema.Config, arguments: list[str]) -> list[str]:
    """`arguments`, after the settings of NCCL that the node has for its plugin."""
    profile = METHODS.get(config.deploy.machine_type, {}).get("profile")
    if not config.pods.gpu_direct or not profile:
        return arguments
    return ["bash", "-c", f'source {profile} && exec "$@"', "--", *arguments]


def patch(config: schema.Config) -> Object:
    """The network, devices and libraries of GPU hosts; empty without `gpu_direct`."""
    if not config.pods.gpu_direct:
        return {}
    method = METHODS[config.deploy.machine_type]
    interfaces = [("eth0", "default")]
    interfaces += [
        (f"eth{number}", network)
        for number, network in enumerate(networks(config), method["first_interface"])
    ]
    lines = ",\n".join(
        f"  {json.dumps({'interfaceName': name, 'network': network})}"
        for name, network in interfaces
    )
    filled: Object = template.fill(method["patch"], {"interfaces": f"[\n{lines}\n]\n"})
    return filled
