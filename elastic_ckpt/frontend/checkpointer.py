"""A checkpointer over tiers, wherever its hosts are: the same lines for every job.

* One process, or one on each host: each process drives its own memory
  (`checkpoint.factory`).
* One controller of many hosts (Pathways): agents in colocated Python, beside the
  accelerators, drive the hosts' memory (`elastic_ckpt_sidecar`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from elastic_ckpt_sidecar import host_agent, remote_hosts
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import checkpointer, factory
from elastic_ckpt.checkpoint.run_world import ALONE, RunWorld
from elastic_ckpt.core import addresses, events, topology
from elastic_ckpt.tiers.choices import Chosen, Tier
from elastic_ckpt.universal.step_layouts import LAYOUTS


def Checkpointer(
    tiers: Sequence[Tier],
    *,
    mesh: Mesh | None = None,
    run: str | None = None,
    slice_name: str | None = None,
    world: RunWorld = ALONE,
    emit: events.Emit = events.nobody,
    context: ocp.Context | None = None,
    read_only: bool = False,
) -> checkpointer.Checkpointer:
    """Makes a checkpointer with the methods of Orbax's `training.Checkpointer`.

    A step is saved into each of the tiers whose turn it is, and restored from the
    nearest one that has it. Every process of the run makes one, with the same
    arguments, and calls its methods alike.

        tiers = [
            ec.Local("/dev/shm/my_run", every=10),
            ec.Persistent("gs://bucket/my_run/steps", every=1000),
        ]
        with ec.Checkpointer(tiers) as checkpointer:
            if checkpointer.latest is not None:
                state = checkpointer.load_checkpointables(
                    None, {"state": abstract_state, "data": batches}
                )["state"]
            ...
            checkpointer.save_checkpointables_async(
                step, {"state": state, "data": batches}
            )

    Args:
      tiers: at most one each of `Local`, `Peers` and `Persistent`; `Peers` needs
        `Local`. Under a single controller the directories are those of the hosts, and
        `Peers.interface` is the controller's address in the network that the hosts
        share, by default that of its default route.
      mesh: the training mesh; needed only if it does not cover all devices.
      run: the name of the run; by default that of the steps in the tiers, or, if there
        are none, that of the directory of `Local` or `Persistent`.
      slice_name: the slice that this process's devices are in, by default the one that
        the hardware reports. A single controller takes the slices from its mesh.
      world: the place of this checkpointer among those of an elastic run, which
        `ec.elastic.World.checkpointer` fills in.
      emit: called with each event.
      context: Orbax's context for all calls outside of a `with` block of another one.
      read_only: opens the steps in persistent storage and in the RAM of this machine
        beside a program that writes them. Nothing is written, and saving is an error.

    Raises:
      ConfigError: if the tiers do not fit together, or hosts were given different
        ones.
      RunError: if a host cannot be reached, the RAM disk is in use or holds steps of
        another run, or another program writes to the same storage.
    """
    chosen = Chosen.from_choices(tiers, read_only=read_only)
    mesh = mesh or Mesh(np.array(jax.devices()), ("device",))
    if not topology.is_single_controller(mesh):
        return factory.Checkpointer(
            tiers,
            run=run,
            slice_name=slice_name,
            world=world,
            emit=emit,
            layouts=LAYOUTS,
            context=context,
            read_only=read_only,
        )
    peers = chosen.peers
    if peers is not None and peers.interface is None:
        peers = dataclasses.replace(peers, interface=addresses.of_the_head())
    found = factory.find_run(chosen)
    run = run or found or chosen.run
    chosen = dataclasses.replace(chosen, peers=peers)
    if read_only:
        chosen = chosen.for_reading()
    directory = chosen.ram_directory()
    hosts = remote_hosts.hosts_of(mesh)
    slices = topology.slices_of(mesh)
    choices = [
        host_agent.HostChoice(
            number=number,
            device_ids=tuple(cpu.id for cpu in host.cpus),
            run=run,
            slice_name=slices[host.accelerators[0]],
            directory=directory,
            chosen=chosen,
        )
        for number, host in enumerate(hosts)
    ]
    members = remote_hosts.RemoteHosts(hosts, choices)
    return factory.over(
        members,
        chosen,
        run=run,
        found=found,
        world=world,
        emit=emit,
        layouts=LAYOUTS,
        context=context,
    )
