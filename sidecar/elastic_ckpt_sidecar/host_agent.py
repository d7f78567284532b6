"""The host agent: the tiers' work of the accelerator hosts under a single controller.

One object in each host's process, in colocated Python, around what a host does in any
world (`tiers.host`). The head asks for phases by letter, and polls for the answers,
since calls of a host may be carried out one after the other: a host that writes, copies
or reads for seconds does it in a thread, and the data iterator has its turn meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax.experimental import colocated_python

from elastic_ckpt.core import addresses
from elastic_ckpt.host.host_tiers import HostTiers
from elastic_ckpt.host.world import HostWorld
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt_sidecar import failures, letters
from elastic_ckpt_sidecar.component_files import ComponentFiles
from elastic_ckpt_sidecar.host_arrays import HostArrays

# Of an answer, at a time: the size of what a method returns is fixed.
CHUNK_BYTES = 16384
# Stands for the length of an answer that is not there yet.
UNDER_WAY = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostChoice:
    """A host, as the head chose it to be.

    Attributes:
      number: of the host, from 0.
      device_ids: of its CPU devices.
      run: the identity of the run.
      slice_name: the slice that it is in.
      directory: see `HostWorld`; the same on all machines.
      chosen: the tiers. Where there are peers, the host listens at that address of its
        own from which it reaches `interface`, which is an address of the head.
    """

    number: int
    device_ids: tuple[int, ...]
    run: str
    slice_name: str
    directory: str
    chosen: Chosen


class _Host(HostTiers):
    """What one host does for the tiers, and for the head that has no host's memory."""

    def __init__(self, choice: HostChoice, devices: dict[int, jax.Device]) -> None:
        peers = choice.chosen.peers
        if peers is not None and peers.interface is not None:
            own_address = addresses.toward(peers.interface)
            peers = dataclasses.replace(peers, interface=own_address)
        super().__init__(
            HostWorld(
                run=choice.run,
                number=choice.number,
                slice_name=choice.slice_name,
                directory=choice.directory,
                chosen=dataclasses.replace(choice.chosen, peers=peers),
            )
        )
        self.files = ComponentFiles(self.saver)
        self.arrays = HostArrays(
            self.saver, self.reader, own=choice.device_ids, devices=devices
        )


class _HostAgent:
    """The hosts of one process: one, but where a process stands for several.

    Args:
      choices: all hosts of the world.
    """

    def __init__(self, choices: Sequence[HostChoice]) -> None:
        self._choices = {choice.number: choice for choice in choices}
        self._host_of = {
            device: choice.number for choice in choices for device in choice.device_ids
        }
        self._devices: dict[int, jax.Device] = {}
        self._lock = threading.Lock()
        self._hosts: dict[int, _Host] = {}
        self._answers: dict[tuple[int, int], futures.Future[bytes]] = {}

    @failures.told
    def meet(self, call: jax.Array) -> jax.Array:
        """Learns of the CPU devices of all hosts, those of `call`."""
        self._devices = {device.id: device for device in call.sharding.device_set}
        return letters.on_each(call, 0)

    @failures.told
    def begin(self, call: jax.Array) -> jax.Array:
        """Begins a phase, under the number of the call; answers as `lengths`."""
        content = letters.open_letter(call)
        for number in self._asked(call):
            ask = functools.partial(
                self._answer, number, content["phase"], content["arguments"]
            )
            self._answers[content["call"], number] = _in_thread(ask)
        return self._lengths(call, content["call"])

    @failures.told
    def lengths(self, call: jax.Array) -> jax.Array:
        """The bytes of each host's answer, or `UNDER_WAY`: int32 `[devices]`."""
        return self._lengths(call, letters.open_letter(call)["call"])

    @failures.told
    def answers(self, call: jax.Array) -> jax.Array:
        """A chunk of each host's answer, padded: uint8 `[devices, CHUNK_BYTES]`."""
        content = letters.open_letter(call)
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

        return letters.answer(call, chunk)

    @failures.told
    def hold(self, call: jax.Array, *arrays: jax.Array) -> jax.Array:
        """Keeps the arrays of a group, on the devices of `call`, for a capture."""
        content = letters.open_letter(call)
        for number in self._asked(call):
            self._host(number).arrays.hold(
                content["layout"], content["group"], arrays, kept=content["kept"]
            )
        return letters.on_each(call, 0)

    @failures.told
    def arrays(self, call: jax.Array) -> list[jax.Array]:
        """The arrays of a group, on the devices of `call`, as the hosts read them.

        What they are follows from the letter, so whoever calls it says it
        (`specialize`).
        """
        content = letters.open_letter(call)
        layout, group = content["layout"], content["group"]
        made = [
            self._host(number).arrays.made(layout, group)
            for number in self._asked(call)
        ]
        abstract = self._host(self._asked(call)[0]).arrays.abstract(layout, group)
        return [
            jax.make_array_from_single_device_arrays(
                leaf.shape, leaf.sharding, [each for of in shards for each in of]
            )
            for leaf, *shards in zip(abstract, *made, strict=True)
        ]

    def _asked(self, call: jax.Array) -> list[int]:
        # The hosts of this process whose devices are those of the call, in order.
        return sorted(
            {self._host_of[shard.device.id] for shard in call.addressable_shards}
        )

    def _host(self, number: int) -> _Host:
        with self._lock:
            if number not in self._hosts:
                self._hosts[number] = _Host(self._choices[number], self._devices)
            return self._hosts[number]

    def _answer(self, number: int, phase: str, arguments: Sequence[Any]) -> bytes:
        try:
            answer = self._host(number).answer(phase, *arguments)
            return json.dumps({"is": answer}).encode()
        # The root of a thread: the head raises it.
        except Exception as error:
            return json.dumps({"failed": failures.account(error)}).encode()

    def _lengths(self, call: jax.Array, number: int) -> jax.Array:
        def length(device: jax.Device) -> np.ndarray:
            answer = self._answers[number, self._host_of[device.id]]
            return np.array(
                len(answer.result()) if answer.done() else UNDER_WAY, np.int32
            )

        return letters.answer(call, length)


def _in_thread(work: Callable[[], bytes]) -> futures.Future[bytes]:
    # A daemon: a process that ends waits for no other host.
    doing: futures.Future[bytes] = futures.Future()

    def run() -> None:
        doing.set_result(work())

    threading.Thread(target=run, name="host-agent", daemon=True).start()
    return doing


HostAgent: Any = colocated_python.colocated_python_class(_HostAgent)
