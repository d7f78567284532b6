"""The simulated run of a configuration: its keys, on a cluster of another size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from elastic_ckpt.application import configured
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.simulation.costs import Costs
from elastic_ckpt.simulation.hardware import Hardware
from elastic_ckpt.simulation.run_plan import RunPlan
from elastic_ckpt.simulation.saves import Setting
from elastic_ckpt.steps import failure_domains, placement
from elastic_ckpt.tiers.choices import Local, Peers, Persistent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster that a configuration is simulated on.

    Attributes:
      hosts: of the cluster; 0 for those of the configuration.
      slices: that they are divided into; 0 keeps the hosts of a slice.
      hosts_per_rack: of consecutive machines; 0 if there are no racks.
      spares: slices that do not train; None for those of the configuration.
    """

    hosts: int = 0
    slices: int = 0
    hosts_per_rack: int = 0
    spares: int | None = None


def on_cluster(config: schema.Config, cluster: Cluster) -> schema.Config:
    """The configuration for another number of hosts: as many rows for each device.

    Raises:
      ConfigError: if hosts do not divide into slices, or all of them would be spares.
    """
    world = config.world
    hosts = cluster.hosts or world.hosts
    slices = cluster.slices
    if not slices:
        slices = max(1, round(hosts * world.slices / world.hosts))
    if hosts % slices:
        raise errors.ConfigError(
            f"{hosts} hosts do not divide into {slices} slices; choose --hosts and"
            " --slices so that they do"
        )
    rows, rest = divmod(config.data.global_batch_size * hosts, world.hosts)
    if rest:
        raise errors.ConfigError(
            f"global_batch_size={config.data.global_batch_size} for {world.hosts} hosts"
            f" is no whole number of rows for {hosts}; set per_device_batch_size"
        )
    elastic = config.elastic
    if cluster.spares is not None:
        most = slices - cluster.spares
        if not 0 < most <= slices:
            raise errors.ConfigError(
                f"spares={cluster.spares} leaves none of {slices} slices to train;"
                " choose fewer, or more --slices"
            )
        elastic = dataclasses.replace(
            elastic,
            elastic_max_slice_count=most,
            elastic_min_slice_count=min(elastic.elastic_min_slice_count, most),
        )
    changed = dataclasses.replace(
        config,
        world=dataclasses.replace(world, hosts=hosts, slices=slices),
        data=dataclasses.replace(config.data, global_batch_size=rows),
        elastic=elastic,
    )
    configured.check_counts(changed)
    return changed


def plan(
    config: schema.Config,
    cluster: Cluster,
    *,
    costs: Costs,
    state_bytes: int,
    secs: float = math.inf,
) -> RunPlan:
    """The run of a configuration on a cluster.

    Args:
      config: of the run, as it is; `cluster` changes it.
      cluster: its size.
      costs: of phases.
      state_bytes: of the state, in one slice.
      secs: to simulate; infinite until the configured steps are done.

    Raises:
      ConfigError: if the configuration cannot run on it.
    """
    config = on_cluster(config, cluster)
    groups = configured.groups(config)
    local, peers, persistent = _tiers(config)
    by_racks = peers is not None and failure_domains.smallest(peers.domain) != "slice"
    if by_racks and not cluster.hosts_per_rack:
        raise errors.ConfigError(
            f"peer_domain={config.tiers.peer_domain}: name the hosts of each with"
            " --rack-hosts, or set peer_domain=slice"
        )
    section = config.elastic
    return RunPlan(
        hardware=Hardware(
            slices=groups.number,
            hosts_per_slice=max(1, groups.full.hosts // groups.number),
            hosts_per_rack=cluster.hosts_per_rack or 1,
        ),
        policy=configured.policy(config, groups),
        work=configured.work(config, groups),
        setting=Setting(
            costs=costs,
            state_bytes=state_bytes,
            in_ram=local is not None,
            most_mib_per_sec=config.tiers.peer_max_mib_per_sec,
        ),
        period=local.every if local is not None else persistent.every or 1,
        backup_steps=persistent.every or 0,
        backup_minutes=persistent.every_minutes or 0.0,
        hang_secs=section.elastic_heartbeat_timeout_seconds + costs.detect_secs,
        compiles_ahead=bool(section.elastic_compile_ahead_seconds),
        by_racks=by_racks,
        secs=secs,
        steps=0 if secs < math.inf else config.run.steps,
    )


def copies(config: schema.Config) -> placement.Policy:
    """The policy of copies of a configuration; none without a local tier."""
    _, peers, _ = _tiers(config)
    if peers is None:
        return placement.Policy(copies=0)
    return placement.Policy(
        copies=peers.copies,
        domain=failure_domains.smallest(peers.domain),
        assume_data_parallelism=peers.assume_data_parallelism,
    )


def state_bytes(config: schema.Config) -> int:
    """The bytes of the state of the configured model."""
    import jax
    import numpy as np

    from elastic_ckpt.core import topology

    jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()[:1]
    mesh = topology.mesh_of(topology.present(1, devices), devices)
    program = configured.program(config, mesh)
    leaves = jax.tree.leaves(program.abstract_state)
    return sum(
        int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in leaves
    )


def _tiers(config: schema.Config) -> tuple[Local | None, Peers | None, Persistent]:
    by_kind: Mapping[type, object] = {
        type(tier): tier for tier in configured.tiers(config, persistent="steps")
    }
    local, peers = by_kind.get(Local), by_kind.get(Peers)
    persistent = by_kind[Persistent]
    assert local is None or isinstance(local, Local)
    assert peers is None or isinstance(peers, Peers)
    assert isinstance(persistent, Persistent)
    return local, peers, persistent
