"""Callbacks of runs that Prometheus scrapes."""

import time

from elastic_ckpt.core import topology
from tests.processes.callbacks import Stateless

_STEP_SECS = 0.05


class Paced(Stateless):
    """Steps that take so long that data and saves are a small part of them."""

    def after_step(self, step, report):
        del step, report
        time.sleep(_STEP_SECS)


class Differs(Paced):
    """Has a state on each host that should be equal and is not."""

    def get_state(self):
        return {"host": topology.this_host()}

    def set_state(self, state):
        pass


def paced(config):
    del config
    return {"paced": Paced()}


def differs(config):
    del config
    return {"differs": Differs()}


def named(function):
    return f"{__name__}:{function.__name__}"
