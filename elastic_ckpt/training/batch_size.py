"""The number of rows in each batch, and whether a world can split it evenly."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import data_keys, rows

# The first step of each stage and the number of rows in its global batches.
Schedule: TypeAlias = tuple[tuple[int, int], ...]


def at(stages: Schedule, step: int) -> int:
    """The number of rows in the global batch of `step`."""
    return next(rows for begin, rows in reversed(stages) if begin <= step)


def schedule(data: data_keys.DataKeys, world: topology.Topology) -> Schedule:
    """The batch sizes of a run on `world`.

    A ramp follows Megatron-LM (`num_microbatches_calculator.py`): its stages grow from
    the initial to the final size, and each uses an equal share of the ramp's rows.

    Raises:
      ConfigError: if a batch cannot be split evenly among the devices, a ramp does not
        reach its final size, or hosts would read logical shards more often than
        `max_shard_reads`.
    """
    if data.enable_rampup_batch_size:
        stages = _ramp(data, world)
    else:
        stages = [
            (begin, global_batch_size(section, world))
            for begin, section in data_keys.stages(data)
        ]
    _check_shard_reads(data, world, [size for _, size in stages])
    return tuple(stages)


def _check_shard_reads(
    data: data_keys.DataKeys, world: topology.Topology, sizes: list[int]
) -> None:
    num_shards, hosts = data.num_logical_shards, world.hosts
    for size in sizes:
        reads = rows.shard_reads(num_shards, rows.in_order(hosts, size))
        if reads > data.max_shard_reads:
            raise errors.ConfigError(
                f"with num_logical_shards={num_shards} and batches of {size} rows,"
                f" {hosts} hosts would read each shard {reads:.3g} times; choose"
                f" num_logical_shards={hosts * max(1, round(num_shards / hosts))},"
                f" a different multiple of {hosts} or a different batch size. If the"
                " run has begun, use a number of hosts that divides its number of"
                " shards, or raise max_shard_reads"
            )
    if data.enable_rampup_batch_size and num_shards % hosts:
        raise errors.ConfigError(
            f"enable_rampup_batch_size=true: the number of hosts, {hosts}, does not"
            f" divide num_logical_shards={num_shards}, so shards would move between"
            " hosts when the batch grows; set num_logical_shards to a multiple of the"
            " number of hosts"
        )


def _ramp(data: data_keys.DataKeys, world: topology.Topology) -> list[tuple[int, int]]:
    if data.data_stages:
        raise errors.ConfigError(
            "enable_rampup_batch_size=true does not work with data_stages; set the"
            " batch size of each data stage instead"
        )
    start, step = data.per_device_batch_size_start, data.per_device_batch_size_increment
    distance = data.per_device_batch_size - start
    if data.global_batch_size or not step or distance < 0 or distance % step:
        raise errors.ConfigError(
            f"a ramp from per_device_batch_size_start={start} by"
            f" per_device_batch_size_increment={step} does not reach"
            f" per_device_batch_size={data.per_device_batch_size}; choose values with"
            " which it does, and set global_batch_size=0"
        )
    num_increments = round(distance / step)
    begin, stages = 0, []
    for number in range(num_increments):
        size = dataclasses.replace(data, per_device_batch_size=start + number * step)
        num_rows = global_batch_size(size, world)
        stages.append((begin, num_rows))
        begin += max(1, round(data.global_rampup_samples / num_increments / num_rows))
    return [*stages, (begin, global_batch_size(data, world))]


def global_batch_size(data: data_keys.DataKeys, world: topology.Topology) -> int:
    """The number of rows in a global batch on `world`.

    Raises:
      ConfigError: if the batch cannot be split evenly among the devices.
    """
    size = data.global_batch_size
    if not size:
        exact = data.per_device_batch_size * world.devices
        size = round(exact)
        if not size or size != exact:
            raise errors.ConfigError(
                f"per_device_batch_size={data.per_device_batch_size} on"
                f" {world.devices} devices gives a global batch of {exact:g} rows;"
                " choose a value that makes it a positive integer"
            )
    if size % world.devices:
        raise errors.ConfigError(
            f"a global batch of {size} rows cannot be divided evenly among"
            f" {world.devices} devices, as JAX requires; set global_batch_size to a"
            f" multiple of {world.devices}, or use a number of devices that divides"
            f" {size}"
        )
    return size
