"""Turns a configuration into the plain values that the libraries accept.

Imports JAX and Orbax only where they are used, so that the fork server starts fast.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable
from typing import Any, cast

from etils import epath, epy

from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import decision, faults, host, watch
from elastic_ckpt.steps import layout, owners
from elastic_ckpt.steps.retention import BestN, PreservationPolicy
from elastic_ckpt.tiers.choices import Local, Peers, Persistent, Tier, TlsFiles
from elastic_ckpt.training import journal, load, schema

with epy.lazy_imports():
    from elastic_ckpt.core import topology
    from elastic_ckpt.training import batch_size, run_saver, validation_schedule

_QUANTITY = re.compile(r"([1-9]\d*)([KMGT]i?)?")
_UNITS = {"": 1} | {
    unit + i: (1024 if i else 1000) ** power
    for power, unit in enumerate("KMGT", start=1)
    for i in ("", "i")
}


# Checkpoints.


def tiers(
    config: schema.Config, *, persistent: epath.PathLike, ram: str | None = None
) -> list[Tier]:
    """The local, peer and persistent tiers of a run, or only the persistent tier.

    `persistent` and `ram` are the run's directories in storage and on this slice's RAM
    disk; `ram` defaults to a directory in `local_checkpoint_directory`.

    Raises:
      ConfigError: if keys are missing or mutually exclusive.
    """
    section = config.tiers
    keep = _preservation(config.checkpoint)
    if not section.enable_multi_tier_checkpointing:
        period = config.checkpoint.checkpoint_period
        return [Persistent(persistent, every=period, keep=keep)]
    directory, period = (
        section.local_checkpoint_directory,
        section.local_checkpoint_period,
    )
    if not directory or not period:
        raise errors.ConfigError(
            "enable_multi_tier_checkpointing=true needs a RAM disk and a period, but"
            f" local_checkpoint_directory={directory!r} and"
            f" local_checkpoint_period={period}; set both, for example to /dev/shm and"
            " 10"
        )
    minutes = section.multi_tier_checkpointing_backup_interval_minutes
    steps = section.multi_tier_checkpointing_backup_interval_steps
    if bool(minutes) == bool(steps):
        raise errors.ConfigError(
            "set either multi_tier_checkpointing_backup_interval_minutes or"
            " multi_tier_checkpointing_backup_interval_steps as the interval between"
            f" backups to persistent storage; {'both are' if minutes else 'neither is'}"
            " set now"
        )
    return [
        Local(
            ram or os.path.join(directory, config.run.run_name),
            every=period,
            limit_bytes=num_bytes(section, "local_checkpoint_size_limit"),
            pinned_bytes=num_bytes(section, "local_checkpoint_pinned_memory"),
        ),
        peers(section),
        Persistent(
            persistent, every=steps or None, every_minutes=minutes or None, keep=keep
        ),
    ]


def saved(section: schema.CheckpointSection) -> run_saver.Saved:
    """The steps that a run saves in addition to the steps due in its tiers."""
    return run_saver.Saved(
        at_end=section.save_checkpoint_on_completion,
        best=_best_steps(section) if section.save_best_checkpoint else None,
        in_background=section.async_checkpointing,
    )


def record(config: schema.Config, *, program: str = "train") -> dict[str, Any]:
    """The fields that a configuration adds to the `RunRecord` of its tiers.

    `program` is `train` or `maxtext`; MaxText numbers its first saved step 0.
    """
    saves, name = config.checkpoint.enable_checkpointing, config.run.run_name
    base = config.tiers.local_checkpoint_directory
    slices = range(config.world.slices)
    in_ram = [base, *(layout.slice_directory(base, each) for each in slices)]
    if not saves or not config.tiers.enable_multi_tier_checkpointing:
        in_ram = []
    found = {
        "run": name,
        "program": program,
        "at_end": saves and config.checkpoint.save_checkpoint_on_completion,
        "ram": tuple(os.path.abspath(os.path.join(each, name)) for each in in_ram),
        "first_step": 0 if program == "maxtext" else 1,
        "data": dataclasses.asdict(config.data),
        "settings": load.values(config),
    }
    return found if saves else found | {"every": 0}


def num_bytes(section: schema.TiersSection, key: str) -> int:
    """The value in bytes of a key in Kubernetes notation, such as `64Gi` or `512Mi`.

    Raises:
      ConfigError: if the value is not an amount of memory.
    """
    quantity = getattr(section, key)
    match = _QUANTITY.fullmatch(quantity)
    if not match:
        raise errors.ConfigError(
            f"{key}={quantity!r} is not an amount of memory; use a value such as 64Gi"
        )
    return int(match[1]) * _UNITS[match[2] or ""]


def validation(
    section: schema.ValidationSection,
    emit: events.Emit,
    *,
    preserve: Callable[[int], int | None] = lambda _: None,
) -> validation_schedule.ValidationSchedule | None:
    """The configured comparison of replicas; None if it is disabled."""
    if section.replica_validation == "none":
        return None
    return validation_schedule.ValidationSchedule(
        level=cast(Any, section.replica_validation),
        at_saves=section.replica_validation_at_saves,
        interval=section.replica_validation_interval,
        stops=section.replica_validation_action == "stop",
        emit=emit,
        preserve=preserve,
    )


def _preservation(section: schema.CheckpointSection) -> PreservationPolicy | None:
    # The steps that persistent storage keeps; None keeps all.
    from orbax.checkpoint import v1 as ocp

    policies = ocp.training.preservation_policies
    newest = section.max_num_checkpoints_to_keep
    kept: list[PreservationPolicy] = [policies.LatestN(newest)]
    if section.num_best_checkpoints_to_keep:
        kept.append(_best_steps(section))
    return policies.AnyPreservationPolicy(kept) if newest else None


def _best_steps(section: schema.CheckpointSection) -> BestN:
    return BestN(
        section.num_best_checkpoints_to_keep,
        metric=section.best_checkpoint_metric,
        higher_is_better=section.best_checkpoint_mode == "max",
    )


def peers(section: schema.TiersSection) -> Peers:
    """The peer tier.

    Raises:
      ConfigError: if keys are missing or mutually exclusive.
    """
    given = [section.peer_tls_certificate, section.peer_tls_key, section.peer_tls_ca]
    if any(given) and not all(given):
        raise errors.ConfigError(
            f"peer_tls_certificate, peer_tls_key and peer_tls_ca are {given}, so only"
            " some are set; set all three or, to send data unencrypted, none"
        )
    return Peers(
        copies=section.peer_copies,
        assume_data_parallelism=section.peer_assume_data_parallelism,
        domain=section.peer_domain,
        domains=owners.parse_domains(section.peer_domains, what="peer_domains"),
        interface=section.peer_interface or None,
        port=section.peer_port,
        known=_listed(section.peer_urls),
        backups=_listed(section.peer_backup_urls),
        secret_file=section.peer_secret_file or None,
        max_bytes_per_sec=section.peer_max_mib_per_sec * 2**20 or None,
        timeout_secs=section.peer_timeout_secs,
        tls=(
            TlsFiles(
                certificate=section.peer_tls_certificate,
                key=section.peer_tls_key,
                authority=section.peer_tls_ca,
            )
            if any(given)
            else None
        ),
    )


def _listed(value: str) -> tuple[str, ...]:
    return tuple(each for each in value.split(";") if each)


# Slices and hosts.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of hosts that are lost together; a `Cluster` calls them slices.

    Attributes:
      number: the number of groups that a run may have.
      most: the maximum number of groups that train; the others are spares.
      full: the topology of all groups.
    """

    number: int
    most: int
    full: topology.Topology

    def some(self, number: int) -> topology.Topology:
        """The topology of `number` of the groups."""
        full = self.full
        return dataclasses.replace(
            full,
            # A single host has all groups and is part of any selection.
            hosts=max(1, full.hosts * number // self.number),
            slices=full.slices * number // self.number,
            devices=full.devices * number // self.number,
        )


def groups(config: schema.Config, there: topology.Topology | None = None) -> Groups:
    """The configured groups, or the groups of the topology that this process found."""
    world, elastic = config.world, config.elastic
    full = there or topology.Topology(
        hosts=world.hosts,
        slices=world.slices,
        devices=world.hosts * world.devices_per_host,
    )
    is_controlled = elastic.elastic_enabled and world.enable_single_controller
    # A host that simulates multiple slices is lost with all of them.
    number = min(world.hosts, world.slices)
    if is_controlled or is_simulated(config):
        number = world.slices
    most = min(number, elastic.elastic_max_slice_count or number)
    return Groups(number=number, most=most, full=full)


def policy(config: schema.Config, groups: Groups) -> decision.Policy:
    """The policy of a run for groups that are lost and rejoin."""
    section = config.elastic
    # A run that is not elastic saves and stops when one of its hosts is asked to stop.
    least = section.elastic_min_slice_count if section.elastic_enabled else groups.most
    return decision.Policy(
        min_slices=least or groups.most,
        max_slices=section.elastic_max_slice_count or None,
        batch="keep_global" if config.data.global_batch_size else "keep_per_device",
        wait_secs=section.elastic_timeout_seconds,
        settle_secs=section.elastic_settle_seconds,
        max_retries=section.elastic_max_retries if section.elastic_enabled else 0,
        quarantine_failures=section.elastic_quarantine_failures,
        quarantine_secs=section.elastic_quarantine_seconds,
        leave_out_slow=section.elastic_leave_out_slow_hosts,
    )


def work(config: schema.Config, groups: Groups) -> decision.Work:
    """The work of a step, based on the largest number of groups that train."""
    full = groups.some(groups.most)
    if config.world.hardware != "cpu" and config.world.hosts == 1:
        # The number of devices is unknown: only the host itself may ask JAX.
        return decision.Work(devices_per_slice=full.devices)
    rows = batch_size.global_batch_size(config.data, full)
    return decision.Work(
        num_slices=groups.most,
        rows=rows,
        devices_per_slice=full.devices // groups.most,
        max_rows_per_device=rows // full.devices,
        objection=functools.partial(_objection, config, groups),
    )


def _objection(
    config: schema.Config, groups: Groups, number: int, rows: int
) -> str | None:
    # Returns why `number` groups cannot share the data; None if they can.
    del rows
    try:
        batch_size.schedule(config.data, groups.some(number))
    except errors.ConfigError as error:
        return str(error)
    return None


def limits(config: schema.Config) -> watch.Limits:
    """The time limits for hosts."""
    section = config.elastic
    # The rest of the grace period is for reporting that the run ended.
    grace_secs = 0.9 * config.run.termination_grace_period_seconds
    if not section.elastic_enabled:
        return watch.Limits(
            most_secs=math.inf, heartbeat_secs=math.inf, grace_secs=grace_secs
        )
    return watch.Limits(
        most_secs=section.elastic_hang_timeout_seconds,
        heartbeat_secs=section.elastic_heartbeat_timeout_seconds,
        grace_secs=grace_secs,
    )


def memory(config: schema.Config) -> host.SliceMemory | None:
    """The RAM disks of slices; None if hosts do not save checkpoints to RAM."""
    section = config.tiers
    if not section.enable_multi_tier_checkpointing:
        return None
    return host.SliceMemory(
        directory=section.local_checkpoint_directory,
        run=config.run.run_name,
        tls_certificate=section.peer_tls_certificate or None,
        tls_key=section.peer_tls_key or None,
    )


def is_simulated(config: schema.Config) -> bool:
    """Whether CPU devices of this process simulate slices that can be lost."""
    world = config.world
    return (
        config.elastic.elastic_enabled
        and not world.enable_single_controller
        and world.hardware == "cpu"
        and world.hosts == 1
        and world.slices > 1
    )


# Mutually exclusive keys.


def check_checkpoints(config: schema.Config) -> None:
    """Raises a ConfigError for checkpoint keys that contradict other keys."""
    section = config.checkpoint
    if config.elastic.elastic_enabled and not section.enable_checkpointing:
        raise errors.ConfigError(
            "elastic_enabled=true with enable_checkpointing=false: without saved steps,"
            " a run that loses a slice would restart at step 0; set"
            " enable_checkpointing=true or elastic_enabled=false"
        )
    kept = section.num_best_checkpoints_to_keep
    is_ranked = (
        config.data.eval_interval or section.best_checkpoint_metric != "eval_loss"
    )
    if (section.save_best_checkpoint or kept) and not is_ranked:
        raise errors.ConfigError(
            f"save_best_checkpoint={str(section.save_best_checkpoint).lower()} and"
            f" num_best_checkpoints_to_keep={kept} have no effect with eval_interval=0:"
            " nothing is evaluated, so there is no best step; set eval_interval,"
            " or remove these keys"
        )
    if kept and not section.max_num_checkpoints_to_keep:
        raise errors.ConfigError(
            f"num_best_checkpoints_to_keep={kept} has no effect with"
            " max_num_checkpoints_to_keep=0, which keeps all steps; set"
            " max_num_checkpoints_to_keep to the number of newest steps to keep"
        )


def check_keys(config: schema.Config) -> None:
    """Raises a ConfigError for keys that `train` rejects with any hosts and files."""
    check_checkpoints(config)
    if config.checkpoint.enable_checkpointing:
        tiers(config, persistent=journal.path_of(config))
    faults.parse(config.elastic.faults)


def check_slices(config: schema.Config, number: int | None = None) -> None:
    """Raises a ConfigError unless the run can train on `number` slices.

    By default, `number` is the maximum number of slices that the run uses.
    """
    available = groups(config)
    chosen, most = policy(config, available), available.most
    available.some(most).check()
    number = number or most
    if not chosen.min_slices <= number <= most:
        section = config.elastic
        raise errors.ConfigError(
            f"{number} slices: the run trains on {chosen.min_slices} to {most} slices"
            f" (elastic_min_slice_count={section.elastic_min_slice_count},"
            f" elastic_max_slice_count={section.elastic_max_slice_count},"
            f" slices={config.world.slices}); choose a number in this range, or restart"
            " the run with different limits"
        )
    exactly = dataclasses.replace(chosen, min_slices=number, max_slices=number)
    alive_secs = dict.fromkeys(range(number), math.inf)
    decided = decision.decide(
        decision.Slices(alive_secs=alive_secs), exactly, work(config, available)
    )
    if not isinstance(decided, decision.Train):
        raise errors.ConfigError(f"{number} slices: {decided.why}")


def check_local(config: schema.Config) -> None:
    """Raises a ConfigError if the local launcher cannot start the configured world."""
    check_keys(config)
    world = config.world
    if world.hardware == "tpu" and world.hosts > 1:
        # libtpu must know each process's place in the world at startup, and it cannot
        # run on only some of a topology's hosts.
        raise errors.ConfigError(
            f"hosts={world.hosts} with hardware=tpu: the local launcher starts hosts"
            " only on CPUs and GPUs; start one process per host with Slurm or a"
            " JobSet, or set hosts=1"
        )
    is_elastic = config.elastic.elastic_enabled
    for fault in faults.parse(config.elastic.faults):
        if world.hosts == 1 and not is_elastic:
            raise errors.ConfigError(
                "faults have no effect with hosts=1 and elastic_enabled=false, because"
                " nothing supervises the only host; set elastic_enabled=true, or"
                " faults=[]"
            )
        kind, number = "slices", groups(config).number
        if fault.kind in faults.OF_HOSTS:
            kind, number = "hosts", world.hosts
        if fault.target >= number:
            raise errors.ConfigError(
                f"faults has {fault.kind} {fault.target}, but the run has {kind} 0 to"
                f" {number - 1}; choose one of these or set faults=[]"
            )
    is_split = world.slices > world.hosts and not is_simulated(config)
    if is_elastic and is_split:
        raise errors.ConfigError(
            f"elastic_enabled=true with slices={world.slices} and hosts={world.hosts}:"
            " a slice must consist of whole hosts, because they are lost together; set"
            " hosts to a multiple of slices, or set slices=1"
        )
    if world.hardware == "cpu" or world.hosts > 1:
        # In other cases, JAX determines the number of devices.
        check_slices(config)
