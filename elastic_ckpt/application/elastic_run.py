"""An elastic run as it is configured, over any cluster.

It imports JAX only where it is used, so that the fork server starts at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic_ckpt.application import run_directory
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import decision, faults, runtime, scale_request
from elastic_ckpt.elastic.cluster import Cluster
from elastic_ckpt.elastic.decision import Policy, Work
from elastic_ckpt.elastic.world import World

if TYPE_CHECKING:
    from elastic_ckpt.core.topology import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """All that a run may have: the groups of hosts that are lost together.

    Attributes:
      number: of the groups; `Cluster` has them as slices.
      full: the topology of all of them.
    """

    number: int
    full: Topology

    def some(self, number: int) -> Topology:
        """The topology of some of the groups."""
        full = self.full
        return dataclasses.replace(
            full,
            # The only host has all groups, and is there with some of them.
            hosts=max(1, full.hosts * number // self.number),
            slices=full.slices * number // self.number,
            devices=full.devices * number // self.number,
        )


def groups(config: schema.Config) -> Groups:
    """The groups of hosts that are configured."""
    from elastic_ckpt.core import topology

    world = config.world
    full = topology.Topology(
        hosts=world.hosts,
        slices=world.slices,
        devices=world.hosts * world.devices_per_host,
    )
    is_controlled = world.hosts == 1 or world.enable_single_controller
    if config.elastic.elastic_enabled and is_controlled:
        return Groups(number=world.slices, full=full)
    # A host that simulates several slices is lost with all of them.
    return Groups(number=min(world.hosts, world.slices), full=full)


def check_request(config: schema.Config, number: int) -> None:
    """Raises a ConfigError unless the run can train on a number of slices."""
    available = groups(config)
    present_policy = policy(config, available)
    least, most = present_policy.min_slices, num_used(config, available)
    if not least <= number <= most:
        raise errors.ConfigError(
            f"--slices {number}: the run trains on {least} to {most} slices"
            f" (elastic_min_slice_count={config.elastic.elastic_min_slice_count},"
            f" elastic_max_slice_count={config.elastic.elastic_max_slice_count},"
            f" slices={config.world.slices}); choose a number between, or start the run"
            " again with other bounds"
        )
    exactly = dataclasses.replace(present_policy, min_slices=number, max_slices=number)
    present_secs = dict.fromkeys(range(number), math.inf)
    decided = decision.decide(
        decision.Slices(present_secs=present_secs), exactly, work(config, available)
    )
    if not isinstance(decided, decision.Train):
        raise errors.ConfigError(f"--slices {number}: {decided.why}")


def check_checkpoints(config: schema.Config) -> None:
    """Raises a ConfigError if a run that is elastic saves nothing to go on from."""
    if config.elastic.elastic_enabled and not config.checkpoint.enable_checkpointing:
        raise errors.ConfigError(
            "elastic_enabled=true with enable_checkpointing=false: a run that loses a"
            " slice continues from a saved step, and without one it would start again"
            " at step 0; set enable_checkpointing=true or elastic_enabled=false"
        )


def check_tiers(config: schema.Config) -> None:
    """Raises a ConfigError if the tiers of the run lack keys or have wrong ones."""
    from elastic_ckpt.checkpoint import configured_tiers

    if config.checkpoint.enable_checkpointing:
        configured_tiers.tiers(config, persistent=run_directory.path_of(config))


def check_keys(config: schema.Config) -> None:
    """Raises a ConfigError for keys that `train` refuses on all hosts and files."""
    check_checkpoints(config)
    check_tiers(config)
    check_counts(config)
    faults.parse(config.elastic.faults)


def check_world(config: schema.Config) -> None:
    """Raises a ConfigError unless the hosts divide into slices, and batches on them."""
    from elastic_ckpt.data import batch_size

    available = groups(config)
    expected = available.some(num_used(config, available))
    expected.check()
    batch_size.schedule(config.data, expected)


def check_counts(config: schema.Config) -> None:
    """Raises a ConfigError if the numbers of slices exclude each other."""
    section, slices = config.elastic, config.world.slices
    most = section.elastic_max_slice_count
    if most > slices:
        raise errors.ConfigError(
            f"elastic_max_slice_count={most} is more than slices={slices}; lower"
            " it, or raise slices: those beyond it are spares"
        )
    if most and not section.elastic_enabled:
        raise errors.ConfigError(
            f"elastic_max_slice_count={most} needs elastic_enabled=true, or else"
            " spares would never replace a lost slice; set elastic_enabled=true or"
            " elastic_max_slice_count=0"
        )
    if most and section.elastic_min_slice_count > most:
        raise errors.ConfigError(
            f"elastic_min_slice_count={section.elastic_min_slice_count} is more than"
            f" elastic_max_slice_count={most}; lower it"
        )
    if section.elastic_min_slice_count > slices:
        raise errors.ConfigError(
            f"elastic_min_slice_count={section.elastic_min_slice_count} is more than"
            f" slices={slices}; lower it"
        )


def num_used(config: schema.Config, groups: Groups) -> int:
    """The number of groups that train at most; the others are spares."""
    return min(groups.number, config.elastic.elastic_max_slice_count or groups.number)


def policy(config: schema.Config, groups: Groups) -> Policy:
    """The policy of a run for groups that are lost and come back."""
    section = config.elastic
    return Policy(
        min_slices=section.elastic_min_slice_count or num_used(config, groups),
        max_slices=section.elastic_max_slice_count or None,
        batch="keep_global" if config.data.global_batch_size else "keep_per_device",
        wait_secs=section.elastic_timeout_seconds,
        settle_secs=section.elastic_settle_seconds,
        max_retries=section.elastic_max_retries if section.elastic_enabled else 0,
        quarantine_failures=section.elastic_quarantine_failures,
        quarantine_secs=section.elastic_quarantine_seconds,
        leave_out_slow=section.elastic_leave_out_slow_hosts,
    )


def work(config: schema.Config, groups: Groups) -> Work:
    """The work of a step, on as many groups as train at most."""
    from elastic_ckpt.data import batch_size

    number = num_used(config, groups)
    full = groups.some(number)
    rows = batch_size.global_batch_size(config.data, full)
    return Work(
        num_slices=number,
        rows=rows,
        devices_per_slice=full.devices // number,
        max_rows_per_device=rows // full.devices,
        objection=functools.partial(_objection, config, groups),
    )


def run(
    config: schema.Config,
    cluster: Cluster,
    train: Callable[[schema.Config, World], object],
    *,
    groups: Groups,
    compile_ahead: Callable[[schema.Config, World], object] | None = None,
    emit: events.Emit,
) -> None:
    """Trains on the groups of a cluster that are there, until the run has ended.

    Args:
      config: of the run; the files of its data exist.
      cluster: closed by the caller.
      train: of each host.
      groups: all that the cluster may have.
      compile_ahead: of each host; see `runtime.run`.
      emit: called for each event of the run.

    Raises:
      RunError: see `runtime.run`.
    """
    runtime.run(
        functools.partial(train, config),
        cluster=cluster,
        policy=scale_request.ScaledPolicy(
            run_directory.path_of(config), policy(config, groups)
        )
        if config.elastic.elastic_enabled
        else policy(config, groups),
        work=work(config, groups),
        compile_ahead=None
        if compile_ahead is None
        else functools.partial(compile_ahead, config),
        emit=emit,
    )


def _objection(
    config: schema.Config, groups: Groups, number: int, rows: int
) -> str | None:
    # Why the data cannot be dealt to a number of groups.
    from elastic_ckpt.data import batch_size

    del rows
    try:
        batch_size.schedule(config.data, groups.some(number))
    except errors.ConfigError as error:
        return str(error)
    return None
