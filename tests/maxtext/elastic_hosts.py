"""Hosts of an elastic run of MaxText that note the batches of each world."""

import dataclasses
import functools
import pathlib
import time

from elastic_ckpt.core import events
from elastic_ckpt.integrations import maxtext_elastic
from tests.maxtext import hosts

# The second world waits here until it is asked to leave, some steps after a slice
# is back: MaxText reports a step after the next one.
LEAVES_AT = 12
# The first one waits here for the loss of a slice, which is due some steps before.
LOST_BY = 8


def train(directory, arguments, config, world):
    """Trains on a host of a world, which has a directory of its batches."""
    from elastic_ckpt.core import topology

    noted = pathlib.Path(directory, f"world-{world.number}")
    noted.mkdir(exist_ok=True)
    hosts.note_batches(noted / f"{topology.this_host()}.jsonl")
    asked = pathlib.Path(directory, "world_leaving")

    def should_stop(step):
        while world.number == 1 and step >= LOST_BY:
            time.sleep(0.1)
        # The world of fewer slices goes on until there are all again. JAX passes the
        # request on within about a second.
        if world.number == 2 and step >= LEAVES_AT:
            while not asked.exists():
                time.sleep(0.1)
            time.sleep(1)
        return world.should_stop(step)

    changed = dataclasses.replace(world, should_stop=should_stop)
    maxtext_elastic.train_maxtext(arguments, config, changed)


def run(directory, arguments):
    """Runs MaxText on the hosts that the arguments name."""

    def emit(name, **fields):
        events.check(name, fields)
        pathlib.Path(directory, name).touch()

    config = maxtext_elastic.run_config(arguments)
    noted = functools.partial(train, directory)
    maxtext_elastic.run(config, arguments, emit=emit, train=noted)
