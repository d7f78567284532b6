"""The supervisor of one of the machines of a run of MaxText, whose steps are slow.

    python -m tests.maxtext.machine DIRECTORY ARGS...

Its hosts note the batches of each world.
"""

import dataclasses
import functools
import pathlib
import sys
import time

from elastic_ckpt.core import events
from elastic_ckpt.elastic import termination
from elastic_ckpt.integrations import maxtext_keys, maxtext_worlds
from tests.maxtext import environment, hosts


def train(directory, arguments, config, world):
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
        # There are few steps while a machine starts.
        time.sleep(0.2)
        return world.should_stop(step)

    changed = dataclasses.replace(world, emit=emit, should_stop=should_stop)
    maxtext_worlds.train_maxtext(arguments, config, changed)


def run(directory, arguments):
    """Runs MaxText on the hosts that the arguments name; the exit code."""

    def emit(name, **fields):
        events.check(name, fields)
        pathlib.Path(directory, name).touch()

    config = maxtext_keys.supervised(maxtext_keys.given(arguments))
    noted = functools.partial(train, directory)
    is_stopped = maxtext_worlds.run(config, arguments, emit=emit, train=noted)
    return termination.EXIT_CODE if is_stopped else 0


if __name__ == "__main__":
    # Hosts look for what they run in the module of this name.
    from tests.maxtext import machine

    sys.exit(machine.run(sys.argv[1], sys.argv[2:]))
