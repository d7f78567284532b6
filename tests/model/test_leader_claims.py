"""Who leads: claims of several machines in virtual time, over every crash and stall."""

import contextlib
import dataclasses
import itertools
import pathlib
from concurrent import futures

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastic_ckpt.core import process, storage
from elastic_ckpt.elastic import leader_claim
from tests import seams, shared_memory
from tests.model import simulated_world

SECS = 10.0
MACHINES = range(3)
numbers = st.sampled_from(MACHINES)


class NoThreads:
    """Renewals are made by the test."""

    pool = wait = None

    def in_thread(self, call, *, name):
        del call
        assert name == "renewals"
        return futures.Future()


@contextlib.contextmanager
def simulated():
    virtual = simulated_world.VirtualClock()
    with seams.by(virtual), seams.made_by(NoThreads()):
        yield virtual


def machine(directory, number):
    # On another machine than all others, which cannot tell whether it is alive.
    far = dataclasses.replace(process.this(), host=f"m{number}", boot_id=f"b{number}")
    return leader_claim.LeaderClaims(
        directory, machine=number, lost_secs=SECS, owner=far
    )


def take(claims):
    """Looks, and takes the claim if it is free."""
    return is_free(claims) and claims.take("a:1", "key", renewed_to=lambda _: None)


def is_free(claims):
    leader = claims.look()
    return leader is None or bool(leader.lost)


class Claims(RuleBasedStateMachine):
    """Machines look, take, renew, give back, stand still and start anew."""

    def __init__(self):
        super().__init__()
        self.resources = contextlib.ExitStack()
        self.clock = self.resources.enter_context(simulated())
        self.directory = self.resources.enter_context(shared_memory.directory("claims"))
        self.starts = itertools.count(len(MACHINES))
        self.machines = [machine(self.directory, number) for number in MACHINES]
        # The only one that holds it, or held it; the end of its last renewal; and
        # whether it has given it back.
        self.holder, self.renewed_secs, self.is_back = None, 0.0, True
        # What each has seen, and the newest number.
        self.free = dict.fromkeys(MACHINES, False)
        self.term = 0

    def teardown(self):
        self.resources.close()

    @rule(secs=st.sampled_from([0.5, 2.5, SECS, 3 * SECS]))
    def passes(self, secs):
        self.clock.sleep(secs)

    @rule(number=numbers)
    def looks(self, number):
        claims = self.machines[number]
        if claims.has_lead:
            return
        self.free[number] = is_free(claims)
        if self.free[number] and not self.is_back:
            # Never before the claim has lapsed.
            assert self.clock.secs - self.renewed_secs >= SECS

    @rule(number=numbers)
    def takes(self, number):
        claims = self.machines[number]
        if claims.has_lead or not self.free[number]:
            return
        self.free[number] = False
        if claims.take(f"m{number}:1", "key", renewed_to=lambda _: None):
            self.taken(number)

    @rule(number=numbers)
    def renews(self, number):
        held = self.machines[number]._held
        if held is None or not self.machines[number].has_lead:
            return
        held.renew()
        assert held.is_lost == (number != self.holder)
        if number == self.holder:
            self.renewed_secs = self.clock.secs

    @rule(number=numbers)
    def gives_back(self, number):
        is_holder = self.machines[number].check()
        self.machines[number].release()
        self.is_back |= is_holder

    @rule(number=numbers)
    def starts_anew(self, number):
        # Another process of the machine, which nothing shows to be related.
        self.machines[number] = machine(self.directory, next(self.starts))
        self.free[number] = False

    @precondition(lambda self: self.is_back)
    @rule(number=numbers)
    def a_claim_that_was_given_back_is_taken_at_once(self, number):
        if not self.machines[number].has_lead:
            assert take(self.machines[number])
            self.taken(number)

    def taken(self, number):
        self.holder, self.renewed_secs = number, self.clock.secs
        self.is_back = False

    @invariant()
    def one_holds_it(self):
        holding = [n for n in MACHINES if self.machines[n].check()]
        assert holding in ([], [self.holder])

    @invariant()
    def numbers_grow(self):
        files = pathlib.Path(self.directory, leader_claim.DIRECTORY).glob("*.json")
        term = max((int(each.stem) for each in files), default=0)
        assert term >= self.term
        self.term = term


TestClaims = Claims.TestCase


def lapse(claims, virtual):
    claims.look()
    virtual.sleep(SECS + 1)


def changes(act):
    """How many changes of files an act makes."""
    made = []
    with seams.watched(lambda *change: made.append(change)):
        act()
    return len(made)


@pytest.mark.parametrize("act", ["renew", "release"])
def test_a_leader_that_stands_still_within_a_change_of_its_claim_has_lost_it(
    tmp_path, act
):
    with simulated() as virtual:

        def stalled(directory, at):
            first, second, third = (machine(directory, n) for n in MACHINES)
            assert take(first)
            count = 0

            def watch(*_):
                nonlocal count
                count += 1
                if count == at:
                    lapse(second, virtual)
                    assert take(second)

            with seams.watched(watch):
                (first._held.renew if act == "renew" else first.release)()
            if at is None:
                return count
            # It goes on, and what it has written changes nothing.
            if act == "renew":
                assert not first.check()
            assert second.check()
            assert third.look().machine == 1
            second.release()
            assert take(third)
            assert not first.check()
            assert third.check()
            return count

        number = stalled(tmp_path / "whole", None)
        assert number >= 3
        for at in range(1, number + 1):
            stalled(tmp_path / str(at), at)


def test_a_crash_within_any_change_of_a_claim_leaves_one_that_can_be_taken(tmp_path):
    def turn(first, virtual):
        assert take(first)
        first._held.renew()
        first.release()
        virtual.sleep(1)
        assert take(first)

    with simulated() as virtual:
        count = changes(lambda: turn(machine(tmp_path / "whole", 0), virtual))
        for at in range(1, count + 1):
            directory = tmp_path / str(at)
            first, second, third = (machine(directory, n) for n in MACHINES)
            left = iter(range(at - 1))

            def crash(*_, left=left):
                if next(left, None) is None:
                    raise simulated_world.Crash

            with contextlib.suppress(simulated_world.Crash), seams.watched(crash):
                turn(first, virtual)
            lapse(second, virtual)
            assert take(second)
            assert third.look().machine == 1


def test_a_process_that_has_ended_is_not_waited_for(tmp_path):
    with simulated():
        first, second = machine(tmp_path, 0), machine(tmp_path, 1)
        assert take(first)
        assert not second.look().lost
        assert second.take("a:1", "key", renewed_to=lambda _: None)
        # The next one is another process.
        assert not take(first)
        # Its key is for its owner alone.
        for path in (tmp_path / leader_claim.DIRECTORY).iterdir():
            assert path.stat().st_mode & 0o077 == 0


def test_a_request_that_was_carried_out_though_it_failed_is_no_leader(
    tmp_path, monkeypatch
):
    # The answer of an object store was lost.
    with simulated():
        first, second = machine(tmp_path, 0), machine(tmp_path, 1)

        create = storage.create

        def fail(*each, **more):
            assert create(*each, **more)
            raise OSError

        assert take(first)
        first.release()
        first.look()
        with monkeypatch.context() as patch:
            patch.setattr(storage, "create", fail)
            with pytest.raises(OSError):  # noqa: PT011
                first.take("a:1", "key", renewed_to=lambda _: None)
        assert first.look() is None
        assert second.look().machine == 0
        assert take(first)
        assert second.look().term == 3
