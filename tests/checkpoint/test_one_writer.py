"""One run, and one program of it, writes to a directory of steps.

Others are refused, or read beside it. RAM counts for the run alone whose storage has
the same identity.
"""

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import pathlib
import re
import shutil
import signal

import numpy as np
import pytest
from etils import epath

import elastic_ckpt as ec
from elastic_ckpt.core import allgather, clock, errors, process, storage
from elastic_ckpt.tiers.peers import agent
from elastic_ckpt.tiers.persistent import claims, records, run_files
from elastic_ckpt.training import launch
from tests import shared_memory
from tests.tiers import served


def opened(steps, run="tiny", *, ram=None, **options):
    tiers = [ec.Local(ram)] if ram else []
    if steps:
        tiers.append(ec.Persistent(steps, every=4 if ram else 1))
    return ec.Checkpointer(tiers, run=run, **options)


def save(checkpointer, *steps, more=0):
    for step in steps:
        assert checkpointer.save(step, {"w": np.full(4, more + step)})
        checkpointer.wait()


def value(checkpointer):
    return int(checkpointer.load(None, {"w": np.zeros(4, int)})["w"][0])


def save_steps(steps, told, environment):
    """Saves steps until it is killed; says which are durable, and waits after each."""
    os.environ.update(environment)
    with opened(steps) as checkpointer:
        for step in itertools.count(1):
            save(checkpointer, step)
            told.send(step)
            told.recv()


@contextlib.contextmanager
def running(steps):
    """A program that saves steps, and a pipe to it; killed at the end of the block."""
    launch.warm_up()
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


@pytest.mark.parametrize("place", ["local", pytest.param("gs", marks=pytest.mark.slow)])
def test_a_second_program_is_refused_until_the_first_is_killed(place, steps_in):
    steps = steps_in(place)
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
            save(second, 3)


def _files(directory):
    # All but the times of access.
    found = {path: path.stat() for path in directory.rglob("*")}
    return {path: (s.st_ino, s.st_mtime_ns, s.st_size) for path, s in found.items()}


def test_a_program_that_reads_sees_the_ram_of_the_one_that_runs(tmp_path):
    with shared_memory.directory("writer") as ram:
        tiers = [ec.Local(ram), ec.Persistent(tmp_path / "steps", every=2)]
        with ec.Checkpointer(tiers, run="tiny") as running:
            save(running, 1, 2, 3)
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
            save(running, 4)


@pytest.mark.parametrize("renews", [True, False])
def test_a_writer_of_another_machine_counts_as_long_as_it_renews(
    tmp_path, monkeypatch, renews
):
    path = epath.Path(tmp_path / claims.DIRECTORY / "1.json")
    with contextlib.suppress(KeyError), opened(tmp_path) as before:
        save(before, 1)
        assert records.read(path).process == process.this()
        raise KeyError
    # A program that has ended lets others write at once.
    assert records.read(path).secs == 0
    # A process of another machine: nothing can be proved of it.
    elsewhere = dataclasses.replace(process.this(), host="far", boot_id="another")
    record = records.read(path)
    far = dataclasses.replace(record, process=elsewhere, secs=60.0, start="a")
    storage.write_atomic(path, records.to_bytes(far))

    def sleep(_):
        # Others act meanwhile.
        if renews:
            again = dataclasses.replace(far, count=1)
            storage.write_atomic(path, records.to_bytes(again))

    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(clock, "monotonic", map(float, itertools.count()).__next__)
    refused = pytest.raises(errors.RunError, match=r"process \d+ on far, since")
    with refused if renews else contextlib.nullcontext():
        opened(tmp_path).close()


def test_a_start_by_hand_of_a_run_that_runs_is_refused(tmp_path):
    def begin(owner):
        begun = claims.WriteClaim(tmp_path, claimant=claims.Claimant(owner=owner))
        begun.begin()
        return begun

    pid, ticks = os.getppid(), process._state_and_start(os.getppid())[1]
    running = dataclasses.replace(process.this(), pid=pid, start_ticks=ticks)
    first = begin(running)
    with pytest.raises(errors.RunError, match=f"process {pid} on"):
        begin(process.this())
    first.close()
    # Its number was that of another process before.
    begin(dataclasses.replace(running, start_ticks=ticks - 1))
    begin(process.this()).close()


@pytest.fixture
def ram():
    with shared_memory.directory("identity") as directory:
        yield pathlib.Path(directory) / "tiny"


def continue_run(steps, ram, *numbers, more=0):
    with opened(steps, ram=ram) as checkpointer:
        if checkpointer.latest is not None:
            value(checkpointer)
        save(checkpointer, *numbers, more=more)


def newest(steps, ram, run="tiny"):
    with opened(steps, run, ram=ram) as checkpointer:
        latest = checkpointer.latest
        return latest and (latest.step, value(checkpointer))


# The storage of the run in RAM may be gone, or is that of another run.
GONE, OTHER = "a run that had persistent storage", "another run"


def refused(steps, ram, *, whose):
    with pytest.raises(errors.RunError, match=f"steps of {whose}") as raised:
        newest(steps, ram)
    assert "a different run_name" in str(raised.value)
    assert f"rm -r {ram}" in str(raised.value)


def test_ram_of_another_run_of_the_same_name_is_refused(tmp_path, ram):
    first, second = tmp_path / "a", tmp_path / "b"
    continue_run(first, ram, 4, 5)
    refused(second, ram, whose=GONE)
    # Nothing was changed, and the run of the RAM disk goes on.
    assert newest(first, ram) == (5, 5)
    # The remedy: the other run begins with an empty disk.
    shutil.rmtree(ram)
    assert newest(second, ram) is None
    continue_run(second, ram, 4, more=100)
    assert newest(second, ram) == (4, 104)
    refused(first, ram, whose=OTHER)


def test_ram_is_continued_with_the_identity_of_its_storage(tmp_path, ram):
    steps = tmp_path / "a"
    continue_run(steps, ram, 4, 5)
    shutil.rmtree(steps)
    copied = f"copy {ram}/run.json to {steps}/run.json"
    with pytest.raises(errors.RunError, match=f"has steps .* only copy.*{copied}"):
        newest(steps, ram)
    steps.mkdir(exist_ok=True)
    shutil.copy(ram / "run.json", steps)
    assert newest(steps, ram) == (5, 5)
    continue_run(steps, ram, 8)
    assert newest(steps, None) == (8, 8)


def test_a_run_can_gain_drop_and_rename_its_tiers(tmp_path, ram, monkeypatch):
    steps = tmp_path / "a"
    continue_run(None, ram, 1, 2)
    continue_run(steps, ram, 4, 5)
    assert newest(steps, ram) == newest(None, ram) == (5, 5)
    assert newest(steps, None) == (4, 4)
    refused(tmp_path / "b", ram, whose=GONE)
    renamed = ram.rename(ram.with_name("renamed"))
    assert newest(steps, renamed, run=None) == (5, 5)
    for disk in (renamed, None):
        with pytest.raises(errors.RunError, match="another run, 'tiny', but this run"):
            newest(steps, disk, run="two")

    def agreed(messages, _, work, **__):
        # What this host finds as a host after one that has no steps.
        messages.host = 1
        found = work()
        messages.host = 0
        return [None, found]

    monkeypatch.setattr(allgather.Allgather, "agreed", agreed)
    assert newest(None, renamed, run=None) == (5, 5)


@pytest.mark.parametrize("place", ["ram", "steps"])
def test_of_a_live_run_any_file_may_be_taken_or_is_named(ram, place):
    for number in itertools.count():
        root, told = ram / str(number), ""
        root.mkdir(parents=True)
        tiers = [ec.Persistent(root, every=1), ec.Local(f"{root}-in-ram")]
        with contextlib.ExitStack() as stack:
            if place == "ram":
                stack.enter_context(served.serving(agent.Service(root=str(root))))
                tiers = [ec.Local(root), ec.Peers()]
            try:
                with ec.Checkpointer(tiers, run="tiny") as live:
                    save(live, 1, 2)
                    there = (each for each in sorted(root.rglob("*")) if each.is_file())
                    names = [str(each.relative_to(root)) for each in there]
                    # Those that are in no step: each alone, and all at last.
                    names = [n for n in names if not re.match(r"(hosts/0/)?\d+[-/]", n)]
                    taken = names[number : number + 1] or names
                    for name in taken:
                        (root / name).unlink()
                    save(live, 3)
            except errors.ElasticCkptError as error:
                told = str(error)
            if not any(str(root / name) in told for name in taken):
                # A new agent, and the next removal or repair, lock files of their own.
                left = {name for name in taken if not (root / name).exists()}
                assert left <= {"agent.lock", "hosts/0/repairs.lock"}
                with ec.Checkpointer(tiers[:1], run="tiny") as later:
                    assert later.load()["w"].tolist() == [3] * 4
        if taken == names:
            break
    assert {"run.json", "agents.json"} < set(names)


def test_the_disks_of_hosts_without_storage_are_of_one_run():
    known = [run_files.Identity(name=name, is_stored=True) for name in ("1", "3")]
    disks = [
        run_files.StepsDirectory(directory=name, identity=identity)
        for name, identity in (("a", known[0]), ("b", None), ("c", known[0]))
    ]
    assert run_files.agreed(None, disks, fresh="2") == known[0]
    disks[1] = run_files.StepsDirectory(directory="b", identity=known[1])
    with pytest.raises(
        errors.RunError, match="host 1: b contains steps of another run"
    ):
        run_files.agreed(None, disks, fresh="2")
