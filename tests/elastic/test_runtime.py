"""The loop of an elastic run, over a cluster whose slices come and go by a script."""

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import decision, runtime
from elastic_ckpt.elastic.failures import WorldLostError, silent_death

SETTLED = 1e6
RATES = {"tokens": 9, "learning_rate": 0.1}
RESTORED = dict.fromkeys(
    (
        *("local_bytes", "close_bytes", "distant_bytes", "persistent_bytes"),
        *("bad_copies", "repaired"),
    ),
    0,
)


class ScriptedCluster:
    """Worlds end as listed: with the slices that are lost, or with a change."""

    devices_per_slice = 2

    def __init__(self, present, worlds):
        self.present = dict.fromkeys(present, SETTLED)
        self.worlds = list(worlds)
        self.ran = []
        self.lost = set()
        self.failures = []
        self.waited = []

    def slices(self, current):
        return decision.Slices(
            current=current - self.lost,
            alive_secs=dict(self.present),
            failures=tuple(self.failures),
        )

    def run_world(self, train, assignment, *, emit, has_changed):
        del train
        self.emit, self.has_changed = emit, has_changed
        self.ran.append((assignment.number, assignment.work.slices))
        self.lost -= set(assignment.work.slices)
        assert not has_changed()
        return self.worlds.pop(0)(self)

    def wait(self, secs):
        self.waited.append(secs)

    def close(self):
        pass


def ends(cluster):
    del cluster
    return True


def loses(*numbers, returned_secs=None, step=None):
    def world(cluster):
        if step is not None:
            cluster.emit("step", step=step, steps=9, loss=1.0, secs=0.1, **RATES)
        for number in numbers:
            cluster.lost.add(number)
            cluster.failures.append(decision.Failure(slice=number, at_secs=0.0))
            del cluster.present[number]
            if returned_secs is not None:
                cluster.present[number] = returned_secs
        raise WorldLostError([silent_death(0, -9)], num_hosts=9, gone=numbers)

    return world


def grows(number):
    def world(cluster):
        cluster.present[number] = 0.0
        assert not cluster.has_changed(), "it has to settle"
        cluster.present[number] = SETTLED
        assert cluster.has_changed()
        return False

    return world


def run(cluster, events=None, present_policy=None, **policy):
    def emit(name, **fields):
        if events is not None:
            events.append((name, fields))

    runtime.run(
        lambda _: None,
        cluster=cluster,
        policy=present_policy or decision.Policy(**policy),
        work=decision.Work(
            num_slices=4, rows=24, devices_per_slice=2, max_rows_per_device=3
        ),
        emit=emit,
    )


def named(events, name):
    return [fields for each, fields in events if each == name]


BACK = {"returned_secs": SETTLED}
ALL, LEFT = (0, 1, 2, 3), (0, 2, 3)
# The slices there are, what happens in each world, the policy, and the slices of each.
RUNS = {
    "ends": (4, [ends], {}, [ALL]),
    "loses a slice, which returns and settles": (
        *(4, [loses(1), grows(1), ends], {"min_slices": 2}),
        [ALL, LEFT, ALL],
    ),
    "loses one that is back at once, and has to settle": (
        *(4, [loses(1, returned_secs=0.0), ends], {"min_slices": 2}),
        [ALL, LEFT],
    ),
    "takes one that is back at once where there are too few": (
        *(2, [loses(1, returned_secs=0.0), ends], {"min_slices": 2}),
        [(0, 1), (0, 1)],
    ),
    "has new retries after new steps": (
        *(
            4,
            [loses(0, step=1), loses(1, step=1), loses(2, step=2), ends],
        ),
        {"max_retries": 2},
        [ALL, (1, 2, 3), (2, 3), (3,)],
    ),
    "quarantines one that is lost repeatedly": (
        *(3, [loses(1, step=1, **BACK), loses(1, step=2, **BACK), ends]),
        {"min_slices": 2, "quarantine_failures": 2},
        [(0, 1, 2), (0, 1, 2), (0, 2)],
    ),
    "replaces one by a spare": (
        *(4, [loses(1, returned_secs=0.0), ends], {"max_slices": 3}),
        [(0, 1, 2), (0, 2, 3)],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_worlds_have_the_slices_that_are_decided_on(name):
    present, worlds, policy, ran = RUNS[name]
    cluster = ScriptedCluster(range(present), worlds)
    events = []
    run(cluster, events, **policy)
    assert cluster.ran == [*enumerate(ran, start=1)]
    started = named(events, "world_started")
    assert [each["world"] for each in started] == [number for number, _ in cluster.ran]
    spares = [each["spares"] for each in started]
    assert spares == ([[3], []] if "max_slices" in policy else [[]] * len(ran))
    quarantined = {"slice": 1, "why": "it has failed 2 times in this run"}
    assert named(events, "slice_quarantined") == (
        [quarantined] if "quarantine_failures" in policy else []
    )
    assert not named(events, "waiting_for_slices")
    # A spare is there at once.
    assert "max_slices" not in policy or not cluster.waited


def trains(first, until):
    """A world that trains some steps, and loses hosts, but no slice."""

    def world(cluster):
        for step in range(first, until):
            cluster.emit("step_done", step=step)
        raise WorldLostError([silent_death(0, -9)], num_hosts=9)

    return world


def raises(cluster):
    del cluster
    raise errors.RunError("ZeroDivisionError")


# The slices there are, what happens in each world, the policy, how many worlds run, and
# the error.
QUARANTINE = {"min_slices": 2, "quarantine_failures": 1, "wait_secs": 0}
ENDS = {
    "no slice comes": (
        *(2, [loses(0)], {"min_slices": 2, "wait_secs": 0.02}, 1),
        r"after a wait of 0 s, slices \[1\] are usable, but min_slices=2; bring",
    ),
    "slices are quarantined": (
        *(2, [loses(1, **BACK)], QUARANTINE, 1),
        r"slices \[1\] are quarantined after repeated failures; bring slices back",
    ),
    "worlds are lost without a new step": (
        *(4, [loses(0), loses(1), loses(2), ends], {"max_retries": 2}, 3),
        "3 worlds in a row were lost without a new step, .* First loss: host 0",
    ),
    "worlds fail before a save": (
        *(1, [trains(11, 14)] * 4, {"max_retries": 2}, 3),
        "3 worlds in a row",
    ),
    "there are no retries": (
        *(4, [loses(3)], {"max_retries": 0}, 1),
        "^host 0 failed: killed by SIGKILL",
    ),
    "the training fails": (4, [raises, ends], {"max_retries": 5}, 1, "ZeroDivision"),
}


@pytest.mark.parametrize("why", ENDS)
def test_a_run_ends_if(why):
    present, worlds, policy, count, message = ENDS[why]
    cluster, events = ScriptedCluster(range(present), worlds), []
    with pytest.raises(errors.RunError, match=message):
        run(cluster, events, **policy)
    assert len(cluster.ran) == count
    is_told = why == "no slice comes"
    assert bool(cluster.waited) == is_told
    assert len(named(events, "waiting_for_slices")) == is_told


def test_a_run_with_too_few_slices_has_a_verdict_before_its_first_world():
    events = []
    with pytest.raises(errors.RunError, match="min_slices=2"):
        run(ScriptedCluster(range(1), []), events, min_slices=2, wait_secs=0)
    (judged,) = named(events, "verdict")
    assert judged["kind"] == "cannot_continue"
    assert (judged["world"], judged["step"]) == (0, 0)


def test_a_run_goes_on_while_each_world_begins_later_than_the_lost_one_did():
    # The slice with the newest steps is lost, and its memory.
    again = [trains(first, first + 200) for first in range(4001, 5001, 200)]
    cluster = ScriptedCluster(range(1), [trains(4900, 5001), *again, ends])
    run(cluster, max_retries=2)
    assert len(cluster.ran) == 7


def crashes(*steps):
    """A world in which a host crashes after some steps."""

    def world(cluster):
        for step in steps:
            cluster.emit("step_done", step=step)
        raise WorldLostError([silent_death(0, -11)], num_hosts=9)

    return world


def test_a_crash_is_that_of_the_program_only_if_no_world_was_past_it():
    cluster = ScriptedCluster(range(2), [crashes(), crashes(1, 2), crashes(), ends])
    run(cluster)
    assert len(cluster.ran) == 4
    with pytest.raises(errors.RunError, match="fails at the same step"):
        run(ScriptedCluster(range(2), [crashes(1), crashes(1), ends]))


def test_what_a_change_of_slices_took_is_told_after_the_first_step():
    def shrinks(cluster):
        for step in (11, 12):
            cluster.emit("step_done", step=step)
        cluster.emit("world_leaving", slices=[0])
        return False

    def grows_back(cluster):
        cluster.emit("restored_from", **RESTORED, step=10)
        cluster.emit("step_done", step=11)
        cluster.emit("run_finished", step=11, secs=0.0)
        return True

    events = []
    run(ScriptedCluster(range(2), [shrinks, grows_back]), events)
    (recovered,) = named(events, "recovered")
    assert (recovered["world"], recovered["steps_lost"]) == (2, 2)
    (finished,) = named(events, "run_finished")
    assert finished["secs"] >= recovered["secs"] > 0
    names = [name for name, _ in events]
    assert names[names.index("recovered") - 1] == "step_done"


def requests(scaled):
    """A world in which another number of slices is requested."""

    def world(cluster):
        scaled.append(decision.Policy(max_slices=2))
        assert cluster.has_changed().slices == (0, 1)
        return False

    return world


def test_another_policy_changes_the_slices_and_is_reported_once():
    policies = [decision.Policy()]
    cluster = ScriptedCluster(range(4), [requests(policies), ends])
    events = []
    run(cluster, events, present_policy=lambda: policies[-1])
    assert [slices for _, slices in cluster.ran] == [(0, 1, 2, 3), (0, 1)]
    assert named(events, "scale_requested") == [{"slices": 2, "chosen": [0, 1]}]


def preempts(number):
    def world(cluster):
        del cluster.present[number]
        cluster.decided = cluster.has_changed()
        return not cluster.decided

    return world


def test_slices_that_are_preempted_are_left_even_if_the_others_have_to_wait():
    cluster = ScriptedCluster(range(2), [preempts(1)])
    with pytest.raises(errors.RunError, match=r"a wait of 0 s, .* min_slices=2"):
        run(cluster, min_slices=2, wait_secs=0.01)
    assert isinstance(cluster.decided, decision.Wait)


def test_without_retries_a_run_ends_when_a_slice_is_preempted():
    cluster = ScriptedCluster(range(2), [preempts(1)])
    run(cluster, min_slices=2, max_retries=0)
    assert cluster.decided is None
