"""The checkpointer over some tiers, whatever world this process is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import allgather, hosts, rendezvous, tiered
from elastic_ckpt.core import events, storage, topology
from elastic_ckpt.host.endpoint import HostEndpoint
from elastic_ckpt.host.host_tiers import HostTiers
from elastic_ckpt.host.world import HostConfig
from elastic_ckpt.tiers.choices import Chosen, Persistent, TierChoice


def Checkpointer(
    tiers: Sequence[TierChoice],
    *,
    run: str | None = None,
    slice_name: str | None = None,
    emit: events.Emit = events.nobody,
) -> tiered.TieredCheckpointer | ocp.training.Checkpointer:
    """A checkpointer with the verbs of Orbax's `training.Checkpointer`.

    Every process of a world calls it alike, and it returns when all have.

    Args:
      tiers: at most one of each kind. A persistent tier alone is Orbax's checkpointer;
        with a local tier, hosts save to their RAM first.
      run: the identity of the run; by default the name of the local directory.
      slice_name: the slice that this process's devices are in; by default the
        hardware's.
      emit: hears what happens.

    Raises:
      ConfigError: if the tiers do not fit together.
      RunError: if hosts cannot be reached, or a RAM disk is in use.
    """
    chosen = Chosen.of(tiers)
    if chosen.local is None:
        return _orbax(chosen.persistent)
    config = HostConfig(
        number=topology.this_host(),
        run=run or chosen.run,
        slice_name=slice_name or topology.hardware_slice(),
        local=chosen.local,
        peers=chosen.peers,
        persistent=chosen.persistent,
    )
    own = HostEndpoint(config, HostTiers)
    world = hosts.InEveryProcess(own, allgather.of_this_world())
    return over(world, chosen, emit=emit)


def over(
    world: hosts.Hosts, chosen: Chosen, *, emit: events.Emit = events.nobody
) -> tiered.TieredCheckpointer:
    """A checkpointer over hosts of any kind, which meet each other for it.

    Args:
      world: the hosts; the checkpointer closes them.
      chosen: the tiers, a local one among them.
      emit: hears what happens.

    Raises:
      HostsFailed: if a host cannot take part, with the reason.
    """
    assert chosen.local is not None
    try:
        rendezvous.join(world)
        return tiered.TieredCheckpointer(
            world, local=chosen.local, persistent=chosen.persistent, emit=emit
        )
    except BaseException:
        world.close()
        raise


def _orbax(persistent: Persistent | None) -> ocp.training.Checkpointer:
    assert persistent is not None
    policies = ocp.training.save_decision_policies
    save: Any = policies.AnySavePolicy(
        [
            policies.FixedIntervalPolicy(persistent.every or 1),
            policies.PreemptionCheckpointingPolicy(),
        ]
    )
    return ocp.training.Checkpointer(
        storage.absolute(persistent.directory),
        save_decision_policy=save,
        preservation_policy=cast(Any, persistent.keep),
        cleanup_tmp_directories=True,
    )
