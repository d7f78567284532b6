"""One program writes to a directory of steps; others are refused, or read beside it."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors, process
from elastic_ckpt.tiers.persistent import claims, writer
from tests import shared_memory

# Saves steps until it is killed, and says which are durable.
PROGRAM = """
import itertools, sys
import jax.numpy as jnp
import elastic_ckpt as ec
steps, run = sys.argv[1:]
with ec.Checkpointer([ec.Persistent(steps, every=1)], run=run) as checkpointer:
    first = 0 if checkpointer.latest is None else checkpointer.latest.step
    for step in itertools.count(first + 1):
        assert checkpointer.save(step, {"w": jnp.full(4, step)})
        print(step, flush=True)
        sys.stdin.readline()
"""


# Becomes the writer as a process of another machine, and looks whether it still is.
FAR = """
import dataclasses, sys
from elastic_ckpt.core import errors, process
from elastic_ckpt.tiers.persistent import writer
far = dataclasses.replace(process.this(), host="far", boot_id="another")
writing = writer.Writer(sys.argv[1], owner=far, duration_secs=6)
writing.begin()
print("begun", flush=True)
sys.stdin.readline()
try:
    writing.check()
except errors.ReplacedError as error:
    print(error, flush=True)
"""
_SLOW = pytest.mark.slow


@pytest.fixture(params=["local", pytest.param("gs", marks=_SLOW)])
def steps(request, steps_in):
    """A directory of steps, on a disk or in a bucket."""
    return steps_in(request.param)


@contextlib.contextmanager
def running(program, *arguments, until):
    """A program that has printed a line and waits; killed at the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ) as started:
        try:
            assert started.stdout.readline() == until
            yield started
        finally:
            started.kill()


def opened(steps, run="tiny", **options):
    return ec.Checkpointer([ec.Persistent(steps, every=1)], run=run, **options)


def value(checkpointer):
    return int(checkpointer.load(None, None)["w"][0])


def test_a_second_program_is_refused_until_the_first_is_killed(steps):
    with running(PROGRAM, steps, "tiny", until="1\n") as first:
        for run in ("tiny", "another"):
            with pytest.raises(errors.RunError) as refused:
                opened(steps, run)
            assert f"process {first.pid} on {os.uname().nodename}, since 2" in str(
                refused.value
            )
            assert "read_only=True" in str(refused.value)
        # It may stand still: it is alive, and goes on one day.
        first.send_signal(signal.SIGSTOP)
        with pytest.raises(errors.RunError, match=f"process {first.pid} on"):
            opened(steps)
        first.send_signal(signal.SIGCONT)
        # And reading is no writing.
        with opened(steps, read_only=True) as reading:
            assert value(reading) == 1
            first.stdin.write("\n")
            first.stdin.flush()
            assert first.stdout.readline() == "2\n"
            reading.reload()
            assert value(reading) == 2
            for refused in (
                lambda: reading.save(3, {"w": jnp.zeros(4)}),
                lambda: reading.delete(1),
                lambda: reading.record_metrics(1, {"loss": 1.0}),
            ):
                with pytest.raises(errors.CheckpointError, match="read_only=True"):
                    refused()
            assert not reading.should_save(3)
        first.kill()
        first.wait()
        # At once, with nothing to wait for.
        with opened(steps) as second:
            assert value(second) == 2
            assert second.save(3, {"w": jnp.full(4, 3)})
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
                assert running.save(step, {"w": jnp.full(4, step)})
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
            assert running.save(4, {"w": jnp.full(4, 4)})


def elsewhere(**fields):
    # A process of another machine: nothing can be proved of it.
    return dataclasses.replace(process.this(), host="far", boot_id="another", **fields)


@_SLOW
def test_a_writer_of_another_machine_counts_as_long_as_it_renews(steps):
    with running(FAR, steps, until="begun\n") as far:
        with pytest.raises(errors.RunError, match="on far, since"):
            opened(steps)
        # It stands still for too long.
        far.send_signal(signal.SIGSTOP)
        with opened(steps) as second:
            assert second.save(1, {"w": jnp.full(4, 1)})
            far.send_signal(signal.SIGCONT)
            said, _ = far.communicate("\n")
            # And when it comes back, it does not write.
            assert f"process {os.getpid()} on" in said
            assert "commits no step there" in said
            assert second.save(2, {"w": jnp.full(4, 2)})


def test_a_writer_that_was_replaced_commits_no_step(tmp_path):
    steps = tmp_path / "steps"
    first = opened(steps)
    assert first.save(1, {"w": jnp.full(4, 1)})
    # As after a pause that was too long: another program has taken over.
    with opened(steps) as second:
        assert second.save(2, {"w": jnp.full(4, 2)})
        with pytest.raises(errors.ReplacedError, match="commits no step there"):
            first.save(3, {"w": jnp.full(4, 3)})
        with pytest.raises(errors.ReplacedError):
            first.close()
        assert [each.step for each in second.checkpoints] == [1, 2]
        assert second.save(4, {"w": jnp.full(4, 4)})
    assert {path.name for path in steps.iterdir() if path.name.isdigit()} == set("124")
    # A program that has ended leaves no record.
    with contextlib.suppress(KeyError), opened(steps):
        assert writer.live(steps).process == process.this()
        raise KeyError
    assert writer.live(steps) is None


def begin(steps, claimant=None, owner=None):
    begun = writer.Writer(steps, claimant=claimant, owner=owner)
    begun.begin()
    return begun


def test_a_start_by_hand_of_a_run_that_runs_is_refused(tmp_path):
    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            stat = pathlib.Path("/proc", str(other.pid), "stat").read_text()
            owner = dataclasses.replace(
                process.this(), pid=other.pid, start_ticks=int(stat.split()[21])
            )
            first = begin(tmp_path, claims.new_claimant(owner))
            again = claims.new_claimant(process.this())
            with pytest.raises(errors.RunError, match=f"process {other.pid} on"):
                begin(tmp_path, again)
        finally:
            other.kill()
        other.wait()
        begin(tmp_path, again).close()
        first.close()
