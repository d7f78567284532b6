"""The steps that are kept, reported and retried when a stage of a save fails.

Hosts are those of the simulation in `tests/model`.
"""

import functools
import pathlib
import re

import numpy as np
import pytest

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.checkpoint.host.backup import HostBackup
from elastic_ckpt.checkpoint.host.copies import HostCopies
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.core import boxes, errors
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.ram import ram_disk
from tests import shared_memory, spoilt_files
from tests.model import simulated_world


@pytest.fixture
def sim():
    """Machines and storage of a run."""
    with (
        shared_memory.directory("stages") as directory,
        simulated_world.Simulation(pathlib.Path(directory), num_machines=6) as sim,
    ):
        yield sim


def begin(sim, *steps, **options):
    """Saves steps, and waits for none of what follows their commits."""
    state_of = simulated_world.state_of
    return [
        sim.world.save_checkpointables(step, {"state": state_of(step)}, **options)
        for step in steps
    ]


def save(sim, *steps):
    """Saves steps one after the other, and all that follows; whether each is there."""
    saved = []
    for step in steps:
        saved += begin(sim, step)
        sim.world.wait()
    return saved


def reopen(sim, step, **options):
    """Begins another world, which restores this step as the newest."""
    sim.end()
    sim.open((0, 1), **options)
    wanted = {"state": simulated_world.abstract()}
    state = sim.world.load_checkpointables(None, wanted)["state"]
    assert sim.world.latest.step == step
    for name, values in simulated_world.state_of(step).items():
        assert state[name].tobytes() == values.tobytes()


def fail_with(patch, error, owner, name):
    """Has a method raise an error."""

    @functools.wraps(getattr(owner, name))
    def fail(*_, **__):
        raise error

    patch.setattr(owner, name, fail)


def in_ram(sim, machine=0):
    disk = ram_disk.RamDisk(sim.roots[machine], run=simulated_world.RUN)
    return [step for step, _ in disk.saves(0)]


def told(sim, tier):
    return [
        (fields["step"], fields["why"])
        for name, fields in sim.events
        if name == "degraded" and fields["tier"] == tier
    ]


def steps(sim, name):
    return [fields["step"] for each, fields in sim.events if each == name]


def test_what_one_machine_preserves_stays_on_all(sim, monkeypatch):
    sim.open((0, 1), store_every=1000)
    save(sim, 1)
    (directory,) = sim.roots[1].glob("hosts/0/1-*")
    preserved.pin(directory)
    save(sim, 2)
    reopen(sim, 2, store_every=1000)
    error = errors.CheckpointError("copies do not fit")
    for newest, call in ((3, "offer"), (4, "take")):
        fail_with(monkeypatch, error, HostCopies, call)
        save(sim, newest)
        assert in_ram(sim)[0] == in_ram(sim, 1)[0] == 1
        monkeypatch.undo()
    assert "copies do not fit" in told(sim, "peer")[0][1]
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
    assert why.startswith("state/b[0:3] has different values on hosts 0, 1")
    with pytest.raises(errors.NotStoredError, match="step 2 was due"):
        sim.world.close()


# The first pipeline stage is four times as large; hosts of the smaller domain hold the
# copies of the other one. For each host that has not enough room, what it needs.
@pytest.mark.parametrize(
    ("slices", "stages", "needed"),
    [("0123", (4, 1, 1, 1), {0: 5, 1: 5}), ("000011", 6 * (1,), {4: 3, 5: 3})],
)
def test_hosts_without_room_are_named_before_a_copy_is_sent(
    sim, monkeypatch, slices, stages, needed
):
    def of_one_host(_, path, leaf, number):
        stage = int(path.rpartition("/")[2])
        held = ((boxes.whole(leaf.shape), leaf),) if stage == number else ()
        whole = Leaf(path=path, shape=leaf.shape, dtype="uint8")
        return capture.Shards(whole, leaf.shape, held, False, lambda _: (stage,))

    monkeypatch.setattr(simulated_world.SimulatedHosts, "_shards", of_one_host)
    state = {str(n): np.full(s * 2**16, n, np.uint8) for n, s in enumerate(stages)}
    hosts, num_bytes = range(len(stages)), 2 * max(needed.values()) * 2**16
    for is_saved in (False, True):
        limit_bytes = num_bytes - 1 + is_saved
        sim.open(hosts, slices=slices, limit_bytes=limit_bytes, store_every=None)
        assert sim.world.save_checkpointables(1, {"state": state}) == is_saved
        sim.world.wait()
        assert steps(sim, "replicated") == [1] * is_saved
        assert [in_ram(sim, host) for host in hosts] == [[1] * is_saved for _ in hosts]
        if not is_saved:
            ((_, why),) = told(sim, "local")
            named = re.findall(r"host (\d): 2 steps .*? need (\d+) .*? use (\d+);", why)
            sizes = [(n, 2 * size * 2**16, limit_bytes) for n, size in needed.items()]
            assert [(*map(int, each),) for each in named] == sizes
        sim.end()


def test_a_step_that_came_while_copies_were_made_gets_them_at_the_end(sim):
    sim.open((0, 1), store_every=1000)
    sim.threads.late = frozenset({"replicate"})
    begin(sim, 1, 2, 3)
    sim.threads.late = frozenset()
    sim.world.wait()
    # Copies keep up with saves again.
    save(sim, 4, 5)
    assert steps(sim, "replicated") == [1, 3, 4, 5]
    why = "copies of an earlier step are not done, so this step is not copied yet"
    assert told(sim, "peer") == [(2, why)]


def test_storage_that_is_late_is_slow_until_it_has_taken_all_that_is_due(sim):
    sim.open((0, 1), store_every=1)
    sim.threads.late = frozenset({"back-up"})
    begin(sim, 1, 2, 3)
    late = told(sim, "persistent")
    assert [step for step, _ in late] == [2, 3]
    assert all("is backed up next. Save less often, or use" in why for _, why in late)
    sim.threads.late = frozenset()
    sim.threads.catch_up()
    sim.world._events.flush()
    # One that is stored late leaves two that are due.
    assert steps(sim, "backed_up") == [1]
    assert steps(sim, "storage_recovered") == []
    sim.world.wait()
    assert steps(sim, "backed_up") == [1, 3]
    ((_, recovered),) = (each for each in sim.events if each[0] == "storage_recovered")
    assert (recovered["step"], recovered["cause"], recovered["steps"]) == (3, "slow", 2)


def test_what_went_bad_before_it_was_copied_or_stored_is_told(sim):
    def spoil(leaf):
        for path in sim.roots[0].glob(f"hosts/0/*-*/state/{leaf}/c/*"):
            spoilt_files.change_first_byte(path)
        sim.world.wait()

    sim.open((0, 1), store_every=1)
    sim.threads.late = frozenset({"back-up"})
    begin(sim, 1)
    # The other host has it, too.
    spoil("b")
    ((step, why),) = told(sim, "local")
    assert step == 1
    assert why.startswith("state/b[0:3] at host ")
    assert why.endswith("its digest differs; it was backed up from other copies")
    sim.threads.late = frozenset({"replicate", "back-up"})
    begin(sim, 2)
    spoil("w")
    (why,) = (why for _, why in told(sim, "peer") if why.startswith("state/"))
    assert why.startswith("state/w[0:6] at host ")
    assert why.endswith("its digest differs")
    (why, *_) = (why for _, why in told(sim, "persistent"))
    assert "host 0: step 2: no good copy of state/w[0:6] is left" in why
    assert steps(sim, "backed_up") == [1]


def test_what_a_world_owes_to_storage_the_next_ones_store(sim, monkeypatch):
    keep = simulated_world.latest(9)
    sim.open((0, 1), store_every=10, keep_local=keep)
    # The world is left before the backups are made. Its last step is not due in
    # storage, and stands for those before it.
    sim.threads.late = frozenset({"back-up", "replicate"})
    begin(sim, 9, 10, 15, 20)
    sim.is_leaving_world = True
    assert begin(sim, 21, force=True) == [True]
    sim.world.close()
    sim.threads.late = frozenset()
    error = errors.CheckpointError("no room")
    with monkeypatch.context() as patch:
        fail_with(patch, error, HostBackup, "commit")
        # Another schedule changes nothing for what was saved before.
        reopen(sim, 21, store_every=1, keep_local=keep)
        assert [step for step, _ in told(sim, "persistent")] == [21]
        assert steps(sim, "replicated") == [21]
        remedy = "restart the run while the step is still in the hosts' RAM"
        with pytest.raises(errors.NotStoredError, match=remedy):
            sim.world.close()
        reopen(sim, 21, store_every=1, keep_local=keep)
    # It is tried again at the end, and what was uploaded is not sent once more.
    sim.world.close()
    stored = [each for name, each in sim.events if name == "backed_up"]
    assert [(each["step"], each["bytes"]) for each in stored] == [(21, 0)]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (HostCopies, "take"),
        (HostBackup, "back_up"),
        (HostSaver, "write"),
        (HostSaver, "collect"),
        (HostBackup, "collect"),
    ],
)
def test_an_error_of_a_stage_is_an_event(sim, monkeypatch, owner, name):
    sim.open((0, 1), store_every=1, keep=simulated_world.latest(1))
    with monkeypatch.context() as patch:
        fail_with(patch, TypeError("a bug"), owner, name)
        assert save(sim, 1) == [name != "write"]
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
    missing = f"step 1 was due in persistent storage but is not there: {why}; save the"
    with pytest.raises(errors.NotStoredError) as caught:
        sim.world.close()
    assert str(caught.value).startswith(f"{missing} step again, because no tier has it")


def test_a_save_takes_6_rounds_or_10_with_storage_and_a_restore_5(sim):
    sim.open((0, 1), store_every=2)
    rounds, taken = [], []
    sim.on_round = lambda *each: rounds.append(each)
    for step in (1, 2, 3):
        rounds.clear()
        assert save(sim, step) == [True]
        taken.append(len(rounds))
    # The first claims the line.
    assert taken == [7, 10, 6]
    sim.world.close()
    world = sim.open((2, 1), store_every=2)
    rounds.clear()
    world.load_checkpointables(None, {"state": simulated_world.abstract()})
    # What follows copies the step to its new hosts.
    assert rounds.index(("all", HostReader.hold)) == 5
