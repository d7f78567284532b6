"""A run on several machines outlives each of them, and the one that leads it, too."""

import signal

import pytest

from elastic_ckpt.training import step_log
from tests import runs, shared_memory
from tests.multiprocess import supervisors, test_elastic_run


def others(number):
    return [each for each in range(3) if each != number]


@pytest.mark.night
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
        first = machines.leader()
        machines.kill(first)
        machines.train_on(others(first))
        second = machines.leader()
        machines.start(first)
        machines.train_on([0, 1, 2])
        # It stands still, though its connections stay open.
        machines.freeze(second)
        machines.train_on(others(second))
        third = machines.leader()
        machines.wake(second)
        machines.train_on([0, 1, 2])
        # Its claim was taken, so it follows, and so does the one that was killed.
        assert machines.leader() == third
        machines.kill(second)
        machines.train_on(others(second))
        machines.stop()
        assert machines.leaders() == [first, second, third]
        lost = [each["machine"] for each in machines.events("leader_lost")]
        assert lost == [first, second]
        verdicts = machines.events("verdict")
        judged = [each["which"] for each in verdicts if each["kind"] == "leader_lost"]
        assert judged == [str(first), str(second)]
        # No world began with the first step again.
        starts = [attempt.start_step for attempt in step_log.read(machines.run)]
        assert starts[0] == 0
        assert all(starts[1:])
        restored = runs.events(machines.run, "restored_from")
        assert all(each["persistent_bytes"] == 0 for each in restored)
        assert test_elastic_run.names(machines.run)[-1] == "run_stopped"
        assert "PASSED" in runs.verb("audit", machines.run)


@pytest.mark.night
def test_machines_that_get_sigterm_leave_without_a_lost_step_and_then_all_end(
    tmp_path, corpus
):
    with (
        shared_memory.directory("machines") as ram,
        supervisors.Supervisors(*(tmp_path, corpus, ram), machines=3) as machines,
    ):
        machines.train_on([0, 1, 2])
        first = machines.leader()
        left = others(first)
        machines.started[left[1]].terminate()
        code, output = machines.ended(left[1])
        assert code == 128 + signal.SIGTERM, output
        two = sorted([first, left[0]])
        machines.train_on(two)
        machines.started[first].terminate()
        code, output = machines.ended(first)
        assert code == 128 + signal.SIGTERM, output
        machines.train_on(left[:1])
        machines.stop()
        assert machines.worlds() == [[0, 1, 2], two, left[:1]]
        assert machines.leaders() == [first, left[0]]
        assert not machines.events("leader_lost")
        # Each world begins with the step that the one before has left after.
        left = [each["step"] for each in runs.events(machines.run, "world_left")]
        *before, last = step_log.read(machines.run)
        assert [each.start_step for each in (*before[1:], last)] == left
        assert [each.records[-1].step + 1 for each in before] == left
        assert not runs.events(machines.run, "slice_lost")
        (stopped,) = runs.events(machines.run, "run_stopped")
        assert stopped["saved"]
        assert stopped["step"] == last.start_step + len(last.records)
        assert "PASSED" in runs.verb("audit", machines.run)
