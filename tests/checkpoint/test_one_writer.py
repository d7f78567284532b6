"""One program writes to a directory of steps; others are refused, or read beside it."""

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import pathlib
import signal
import subprocess

import numpy as np
import pytest
from etils import epath

import elastic_ckpt as ec
from elastic_ckpt.core import errors, process, storage
from elastic_ckpt.tiers.persistent import claims, records
from elastic_ckpt.training import elastic_run
from tests import seams, shared_memory

_SLOW = pytest.mark.slow


@pytest.fixture(params=["local", pytest.param("gs", marks=_SLOW)])
def steps(request, steps_in):
    """A directory of steps, on a disk or in a bucket."""
    return steps_in(request.param)


def save_steps(steps, told, environment):
    """Saves steps until it is killed; says which are durable, and waits after each."""
    os.environ.update(environment)
    with opened(steps) as checkpointer:
        for step in itertools.count(1):
            assert checkpointer.save(step, {"w": np.full(4, step)})
            told.send(step)
            told.recv()


@contextlib.contextmanager
def running(steps):
    """A program that saves steps, and a pipe to it; killed at the end of the block."""
    elastic_run.warm_up()
    forked = multiprocessing.get_context("forkserver")
    ours, theirs = forked.Pipe()
    program = forked.Process(target=save_steps, args=(steps, theirs, dict(os.environ)))
    program.start()
    theirs.close()
    try:
        yield program, ours
    finally:
        program.kill()
        program.join()
        ours.close()


def opened(steps, run="tiny", **options):
    return ec.Checkpointer([ec.Persistent(steps, every=1)], run=run, **options)


def value(checkpointer):
    return int(checkpointer.load(None, {"w": np.zeros(4, int)})["w"][0])


def test_a_second_program_is_refused_until_the_first_is_killed(steps):
    with running(steps) as (first, pipe):
        assert pipe.recv() == 1
        for run in ("tiny", "another"):
            with pytest.raises(errors.RunError, match="read_only=True") as refused:
                opened(steps, run)
            named = f"process {first.pid} on {os.uname().nodename}, since 2"
            assert named in str(refused.value)
        # It may stand still: it is alive, and goes on one day.
        os.kill(first.pid, signal.SIGSTOP)
        with pytest.raises(errors.RunError, match=f"process {first.pid} on"):
            opened(steps)
        os.kill(first.pid, signal.SIGCONT)
        # And reading is no writing.
        with opened(steps, read_only=True) as reading:
            assert value(reading) == 1
            pipe.send(None)
            assert pipe.recv() == 2
            reading.reload()
            assert value(reading) == 2
            assert not reading.should_save(3)
        first.kill()
        first.join()
        # At once, with nothing to wait for.
        with opened(steps) as second:
            assert value(second) == 2
            assert second.save(3, {"w": np.full(4, 3)})
    with opened(steps) as third:
        assert value(third) == 3


def _files(directory):
    # All but the times of access.
    found = {path: path.stat() for path in directory.rglob("*")}
    return {path: (s.st_ino, s.st_mtime_ns, s.st_size) for path, s in found.items()}


def test_a_program_that_reads_sees_the_ram_of_the_one_that_runs(tmp_path):
    with shared_memory.directory("writer") as ram:
        tiers = [ec.Local(ram), ec.Persistent(tmp_path / "steps", every=2)]
        with ec.Checkpointer(tiers, run="tiny") as running:
            for step in (1, 2, 3):
                assert running.save(step, {"w": np.full(4, step)})
            running.wait()
            before = _files(tmp_path)
            # A program that reads does not know how often the other saves.
            both = [tiers[0], ec.Persistent(tmp_path / "steps")]
            with ec.Checkpointer(both, run="tiny", read_only=True) as reading:
                assert value(reading) == 3
                assert [each.step for each in reading.checkpoints] == [2, 3]
            with ec.Checkpointer(tiers[:1], run="tiny", read_only=True) as reading:
                assert value(reading) == 3
                assert reading.directory == pathlib.Path(ram)
            # Nothing was written.
            assert _files(tmp_path) == before
            assert running.save(4, {"w": np.full(4, 4)})


def elsewhere(**fields):
    # A process of another machine: nothing can be proved of it.
    return dataclasses.replace(process.this(), host="far", boot_id="another", **fields)


class Waiting(seams.Clock):
    """A clock whose sleeps are over at once; others act meanwhile."""

    def __init__(self, act):
        self._act = act
        self._secs = 0.0

    def monotonic(self):
        return self._secs

    def sleep(self, secs):
        self._secs += secs
        self._act()


@pytest.mark.parametrize("renews", [True, False])
def test_a_writer_of_another_machine_counts_as_long_as_it_renews(tmp_path, renews):
    with opened(tmp_path) as before:
        assert before.save(1, {"w": np.full(4, 1)})
    path = epath.Path(tmp_path / claims.DIRECTORY / "1.json")
    record = records.read(path)
    far = dataclasses.replace(record, process=elsewhere(), secs=60.0, start="a")
    storage.write_atomic(path, records.to_bytes(far))

    def act():
        if renews:
            again = dataclasses.replace(far, count=1)
            storage.write_atomic(path, records.to_bytes(again))

    with seams.by(Waiting(act)):
        if renews:
            with pytest.raises(errors.RunError, match=r"process \d+ on far, since"):
                opened(tmp_path)
        else:
            opened(tmp_path).close()


def test_a_writer_that_was_replaced_commits_no_step(tmp_path):
    steps = tmp_path / "steps"
    first = opened(steps)
    assert first.save(1, {"w": np.full(4, 1)})
    # As after a pause that was too long: another program has taken over.
    with opened(steps) as second:
        assert second.save(2, {"w": np.full(4, 2)})
        with pytest.raises(errors.ReplacedError, match="commits no step there"):
            first.save(3, {"w": np.full(4, 3)})
        with pytest.raises(errors.ReplacedError):
            first.close()
        assert [each.step for each in second.checkpoints] == [1, 2]
        assert second.save(4, {"w": np.full(4, 4)})
    assert {path.name for path in steps.iterdir() if path.name.isdigit()} == set("124")
    # A program that has ended lets others write at once.
    path = epath.Path(steps / claims.DIRECTORY / "3.json")
    with contextlib.suppress(KeyError), opened(steps):
        assert records.read(path).process == process.this()
        raise KeyError
    assert records.read(path).secs == 0


def begin(steps, claimant=None):
    begun = claims.Writer(steps, claimant=claimant)
    begun.begin()
    return begun


def test_a_start_by_hand_of_a_run_that_runs_is_refused(tmp_path):
    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            stat = pathlib.Path("/proc", str(other.pid), "stat").read_text()
            owner = dataclasses.replace(
                process.this(), pid=other.pid, start_ticks=int(stat.split()[21])
            )
            first = begin(tmp_path, claims.Claimant(owner=owner))
            again = claims.Claimant(owner=process.this())
            with pytest.raises(errors.RunError, match=f"process {other.pid} on"):
                begin(tmp_path, again)
        finally:
            other.kill()
        other.wait()
        begin(tmp_path, again).close()
        first.close()
