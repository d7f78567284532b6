"""A world that is killed with SIGKILL at a write after it has decided to go back.

Its process must lead a group (`runs.forked`).
"""

import functools
import os
import re
import signal

from elastic_ckpt.core import storage, topology
from elastic_ckpt.elastic import supervisor
from elastic_ckpt.monitoring import progress
from elastic_ckpt.training import elastic_run, journal, load, training_files
from elastic_ckpt.training.callbacks import Rollbacks

_WRITERS = ("write_atomic", "rename", "create", "remove")


def _wrap(name, kill, *, pattern, moment):
    original = getattr(storage, name)

    @functools.wraps(original)
    def wrapped(*arguments, **keywords):
        contents = (bytes, memoryview)
        paths = [
            os.fspath(each) for each in arguments if not isinstance(each, contents)
        ]
        is_here = re.search(pattern, " > ".join([name, *paths]))
        if is_here and moment == "before":
            kill()
        result = original(*arguments, **keywords)
        if is_here and moment == "after":
            kill()
        return result

    setattr(storage, name, wrapped)


def _armed(pattern, moment, victim, config, world):
    def kill():
        os.killpg(0, signal.SIGKILL)

    choose = Rollbacks.choose

    def chosen(*arguments, **keywords):
        step = choose(*arguments, **keywords)
        if not pattern:
            kill()
        for name in _WRITERS:
            _wrap(name, kill, pattern=pattern, moment=moment)
        return step

    if topology.this_host() == victim:
        Rollbacks.choose = chosen
    elastic_run.train(config, world)


def train(pattern, moment, victim, settings):
    """Trains until a host that has decided to go back makes a write.

    Args:
      pattern: of the write and its paths; if it is empty, the run is killed at once.
      moment: `before` or `after` the write.
      victim: the number of the host.
      settings: the path of the configuration, and overrides.
    """
    supervisor.warm_up(["elastic_ckpt.training.job", "tests.faults.killed_rollback"])
    config = training_files.prepare(load.load(settings[0], settings[1:]))
    armed = functools.partial(_armed, pattern, moment, victim)
    with (
        progress.Progress(config.run.log_period) as shown,
        journal.kept(config, shown) as emit,
    ):
        elastic_run.run_on_hosts(config, emit, train=armed)
