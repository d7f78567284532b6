"""Callbacks that hold hosts at the point of a fault until it is injected there.

The supervisor injects faults between its looks at the hosts, which train on meanwhile.
"""

import pathlib
import threading

from elastic_ckpt.core import topology
from elastic_ckpt.elastic import faults


class Held:
    """Holds hosts for the first fault of a run, which ends them.

    Args:
      config: of the run.
    """

    def __init__(self, config):
        (self._fault, *_) = faults.parse(config.elastic.faults)
        self._hosts = config.world.hosts

    def after_step(self, step, report):
        del report
        if self._fault.in_phase:
            return
        if step == self._fault.at_step and topology.num_hosts() == self._hosts:
            threading.Event().wait()

    def after_evaluation(self, step, loss):
        del step, loss

    def get_state(self):
        return {}

    def set_state(self, state):
        assert state == {}


class HeldInRestore(Held):
    """Holds the host of the fault in its first world, when it restores after the step.

    Args:
      config: of the run.
    """

    def __init__(self, config):
        super().__init__(config)
        self._reached = pathlib.Path(config.run.base_output_directory, "reached")
        self._holds = False

    def after_step(self, step, report):
        super().after_step(step, report)
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
