"""Callbacks that hold hosts at the point of a fault until it is injected there.

The supervisor injects faults between its looks at the hosts, which train on meanwhile.
"""

import pathlib
import threading

from elastic_ckpt.core import topology
from elastic_ckpt.elastic import faults
from tests.multiprocess.stateless import Stateless


class Held(Stateless):
    """Holds hosts for the first fault of a run, which ends them.

    Args:
      config: of the run.
    """

    def __init__(self, config):
        (self._fault, *_) = faults.parse(config.elastic.faults)
        self._hosts = config.world.hosts

    def after_step(self, step, report):
        del report
        if step == self._fault.at_step and topology.num_hosts() == self._hosts:
            threading.Event().wait()


class HeldInRestore(Stateless):
    """Holds the host of the fault in its first world, when it restores after the step.

    Args:
      config: of the run.
    """

    def __init__(self, config):
        (self._fault, *_) = faults.parse(config.elastic.faults)
        self._reached = pathlib.Path(config.run.base_output_directory, "reached")
        self._holds = False

    def after_step(self, step, report):
        del report
        if step == self._fault.at_step and topology.this_host() == self._fault.target:
            self._holds = not self._reached.exists()
            self._reached.touch()

    def set_state(self, state):
        super().set_state(state)
        if self._holds:
            threading.Event().wait()


def callbacks(config):
    """Holds all hosts after the step of the fault."""
    return {"held": Held(config)}


def in_restore(config):
    """Holds the host of the fault while it restores."""
    return {"held": HeldInRestore(config)}
