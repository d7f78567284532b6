"""A callback that finds a divergence at a planted step, once a process."""

from elastic_ckpt.training.callbacks import Action, Finding
from tests.multiprocess.stateless import Stateless

STEP = 11


class Planted(Stateless):
    """Has the run go back to the newest step from before the one before `STEP`."""

    def __init__(self):
        # Not of its state: the data of the step is left out when it comes again.
        self._has_acted = False

    def after_step(self, step, report):
        del report
        if step != STEP or self._has_acted:
            return None
        self._has_acted = True
        return Finding(action=Action.ROLLBACK, why="it is planted", since=STEP - 1)


def callbacks(config):
    """The callback of a run, by name."""
    del config
    return {"planted": Planted()}
