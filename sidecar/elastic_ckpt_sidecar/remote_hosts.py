"""The head's handle for all hosts of a world, whose agents run on these hosts.

It implements `checkpoint.hosts.Hosts`, so saves and restores work as in a
multi-controller world. Calls and answers are messages; arrays stay on their hosts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding

from elastic_ckpt.checkpoint.host.answers import ReadParts
from elastic_ckpt.checkpoint.host.endpoint import HostEndpoint
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.saver import CapturedIn, HostSaver
from elastic_ckpt.checkpoint.host.trees import AskedLeaf, asked, rebuilt
from elastic_ckpt.checkpoint.host.trees import arrays as captured_leaves
from elastic_ckpt.checkpoint.host.verified_read import OtherTree
from elastic_ckpt.checkpoint.host.world import HostConfig
from elastic_ckpt.core import addresses, allgather, background, calls, errors, topology
from elastic_ckpt.core.allgather import HostTree
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.data import compatibility
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.tiers.ram import machine
from elastic_ckpt_sidecar import (
    failures,
    host_agent,
    host_calls,
    messages,
    worker,
)
from elastic_ckpt_sidecar.arrays import (
    Group,
    HeadArrays,
    HostArrays,
    HostDevices,
    joined,
)

AnswerT = TypeVar("AnswerT")
P = ParamSpec("P")
Method = Callable[Concatenate[Any, P], AnswerT]


def hosts_of(mesh: Mesh) -> list[HostDevices]:
    """The hosts of a mesh, in order; the devices of each worker process form a host.

    Raises:
      ConfigError: if a host's software differs from the head's.
    """
    accelerators = tuple(mesh.devices.flat)
    cpus = tuple(colocated_python.colocated_cpu_devices(accelerators))
    with failures.reaching_the_head():
        answer = worker.Facts(messages.encode({}, _over(cpus)))
        facts = messages.decode_rows(answer)
    compatibility.check([compatibility.local_facts(role="the head"), *facts])
    devices_of: dict[str, list[int]] = {}
    for number, fact in enumerate(facts):
        devices_of.setdefault(fact[compatibility.HOST], []).append(number)
    return [
        HostDevices(
            accelerators=tuple(accelerators[n] for n in numbers),
            cpus=tuple(cpus[n] for n in numbers),
        )
        for numbers in devices_of.values()
    ]


def over(mesh: Mesh, chosen: Chosen, *, run: str) -> RemoteHosts:
    """Connects to the hosts of a mesh.

    Args:
      mesh: the accelerators; the mesh's axis or the hardware determines the slices.
      chosen: the tiers. The peers' `interface` is an address of the head, by default
        the local address of its default route.
      run: the run name.

    Raises:
      ConfigError: as in `hosts_of`.
    """
    if (peers := chosen.peers) is not None:
        interface = peers.interface or addresses.of_the_head()
        peers = dataclasses.replace(peers, interface=interface)
    slices, directory = topology.slices_of(mesh), chosen.ram_directory()
    hosts = hosts_of(mesh)
    configs = [
        HostConfig(
            number=number,
            run=run,
            slice_name=slices[host.accelerators[0]],
            directory=directory,
            chosen=dataclasses.replace(chosen, peers=peers),
        )
        for number, host in enumerate(hosts)
    ]
    return RemoteHosts(hosts, configs)


class RemoteHosts:
    """All hosts of a world under a single controller.

    Args:
      hosts: the devices of each host.
      configs: the config of each host, in the same order.

    Attributes:
      num_hosts: the number of hosts.
    """

    # The host on which paths mean the same as in this process.
    own = 0

    def __init__(
        self, hosts: Sequence[HostDevices], configs: Sequence[HostConfig]
    ) -> None:
        self.num_hosts = len(hosts)
        # The RAM directory of host 0.
        self._directory = configs[0].directory
        host_of = {cpu.id: n for n, host in enumerate(hosts) for cpu in host.cpus}
        self._agent = host_agent.HostAgent(tuple(configs), host_of)
        self._caller = host_calls.Caller(self._agent)
        self._arrays = HeadArrays(hosts)
        self._tree = HostTree(num_hosts=self.num_hosts)
        self._cpus = [host.cpus[0] for host in hosts]
        self._layouts: dict[tuple[Group, ...], int] = {}
        # The requested leaves, in groups, the restored leaves, and the saved dtypes of
        # leaves that are requested without one.
        self._wanted: tuple[tuple[Group, ...], list[list[AskedLeaf]]] = ((), [])
        self._made: dict[str, Any] = {}
        self._dtypes: dict[str, str] = {}
        # Restored trees with other layouts.
        self._others: dict[str, Any] = {}
        cpus = _over([device for host in hosts for device in host.cpus])
        # Also runs if `close` is never called.
        background.close_with(self, functools.partial(messages.release, self._agent))
        self._caller.run(self._agent.connect, {}, cpus)

    @functools.cached_property
    def is_apart(self) -> bool:
        """See `Hosts`; a head that shares host 0's RAM finds the machine ID there."""
        own = self.first(HostEndpoint.introduce).machine
        return machine.find(self._directory) != own

    def all(
        self, method: Method[P, AnswerT], *args: P.args, **kwargs: P.kwargs
    ) -> list[AnswerT]:
        """See `Hosts`."""
        call = calls.of(method)
        arguments = call.bind(*args, **kwargs)
        answered: dict[int, AnswerT] = {}
        for group in self._tree.in_order(call.order):
            answered |= self._send(group, call, arguments)
        return [answered[number] for number in range(self.num_hosts)]

    def first(
        self, method: Method[P, AnswerT], *args: P.args, **kwargs: P.kwargs
    ) -> AnswerT:
        """See `Hosts`."""
        call = calls.of(method)
        return self._send(range(1), call, call.bind(*args, **kwargs))[0]

    def gather(self, name: str, value: AnswerT) -> list[AnswerT]:
        """See `Hosts`; this process is the only driver."""
        del name
        return [value]

    def are_leaving(self, error: BaseException) -> bool:
        """See `Hosts`; the hosts may be gone with the devices."""
        return not isinstance(error, jax.errors.JaxRuntimeError)

    def capture(self, step_id: StepId, trees: Mapping[str, Any]) -> CapturedIn:
        """See `Hosts`."""
        groups, values = self._arrays.to_save(captured_leaves(trees))
        layout = self._layout(groups)
        for number, (group, of_group) in enumerate(zip(groups, values, strict=True)):
            content = {
                "layout": layout,
                "group": number,
                "kept": self._arrays.apart and group.leaves[0].spec is not None,
            }
            moved = group.beside(of_group)
            self._caller.run(self._agent.hold, content, _over(group.mesh), *moved)
        try:
            return CapturedIn(self.all(HostArrays.capture, step_id, layout)[0])
        except errors.HostsFailedError:
            self.all(HostSaver.abandon, step_id)
            raise

    def opened(self) -> Contents:
        """See `Hosts`."""
        return self.first(HostReader.opened)

    def check(
        self,
        trees: Mapping[str, Any],
        components: Sequence[str],
        others: Mapping[str, OtherTree],
    ) -> int:
        """See `Hosts`."""
        self._others = {name: read(None) for name, read in others.items()}
        self._wanted = self._arrays.to_restore(asked(trees))
        self._made = {}
        layout = self._layout(self._wanted[0])
        self._dtypes, *_ = self.all(HostArrays.select, layout, tuple(components))
        return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(self._others))

    def read(self, components: Sequence[str]) -> list[ReadParts]:
        """See `Hosts`; moves arrays to their devices group by group."""
        groups, wanted = self._wanted
        layout = self._layout(groups)
        parts: dict[AskedLeaf, dict[Box, Any]] = {}
        for number, (group, of_group) in enumerate(zip(groups, wanted, strict=True)):
            self.all(HostArrays.read, layout, number)
            abstract = [group.abstract(leaf, self._dtypes) for leaf in group.leaves]
            take = self._agent.arrays.specialize(
                out_specs_fn=lambda *_, abstract=abstract: abstract
            )
            with failures.reaching_the_head():
                content = {"layout": layout, "group": number}
                arrays = take(messages.encode(content, _over(group.mesh)))
            made = group.restored(arrays, of_group, self._dtypes)
            # Frees the hosts' memory for the next group.
            del arrays
            if self._arrays.apart:
                jax.block_until_ready(made)
            for leaf, placed, value in zip(of_group, group.leaves, made, strict=True):
                parts.setdefault(leaf, {})[placed.part] = value
        while parts:
            leaf, of_leaf = parts.popitem()
            self._made[leaf.path] = leaf.finish(joined(leaf, of_leaf))
        return self.all(HostReader.materialize, tuple(components))

    def arrays(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        """See `Hosts`."""
        self.all(HostReader.close_step)
        made, self._made = self._made, {}
        others, self._others = self._others, {}
        return others | {
            name: rebuilt(tree, name, made) for name, tree in trees.items()
        }

    def close(self) -> None:
        """See `Hosts`; does nothing if already closed."""
        if not vars(self._agent):
            return
        try:
            self.all(HostEndpoint.close)
        finally:
            messages.release(self._agent)

    def _layout(self, groups: tuple[Group, ...]) -> int:
        known = self._layouts.get(groups)
        if known is None:
            known = len(self._layouts)
            descriptions = tuple(group.describe() for group in groups)
            self.all(HostArrays.describe, known, descriptions)
            self._layouts[groups] = known
        return known

    def _send(
        self, hosts: Sequence[int], method: calls.Call, arguments: Mapping[str, Any]
    ) -> dict[int, Any]:
        # The answers of some hosts, keyed by host index.
        sharding = _over([self._cpus[number] for number in hosts])
        outcomes = self._caller.outcomes(method, arguments, sharding)
        encoded = allgather.answers(dict(zip(hosts, outcomes, strict=True)))
        return dict(zip(hosts, map(method.decode_answer, encoded), strict=True))


def _over(devices: Mesh | Sequence[jax.Device]) -> NamedSharding:
    # A message has a row for each device.
    if not isinstance(devices, Mesh):
        devices = Mesh(np.array(devices), ("device",))
    return topology.over_all_devices(devices)
