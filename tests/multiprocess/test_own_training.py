"""Training functions of users run under the supervisors of several machines."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.elastic.machines import leader_claim
from elastic_ckpt.inspect import run_files
from elastic_ckpt.steps import layout
from elastic_ckpt.training import run_audit, step_log
from tests import corpora, process_tree, runs, shared_memory
from tests.multiprocess import own_training, supervisors

MACHINES = 3


class Machines:
    """Programs of a user on several machines, by their numbers."""

    def __init__(self, directory, ram):
        self.directory, self.ram, self.run = directory, ram, directory / "run"
        self.started = {}
        for number in range(MACHINES):
            self.start(number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number in list(self.started):
            self.kill(number)

    def start(self, number):
        arguments = (self.directory, self.ram, MACHINES, number)
        with open(self.directory / f"machine-{number}.txt", "ab") as output:
            self.started[number] = subprocess.Popen(
                [sys.executable, own_training.__file__, *map(str, arguments)],
                cwd=runs.ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self, number):
        """Kills a machine, whose memory is lost with it."""
        process_tree.kill(self.started.pop(number))
        memory = layout.slice_directory(self.ram, number)
        shutil.rmtree(memory, ignore_errors=True)

    def send(self, number, sent):
        """Sends a signal to all processes of a machine."""
        process_tree.send(process_tree.of(self.started[number].pid), sent)

    def outputs(self):
        return "\n".join(
            "\n".join([f"== {path.name}", *path.read_text().splitlines()[-40:]])
            for path in sorted(self.directory.glob("machine-*.txt"))
        )

    def leader(self):
        """The machine whose supervisor holds the claim."""
        claims = leader_claim.LeaderClaims(
            self.directory / "steps", machine=-1, lost_secs=1.0
        )
        claims.look()
        return claims.leader().machine

    def wait_until(self, is_so):
        deadline = time.monotonic() + supervisors.WAIT_SECS
        while not is_so():
            assert time.monotonic() < deadline, self.outputs()
            ended = [n for n, each in self.started.items() if each.poll() is not None]
            assert not ended, (ended, self.outputs())
            time.sleep(0.1)

    def train_on(self, number, *, steps=8):
        """Waits until a world of so many hosts has done a number of steps more."""

        def is_trained():
            with contextlib.suppress(errors.DataError):
                *_, last = step_log.read(self.run)
                return last.hosts == number and len(last.records) >= steps
            return False

        self.wait_until(is_trained)


@pytest.mark.slow
def test_its_rows_are_those_of_one_host_though_leader_and_follower_are_killed(
    tmp_path, monkeypatch
):
    texts = [{"text": f"text {n} " * (1 + n % 4)} for n in range(100)]
    file = corpora.write_arrayrecord(tmp_path / "texts.array_record", texts)
    monkeypatch.setenv(own_training.FILES, str(file))
    with (
        shared_memory.directory("own") as ram,
        Machines(tmp_path, ram) as machines,
    ):
        machines.train_on(3)
        first = machines.leader()
        machines.kill(first)
        machines.train_on(2)
        second = machines.leader()
        assert second != first
        machines.start(first)
        machines.train_on(3)
        # It follows.
        assert machines.leader() == second
        # The leader stands still, and comes back.
        machines.send(second, signal.SIGSTOP)
        machines.train_on(2)
        third = machines.leader()
        machines.send(second, signal.SIGCONT)
        machines.train_on(3)
        assert machines.leader() == third
        (follower,) = {*range(MACHINES)} - {second, third}
        machines.kill(follower)
        machines.train_on(2)
        (tmp_path / "end").touch()
        codes = [each.wait(supervisors.WAIT_SECS) for each in machines.started.values()]
        assert codes == [0, 0], machines.outputs()
    outcome = run_audit.RunAudit(
        str(machines.run), data="tests.multiprocess.own_training:data"
    ).outcome()
    assert outcome.passed
    # On a busy machine a leader may begin before another one has found it.
    seen = iter(outcome.hosts)
    assert all(number in seen for number in (3, 2) * 3), outcome.hosts
    assert outcome.num_row_identical_steps == outcome.num_steps
    events = run_files.read_events(str(machines.run))
    restored = [each for each in events if each["event"] == "restored_from"]
    assert len(restored) == len(outcome.hosts) - 1 >= 5
    # The steps of lost machines were in the memory of others.
    assert all(each["persistent_bytes"] == 0 for each in restored)
