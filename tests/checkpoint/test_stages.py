"""The steps that are kept, reported and retried when a stage of a save fails.

Hosts are those of the simulation in `tests/model`.
"""

import functools
import pathlib

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint.host import backup
from elastic_ckpt.checkpoint.host.backup import HostBackup
from elastic_ckpt.checkpoint.host.copies import HostCopies
from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.checkpoint.stages import SaveStages
from elastic_ckpt.core import errors
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.persistent import leases, persistent_root, upload
from elastic_ckpt.tiers.ram import ram_disk
from tests import shared_memory, spoilt_files
from tests.model import simulated_world


@pytest.fixture
def sim():
    """Machines and storage of a run; a world has two hosts unless a test opens more."""
    with (
        shared_memory.directory("stages") as directory,
        simulated_world.Simulation(pathlib.Path(directory)) as sim,
    ):
        yield sim


def begin(sim, *steps):
    """Saves steps, and waits for none of what follows their commits."""
    saved = []
    for step in steps:
        parts = {"state": simulated_world.state_of(step)}
        saved.append(sim.world.save_checkpointables(step, parts))
    return saved


def save(sim, *steps):
    """Saves steps one after the other, and all that follows; whether each is there."""
    saved = []
    for step in steps:
        saved += begin(sim, step)
        sim.world.wait()
    return saved


def restore(sim):
    """Restores the newest step; returns its number."""
    wanted = {"state": simulated_world.abstract()}
    state = sim.world.load_checkpointables(None, wanted)["state"]
    step = sim.world.latest.step
    for name, values in simulated_world.state_of(step).items():
        assert state[name].tobytes() == values.tobytes()
    return step


def in_ram(sim, machine=0):
    disk = ram_disk.RamDisk(sim.roots[machine], run=simulated_world.RUN)
    return [step for step, _ in disk.saves(0)]


def values_of(sim, machine, leaf):
    """The file of a leaf on a machine with one step."""
    (path,) = pathlib.Path(sim.roots[machine]).glob(f"hosts/0/*-*/state/{leaf}/c/*")
    return path


def told(sim, tier):
    return [
        (fields["step"], fields["why"])
        for name, fields in sim.events
        if name == "degraded" and fields["tier"] == tier
    ]


def steps(sim, name):
    return [fields["step"] for each, fields in sim.events if each == name]


def test_the_newest_step_that_has_its_copies_is_kept_until_another_has(sim):
    sim.open((0, 1), store_every=1000)
    save(sim, 1)
    sim.network.failing.add(1)
    for newest in (2, 3, 4):
        save(sim, newest)
        assert in_ram(sim) == in_ram(sim, 1) == [1, newest]
    # That its agent fails is told once.
    ((step, why),) = told(sim, "peer")
    assert step == 2
    assert why == "the parts of host 1: the list cannot be read: machine 1 fails"
    sim.network.failing.clear()
    save(sim, 5)
    assert in_ram(sim) == [5]
    sim.world.close()
    # A step that was restored stays, too.
    sim.open((0, 1), store_every=1000)
    assert restore(sim) == 5
    sim.network.failing.add(1)
    save(sim, 6)
    assert in_ram(sim) == [5, 6]


@pytest.mark.parametrize("call", ["offer", "take"])
def test_what_is_preserved_on_one_machine_stays_on_all_though_copies_fail(
    sim, monkeypatch, call
):
    sim.open((0, 1), store_every=1000)
    save(sim, 1)
    (directory,) = sim.roots[1].glob("hosts/0/1-*")
    preserved.pin(directory)
    save(sim, 2)
    sim.end()
    sim.open((0, 1), store_every=1000)
    assert restore(sim) == 2
    made = getattr(HostCopies, call)

    @functools.wraps(made)
    def fails(*_, **__):
        raise errors.CheckpointError("copies do not fit")

    monkeypatch.setattr(HostCopies, call, fails)
    for newest in (3, 4):
        save(sim, newest)
        assert in_ram(sim)[0] == in_ram(sim, 1)[0] == 1
    assert "copies do not fit" in told(sim, "peer")[0][1]
    monkeypatch.undo()
    preserved.unpin(directory)
    save(sim, 5)
    assert in_ram(sim) == in_ram(sim, 1) == [5]


def test_a_step_whose_replicas_differ_is_given_up(sim, monkeypatch):
    sim.open((0, 1), store_every=1)
    save(sim, 1)
    shards = simulated_world.SimulatedHosts._shards

    def one_bit_differs(hosts, path, leaf, number):
        if path == "state/b" and number == 1:
            leaf = leaf ^ 1
        return shards(hosts, path, leaf, number)

    with monkeypatch.context() as patch:
        patch.setattr(simulated_world.SimulatedHosts, "_shards", one_bit_differs)
        assert save(sim, 2) == [False]
    assert in_ram(sim) == in_ram(sim, 1) == [1]
    assert steps(sim, "backed_up") == [1]
    ((_, why),) = told(sim, "local")
    assert why.startswith("state/b[0:3] has different values at the hosts 0, 1")
    with pytest.raises(errors.NotStoredError, match="step 2 was due"):
        sim.world.close()
    sim.end()
    sim.open((0, 1), store_every=1)
    assert restore(sim) == 1


def test_a_step_that_came_while_copies_were_made_gets_them_at_the_end(sim):
    sim.open((0, 1), store_every=1000)
    for first in (1, 6):
        sim.threads.late = frozenset({"replicate"})
        begin(sim, first, first + 1, first + 2)
        sim.threads.late = frozenset()
        sim.world.wait()
        # Copies keep up with saves again.
        save(sim, first + 3, first + 4)
    assert steps(sim, "replicated") == [1, 3, 4, 5, 6, 8, 9, 10]
    why = "copies of an earlier step are not done; it gets none yet"
    assert told(sim, "peer") == [(2, why), (7, why)]


def test_what_went_bad_before_it_was_copied_or_stored_is_told(sim):
    sim.open((0, 1), store_every=1)
    sim.threads.late = frozenset({"back-up"})
    begin(sim, 1)
    path = values_of(sim, 0, "b")
    spoilt_files.change_first_byte(path)
    sim.world.wait()
    # The other host has it, too.
    ((step, why),) = told(sim, "local")
    assert step == 1
    assert why.startswith("state/b[0:3] at host ")
    assert why.endswith("its digest differs; it was backed up from elsewhere")
    sim.threads.late = frozenset({"replicate", "back-up"})
    begin(sim, 2)
    for path in sim.roots[0].glob("hosts/0/2-*/state/w/c/*"):
        spoilt_files.change_first_byte(path)
    sim.world.wait()
    (why,) = (why for _, why in told(sim, "peer") if why.startswith("state/"))
    assert why.startswith("state/w[0:6] at host ")
    assert why.endswith("its digest differs")
    (why, *_) = (why for _, why in told(sim, "persistent"))
    assert "host 0: step 2: no good copy of state/w[0:6] is left" in why
    assert steps(sim, "backed_up") == [1]


def test_a_step_that_waits_for_its_backup_is_stored_as_the_next_one_that_is_saved(sim):
    sim.open((0, 1), store_every=2)
    sim.threads.late = frozenset({"back-up"})
    begin(sim, 2, 4)
    sim.threads.late = frozenset()
    sim.threads.catch_up()
    save(sim, 5)
    assert steps(sim, "backed_up") == [2, 5]


def leave(sim, *numbers):
    """Saves steps in a world that is left before their backups are made."""
    sim.threads.late = frozenset({"back-up", "replicate"})
    *before, last = numbers
    begin(sim, *before)
    sim.is_left = True
    parts = {"state": simulated_world.state_of(last)}
    assert sim.world.save_checkpointables(last, parts, force=True)
    sim.world.close()
    # Its processes end.
    sim.end()
    sim.threads.late = frozenset()


def test_what_a_world_owes_to_storage_the_next_one_stores_with_the_step_restored(sim):
    keep = ocp.training.preservation_policies.PreserveAll()
    sim.open((0, 1), store_every=10, keep_local=keep)
    # The last step of a world is not due in storage, and stands for those before it.
    leave(sim, 9, 10, 15, 20, 21)
    # Another schedule changes nothing for what was saved before.
    sim.open((0, 1), store_every=1, keep_local=keep)
    assert restore(sim) == 21
    sim.world.wait()
    assert steps(sim, "backed_up") == [21]
    # Copies, too.
    assert steps(sim, "replicated") == [21]
    sim.world.close()
    sim.end()
    sim.open((0, 1), store_every=10, keep_local=keep)
    leave(sim, 30, 31)
    sim.open((0, 1), store_every=1, keep_local=keep)
    wanted = {"state": simulated_world.abstract()}
    sim.world.load_checkpointables(21, wanted, go_back=True)
    sim.world.wait()
    assert not steps(sim, "backed_up")


def test_a_step_stays_in_ram_until_the_next_world_has_stored_it(sim, monkeypatch):
    sim.open((0, 1), store_every=10)
    leave(sim, 10, 11)
    upload, held = SaveStages._upload, []

    def upload_late(stages, saving):
        begin(sim, 12)
        held.extend(in_ram(sim))
        return upload(stages, saving)

    sim.open((0, 1), store_every=10)
    monkeypatch.setattr(SaveStages, "_upload", upload_late)
    wanted = {"state": simulated_world.abstract()}
    sim.world.load_checkpointables(None, wanted)
    sim.world.wait()
    assert steps(sim, "backed_up") == [11]
    assert 11 in held
    save(sim, 13)
    assert in_ram(sim) == [13]


def test_a_step_outlasts_worlds_that_cannot_store_it(sim, monkeypatch):
    @functools.wraps(HostBackup.back_up)
    def fail(*_, **__):
        raise errors.CheckpointError("no room")

    sim.open((0, 1), store_every=10)
    leave(sim, 10, 11)
    with monkeypatch.context() as patch:
        patch.setattr(HostBackup, "back_up", fail)
        sim.open((0, 1), store_every=10)
        assert restore(sim) == 11
        assert [step for step, _ in told(sim, "persistent")] == [11]
        remedy = "start the run once more while the hosts' RAM has the step"
        with pytest.raises(errors.NotStoredError, match=remedy):
            sim.world.close()
        sim.end()
        sim.open((0, 1), store_every=10)
        assert restore(sim) == 11
        leave(sim, 12, 13)
        sim.open((0, 1), store_every=10)
        assert restore(sim) == 13
    # It is tried again at the end.
    sim.world.close()
    assert steps(sim, "backed_up") == [13]


def test_the_last_backup_waits_until_peers_that_failed_are_asked_again(
    sim, monkeypatch
):
    sim.open((0, 1), store_every=1)
    sim.threads.late = frozenset({"back-up"})
    begin(sim, 1)
    spoilt_files.change_first_byte(values_of(sim, 1, "b"))
    sim.network.failing.add(0)

    def asked(_):
        sim.network.failing.clear()
        return 0.01

    monkeypatch.setattr(simulated_world._Client, "left_skipped_secs", asked)
    sim.world.close()
    assert steps(sim, "backed_up") == [1]


def test_an_upload_that_fails_is_continued_and_not_begun_anew(sim, monkeypatch):
    monkeypatch.setattr(backup, "_BATCH_ITEMS", 1)
    monkeypatch.setattr(upload, "_PROGRESS_SECS", 0.0)
    monkeypatch.setattr(upload, "_PROGRESS_SHARE", 0)
    write, written, failed = upload.Upload.write, [], []

    def fail_once(uploading, parts, values):
        if len(written) == 1 and not failed:
            failed.append(parts)
            raise errors.CheckpointError("a failure")
        written.extend((each.leaf, str(each.box)) for each in parts)
        write(uploading, parts, values)

    monkeypatch.setattr(upload.Upload, "write", fail_once)
    sim.open((0,), store_every=1)
    save(sim, 1)
    assert steps(sim, "backed_up") == [1]
    assert failed
    assert len(written) == len(set(written)) > 1


def test_a_step_is_removed_once_the_lease_of_a_killed_reader_has_expired(sim):
    def saved(step):
        save(sim, step)
        return persistent_root.PersistentRoot.from_path(sim.storage).steps()

    def read():
        # The simulation does not renew it, as if the reader was killed.
        with leases.lease(sim.storage / "1", duration_secs=100.0):
            assert saved(2) == [1, 2]
            sim.clock.sleep(90)
            assert saved(3) == [1, 3]
            sim.clock.sleep(20)
            assert saved(4) == [4]

    sim.open((0,), store_every=1, keep=simulated_world.latest(1))
    save(sim, 1)
    with pytest.raises(errors.CheckpointError, match="was lost while it was read"):
        read()


STAGES = {
    "peer": (HostCopies, "take"),
    "persistent": (HostBackup, "back_up"),
    "local": (HostSaver, "write"),
    "ram is not tidied": (HostSaver, "collect"),
    "storage is not tidied": (HostBackup, "collect"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_of_a_stage_is_an_event_and_no_later_call_raises_it(
    sim, monkeypatch, stage
):
    keep = simulated_world.latest(1)
    sim.open((0, 1), store_every=1, keep=keep)
    owner, name = STAGES[stage]

    @functools.wraps(getattr(owner, name))
    def fail(*_, **__):
        raise TypeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        assert save(sim, 1) == [stage != "local"]
    reasons = [fields["why"] for name, fields in sim.events if name == "degraded"]
    assert reasons
    assert all("a bug" in why for why in reasons)
    assert save(sim, 2) == [True]
    assert steps(sim, "backed_up")[-1] == 2


def test_a_host_that_is_missing_is_named_at_the_end(sim):
    sim.open((0, 1), store_every=1)
    sim.hosts.lost_at = 1
    with pytest.raises(errors.RunError, match="HostSaver"):
        save(sim, 1)
    ((step, why), *_) = told(sim, "local")
    assert step == 1
    assert why.startswith("HostSaver.write")
    with pytest.raises(errors.NotStoredError) as caught:
        sim.world.close()
    missing = "step 1 was due in persistent storage and is not there"
    remedy = (
        "save it again: no tier has it, and a start goes on from the newest step that"
        " was saved"
    )
    assert str(caught.value) == f"{missing}: {why}; {remedy}"
