"""Several settings of a run, simulated under the same failures.

A setting is a configuration on a cluster of another size.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from elastic_ckpt.core import errors
from elastic_ckpt.simulation import cluster as clusters
from elastic_ckpt.simulation import simulated_run
from elastic_ckpt.simulation.cluster import ClusterSize, FailureModel
from elastic_ckpt.simulation.costs import Costs
from elastic_ckpt.simulation.decisions import Decisions, WorldLayout
from elastic_ckpt.simulation.simulated_run import Outcome, RunPlan
from elastic_ckpt.steps import owners
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.training import configured, load, run_directory, schema

# Settings of the cluster that may vary besides the keys of a configuration.
OF_CLUSTER = ("spares", "slices")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """The things that all settings have in common.

    Attributes:
      config: the path of a configuration.
      overrides: of it, `key=value`.
      cluster: its size.
      costs: of phases.
      failures: drawn at random.
      trace: the path of a trace, in place of those; empty for none.
      secs: to simulate; infinite until the configured steps are done.
      state_bytes: of the state; 0 computes those of the configured model.
    """

    config: str
    overrides: Sequence[str] = ()
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    costs: Costs = dataclasses.field(default_factory=Costs)
    failures: FailureModel = dataclasses.field(default_factory=FailureModel)
    trace: str = ""
    secs: float = math.inf
    state_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One setting, simulated.

    Attributes:
      values: of what varies; empty if nothing does.
      hardware: of the cluster.
      outcome: of the run.
    """

    values: Mapping[str, str]
    hardware: ClusterSize
    outcome: Outcome

    @property
    def name(self) -> str:
        """The setting, for people."""
        return _name(self.values)


def settings(varied: Sequence[str]) -> list[dict[str, str]]:
    """All combinations of `key=value,value` texts.

    Raises:
      ConfigError: if a text has another form.
    """
    choices = []
    for text in varied:
        key, _, values = text.partition("=")
        listed = [value for value in values.split(",") if value]
        if not (key and listed):
            raise errors.ConfigError(
                f"--vary {text}: write a key and its values, such as"
                " --vary local_checkpoint_period=5,20,100"
            )
        choices.append([(key, value) for value in listed])
    return [dict(each) for each in itertools.product(*choices)]


def run(study: Study, varied: Sequence[str] = ()) -> list[Result]:
    """Simulates each setting.

    Raises:
      ConfigError: if one of them cannot run.
    """
    size = study.state_bytes
    if not size:
        size = state_bytes(load.load(study.config, study.overrides))
    decisions: dict[owners.Policy, Decisions] = {}
    results = []
    for values in settings(varied):
        keys = [f"{k}={v}" for k, v in values.items() if k not in OF_CLUSTER]
        changed = {
            key: _number(key, values[key]) for key in OF_CLUSTER if key in values
        }
        config = load.load(study.config, [*study.overrides, *keys])
        cluster = dataclasses.replace(study.cluster, **changed)
        try:
            planned = plan(
                config, cluster, costs=study.costs, state_bytes=size, secs=study.secs
            )
        except errors.ConfigError as error:
            raise errors.ConfigError(f"{_name(values)}: {error}") from error
        policy = copies(config)
        if policy not in decisions:
            layout = WorldLayout(state_bytes=size, domain=policy.domain)
            decisions[policy] = Decisions(layout, policy)
        hardware = planned.hardware
        if study.trace:
            events = clusters.read(study.trace, hardware)
        else:
            events = study.failures.trace(hardware, secs=study.secs)
        outcome = simulated_run.simulate(planned, events, decisions[policy])
        results.append(Result(values=values, hardware=hardware, outcome=outcome))
    return results


def on_cluster(config: schema.Config, cluster: Cluster) -> schema.Config:
    """The configuration for another number of hosts: as many rows for each device.

    Raises:
      ConfigError: if hosts do not divide into slices, or all of them would be spares.
    """
    world = config.world
    hosts = cluster.hosts or world.hosts
    slices = cluster.slices or max(1, round(hosts * world.slices / world.hosts))
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
    directory = run_directory.path_of(config)
    tiers = Chosen.from_choices(configured.tiers(config, persistent=directory))
    local, peers, persistent = tiers.local, tiers.peers, tiers.persistent
    assert persistent is not None
    by_racks = peers is not None and peers.domain.split(";")[-1] != "slice"
    if by_racks and not cluster.hosts_per_rack:
        raise errors.ConfigError(
            f"peer_domain={config.tiers.peer_domain}: name the hosts of each with"
            " --rack-hosts, or set peer_domain=slice"
        )
    section = config.elastic
    return RunPlan(
        hardware=ClusterSize(
            slices=groups.number,
            hosts_per_slice=max(1, groups.full.hosts // groups.number),
            hosts_per_rack=cluster.hosts_per_rack or 1,
        ),
        policy=configured.policy(config, groups),
        work=configured.work(config, groups),
        costs=costs,
        state_bytes=state_bytes,
        in_ram=local is not None,
        most_mib_per_sec=config.tiers.peer_max_mib_per_sec,
        period=local.every if local is not None else persistent.every or 1,
        backup_steps=persistent.every or 0,
        backup_minutes=persistent.every_minutes or 0.0,
        hang_secs=section.elastic_heartbeat_timeout_seconds + costs.detect_secs,
        by_racks=by_racks,
        secs=secs,
        steps=0 if secs < math.inf else config.run.steps,
    )


def copies(config: schema.Config) -> owners.Policy:
    """The policy of copies of a configuration; none without a local tier."""
    peers = configured.peers(config)
    if peers is None:
        return owners.Policy(copies=0)
    return owners.Policy(
        copies=peers.copies,
        domain=peers.domain.split(";")[-1],
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


def _name(values: Mapping[str, str]) -> str:
    listed = [f"{key}={value}" for key, value in values.items()]
    return ", ".join(listed) or "as configured"


def _number(key: str, text: str) -> int:
    if not text.isdecimal():
        raise errors.ConfigError(f"--vary {key}={text}: write whole numbers")
    return int(text)
