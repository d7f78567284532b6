"""The host agent: runs calls on an accelerator host under a single controller.

In colocated Python, each process has one agent with the endpoints of its hosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import colocated_python

from elastic_ckpt.checkpoint.host.endpoint import HostEndpoint
from elastic_ckpt.checkpoint.host.world import HostConfig
from elastic_ckpt.core import addresses
from elastic_ckpt_sidecar import failures, host_calls, messages
from elastic_ckpt_sidecar.arrays import HostArrays


class _HostAgent(host_calls.HostCalls):
    """The hosts of one process.

    The peer tier's `interface` is an address of the head. The agent replaces it with
    the local address from which its machine reaches the head.

    Args:
      configs: the configs of all hosts of the world, in host order.
      host_of: a dict from CPU device ID to host index.
    """

    def __init__(
        self, configs: Sequence[HostConfig], host_of: Mapping[int, int]
    ) -> None:
        super().__init__(host_of)
        self._configs = configs

    @failures.reported()
    def connect(self, call: jax.Array) -> jax.Array:
        """Creates this process's hosts; `call` is on the CPU devices of all hosts."""
        devices = {device.id: device for device in call.sharding.device_set}
        self.hosts = {
            number: self._endpoint(self._configs[number], devices)
            for number in self.asked(call)
        }
        return messages.on_each(call, 0)

    @failures.reported()
    def hold(self, call: jax.Array, *arrays: jax.Array) -> jax.Array:
        """Holds a group's arrays, on the devices of `call`, for a capture."""
        content = messages.decode(call)
        for number in self.asked(call):
            self._arrays_of(number).hold(
                content["layout"], content["group"], arrays, kept=content["kept"]
            )
        return messages.on_each(call, 0)

    @failures.reported()
    def arrays(self, call: jax.Array) -> list[jax.Array]:
        """The arrays of a group that the hosts have read, on the devices of `call`.

        The caller declares their shapes and shardings (`specialize`).
        """
        content = messages.decode(call)
        layout, group = content["layout"], content["group"]
        hosts = [self._arrays_of(number) for number in self.asked(call)]
        made = [arrays.made(layout, group) for arrays in hosts]
        abstract = hosts[0].abstract(layout, group)
        return [
            jax.make_array_from_single_device_arrays(
                leaf.shape,
                leaf.sharding,
                [each for boxes_of in shards for each in boxes_of],
            )
            for leaf, *shards in zip(abstract, *made, strict=True)
        ]

    def _arrays_of(self, number: int) -> HostArrays:
        return self.hosts[number].role(HostArrays.__name__)

    def _endpoint(
        self, config: HostConfig, devices: Mapping[int, jax.Device]
    ) -> HostEndpoint:
        peers = config.chosen.peers
        if peers is not None and peers.interface is not None:
            peers = dataclasses.replace(
                peers, interface=addresses.toward(peers.interface)
            )
        chosen = dataclasses.replace(config.chosen, peers=peers)

        def more_roles(roles: Mapping[str, Any]) -> Mapping[str, Any]:
            saver, reader = roles["HostSaver"], roles["HostReader"]
            arrays = HostArrays(
                saver,
                reader,
                host=config.number,
                host_of=self._host_of,
                devices=devices,
            )
            return {"HostArrays": arrays}

        return HostEndpoint(dataclasses.replace(config, chosen=chosen), more_roles)


HostAgent: Any = colocated_python.colocated_python_class(_HostAgent)
