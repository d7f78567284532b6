"""Histories in which `test_histories` has found defects, as it shrank them."""

import contextlib

from tests import shared_memory
from tests.model.checked_run import CheckedRun


@contextlib.contextmanager
def run_on(machines, **tiers):
    with (
        shared_memory.directory("model") as directory,
        CheckedRun(directory, **tiers) as run,
    ):
        run.open(machines)
        yield run


def test_an_overwrite_that_is_cut_short_between_two_hosts_leaves_the_step():
    with run_on((0, 1), store_every=1) as run:
        run.save(1)
        # One host has committed, the other has not.
        run.sim.hosts.lost_at = 4
        run.save(1, overwrite=True)
        run.open((0, 1))
        assert run.head.step == 1
        run.save(2)
        run.close()
        run.open((0, 1))
        assert run.head.step == 2


def test_a_component_is_read_from_storage_if_the_nearest_holder_fails():
    with run_on((0, 1), store_every=2) as run:
        run.fail(0)
        run.save(1)
        run.save(1, overwrite=True)
        run.load(1)
