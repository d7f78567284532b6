"""A checkpointer over tiers, wherever its hosts are: the same lines for every job.

* One process, or one on each host: each process drives its own memory
  (`checkpoint.factory`).
* One controller of many hosts (Pathways): agents in colocated Python, beside the
  accelerators, drive the hosts' memory (`elastic_ckpt_sidecar`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from elastic_ckpt_sidecar import colocated_tiers, remote_hosts
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import factory, tiered
from elastic_ckpt.core import events, topology
from elastic_ckpt.tiers.choices import Chosen, TierChoice


def Checkpointer(
    tiers: Sequence[TierChoice],
    *,
    mesh: Mesh | None = None,
    run: str | None = None,
    slice_name: str | None = None,
    emit: events.Emit = events.nobody,
) -> tiered.TieredCheckpointer | ocp.training.Checkpointer:
    """A checkpointer with the verbs of Orbax's `training.Checkpointer`.

    Args:
      tiers: at most one of each kind; see `factory.Checkpointer`. Under a single
        controller the directories are those of the hosts, and `Peers.interface` is the
        head's address in the network that hosts share.
      mesh: the training mesh, if it is not over all devices.
      run: the identity of the run; by default the name of the local directory.
      slice_name: the slice that this process's devices are in, by default the
        hardware's; those of a single controller follow from its mesh.
      emit: hears what happens.

    Raises:
      ConfigError: if the tiers do not fit together, or hosts differ in what they need
        to have in common.
      RunError: if hosts cannot be reached, or a RAM disk is in use.
    """
    chosen = Chosen.of(tiers)
    mesh = mesh or Mesh(np.array(jax.devices()), ("device",))
    if chosen.local is None or not topology.is_single_controller(mesh):
        return factory.Checkpointer(tiers, run=run, slice_name=slice_name, emit=emit)
    hosts = remote_hosts.hosts_of(mesh)
    slices = topology.slices_of(mesh)
    choices = [
        colocated_tiers.HostChoice(
            number=number,
            device_ids=tuple(cpu.id for cpu in host.cpus),
            run=run or chosen.run,
            slice_name=slices[host.accelerators[0]],
            local=chosen.local,
            peers=chosen.peers,
            persistent=chosen.persistent,
        )
        for number, host in enumerate(hosts)
    ]
    world = remote_hosts.RemoteHosts(hosts, choices)
    return factory.over(world, chosen, emit=emit)
