"""A run on several machines outlives each of them, and the one that leads it, too.

Each machine is a supervisor with its own address, in a process group that is killed
as a whole.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time

import pytest

from elastic_ckpt.manifests import layout
from elastic_ckpt.tiers import working_directory
from elastic_ckpt.training import step_log
from tests import runs, shared_memory
from tests.multiprocess import test_elastic_run

# Far more than it takes, also on a slow machine.
WAIT_SECS = 600


def free_address(host):
    with socket.socket() as bound:
        bound.bind((host, 0))
        return f"{host}:{bound.getsockname()[1]}"


class Supervisors:
    """The supervisors of a run, by the numbers of their machines."""

    def __init__(self, directory, corpus, ram, *, machines, **settings):
        addresses = [free_address(f"127.0.0.{n + 1}") for n in range(machines)]
        self.directory, self.ram, self.run = directory, ram, directory / "tiny"
        self.config = test_elastic_run.configured(
            directory,
            corpus,
            ram,
            hosts=machines,
            slices=machines,
            steps=1_000_000,
            elastic_min_slice_count=1,
            elastic_machines=";".join(addresses),
            termination_grace_period_seconds=900,
            **{"elastic_machine_timeout_seconds": 20, **settings},
        )
        self.started = {}
        self.cut = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number in list(self.started):
            self.kill(number)
        for machine in self.cut:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(machine.pid, signal.SIGKILL)
            machine.wait()
        # The next start on a machine removes what killed supervisors had there.
        next_start = working_directory.new_path("/dev/shm")
        working_directory.WorkingDirectory(next_start).close()

    def start(self, number):
        with open(self.directory / f"machine-{number}.txt", "ab") as output:
            self.started[number] = subprocess.Popen(
                runs.command("train", self.config, f"elastic_machine={number}"),
                cwd=runs.ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self, number):
        """Kills all processes of a machine, whose memory is lost with it."""
        machine = self.started.pop(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(machine.pid, signal.SIGKILL)
        machine.wait()
        memory = layout.slice_directory(self.ram, number)
        shutil.rmtree(memory, ignore_errors=True)

    def cut_off(self, number):
        """Stops all processes of a machine, until they get SIGCONT."""
        machine = self.started.pop(number)
        self.cut.append(machine)
        os.killpg(machine.pid, signal.SIGSTOP)
        return machine

    def outputs(self):
        return "\n".join(
            f"== {path.name}\n{path.read_text()}"
            for path in sorted(self.directory.glob("machine-*.txt"))
        )

    def worlds(self):
        return test_elastic_run.worlds(self.run)

    def wait_until(self, is_so):
        deadline = time.monotonic() + WAIT_SECS
        while not is_so():
            assert time.monotonic() < deadline, self.outputs()
            ended = [n for n, each in self.started.items() if each.poll() is not None]
            assert not ended, (ended, self.outputs())
            time.sleep(0.1)

    def train_on(self, slices, *, steps=12):
        """Waits until a world of these slices has done a number of steps."""

        def is_trained():
            if not (self.run / "step_log").exists() or self.worlds()[-1] != slices:
                return False
            last = step_log.read(self.run)[-1]
            return last.hosts == len(slices) and len(last.records) >= steps

        self.wait_until(is_trained)

    def stop(self, leader):
        """Asks the leader's machine to end the run, and waits for all machines."""
        self.started[leader].terminate()
        codes = {number: each.wait(WAIT_SECS) for number, each in self.started.items()}
        assert set(codes.values()) == {128 + signal.SIGTERM}, self.outputs()


@pytest.mark.slow(minutes=1.5)
def test_machines_are_lost_and_taken_in_again_and_so_is_the_one_that_leads(
    tmp_path, corpus
):
    with (
        shared_memory.directory("machines") as ram,
        Supervisors(tmp_path, corpus, ram, machines=3) as machines,
    ):
        for number in range(3):
            machines.start(number)
        machines.train_on([0, 1, 2])
        machines.kill(0)
        machines.train_on([1, 2])
        machines.start(0)
        machines.train_on([0, 1, 2])
        machines.kill(2)
        machines.train_on([0, 1])
        machines.stop(1)
        leaders = [each["leader"] for each in runs.events(machines.run, "leader_found")]
        assert leaders == [0, 1]
        # No world began with the first step again.
        starts = [attempt.start_step for attempt in step_log.read(machines.run)]
        assert starts[0] == 0
        assert all(starts[1:])
        restored = runs.events(machines.run, "restored_from")
        assert all(each["persistent_bytes"] == 0 for each in restored)
        assert test_elastic_run.names(machines.run)[-1] == "run_stopped"
        assert "PASSED" in runs.verb("audit", machines.run)


@pytest.mark.slow(minutes=1)
def test_a_leader_that_is_cut_off_is_replaced_and_nothing_counts_that_it_still_writes(
    tmp_path, corpus
):
    with (
        shared_memory.directory("machines") as ram,
        Supervisors(
            *(tmp_path, corpus, ram), machines=2, elastic_machine_timeout_seconds=10
        ) as machines,
    ):
        for number in range(2):
            machines.start(number)
        machines.train_on([0, 1])
        cut_off = machines.cut_off(0)
        machines.train_on([1])
        os.killpg(cut_off.pid, signal.SIGCONT)
        # It finds out that it was replaced, by the claim of the next world; or that it
        # leads no more, and is taken in again.
        machines.wait_until(
            lambda: cut_off.poll() is not None or machines.worlds()[-1] == [0, 1]
        )
        if cut_off.poll() is not None:
            assert cut_off.returncode == 1, machines.outputs()
            output = (tmp_path / "machine-0.txt").read_text()
            assert "another start of the run" in output, output
        else:
            machines.started[0] = cut_off
        machines.stop(1)
        # No step of the one that was cut off counts after the other one went on.
        attempts = step_log.read(machines.run)
        alone = next(each for each in attempts if each.hosts == 1)
        of_two = {each.attempt for each in attempts if each.attempt < alone.attempt}
        late = [
            record.step
            for record in runs.steps(machines.run)
            if record.attempt in of_two and record.step >= alone.start_step
        ]
        assert not late
        assert "PASSED" in runs.verb("audit", machines.run)
