"""MaxText on hosts that are lost and come back: processes of this machine, or several.

The supervisors start worlds as those of `elastic-ckpt train`; on each host of a world
MaxText runs on its slices, with the same global batch, and leaves when it is asked to.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic import supervisor
from elastic_ckpt.integrations import maxtext_config, maxtext_seam
from elastic_ckpt.training import (
    configured,
    elastic_run,
    journal,
    listeners,
    machine_run,
    schema,
)

if TYPE_CHECKING:
    from elastic_ckpt.elastic.world import World

# Keys that the supervisor reads besides.
_OF_RUN = (
    "base_output_directory",
    "enable_rampup_batch_size",
    "grain_eval_files",
    "grain_train_files",
    "hardware",
    *maxtext_config.WEIGHT_KEYS,
    "num_logical_shards",
    "per_device_batch_size",
    "run_name",
    "steps",
)
# Keys that each world sets, with the remedy.
_SET_BY_WORLDS = {
    "gradient_accumulation_steps": "leave it out; fewer slices accumulate gradients by"
    " themselves, and per_device_batch_size is that of all slices",
    "enable_single_controller": "leave it out, or leave hosts out: Pathways has the"
    " hosts of a single controller",
}
# Their values where MaxText's own files have them.
_UNSET = {
    "gradient_accumulation_steps": 1,
    "enable_single_controller": False,
}
# The fork server imports it, and with it what a host needs.
_HOST_PROGRAM = "elastic_ckpt.integrations.maxtext"


def run_config(arguments: Sequence[str]) -> schema.Config:
    """The hosts and slices of a run that this program starts itself.

    Args:
      arguments: of MaxText, with keys of ours: a YAML file may be first.

    Returns:
      The configuration of the supervisor; `hosts` is 1 if it starts none.

    Raises:
      ConfigError: naming the key whose value has no meaning.
      DataError: if files of the data are not there.
    """
    wanted = (
        *maxtext_config.OWN_WORLD_KEYS,
        *maxtext_config.ELASTIC_KEYS,
        *maxtext_config.TIER_KEYS,
        *maxtext_config.OWN_TIER_KEYS,
        *maxtext_config.OWN_METRICS_KEYS,
        *_OF_RUN,
        *_SET_BY_WORLDS,
    )
    config, given = maxtext_config.settings_of(wanted, arguments)
    world = config.world
    maxtext_config.check_files(config.data)
    maxtext_config.check_weights(given)
    listeners.check(config.metrics)
    if world.hosts == 1:
        return config
    for key in ("run_name", "base_output_directory", "per_device_batch_size"):
        if not given.get(key):
            raise errors.ConfigError(
                f"{maxtext_config.PLACE}: hosts={world.hosts} needs {key}"
            )
    for key, remedy in _SET_BY_WORLDS.items():
        if given.get(key, _UNSET[key]) != _UNSET[key]:
            raise errors.ConfigError(
                f"{maxtext_config.PLACE}: {key}={given[key]} with hosts={world.hosts}:"
                f" {remedy}"
            )
    if config.data.enable_rampup_batch_size and config.elastic.elastic_enabled:
        raise errors.ConfigError(
            f"{maxtext_config.PLACE}: enable_rampup_batch_size=true with"
            f" hosts={world.hosts} and elastic_enabled=true: fewer slices would have"
            " smaller batches in the ramp; set one of them to false"
        )
    num_devices = world.hosts * world.devices_per_host
    rows = config.data.per_device_batch_size * num_devices
    if rows < num_devices or round(rows) % num_devices:
        raise errors.ConfigError(
            f"{maxtext_config.PLACE}:"
            f" per_device_batch_size={config.data.per_device_batch_size:g} makes a"
            f" global batch of {rows:g} rows, which cannot be divided evenly among"
            f" {num_devices} devices; set it to a whole number"
        )
    # The ramp is MaxText's own.
    data = dataclasses.replace(
        config.data, global_batch_size=round(rows), enable_rampup_batch_size=False
    )
    # Its own program is compiled ahead, MaxText's is not.
    elastic = dataclasses.replace(config.elastic, elastic_compile_ahead_seconds=0.0)
    return dataclasses.replace(config, data=data, elastic=elastic)


def in_world(
    *,
    rows: int,
    eval_rows: int,
    num_devices: int,
    microbatches: int,
    ram_directory: str | None,
) -> list[str]:
    """The arguments of MaxText that change with each world of a run.

    Args:
      rows: of a global batch.
      eval_rows: of one of an evaluation, the same in each world if its devices divide
        it.
      num_devices: of the world.
      microbatches: equal parts in which a device computes its rows.
      ram_directory: of the run on the RAM disk of this host's slice; None for the
        configured one.
    """
    settings: dict[str, Any] = {
        "per_device_batch_size": rows // (num_devices * microbatches),
        "gradient_accumulation_steps": microbatches,
        "skip_jax_distributed_system": True,
        # The supervisor continues the run; MaxText itself can under Pathways alone.
        "elastic_enabled": False,
        # A world that is left saves its last step.
        "enable_autocheckpoint": True,
    }
    if eval_rows % num_devices == 0:
        settings["eval_per_device_batch_size"] = eval_rows // num_devices
    if ram_directory is not None:
        # To which the name of the run is added.
        settings["local_checkpoint_directory"] = os.path.dirname(ram_directory)
    return [f"{key}={value}" for key, value in settings.items()]


def run(
    config: schema.Config,
    arguments: Sequence[str],
    *,
    emit: events.Emit,
    train: Callable[[Sequence[str], schema.Config, World], object] | None = None,
) -> bool:
    """Trains on hosts of this machine and of others, until the run has ended.

    Args:
      config: of the supervisor; see `run_config`. With `elastic_machines` each machine
        has one.
      arguments: of MaxText.
      emit: shows the events.
      train: of each host, picklable; MaxText by default.

    Returns:
      Whether the run was asked to end before its last step.

    Raises:
      ConfigError: if the hosts cannot be started so.
      RunError: if MaxText fails on a host, or slices are missing for too long.
    """
    maxtext_seam.check_installed(maxtext_config.explicit_keys(arguments))
    place = None
    if config.elastic.elastic_machines > 1:
        place = machine_run.place(config, os.environ)
    configured.check_local(config)
    supervisor.warm_up([_HOST_PROGRAM, maxtext_seam.MAIN.module])
    of_host = functools.partial(train or train_maxtext, tuple(arguments))
    if place is not None:
        program = maxtext_config.given(arguments)
        return machine_run.run(config, place, emit, train=of_host, program=program)
    listening = listeners.of_supervisor(config)
    with journal.kept(config, emit, listening=listening) as kept:
        elastic_run.run_on_hosts(config, kept, train=of_host)
        return kept.is_stopped


def _eval_rows(arguments: Sequence[str], config: schema.Config) -> int:
    # With all slices. MaxText takes the size of training if there is no other.
    key = "eval_per_device_batch_size"
    _, given = maxtext_config.settings_of((key,), arguments)
    num_devices = config.world.hosts * config.world.devices_per_host
    rows = round(float(str(given.get(key) or 0)) * num_devices)
    return rows or config.data.global_batch_size


def train_maxtext(
    arguments: Sequence[str], config: schema.Config, world: World
) -> None:
    """Trains on one host of a world; picklable."""
    from elastic_ckpt.integrations import maxtext

    began_secs = time.monotonic()
    left_at: list[int] = []

    def should_stop(step: int) -> bool:
        if world.should_stop(step):
            left_at.append(step)
        return bool(left_at)

    done = [config.run.steps]

    def emit(name: str, **fields: storage.Json) -> None:
        if name == "run_started":
            done[0] = int(str(fields["start_step"]))
        elif name in ("step", "data_ended"):
            done[0] = int(str(fields["step"]))
        world.emit(name, **fields)

    world.begin("prepare")
    changing = in_world(
        rows=config.data.global_batch_size,
        eval_rows=_eval_rows(arguments, config),
        num_devices=world.topology.devices,
        microbatches=world.microbatches,
        ram_directory=world.ram_directory,
    )
    maxtext.run(
        [*arguments, *changing],
        emit=emit,
        world=dataclasses.replace(world, emit=emit, should_stop=should_stop),
        started=config,
    )
    if left_at:
        world.emit("run_stopped", step=left_at[-1], saved=True)
    else:
        secs = time.monotonic() - began_secs
        world.emit("run_finished", step=done[0], secs=secs)
