"""Hosts that hang or are slow are found by their heartbeats and phases."""

import collections

import pytest

from elastic_ckpt.elastic import watch

LIMITS = watch.Limits(most_secs=600.0, heartbeat_secs=20.0)
ALL = (0, 1, 2)


class World:
    """Hosts whose clocks, heartbeats and phases the test moves."""

    def __init__(self, limits=LIMITS, hosts=3):
        self.secs = 1000.0
        self.watch = watch.Watch(limits, hosts, now_secs=self.secs)
        self.begun = collections.Counter()
        self.whys = []

    def after(self, *acts):
        for act in acts:
            act(self)
        return self.watch.hang()

    def slow_after(self, secs, *loads):
        """The hosts that become slow, if each second of theirs has these parts."""
        named = []
        for _ in range(secs):
            passes(1, ())(self)
            for host, load in enumerate(loads):
                self.watch.heartbeat(host, self.begun[host], load)
            named += self.watch.newly_slow()
        self.whys = [why for *_, why in named]
        return [(host, phase) for host, phase, _ in named]


def passes(secs, hosts=ALL):
    """Time passes; these hosts send a heartbeat at its end."""

    def act(world):
        until_secs = world.secs + secs
        while world.secs < until_secs:
            world.secs = min(world.secs + 1, until_secs)
            world.watch.look(now_secs=world.secs)
        for host in hosts:
            world.watch.heartbeat(host, world.begun[host], {})

    return act


def stands_still(world):
    """The watching process is paused, or the hosts wait for their world to begin."""
    world.secs += 900
    world.watch.look(now_secs=world.secs)


def begins(phase, hosts=ALL):
    def act(world):
        for host in hosts:
            world.begun[host] += 1
            world.watch.begin(host, phase, world.begun[host])

    return act


reaches, joins = begins(watch.REACH), begins(watch.JOIN, (0, 1))
host_0_reaches, host_0_joins = begins(watch.REACH, (0,)), begins(watch.JOIN, (0,))
others_reach, all_join = begins(watch.REACH, (1, 2)), begins(watch.JOIN)
step, compiles, others_step = begins("step"), begins("compile"), begins("step", (0, 2))
a_second, bound_is_over = passes(1), [passes(599), passes(2)]
left_by_one = [a_second, begins("evaluate", (0,)), passes(598), passes(3)]
nobody = set()


@pytest.mark.parametrize(
    ("acts", "hosts", "why"),
    [
        # No heartbeat, in any phase.
        ([a_second, *[passes(1, (0, 2))] * 21], {1}, "for 21 s, in ['start']"),
        # None yet, so it has the time of its phase.
        ([passes(1, (0, 2))] * 601, nobody, "phase 'start' for 601 s"),
        ([compiles, passes(600), a_second], nobody, "phase 'compile' for 601 s"),
        # One is behind the others.
        ([step, a_second, others_step, *bound_is_over], {1}, "'step'"),
        # One does not reach host 0, and nobody does.
        ([reaches, joins, passes(30), a_second], {2}, "phase 'reach' for 31 s"),
        ([reaches, host_0_joins, passes(30), a_second], {0}, "'join'"),
        ([reaches, all_join, passes(600), a_second], nobody, "'join'"),
        # Time counts from when host 0 listens.
        (
            [others_reach, passes(100), host_0_reaches, joins, passes(30), a_second],
            {2},
            "'reach'",
        ),
        # Time in which nobody looks does not count, and no heartbeats are missed in it.
        ([reaches, joins, stands_still, passes(29), a_second], {2}, "'reach'"),
        ([step, a_second, stands_still, *[passes(1, (0, 2))] * 20], {1}, "for 21 s"),
        # One has not started, for which the others wait.
        ([begins(watch.REACH, (0, 1)), joins, passes(600), a_second], {2}, "'start'"),
        ([others_reach, passes(600), a_second], {0}, "'start'"),
        # Some are in a phase that another one has left: its slice may have lost its
        # memory, its machine may be new, it had the program.
        *(
            ([begins(phase), *left_by_one], {1, 2}, f"phase '{phase}' for 602 s")
            for phase in ("start", "prepare", "restore", "compile", "step")
        ),
        # Those in a step have the time of the one that compiles.
        (
            [step, begins("compile", (1,)), others_step, *bound_is_over],
            nobody,
            "'step'",
        ),
        # A program is not judged by another one.
        (
            [compiles, a_second, step, a_second, compiles, *bound_is_over],
            nobody,
            "'compile'",
        ),
    ],
)
def test_hang_is_found_when_its_time_is_over_and_not_before(acts, hosts, why):
    world = World()
    assert world.after(*acts[:-1]) is None
    hang = world.after(acts[-1])
    assert hang.hosts == hosts
    assert why in hang.why


@pytest.mark.parametrize(
    ("phase", "longest_secs", "most_secs"),
    [("step", 0.1, 60), ("step", 12, 120), ("step", 100, 600), ("train", 1, 600)],
)
def test_a_known_phase_may_take_ten_times_its_longest(phase, longest_secs, most_secs):
    world = World()
    world.after(begins(phase))
    for _ in range(3):
        world.after(passes(longest_secs))
        # Heartbeats tell that the same phase has begun once more.
        world.begun.update(ALL)
        world.after(passes(0))
    assert world.after(passes(most_secs - 0.5)) is None
    assert f"phase '{phase}'" in world.after(a_second).why


def test_a_host_reaches_host_0_as_slowly_as_a_heartbeat_may_take():
    world = World(watch.Limits(most_secs=600.0, heartbeat_secs=90.0))
    assert world.after(reaches, joins, passes(90)) is None
    assert world.after(a_second).why == "hangs in phase 'reach' for 91 s"


def test_uploads_at_the_end_may_take_any_time_and_hosts_that_ended_count_no_more():
    world = World()
    assert world.after(begins(watch.CLOSE), passes(10_000)) is None
    world.after(step)
    for host in ALL:
        world.watch.end(host)
    assert world.after(passes(1000, ())) is None


QUICK = {"late": 0.02, "data": 0.05}
STARVED = {"late": 0.7, "data": 0.05}
WAITING = {"late": 0.02, "data": 0.8}


@pytest.mark.parametrize(
    ("secs", "loads", "named"),
    [
        (30, [QUICK, STARVED, QUICK], [(1, "step")]),
        (30, [WAITING, QUICK], [(0, "data")]),
        # Named once.
        (300, [QUICK, STARVED, QUICK], [(1, "step")]),
        # Those that are equally slow, as on a machine that has too few processors.
        (300, [STARVED, STARVED, STARVED, QUICK], []),
        (300, [{"late": part} for part in (0.2, 0.3, 0.5, 0.25)], []),
        # A small part of its time.
        (300, [{"late": 0.25}, {"late": 0.001}, {"late": 0.001}], []),
        # Nothing to compare it with.
        (300, [STARVED], []),
        (100, [{}], []),
        (100, [], []),
    ],
)
def test_a_host_is_slow_in_a_phase_if_it_is_so_alone(secs, loads, named):
    world = World(hosts=len(loads))
    world.after(begins("step", range(len(loads))))
    assert world.slow_after(secs, *loads) == named


@pytest.mark.parametrize("pause_secs", [1, 10, 20])
def test_a_pause_of_a_host_is_not_slow_and_a_relapse_is(pause_secs):
    world = World()
    for _ in range(5):
        assert not world.slow_after(pause_secs, QUICK, STARVED, QUICK)
        assert not world.slow_after(30, QUICK, QUICK, QUICK)
    assert not world.slow_after(1, {"data": 60.0}, QUICK, QUICK)
    assert not world.slow_after(60, QUICK, QUICK, QUICK)
    for _ in range(2):
        assert len(world.slow_after(40, QUICK, STARVED, QUICK)) == 1
        world.slow_after(10, QUICK, QUICK, QUICK)


def test_the_reason_has_both_numbers():
    world = World()
    world.slow_after(30, {"data": 0.804}, {"data": 0.012}, {"data": 0.03})
    assert world.whys == [
        "it waited for its data 80 % of the time; the median of the other hosts is 2 %"
    ]
