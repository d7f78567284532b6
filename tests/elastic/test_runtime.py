"""The loop of an elastic run, over a cluster whose slices come and go by a script."""

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import decision, runtime
from elastic_ckpt.elastic.failures import WorldLostError, silent_death
from tests.recorded_events import RecordedEvents

SETTLED = 1e6
RATES = {"tokens": 9, "learning_rate": 0.1}
BYTES = ("local_bytes", "close_bytes", "distant_bytes", "persistent_bytes")
RESTORED = dict.fromkeys((*BYTES, "bad_copies", "repaired"), 0)


class ScriptedCluster:
    """Worlds end as listed: with the slices that are lost, or with a change."""

    devices_per_slice = 2

    def __init__(self, present, *worlds):
        self.present = dict.fromkeys(range(present), SETTLED)
        self.worlds = list(worlds)
        self.ran, self.waited, self.failures = [], [], []
        self.lost = set()
        self.events = RecordedEvents()

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


def ends(_):
    return True


def loses(*numbers, steps=(), back_secs=None, signal=9):
    """A world that loses hosts, and maybe slices, which may be back at once."""

    def world(cluster):
        for step in steps:
            cluster.emit("step", step=step, steps=9, loss=1.0, secs=0.1, **RATES)
        for number in numbers:
            cluster.lost.add(number)
            cluster.failures.append(decision.Failure(slice=number, at_secs=0.0))
            del cluster.present[number]
            if back_secs is not None:
                cluster.present[number] = back_secs
        raise WorldLostError([silent_death(0, -signal)], num_hosts=9, gone=numbers)

    return world


def grows(cluster):
    cluster.present[1] = 0.0
    assert not cluster.has_changed(), "it has to settle"
    cluster.present[1] = SETTLED
    assert cluster.has_changed()
    return False


def preempted(cluster):
    """A slice is to end, and the world is left, if it is decided so."""
    del cluster.present[1]
    return not cluster.has_changed()


def run(cluster, present_policy=None, **policy):
    work = {"num_slices": 4, "rows": 24, "devices_per_slice": 2}
    runtime.run(
        lambda _: None,
        cluster=cluster,
        policy=present_policy or decision.Policy(**policy),
        work=decision.Work(**work, max_rows_per_device=3),
        emit=cluster.events,
    )


ALL, LEFT = (0, 1, 2, 3), (0, 2, 3)
BACK_AT_ONCE = loses(1, back_secs=0.0)
LATER = [range(4900, 5001), *(range(n, n + 200) for n in range(4001, 5001, 200))]


def loses_one_after(*steps):
    return loses(1, steps=steps, back_secs=SETTLED)


@pytest.mark.parametrize(
    ("present", "worlds", "policy", "ran"),
    [
        (4, [ends], {}, [ALL]),
        # A slice is lost, returns and settles.
        (4, [loses(1), grows, ends], {"min_slices": 2}, [ALL, LEFT, ALL]),
        # One is back at once, but has to settle.
        (4, [BACK_AT_ONCE, ends], {"min_slices": 2}, [ALL, LEFT]),
        # A spare is there at once.
        (4, [BACK_AT_ONCE, ends], {"max_slices": 3}, [(0, 1, 2), (0, 2, 3)]),
        # New steps give new retries.
        (
            *(4, [*(loses(n, steps=[n or 1]) for n in range(3)), ends]),
            *({"max_retries": 2}, [ALL, (1, 2, 3), (2, 3), (3,)]),
        ),
        # One that is lost repeatedly is not used again.
        (
            *(3, [loses_one_after(1), loses_one_after(2), ends]),
            {"min_slices": 2, "quarantine_failures": 2},
            [(0, 1, 2), (0, 1, 2), (0, 2)],
        ),
        # The slice with the newest steps is lost, and its memory; each world begins
        # later than the one before.
        (
            *(1, [*(loses(steps=steps) for steps in LATER), ends]),
            *({"max_retries": 2}, [(0,)] * 7),
        ),
        # Without retries, slices that are preempted are not left.
        (2, [preempted], {"min_slices": 2, "max_retries": 0}, [(0, 1)]),
        # A crash is not that of the program if a world was past it.
        (
            *(2, [*(loses(steps=each, signal=11) for each in ((), (1, 2), ())), ends]),
            *({}, [(0, 1)] * 4),
        ),
    ],
)
def test_worlds_have_the_slices_that_are_decided_on(present, worlds, policy, ran):
    cluster = ScriptedCluster(present, *worlds)
    run(cluster, **policy)
    events = cluster.events
    assert cluster.ran == [*enumerate(ran, start=1)]
    started = events.named("world_started")
    assert [each["world"] for each in started] == [number for number, _ in cluster.ran]
    spares = [[3], []] if "max_slices" in policy else [[]] * len(ran)
    assert [each["spares"] for each in started] == spares
    quarantined = {"slice": 1, "why": "it has failed 2 times in this run"}
    is_quarantined = "quarantine_failures" in policy
    assert events.named("slice_quarantined") == [quarantined] * is_quarantined
    assert not events.named("waiting_for_slices")
    assert not cluster.waited


def raises(_):
    raise errors.RunError("ZeroDivisionError")


BRIEF = {"min_slices": 2, "wait_secs": 0.01}


@pytest.mark.parametrize(
    ("present", "worlds", "policy", "count", "message"),
    [
        (1, [], {"min_slices": 2, "wait_secs": 0}, 0, "min_slices=2; bring"),
        (
            *(2, [loses(0)], BRIEF, 1),
            r"after a wait of 0 s, slices \[1\] are usable, but min_slices=2; bring",
        ),
        # Slices that are preempted are left, even if the others have to wait.
        (2, [preempted], BRIEF, 1, r"a wait of 0 s, .* min_slices=2; bring"),
        (
            *(2, [loses_one_after()]),
            *({"min_slices": 2, "quarantine_failures": 1, "wait_secs": 0}, 1),
            r"slices \[1\] are quarantined after repeated failures; bring slices back",
        ),
        (
            *(4, [loses(0), loses(1), loses(2), ends], {"max_retries": 2}, 3),
            "3 worlds in a row were lost without a new step, .* First loss: host 0",
        ),
        # Worlds fail before a save.
        (
            1,
            [loses(steps=range(11, 14))] * 4,
            {"max_retries": 2},
            3,
            "3 worlds in a row",
        ),
        (4, [loses(3)], {"max_retries": 0}, 1, "^host 0 failed: killed by SIGKILL"),
        (4, [raises, ends], {"max_retries": 5}, 1, "ZeroDivision"),
    ],
)
def test_a_run_ends_and_says_why(present, worlds, policy, count, message):
    cluster = ScriptedCluster(present, *worlds)
    with pytest.raises(errors.RunError, match=message):
        run(cluster, **policy)
    assert len(cluster.ran) == count
    assert bool(cluster.waited) == (policy is BRIEF)
    assert len(cluster.events.named("waiting_for_slices")) == (policy is BRIEF)
    # It is judged, even before its first world.
    *_, judged = cluster.events.named("verdict")
    assert judged["world"] == count
    if not count:
        assert (judged["kind"], judged["step"]) == ("cannot_continue", 0)


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

    cluster = ScriptedCluster(2, shrinks, grows_back)
    run(cluster)
    (recovered,) = cluster.events.named("recovered")
    assert (recovered["world"], recovered["steps_lost"]) == (2, 2)
    (finished,) = cluster.events.named("run_finished")
    assert finished["secs"] >= recovered["secs"] > 0
    names = [name for name, _ in cluster.events.events]
    assert names[names.index("recovered") - 1] == "step_done"


def test_another_policy_changes_the_slices_and_is_reported_once():
    policies = [decision.Policy()]

    def requests(cluster):
        policies.append(decision.Policy(max_slices=2))
        assert cluster.has_changed().slices == (0, 1)
        return False

    cluster = ScriptedCluster(4, requests, ends)
    run(cluster, present_policy=lambda: policies[-1])
    assert [slices for _, slices in cluster.ran] == [ALL, (0, 1)]
    requested = cluster.events.named("scale_requested")
    assert requested == [{"slices": 2, "chosen": [0, 1]}]
