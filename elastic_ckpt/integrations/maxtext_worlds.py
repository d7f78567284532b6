"""MaxText on hosts that are lost and come back: processes of this machine, or several.

The supervisors start worlds as those of `elastic-ckpt train`; on each host of a world
MaxText runs on its slices, with the same global batch, and leaves when it is asked to.
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

# The fork server imports them, and with them what a host needs.
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
    """Trains on hosts of this machine and of others, until the run has ended.

    Args:
      config: of the supervisor; see `maxtext_keys.supervised`. With `elastic_machines`
        each machine has one.
      arguments: of MaxText.
      emit: shows the events.
      train: of each host, picklable; MaxText by default.

    Returns:
      Whether the run was asked to end before its last step.

    Raises:
      ConfigError: if the hosts cannot be started so.
      RunError: if MaxText fails on a host, or slices are missing for too long.
    """
    given = maxtext_keys.given(arguments)
    maxtext_keys.check(given, maxtext_hooks.keys())
    maxtext_hooks.check_installed()
    place = None
    if config.elastic.elastic_machines > 1:
        place = launch.place(config, os.environ)
    configured.check_local(config)
    station.warm_up(_HOST_PROGRAMS)
    of_host = functools.partial(train or train_maxtext, tuple(arguments))
    # Equal on all machines, in files or arguments.
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
    """The arguments of MaxText that change with each world of a run."""
    num_devices = world.topology.devices
    rows = config.data.global_batch_size
    settings: dict[str, Any] = {
        "per_device_batch_size": rows // (num_devices * world.microbatches),
        "gradient_accumulation_steps": world.microbatches,
        "skip_jax_distributed_system": True,
        # The supervisor continues the run; MaxText itself can under Pathways alone.
        "elastic_enabled": False,
        # A world that is left saves its last step.
        "enable_autocheckpoint": True,
    }
    # Rows of an evaluation with all slices, the same in each world if its devices
    # divide them. MaxText takes the size of training if there is no other.
    key = "eval_per_device_batch_size"
    of_device = maxtext_keys.given(arguments).get(key) or 0
    of_all = of_device * config.world.hosts * config.world.devices_per_host
    eval_rows = round(of_all) or rows
    if eval_rows % num_devices == 0:
        settings[key] = eval_rows // num_devices
    if world.ram_directory is not None:
        # To which the name of the run is added.
        settings["local_checkpoint_directory"] = os.path.dirname(world.ram_directory)
    return [f"{key}={value}" for key, value in settings.items()]
