"""Hosts of an elastic run of MaxText that note the batches of each world."""

import dataclasses
import functools
import pathlib
import time

from elastic_ckpt.core import events
from elastic_ckpt.elastic import termination
from elastic_ckpt.integrations import maxtext_elastic
from tests.maxtext import environment, hosts

# The second world waits here until it is asked to leave, some steps after a slice
# is back: MaxText reports a step after the next one.
LEAVES_AT = 12
# The first one waits here for the loss of a slice, which is due some steps before.
LOST_BY = 8


def await_slice(directory, world, step):
    """Waits before a step for the loss of a slice, and for its return."""
    asked = pathlib.Path(directory, "world_leaving")
    while world.number == 1 and step >= LOST_BY:
        time.sleep(0.1)
    # The world of fewer slices goes on until there are all again. JAX passes the
    # request on within about a second.
    if world.number == 2 and step >= LEAVES_AT:
        while not asked.exists():
            time.sleep(0.1)
        time.sleep(1)


def go_slowly(directory, world, step):
    """Waits, so that there are few steps while a machine starts."""
    del directory, world, step
    time.sleep(0.2)


def train(directory, wait, arguments, config, world):
    """Trains on a host of a world, which has a directory of its batches."""
    from jax._src import distributed

    from elastic_ckpt.core import topology

    # Each leader begins to count worlds, but each world has its own coordinator.
    address = distributed.global_state.coordinator_address
    noted = pathlib.Path(directory, f"world-{address}")
    noted.mkdir(exist_ok=True)
    hosts.note_batches(noted / f"{topology.this_host()}.jsonl")

    def emit(name, **fields):
        if name == "run_started":
            (noted / environment.BEGIN).write_text(str(fields["start_step"]))
        world.emit(name, **fields)

    def should_stop(step):
        wait(directory, world, step)
        return world.should_stop(step)

    changed = dataclasses.replace(world, emit=emit, should_stop=should_stop)
    maxtext_elastic.train_maxtext(arguments, config, changed)


def run(directory, arguments, wait):
    """Runs MaxText on the hosts that the arguments name; the exit code."""

    def emit(name, **fields):
        events.check(name, fields)
        pathlib.Path(directory, name).touch()

    config = maxtext_elastic.run_config(arguments)
    noted = functools.partial(train, directory, wait)
    is_stopped = maxtext_elastic.run(config, arguments, emit=emit, train=noted)
    return termination.EXIT_CODE if is_stopped else 0
