"""Random histories of a simulated run, which is compared with its model.

python -m tests.model.histories NUMBER
"""

import contextlib
import sys

from hypothesis import HealthCheck, Phase, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests import shared_memory, spoilt_files
from tests.model.checked_run import CheckedRun

MACHINES = 4
# A world has one host for each of these machines.
WORLDS = st.sampled_from(
    [(0,), (1,), (0, 1), (1, 2), (2, 0), (0, 1, 2), (3, 2, 1), (0, 1, 2, 3)]
)
NUMBERS = st.integers(0, 1000)
STAGES = ("commit", "replicate", "back-up", "clean")


LOST = st.sampled_from([(), (), (0,), (1,), (2,), (0, 1)])


class Histories(stateful.RuleBasedStateMachine):
    """Saves, loads and losses in any order."""

    @initialize(
        copies=st.sampled_from([1, 1, 0, 2]),
        store_every=st.sampled_from([1, 1, 2, 1000]),
        stored_steps=st.sampled_from([None, None, 1, 2]),
        claims=st.booleans(),
        world=WORLDS,
        number=st.integers(1, 4),
    )
    def begin(self, copies, store_every, stored_steps, claims, world, number):
        self.resources = contextlib.ExitStack()
        self.run = CheckedRun(
            self.resources.enter_context(shared_memory.directory("model")),
            num_machines=MACHINES,
            copies=copies,
            store_every=store_every,
            stored_steps=stored_steps,
            claims=claims,
        )
        self.claims = claims
        self.resources.enter_context(self.run)
        self.run.open(world)
        for step in range(1, number + 1):
            self.run.save(step)

    def teardown(self):
        if not hasattr(self, "run"):
            return
        with self.resources:
            # What is sure in the end is there. Nothing replaces a step that is leased.
            self.run.end()
            self.run.end_leases()
            self.run.open(range(MACHINES))
            self.run.wait()
            self.run.check_nothing_is_left()

    def is_open(self):
        return self.run.is_open

    def next_step(self):
        return 1 if self.run.head is None else self.run.head.step + 1

    @precondition(is_open)
    @rule(number=st.sampled_from([1, 1, 2, 3]), waits=st.booleans())
    def save(self, number, waits):
        for _ in range(number):
            if self.run.is_open:
                self.run.save(self.next_step())
        if waits and self.run.is_open:
            self.run.wait()

    @precondition(lambda self: self.run.is_open and self.run.head is not None)
    @rule()
    def overwrite(self):
        self.run.save(self.run.head.step, overwrite=True)

    def sure_steps(self):
        # What was begun may remove some of them.
        if self.run.is_open:
            self.run.wait()
        return self.run.sure_steps()

    @precondition(lambda self: self.run.is_open and self.run.sure_steps())
    @rule(data=st.data(), roll_back=st.booleans())
    def load(self, data, roll_back):
        sure = self.sure_steps()
        if sure and self.run.is_open:
            save = data.draw(st.sampled_from(sure))
            self.run.load(save.step, roll_back=roll_back)

    @precondition(lambda self: self.run.is_open and self.run.sure_steps()[1:])
    @rule(data=st.data())
    def roll_back(self, data):
        older = self.sure_steps()[:-1]
        if older and self.run.is_open:
            self.run.load(data.draw(st.sampled_from(older)).step, roll_back=True)
        if self.run.is_open:
            self.run.save(self.next_step())

    @precondition(lambda self: self.run.sure_steps())
    @rule(data=st.data(), is_pinned=st.booleans())
    def keep(self, data, is_pinned):
        sure = self.sure_steps()
        if not sure:
            return
        save = data.draw(st.sampled_from(sure))
        if is_pinned:
            self.run.pin(save)
        else:
            self.run.lease(save)

    @rule()
    def end_leases(self):
        self.run.end_leases()

    @rule()
    def follow(self):
        self.run.follow()

    @precondition(lambda self: self.run.is_open and self.run.sure_steps())
    @rule(data=st.data())
    def evaluate(self, data):
        sure = self.sure_steps()
        if sure and self.run.is_open:
            self.run.evaluate(data.draw(st.sampled_from(sure)))

    @precondition(lambda self: self.run.is_open and self.claims)
    @rule(world=WORLDS)
    def replace(self, world):
        others = [n for n in world if n not in self.run.machines]
        if others:
            self.run.be_replaced(others, self.next_step())

    @precondition(is_open)
    @rule(loses_memory=st.booleans(), world=WORLDS)
    def preempt(self, loses_memory, world):
        self.run.preempt(self.next_step(), loses_memory=loses_memory)
        self.run.open(world)

    @rule(crashes=st.booleans(), lost=LOST, world=WORLDS)
    def resize(self, crashes, lost, world):
        if self.run.is_open and not crashes:
            self.run.close()
        self.run.end()
        for machine in lost:
            self.run.evict(machine)
        self.run.open(world)

    @rule(
        number=st.integers(1, 120),
        victims=st.sampled_from(["all", "one", "room"]),
        torn=st.booleans(),
    )
    def crash_soon(self, number, victims, torn):
        files = self.run.sim.files
        if victims == "room":
            # Nobody crashes, but a file has no room.
            files.full_at = files.count + number
            return
        files.crash_at = files.count + number
        files.victims, files.torn = victims, torn

    @precondition(is_open)
    @rule(number=st.integers(1, 40), is_answer=st.booleans())
    def lose_message(self, number, is_answer):
        self.run.sim.hosts.lost_at = number
        self.run.sim.hosts.lost_answer = is_answer

    @precondition(is_open)
    @rule(late=st.sets(st.sampled_from(STAGES)))
    def let_threads_be_late(self, late):
        self.run.sim.threads.late = frozenset(late)

    @precondition(is_open)
    @rule(
        machine=st.integers(0, MACHINES - 1),
        how=st.sampled_from(["fails", *spoilt_files.KINDS]),
        number=NUMBERS,
    )
    def spoil(self, machine, how, number):
        if how == "fails":
            self.run.fail(machine)
        else:
            self.run.spoil(machine, number, how)

    @rule(kind=st.sampled_from(spoilt_files.KINDS), number=NUMBERS)
    def spoil_stored(self, kind, number):
        self.run.spoil_stored(number, kind)

    @invariant()
    def nothing_is_wrong(self):
        if hasattr(self, "run"):
            assert not self.run.sim.bugs


# Those of one seed are the same in each new process.
SETTINGS = settings(
    stateful_step_count=8,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def run(num_histories, **more):
    """Runs some histories; raises the error of one that goes wrong, with its acts."""
    chosen = settings(SETTINGS, max_examples=num_histories, **more)
    stateful.run_state_machine_as_test(Histories, settings=chosen)


if __name__ == "__main__":
    run(int(sys.argv[1]))
