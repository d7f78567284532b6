"""Whatever happens to a run, it loads what its model says, bit by bit."""

import contextlib

import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests import shared_memory
from tests.model.checked_run import CheckedRun

MACHINES = 4
# A world has one host for each of these machines.
WORLDS = st.sampled_from(
    [(0,), (1,), (0, 1), (1, 2), (2, 0), (0, 1, 2), (3, 2, 1), (0, 1, 2, 3)]
)
STAGES = ("commit", "replicate", "back-up", "clean")


class Histories(stateful.RuleBasedStateMachine):
    """Saves, loads and losses in any order."""

    @initialize(
        copies=st.sampled_from([1, 1, 0, 2]),
        store_every=st.sampled_from([1, 2, 3, 1000]),
        stored_steps=st.sampled_from([None, 1, 2]),
        world=WORLDS,
    )
    def begin(self, copies, store_every, stored_steps, world):
        self.resources = contextlib.ExitStack()
        self.run = CheckedRun(
            self.resources.enter_context(shared_memory.directory("model")),
            num_machines=MACHINES,
            copies=copies,
            store_every=store_every,
            stored_steps=stored_steps,
        )
        self.resources.enter_context(self.run)
        self.run.open(world)

    def teardown(self):
        if not hasattr(self, "run"):
            return
        with self.resources:
            # What is sure in the end is there.
            self.run.end()
            self.run.open(range(MACHINES))
            self.run.wait()

    def is_open(self):
        return self.run.is_open

    def is_closed(self):
        return not self.run.is_open

    @precondition(is_closed)
    @rule(world=WORLDS)
    def open(self, world):
        self.run.open(world)

    @precondition(is_open)
    @rule(number=st.sampled_from([1, 1, 2, 3]), waits=st.booleans())
    def save(self, number, waits):
        for _ in range(number):
            if self.run.is_open:
                self.run.save(self.next_step())
        if waits and self.run.is_open:
            self.run.wait()

    def next_step(self):
        return 1 if self.run.head is None else self.run.head.step + 1

    @precondition(lambda self: self.run.is_open and self.run.head is not None)
    @rule()
    def overwrite(self):
        self.run.save(self.run.head.step, overwrite=True)

    @precondition(is_open)
    @rule()
    def wait(self):
        self.run.wait()

    @precondition(is_open)
    @rule()
    def close(self):
        self.run.close()

    @precondition(lambda self: self.run.is_open and self.run.sure_steps())
    @rule(data=st.data(), go_back=st.sampled_from([None, True, False]))
    def load(self, data, go_back):
        save = data.draw(st.sampled_from(self.run.sure_steps()))
        self.run.load(save.step, go_back=go_back)

    @precondition(lambda self: hasattr(self, "run") and self.run.sure_steps())
    @rule(data=st.data())
    def pin(self, data):
        self.run.pin(data.draw(st.sampled_from(self.run.sure_steps())))

    @precondition(lambda self: hasattr(self, "run") and self.run.sure_steps())
    @rule(data=st.data())
    def lease(self, data):
        self.run.lease(data.draw(st.sampled_from(self.run.sure_steps())))

    @rule()
    def end_leases(self):
        self.run.end_leases()

    @precondition(is_open)
    @rule(loses_memory=st.booleans())
    def preempt(self, loses_memory):
        self.run.preempt(self.next_step(), loses_memory=loses_memory)

    @precondition(is_open)
    @rule(late=st.sets(st.sampled_from(STAGES)))
    def let_threads_be_late(self, late):
        self.run.sim.threads.late = frozenset(late)

    @rule(
        number=st.integers(1, 120),
        victims=st.sampled_from(["all", "one"]),
        torn=st.booleans(),
    )
    def crash_soon(self, number, victims, torn):
        files = self.run.sim.files
        files.crash_at = files.count + number
        files.victims, files.torn = victims, torn

    @rule(number=st.integers(1, 120))
    def lack_room_soon(self, number):
        files = self.run.sim.files
        files.full_at = files.count + number

    @precondition(is_open)
    @rule()
    def crash(self):
        self.run.end()

    @precondition(is_open)
    @rule(number=st.integers(1, 40), is_answer=st.booleans())
    def lose_message(self, number, is_answer):
        self.run.sim.hosts.lost_at = number
        self.run.sim.hosts.lost_answer = is_answer

    @precondition(is_closed)
    @rule(machine=st.integers(0, MACHINES - 1))
    def evict(self, machine):
        self.run.evict(machine)

    @rule(machine=st.integers(0, MACHINES - 1), number=st.integers(0, 1000))
    def flip(self, machine, number):
        self.run.flip(machine, number)

    @precondition(is_open)
    @rule(machine=st.integers(0, MACHINES - 1))
    def fail_peer(self, machine):
        self.run.fail(machine)

    @invariant()
    def nothing_is_wrong(self):
        if hasattr(self, "run"):
            assert not self.run.sim.bugs


Histories.TestCase.settings = settings(
    max_examples=1000, stateful_step_count=8, deadline=None
)
TestHistories = Histories.TestCase


@pytest.mark.slow(minutes=12)
def test_ten_thousand_histories():
    stateful.run_state_machine_as_test(
        Histories, settings=settings(TestHistories.settings, max_examples=10_000)
    )
