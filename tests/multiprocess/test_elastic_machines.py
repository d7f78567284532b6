"""A run on several machines outlives each of them, and the one that leads it, too."""

import pytest

from elastic_ckpt.training import step_log
from tests import runs, shared_memory
from tests.multiprocess import supervisors, test_elastic_run


@pytest.mark.slow(minutes=2)
def test_machines_are_lost_and_taken_in_again_and_so_is_the_one_that_leads(
    tmp_path, corpus
):
    with (
        shared_memory.directory("machines") as ram,
        supervisors.Supervisors(
            *(tmp_path, corpus, ram), machines=3, elastic_min_slice_count=2
        ) as machines,
    ):
        machines.train_on([0, 1, 2])
        machines.kill(0)
        machines.train_on([1, 2])
        machines.start(0)
        machines.train_on([0, 1, 2])
        # It stands still, though its connections stay open.
        machines.freeze(1)
        machines.train_on([0, 2])
        machines.wake(1)
        machines.train_on([0, 1, 2])
        machines.kill(2)
        machines.train_on([0, 1])
        machines.stop(0)
        assert machines.leaders()[-3:] == [0, 1, 0]
        # No world began with the first step again.
        starts = [attempt.start_step for attempt in step_log.read(machines.run)]
        assert starts[0] == 0
        assert all(starts[1:])
        restored = runs.events(machines.run, "restored_from")
        assert all(each["persistent_bytes"] == 0 for each in restored)
        assert test_elastic_run.names(machines.run)[-1] == "run_stopped"
        assert "PASSED" in runs.verb("audit", machines.run)
