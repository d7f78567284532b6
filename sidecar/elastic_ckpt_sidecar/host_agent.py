"""The host agent: runs calls on an accelerator host under a single controller.

One object in each host's process, in colocated Python, has the endpoints of its hosts.
The head sends calls and polls for the answers, because the calls of a process may
be carried out one after the other: a host that writes, copies or reads for seconds
does so in a thread, and the data iterator's calls are not held up.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax.experimental import colocated_python

from elastic_ckpt.checkpoint.host.endpoint import HostEndpoint
from elastic_ckpt.checkpoint.host.world import HostConfig
from elastic_ckpt.core import addresses, allgather, background, calls
from elastic_ckpt_sidecar import failures, messages
from elastic_ckpt_sidecar.arrays import HostArrays

# An answer is returned in chunks, because a method returns arrays of a fixed size.
CHUNK_BYTES = 16384
# Stands for the length of an answer that is not there yet.
UNDER_WAY = -1


class _HostAgent:
    """The hosts of one process: one, but where a process stands for several.

    The agent of a machine uses the local address from which the host reaches the head;
    `interface` of the peer tier is an address of the head.

    Args:
      configs: of all hosts of the world, by number.
      host_of: the number of the host of each CPU device, by its id.
    """

    def __init__(
        self, configs: Sequence[HostConfig], host_of: Mapping[int, int]
    ) -> None:
        self._configs, self._host_of = configs, host_of
        self._hosts: dict[int, HostEndpoint] = {}
        self._answers: dict[tuple[int, int], futures.Future[bytes]] = {}

    @failures.reported()
    def connect(self, call: jax.Array) -> jax.Array:
        """Makes the hosts of this process, given the CPU devices of all hosts."""
        devices = {device.id: device for device in call.sharding.device_set}
        self._hosts = {
            number: self._endpoint(self._configs[number], devices)
            for number in self._asked(call)
        }
        return messages.on_each(call, 0)

    @failures.reported()
    def begin(self, call: jax.Array) -> jax.Array:
        """Begins a call, under its number; answers as `lengths`."""
        content = messages.decode(call)
        for number in self._asked(call):
            ask = functools.partial(self._answer, number, content["method"])
            self._answers[content["call"], number] = background.in_thread(
                ask, name="host-agent"
            )
        return self.lengths(call)

    @failures.reported()
    def lengths(self, call: jax.Array) -> jax.Array:
        """The bytes of each host's answer, or `UNDER_WAY`: int32 `[devices]`."""
        number = messages.decode(call)["call"]

        def length(device: jax.Device) -> np.ndarray:
            answer = self._answers[number, self._host_of[device.id]]
            return np.array(
                len(answer.result()) if answer.done() else UNDER_WAY, np.int32
            )

        return messages.reply(call, length)

    @failures.reported()
    def answers(self, call: jax.Array) -> jax.Array:
        """A chunk of each host's answer, padded: uint8 `[devices, CHUNK_BYTES]`."""
        content = messages.decode(call)
        start = content["start"]
        taken = {
            number: self._answers[content["call"], number].result()
            for number in self._asked(call)
        }
        if content["last"]:
            for number in taken:
                del self._answers[content["call"], number]

        def chunk(device: jax.Device) -> np.ndarray:
            answer = taken[self._host_of[device.id]]
            part = answer[start : start + CHUNK_BYTES].ljust(CHUNK_BYTES)
            return np.frombuffer(part, np.uint8)

        return messages.reply(call, chunk)

    @failures.reported()
    def hold(self, call: jax.Array, *arrays: jax.Array) -> jax.Array:
        """Keeps the arrays of a group, on the devices of `call`, for a capture."""
        content = messages.decode(call)
        for number in self._asked(call):
            self._arrays_of(number).hold(
                content["layout"], content["group"], arrays, kept=content["kept"]
            )
        return messages.on_each(call, 0)

    @failures.reported()
    def arrays(self, call: jax.Array) -> list[jax.Array]:
        """The arrays of a group, on the devices of `call`, as the hosts read them.

        The caller declares their shapes and shardings (`specialize`).
        """
        content = messages.decode(call)
        layout, group = content["layout"], content["group"]
        hosts = [self._arrays_of(number) for number in self._asked(call)]
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

    def _asked(self, call: jax.Array) -> list[int]:
        # The hosts of this process whose devices are those of the call, in order.
        return sorted(
            {self._host_of[shard.device.id] for shard in call.addressable_shards}
        )

    def _arrays_of(self, number: int) -> HostArrays:
        return self._hosts[number].part(HostArrays.__name__)

    def _answer(self, number: int, encoded: Any) -> bytes:
        def run() -> Any:
            call, arguments = calls.decode(encoded)
            return call.run(self._hosts[number], arguments)

        # The root of a thread: the head raises what fails.
        return json.dumps(allgather.outcome(run)).encode()

    def _endpoint(
        self, config: HostConfig, devices: Mapping[int, jax.Device]
    ) -> HostEndpoint:
        peers = config.chosen.peers
        if peers is not None and peers.interface is not None:
            peers = dataclasses.replace(
                peers, interface=addresses.toward(peers.interface)
            )
        chosen = dataclasses.replace(config.chosen, peers=peers)

        def more_parts(parts: Mapping[str, Any]) -> Mapping[str, Any]:
            saver, reader = parts["HostSaver"], parts["HostReader"]
            arrays = HostArrays(
                saver,
                reader,
                host=config.number,
                host_of=self._host_of,
                devices=devices,
            )
            return {"HostArrays": arrays}

        return HostEndpoint(dataclasses.replace(config, chosen=chosen), more_parts)


HostAgent: Any = colocated_python.colocated_python_class(_HostAgent)
