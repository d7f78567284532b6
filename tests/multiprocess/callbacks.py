"""Callbacks of runs, which hold hosts at the point of a fault, or fake a divergence.

The supervisor injects faults between its looks at the hosts, which train on meanwhile.
"""

import pathlib
import threading

import jax
import numpy as np

from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.core import topology
from elastic_ckpt.elastic import faults
from elastic_ckpt.training.callbacks import Action, Finding

# The step at which `Planted` finds a divergence.
PLANTED_STEP = 11


class Stateless:
    """The part of a callback beside `after_step`."""

    def after_evaluation(self, step, loss):
        del step, loss

    def get_state(self):
        return {}

    def set_state(self, state):
        assert state == {}


class AtFault(Stateless):
    """Knows the first fault of a run, and waits for it.

    Args:
      config: of the run.
    """

    def __init__(self, config):
        (self._fault, *_) = faults.parse(config.elastic.faults)
        self._hosts = config.world.hosts
        self._directory = pathlib.Path(config.run.base_output_directory)

    def _is_due(self, step):
        return step == self._fault.at_step

    @staticmethod
    def _wait():
        threading.Event().wait()


class Held(AtFault):
    """Holds all hosts of the first size of the world after the step of the fault."""

    def after_step(self, step, report):
        del report
        if self._is_due(step) and topology.num_hosts() == self._hosts:
            self._wait()


class HeldInRestore(AtFault):
    """Holds the host of the fault in its first world, when it restores after the step.

    Args:
      config: of the run.
    """

    def __init__(self, config):
        super().__init__(config)
        self._holds = False

    def after_step(self, step, report):
        del report
        if self._is_due(step) and topology.this_host() == self._fault.target:
            reached = self._directory / "reached"
            self._holds = not reached.exists()
            reached.touch()

    def set_state(self, state):
        super().set_state(state)
        if self._holds:
            self._wait()


class Poisoned(AtFault):
    """Holds the first world for its fault; the step before that is saved as NaN.

    Its digests are valid: the state was corrupt when it was captured.

    Args:
      config: of the run.
    """

    def __init__(self, config):
        super().__init__(config)
        reached = self._directory / "poisoned"
        self._is_first = not reached.exists()
        if not self._is_first:
            return
        save = run_saver.RunSaver.save

        def save_poisoned(saver, step, state, *, last):
            if self._is_due(step + 1):
                params = jax.tree.map(lambda leaf: leaf * np.nan, state["params"])
                state = {**state, "params": params}
                reached.touch()
            save(saver, step, state, last=last)

        run_saver.RunSaver.save = save_poisoned

    def after_step(self, step, report):
        del report
        if self._is_due(step) and self._is_first:
            self._wait()


class Planted(Stateless):
    """Has the run go back once, to the newest step from before the one before."""

    def __init__(self):
        # Not of its state: the data of the step is left out when it comes again.
        self._has_acted = False

    def after_step(self, step, report):
        del report
        if step != PLANTED_STEP or self._has_acted:
            return None
        self._has_acted = True
        why = "it is planted"
        return Finding(action=Action.ROLLBACK, why=why, since=PLANTED_STEP - 1)


class Stuck(Stateless):
    """Never returns its state after a step, so that no step can be saved."""

    def __init__(self):
        self._is_new = True

    def after_step(self, step, report):
        del step, report
        self._is_new = False

    def get_state(self):
        if not self._is_new:
            threading.Event().wait()
        return {}


def held(config):
    return {"held": Held(config)}


def held_in_restore(config):
    return {"held": HeldInRestore(config)}


def poisoned(config):
    return {"poisoned": Poisoned(config)}


def planted(config):
    del config
    return {"planted": Planted()}


def stuck(config):
    del config
    return {"stuck": Stuck()}


def named(function):
    """The value of `training_callbacks` for one of these functions."""
    return f"{__name__}:{function.__name__}"
