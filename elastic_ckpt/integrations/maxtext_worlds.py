"""MaxText on hosts that are lost and rejoin, on one or more machines.

Supervisors start worlds as `elastic-ckpt train` does. On each host of a world, MaxText
keeps the global batch size and exits when asked to.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from elastic_ckpt.core import events
from elastic_ckpt.elastic import station
from elastic_ckpt.integrations import maxtext_hooks, maxtext_keys
from elastic_ckpt.training import configured, launch, schema

if TYPE_CHECKING:
    from elastic_ckpt.elastic.world import World

# The fork server imports these modules and thereby everything that a host needs.
_HOST_PROGRAMS = (
    "elastic_ckpt.integrations.maxtext",
    "maxtext.trainers.pre_train.train",
)


def run(
    config: schema.Config,
    arguments: Sequence[str],
    *,
    emit: events.Emit,
    train: Callable[[Sequence[str], schema.Config, World], object] | None = None,
) -> bool:
    """Trains on hosts of this machine and others until the run ends.

    Args:
      config: the supervisor's configuration; see `maxtext_keys.supervised`. With
        `elastic_machines`, each machine has a supervisor.
      arguments: MaxText's arguments.
      emit: a function that shows the events.
      train: a picklable function to run on each host; by default, it runs MaxText.

    Returns:
      Whether the run was asked to stop before its last step.

    Raises:
      ConfigError: if hosts cannot be started with this configuration.
      RunError: if MaxText fails on a host, or slices are missing for too long.
    """
    given = maxtext_keys.given(arguments)
    maxtext_keys.check(given, maxtext_hooks.keys())
    maxtext_hooks.check_installed()
    place = None
    if config.elastic.elastic_machines > 1:
        place = launch.place(config, os.environ)
    configured.check_local(config)
    station.warm_up(_HOST_PROGRAMS, config.run.base_output_directory)
    of_host = functools.partial(train or train_maxtext, tuple(arguments))
    # The same on all machines, whether keys are set in files or in arguments.
    program = [f"{key}={given[key]!r}" for key in sorted(given)]
    return launch.on_hosts(config, emit, place=place, train=of_host, program=program)


def train_maxtext(
    arguments: Sequence[str], config: schema.Config, world: World
) -> None:
    """Trains on one host of a world; picklable."""
    from elastic_ckpt.integrations import maxtext

    world.begin("prepare")
    changing = in_world(arguments, config, world)
    maxtext.run([*arguments, *changing], world=world, started=config)


def in_world(
    arguments: Sequence[str], config: schema.Config, world: World
) -> list[str]:
    """The MaxText arguments that change with each world of a run."""
    num_devices = world.topology.devices
    rows = config.data.global_batch_size
    settings: dict[str, Any] = {
        "per_device_batch_size": rows // (num_devices * world.microbatches),
        "gradient_accumulation_steps": world.microbatches,
        "skip_jax_distributed_system": True,
        # The supervisor resumes the run; MaxText can do so only under Pathways.
        "elastic_enabled": False,
    }
    # The rows of an evaluation with all slices, kept in each world whose devices divide
    # them. Without this key, MaxText uses the size of training batches.
    key = "eval_per_device_batch_size"
    of_device = maxtext_keys.given(arguments).get(key) or 0
    of_all = of_device * config.world.hosts * config.world.devices_per_host
    eval_rows = round(of_all) or rows
    if eval_rows % num_devices == 0:
        settings[key] = eval_rows // num_devices
    if world.ram_directory is not None:
        # MaxText appends the run name.
        settings["local_checkpoint_directory"] = os.path.dirname(world.ram_directory)
    return [f"{key}={value}" for key, value in settings.items()]
