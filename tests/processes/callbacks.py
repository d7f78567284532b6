"""Callbacks of runs, which hold hosts at the point of a fault, or fake a divergence.

The supervisor injects faults between its looks at the hosts, which train on meanwhile.
"""

import pathlib
import threading

import jax
import numpy as np

from elastic_ckpt.elastic import faults
from elastic_ckpt.training import run_saver
from elastic_ckpt.training.callbacks import Action, Detection

# The step at which `Planted` finds a divergence.
PLANTED_STEP = 21


class Stateless:
    """The part of a callback beside `after_step`."""

    def after_evaluation(self, step, loss):
        del step, loss

    def get_state(self):
        return {}

    def set_state(self, state):
        assert state == {}


class Poisoned(Stateless):
    """Holds the first world for the first fault; the step before is saved as NaN.

    Its digests are valid: the state was corrupt when it was captured.

    Args:
      config: of the run.
    """

    def __init__(self, config):
        (self._fault, *_) = faults.parse(config.elastic.faults)
        reached = pathlib.Path(config.run.base_output_directory, "poisoned")
        self._is_first = not reached.exists()
        if not self._is_first:
            return
        save = run_saver.RunSaver.save

        def save_poisoned(saver, step, state, *, last):
            if step + 1 == self._fault.at_step:
                params = jax.tree.map(lambda leaf: leaf * np.nan, state["params"])
                state = {**state, "params": params}
                reached.touch()
            save(saver, step, state, last=last)

        run_saver.RunSaver.save = save_poisoned

    def after_step(self, step, report):
        del report
        if step == self._fault.at_step and self._is_first:
            threading.Event().wait()


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
        return Detection(action=Action.ROLLBACK, why=why, since=PLANTED_STEP - 1)


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


def poisoned_and_planted(config):
    return {"poisoned": Poisoned(config), "planted": Planted()}


def stuck(config):
    del config
    return {"stuck": Stuck()}


def named(function):
    """The value of `training_callbacks` for one of these functions."""
    return f"{__name__}:{function.__name__}"
