"""The supervisor of one of the machines of a run of MaxText, whose steps are slow.

python -m tests.maxtext.machine DIRECTORY ARGS...
"""

import dataclasses
import pathlib
import sys
import time

from elastic_ckpt.core import events
from elastic_ckpt.elastic import termination
from elastic_ckpt.integrations import maxtext_keys, maxtext_worlds


def train(arguments, config, world):
    """Trains on a host of a world: there are few steps while a machine starts."""

    def leaving(step):
        time.sleep(0.2)
        return world.leaving(step)

    slow = dataclasses.replace(world, leaving=leaving)
    maxtext_worlds.train_maxtext(arguments, config, slow)


def run(directory, arguments):
    """Runs MaxText on the hosts that the arguments name; the exit code."""

    def emit(name, **fields):
        events.check(name, fields)
        pathlib.Path(directory, name).touch()

    config = maxtext_keys.supervised(maxtext_keys.given(arguments))
    is_stopped = maxtext_worlds.run(config, arguments, emit=emit, train=train)
    return termination.exit_code() if is_stopped else 0


if __name__ == "__main__":
    # Hosts look for what they run in the module of this name.
    from tests.maxtext import machine

    sys.exit(machine.run(sys.argv[1], sys.argv[2:]))
