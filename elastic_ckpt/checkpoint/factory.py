"""The checkpointer over some tiers, whatever world this process is in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import exchange, hosts, joining, tiered
from elastic_ckpt.core import errors, events, storage, topology
from elastic_ckpt.tiers.choices import Local, Peers, Persistent, TierChoice
from elastic_ckpt.tiers.host import host_tiers, host_world


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
    chosen = _one_of_each(tiers)
    local, persistent = chosen.get(Local), chosen.get(Persistent)
    if local is None:
        return _orbax(chosen)
    assert isinstance(local, Local)
    own = host_world.HostWorld(
        run=run or os.path.basename(os.path.abspath(local.directory)),
        number=topology.this_host(),
        slice_name=slice_name or topology.hardware_slice(),
        local_tier=local,
        peers=cast(Peers | None, chosen.get(Peers)),
        storage=cast(Persistent | None, persistent),
    )
    world = hosts.InEveryProcess(host_tiers.HostTiers(own), exchange.of_this_world())
    joining.join(world)
    return tiered.TieredCheckpointer(
        world, local=local, persistent=cast(Persistent | None, persistent), emit=emit
    )


def _one_of_each(tiers: Sequence[TierChoice]) -> dict[type, TierChoice]:
    chosen: dict[type, TierChoice] = {}
    for tier in tiers:
        if type(tier) in chosen:
            raise errors.ConfigError(
                f"there are two tiers {type(tier).__name__}; give one of each kind"
            )
        chosen[type(tier)] = tier
    if Local not in chosen and (Peers in chosen or Persistent not in chosen):
        raise errors.ConfigError(
            "without a local tier a checkpointer has a persistent one, and no peers;"
            " add Local(directory)"
        )
    return chosen


def _orbax(chosen: dict[type, TierChoice]) -> ocp.training.Checkpointer:
    persistent = chosen[Persistent]
    assert isinstance(persistent, Persistent)
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
