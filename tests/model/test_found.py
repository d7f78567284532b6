"""Histories in which defects were found, most of them by `test_histories`."""

import contextlib
import itertools
import time

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import errors
from tests import shared_memory
from tests.model import simulated_world
from tests.model.checked_run import CheckedRun


@contextlib.contextmanager
def run_on(machines, **tiers):
    with (
        shared_memory.directory("model") as directory,
        CheckedRun(directory, **tiers) as run,
    ):
        run.open(machines)
        yield run


def test_an_overwrite_that_is_cut_short_between_two_hosts_leaves_the_step():
    with run_on((0, 1), store_every=1) as run:
        run.save(1)
        # One host has committed, the other has not.
        run.sim.hosts.lost_at = 4
        run.save(1, overwrite=True)
        run.open((0, 1))
        assert run.head.step == 1
        run.save(2)
        run.close()
        run.open((0, 1))
        assert run.head.step == 2


def test_a_component_is_read_from_storage_if_the_nearest_holder_fails():
    with run_on((0, 1), store_every=2) as run:
        run.fail(0)
        run.save(1)
        run.save(1, overwrite=True)
        run.load(1)


def test_a_newer_save_in_ram_counts_more_than_one_of_orbax_alone():
    with run_on((0,), store_every=1000) as run:
        run.close()
        run.sim.clock.secs = time.time() + 1000
        run.open((0,))
        run.save(1)
        run.end()
        with run.sim.files.by_others(), ocp.training.Checkpointer(run.sim.storage) as c:
            c.save_checkpointables(1, {"state": {"w": np.zeros(3)}})
        run.open((0,))
        run.load(1)


def test_a_restore_that_fails_leaves_no_step_open():
    with run_on((0,), copies=0, store_every=1000) as run:
        run.save(1)
        run.wait()
        for number in range(4):
            run.flip(0, number)
        with pytest.raises(errors.HostsFailedError, match="no good copy"):
            run.load(1)
        with pytest.raises(errors.HostsFailedError, match="AssertionError"):
            run.sim.hosts.opened()
        run.sim.bugs.clear()
    with run_on((0,), copies=0, store_every=1000) as run:
        run.save(1)
        run.wait()
        with pytest.raises(errors.CheckpointError, match="of a different model"):
            run.sim.world.load_checkpointables(1, {"state": {"other": np.zeros(3)}})
        with pytest.raises(errors.HostsFailedError, match="AssertionError"):
            run.sim.hosts.opened()
        run.sim.bugs.clear()


def test_the_newest_step_is_known_when_a_load_in_the_background_has_ended():
    with run_on((0,), store_every=1) as run:
        run.save(1)
        run.save(2)
        world, position = run.sim.world, simulated_world.Position()
        run.sim.threads.late = frozenset({"background"})
        wanted = {"state": simulated_world.abstract(), "data": position}
        world.load_checkpointables_async(1, wanted, roll_back=True)
        assert world.latest.step == 1
        assert position.value == 1


def test_a_save_that_a_leased_step_kept_out_of_storage_goes_with_the_next_one():
    with run_on((0,), copies=0, store_every=1) as run:
        run.save(1)
        run.wait()
        (stored,) = run.sure_steps()
        run.lease(stored)
        for _ in range(2):
            run.save(1, overwrite=True)
        run.end()
        run.end_leases()
        run.open((0,))
        run.wait()
        run.check_nothing_is_left()


# Of host 0, of another host, and of a machine that is idle then.
@pytest.mark.parametrize("machine", [0, 1, 2])
def test_an_agent_may_fall_silent_in_each_round_of_a_restore(machine):
    def fall_silent(*_):
        if next(rounds) == silent_at:
            run.sim.network.failing.add(machine)

    silent_at, is_silent = -1, True
    while is_silent:
        silent_at += 1
        with run_on((0, 1, 2), num_machines=3, store_every=1000) as run:
            run.save(1)
            run.save(2)
            run.close()
            rounds, run.sim.on_round = itertools.count(), fall_silent
            run.open((0, 1))
            assert run.head.step == 2
            is_silent = machine in run.sim.network.failing
            run.sim.on_round = lambda *_: None
    assert silent_at > 15


def test_a_step_that_retention_removed_is_not_stored_again():
    with run_on((0,), store_every=1, stored_steps=1) as run:
        run.save(1)
        run.preempt(2, loses_memory=False)
        run.open((0,))
        run.wait()
        like = {"state": simulated_world.abstract(), "data": simulated_world.Position()}
        run.sim.world.load_checkpointables(2, like)
        run.sim.world.wait()
        assert "backed_up" not in [name for name, _ in run.sim.events]


@pytest.mark.slow
def test_a_step_that_was_given_up_is_saved_again_under_another_id():
    given_up = 0
    for number in range(1, 40, 3):
        with run_on((0, 1), store_every=1000) as run:
            run.save(1)
            run.wait()
            run.sim.files.full_at = run.sim.files.count + number
            ids = []
            run.sim.hosts.on_capture = ids.append
            world, seeds = run.sim.world, iter((7, 8))
            while not ids or world.latest.step < 2:
                given_up += len(ids)
                state, position = simulated_world.state_of(next(seeds)), len(ids)
                checkpointables = {
                    "state": state,
                    "data": simulated_world.Position(position),
                }
                with contextlib.suppress(errors.CheckpointError):
                    world.save_checkpointables(2, checkpointables)
                run.sim.files.full_at = None
            assert len(set(ids)) == len(ids)
            run.sim.end()
            run.sim.open((0, 1), store_every=1000)
            found = simulated_world.Position()
            restored = run.sim.world.load_checkpointables(
                2, {"state": simulated_world.abstract(), "data": found}
            )
            assert found.value == position
            for name, leaf in restored["state"].items():
                assert leaf.tobytes() == state[name].tobytes()
    assert given_up


def test_an_idle_machine_is_asked_though_another_one_lost_its_memory():
    with run_on((0, 1, 2), store_every=1) as run:
        run.save(1)
        run.close()
        # Machine 0 comes back with new memory, and its agent at the same address.
        run.evict(0)
        run.open((3, 2, 1))
        run.preempt(2, loses_memory=False)
        run.open((0,))
        run.close()
        run.open((0, 1, 2))
        assert run.head.step == 2


@pytest.mark.parametrize("gone", [0, 1])
def test_the_newest_step_with_copies_stays_until_a_newer_one_has_them(gone):
    with run_on((0, 1), store_every=1000) as run:
        run.save(1)
        run.fail(gone)
        run.save(2)
        run.end()
        run.evict(gone)
        run.open((1 - gone, 2))
        assert run.head.step == 1


def test_a_step_that_waits_for_its_backup_is_stored_as_it_was_saved_last():
    with run_on((0,), store_every=1) as run:
        run.sim.threads.late = frozenset({"back-up"})
        run.save(1)
        # The backup of step 1 is not done: the next one waits, in two saves of it.
        run.save(2)
        run.save(2, overwrite=True)
        run.sim.threads.late = frozenset()
        run.catch_up()
        run.close()
        run.evict(0)
        run.open((0,))
        assert run.head.step == 2


def test_a_save_counts_for_those_who_do_not_see_the_machines_that_have_it():
    with run_on((0,), store_every=1) as run:
        run.save(1)
        run.save(2)
        run.preempt(3, loses_memory=False)
        # Machine 0 is not seen: another step 3 is saved, to the RAM of machine 1.
        run.open((1,))
        assert run.head.step == 2
        run.preempt(3, loses_memory=False)
        run.open((0,))
        assert run.head.step == 2


def test_a_step_whose_copies_a_peer_did_not_take_is_not_said_to_be_replicated():
    with run_on((0, 1, 2), store_every=1000) as run:
        run.save(1)
        run.fail(2)
        run.save(2)
        first, second = run.model.saves.values()
        assert first.is_covered
        assert not second.is_covered
        # The machine is lost: the step before has copies without it.
        run.end()
        run.evict(2)
        run.open((0, 1))


def test_an_evaluation_of_a_saved_step_stays_when_a_world_ends_without_a_save():
    with run_on((0,), store_every=1) as run:
        for step in (1, 2, 3):
            run.save(step)
        run.wait()
        run.close()
        run.open((0,))
        older, newest = run.sure_steps()[1:]
        run.evaluate(older)
        # What it saves from here on is another line.
        run.load(newest.step)
        run.check_evaluations()
        run.save(4)
        run.wait()
        run.check_evaluations()
        run.load(older.step, roll_back=True)
        run.check_evaluations()


def test_a_step_whose_manifests_are_lost_is_not_taken_for_one_of_orbax():
    with run_on((0,), store_every=1) as run:
        for step in (1, 2):
            run.save(step)
        run.wait()
        run.close()
        run.evict(0)
        newest = run.sure_steps()[-1]
        for manifest in (run.sim.storage / "2").glob("manifest-*"):
            manifest.unlink()
        newest.is_spoilt = True
        # Orbax could load it, and nobody would know whether it is what was saved.
        run.open((0,))
        assert run.head.step == 1
        run.save(2)
        run.close()


def test_an_evaluation_of_a_step_that_was_saved_again_does_not_count():
    with run_on((0,), store_every=1) as run:
        for step in (1, 2):
            run.save(step)
        run.wait()
        run.evaluate(run.sure_steps()[-1])
        run.save(2, overwrite=True)
        run.wait()
        run.check_evaluations()
        run.evaluate(run.sure_steps()[-1])
        # What follows has the name of the save that replaced it.
        run.save(3)
        run.wait()
        for save in run.sure_steps():
            run.evaluate(save)


def test_an_idle_machine_is_asked_though_the_host_that_answers_for_it_is_silent():
    with run_on((0, 1, 2, 3)) as run:
        run.save(1)
        run.wait()
        run.close()
        # What the second host of the next world holds is on an idle machine, too.
        run.fail(2)
        run.open((1, 2))
        assert run.head.step == 1


@pytest.mark.parametrize("goes_back", [False, True])
def test_metrics_before_a_step_that_was_saved_again_count_for_their_step(goes_back):
    with run_on((0, 1), store_every=2) as run:
        for step in range(1, 5):
            run.save(step)
        run.save(4, overwrite=True)
        run.wait()
        (second,) = (each for each in run.sure_steps() if each.step == 2)
        run.evaluate(second)
        if goes_back:
            run.load(2, roll_back=True)
            run.save(3)
        else:
            run.save(5)
            run.close()
            run.open((0, 1))
            run.evaluate(second)
        run.wait()
        run.check_evaluations()
