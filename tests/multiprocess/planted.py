"""A callback that finds a divergence at a planted step, once a process."""

from elastic_ckpt.training.callbacks import Action, Finding

STEP = 11


class Planted:
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

    def after_evaluation(self, step, loss):
        del step, loss

    def get_state(self):
        return {}

    def set_state(self, state):
        assert state == {}


def callbacks(config):
    """The callback of a run, by name."""
    del config
    return {"planted": Planted()}
