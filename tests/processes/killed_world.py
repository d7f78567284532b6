"""A world that is killed with SIGKILL when a host reaches a point.

Its process must lead a group (`runs.forked`).
"""

import functools
import os
import signal

from elastic_ckpt.core import topology
from elastic_ckpt.elastic import station
from elastic_ckpt.monitoring import progress
from elastic_ckpt.training import launch, load, trainer


def _wrap(owner, name, kill, *, before, condition=None):
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments, **keywords):
        here = condition is None or condition(*arguments)
        if here and before:
            kill()
        result = original(*arguments, **keywords)
        if here and not before:
            kill()
        return result

    setattr(owner, name, wrapped)


def _at_step(_, target):
    return os.path.basename(os.fspath(target)).isdigit()


def _at_cursors(_, target):
    return os.path.basename(os.fspath(target)).startswith("shards-")


def _points():
    from elastic_ckpt.data import iterator

    return {
        "before_the_state_is_taken": (iterator.HostIterator, "take", {"before": True}),
        "with_the_cursors_half_written": (
            os,
            "replace",
            {"before": True, "condition": _at_cursors},
        ),
        "before_the_step_is_committed": (
            os,
            "replace",
            {"before": True, "condition": _at_step},
        ),
        "after_the_step_is_committed": (
            os,
            "replace",
            {"before": False, "condition": _at_step},
        ),
    }


def _armed(point, occurrence, victim, config, world):
    # The given call at this point, on the host that acts there, is the last one.
    left = [occurrence]

    def kill():
        left[0] -= 1
        if left[0]:
            return
        if victim == "all":
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    if topology.this_host() == (0 if victim == "all" else victim):
        owner, name, when = _points()[point]
        _wrap(owner, name, kill, **when)
    trainer.train(config, world)


def train(point, occurrence, victim, settings):
    """Trains until a host reaches a point for the given time.

    Args:
      point: a name of `_points`.
      occurrence: how often it is reached.
      victim: `all`, when host 0 is there, or the number of the host that kills itself
        when it is.
      settings: the path of the configuration, and overrides.
    """
    station.warm_up(["elastic_ckpt.training.trainer", "tests.processes.killed_world"])
    config = launch.with_files(load.load(settings[0], settings[1:]))
    armed = functools.partial(_armed, point, occurrence, victim)
    with progress.Progress(config.run.log_period) as shown:
        launch.on_hosts(config, shown, train=armed)
