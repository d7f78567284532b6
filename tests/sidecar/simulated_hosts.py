"""Hosts under a single controller, in one process: groups of its CPU devices.

Each host has the memory of a separate machine, a directory in /dev/shm, whose agent
runs in a thread. The steps of a host stay there when its world ends.
"""

import contextlib
import os
import shutil

import jax
import numpy as np
from elastic_ckpt_sidecar import arrays, remote_hosts
from jax.sharding import Mesh

from elastic_ckpt.checkpoint import run_world
from elastic_ckpt.checkpoint.checkpointer import HostsCheckpointer
from elastic_ckpt.checkpoint.host.world import HostConfig
from elastic_ckpt.core import topology
from elastic_ckpt.tiers import choices
from elastic_ckpt.tiers.peers import agent
from elastic_ckpt.universal import loading
from tests import shared_memory
from tests.processes import tier_worlds
from tests.tiers import served


class Machines:
    """The memory of some machines; at the end of the block nothing of it is left."""

    def __init__(self):
        self._directory = shared_memory.directory("hosts")
        self._agents = {}

    def __enter__(self):
        self.root = self._directory.__enter__()
        return self

    def __exit__(self, *error):
        for number in list(self._agents):
            self._agents.pop(number).close()
        self._directory.__exit__(*error)

    def directory(self, number):
        """The memory of a machine, which its agent serves from now on."""
        directory = os.path.join(self.root, f"machine-{number}")
        if number not in self._agents:
            os.makedirs(directory, exist_ok=True)
            self._agents[number] = contextlib.ExitStack()
            self._agents[number].enter_context(
                served.serving(agent.Service(root=directory))
            )
        return directory

    def lose(self, number):
        """Takes a machine away, with all that its memory holds."""
        self._agents.pop(number).close()
        shutil.rmtree(os.path.join(self.root, f"machine-{number}"))


def mesh_of(num_hosts, *, slices=1, apart=False):
    """A mesh over the accelerators of all hosts: all devices, or half of them."""
    devices = jax.devices()[: 4 if apart else 8]
    assert len(devices) % num_hosts == 0
    return Mesh(np.array(devices).reshape(slices, -1), topology.BATCH_AXES)


def hosts_of(mesh, num_hosts, *, apart=False):
    """The devices of the mesh dealt to hosts; apart, others are beside them."""
    devices = list(mesh.devices.flat)
    beside = jax.devices()[4:] if apart else devices
    each = len(devices) // num_hosts
    return [
        arrays.HostDevices(
            accelerators=tuple(devices[start : start + each]),
            cpus=tuple(beside[start : start + each]),
        )
        for start in range(0, len(devices), each)
    ]


def choices_of(machines, hosts, mesh, tiers, *, numbers):
    """The configuration of each host, on the machines with these numbers."""
    slices = topology.slices_of(mesh)
    return [
        HostConfig(
            number=number,
            run="run",
            slice_name=slices[host.accelerators[0]],
            directory=machines.directory(numbers[number]),
            chosen=choices.Chosen.from_choices(
                tiers(machines.directory(numbers[number]))
            ),
        )
        for number, host in enumerate(hosts)
    ]


@contextlib.contextmanager
def world(
    machines,
    num_hosts,
    *,
    slices=1,
    apart=False,
    numbers=None,
    storage_alone=False,
    **options,
):
    """A checkpointer over hosts, its mesh, and the events of it."""
    emitted = []

    def emit(name, **fields):
        emitted.append({"event": name, **fields})

    def tiers(directory):
        return tier_worlds.tiers(None if storage_alone else directory, **options)

    mesh = mesh_of(num_hosts, slices=slices, apart=apart)
    hosts = hosts_of(mesh, num_hosts, apart=apart)
    chosen = choices_of(
        machines, hosts, mesh, tiers, numbers=numbers or list(range(num_hosts))
    )
    checkpointer = HostsCheckpointer(
        remote_hosts.RemoteHosts(hosts, chosen),
        choices.Chosen.from_choices(tiers("/nowhere")),
        run="run",
        found=None,
        relayout=loading.relayout,
        world=run_world.ALONE,
        emit=emit,
        context=None,
    )
    with checkpointer:
        yield checkpointer, mesh, emitted
