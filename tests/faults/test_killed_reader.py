"""A run removes all steps but the newest, and those that other processes read."""

import subprocess
import sys
import time

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.tiers.persistent import leases
from tests.checkpoint.test_tier_retention import opened, stored
from tests.tiers import tiered_steps

# More than what a reader that is killed asks for, and less than the other.
SKIPPED_SECS = 100
KEEP = ocp.training.preservation_policies.LatestN(1)


class Clock:
    """The time, which the test moves on."""

    skipped_secs = 0

    def __call__(self):
        return time.monotonic() + self.skipped_secs


@pytest.fixture
def clock(monkeypatch):
    """The clock by which a run counts leases as expired."""
    clock = Clock()
    monkeypatch.setattr(leases.Watch.__init__, "__defaults__", (clock,))
    return clock


@pytest.fixture
def reader(tmp_path):
    """Starts a reader of the steps."""
    started = []

    def start(mode):
        command = [sys.executable, "-m", "tests.faults.step_reader"]
        process = subprocess.Popen(
            [*command, str(tmp_path / "steps"), mode], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_steps_that_are_read_stay_and_those_of_a_killed_reader_are_removed(
    tmp_path, clock, reader
):
    held, follower = reader("hold"), reader("read")
    with opened(tmp_path, keep=KEEP) as checkpointer:
        tiered_steps.save(checkpointer, 1)
        # Both lease it, and one never ends.
        assert held.stdout.readline() == follower.stdout.readline() == "1\n"
        step, read = 2, []
        while len(read) < 4:
            tiered_steps.save(checkpointer, *range(step, step + 4))
            step += 4
            assert 1 in stored(tmp_path)
            # It is slower than the run, and all that it leases is whole.
            assert len(stored(tmp_path)) <= 3
            read.append(int(follower.stdout.readline()))
        assert read == sorted(set(read))
        held.kill()
        held.wait()
        clock.skipped_secs = SKIPPED_SECS
        deadline = time.monotonic() + 600
        while 1 in stored(tmp_path):
            assert time.monotonic() < deadline
            tiered_steps.save(checkpointer, step)
            step += 1
        assert follower.poll() is None
