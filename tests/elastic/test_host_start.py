"""Processes of this machine: they stand by, begin a task, and are seen to end."""

import contextlib
import gc
import os
import signal

import pytest

from elastic_ckpt.elastic import decision, host_start, process_world, watch
from elastic_ckpt.elastic.cluster import Assignment
from elastic_ckpt.tiers.persistent import claims


def of_nothing(member, channel):
    raise AssertionError((member, channel))


def report(text, pipe):
    pipe.send((text, os.getpid(), gc.get_freeze_count()))


class Text(str):
    """Picklable, with an import of this module."""

    def __call__(self, pipe):
        report(self, pipe)


@pytest.fixture
def machine():
    with contextlib.closing(host_start.ThisMachine()) as machine:
        yield machine


def test_a_process_that_stood_by_does_the_task(machine):
    for _ in range(5):
        machine.stand_by(2, of_nothing)
    assert len(machine._standing_by) == 2
    waiting = {each._process.pid for each in machine._standing_by}
    used = [machine.process() for _ in range(3)]
    for number, each in enumerate(used):
        each.begin(Text(number))
    answers = [each.channel.recv() for each in used]
    assert [text for text, _, _ in answers] == ["0", "1", "2"]
    assert {pid for _, pid, _ in answers[:2]} == waiting
    # What was imported is no garbage.
    assert all(frozen > 10_000 for _, _, frozen in answers)
    assert [each.wait() for each in used] == [0, 0, 0]


def test_a_process_that_died_meanwhile_is_not_used(machine):
    machine.stand_by(1, of_nothing)
    (dead,) = machine._standing_by
    dead.send_signal(signal.SIGKILL)
    dead._process.join()
    used = machine.process()
    assert used is not dead
    used.begin(Text("alive"))
    assert used.channel.recv()[0] == "alive"
    used.wait()


def test_processes_that_stand_by_end_with_the_machine(machine):
    machine.stand_by(1, of_nothing)
    (waiting,) = machine._standing_by
    machine.close()
    assert waiting.wait() == -signal.SIGKILL


def test_a_killed_process_is_ending_before_it_has_ended(machine):
    for _ in range(20):
        process = machine.process()
        assert not process.is_ending
        process.send_signal(signal.SIGKILL)
        assert process.is_ending
        process.wait()
        assert process.is_ending


def work(*slices, spares=()):
    return decision.Train(slices=slices, spares=spares, rows=8, accumulated=1)


@pytest.mark.parametrize(
    ("is_for", "number", "wanted", "more"),
    [
        (True, 2, work(0, 1), {}),
        (True, 2, work(0, 1, spares=(2,)), {"claimant": claims.Claimant()}),
        (False, 3, work(0, 1), {}),
        (False, 2, work(0, 2), {}),
    ],
)
def test_a_prepared_world_is_taken_if_its_hosts_are_those(
    tmp_path, is_for, number, wanted, more
):
    prepared = process_world.ProcessWorld(
        print,
        Assignment(number=2, work=work(0, 1)),
        log_directory=tmp_path,
        limits=watch.unlimited(),
        machines=[host_start.ThisMachine()] * 2,
    )
    assignment = Assignment(number=number, work=wanted, **more)
    assert prepared.is_for(assignment) == is_for
