"""A callback under which the first world of a run saves a corrupt step, and then dies.

Its digests are valid: the state was corrupt when it was captured.
"""

import pathlib
import threading

import jax
import numpy as np

from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.elastic import faults
from tests.multiprocess.stateless import Stateless


class Poisoned(Stateless):
    """Holds hosts for the first fault of a run; the step before is saved as NaN.

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
            if step == self._fault.at_step - 1:
                params = jax.tree.map(lambda leaf: leaf * np.nan, state["params"])
                state = {**state, "params": params}
                reached.touch()
            save(saver, step, state, last=last)

        run_saver.RunSaver.save = save_poisoned

    def after_step(self, step, report):
        del report
        if step == self._fault.at_step and self._is_first:
            threading.Event().wait()


def callbacks(config):
    return {"poisoned": Poisoned(config)}
