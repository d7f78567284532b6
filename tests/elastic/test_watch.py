"""Hosts that hang or are slow are found by their heartbeats and phases."""

import pytest

from elastic_ckpt.elastic import watch

LIMITS = watch.Limits(most_secs=600.0, heartbeat_secs=20.0)
ALL = (0, 1, 2)


class World:
    """Three hosts whose clocks, heartbeats and phases the test moves."""

    def __init__(self, limits=LIMITS):
        self.secs = 1000.0
        self.watch = watch.Watch(limits, 3, now_secs=self.secs)

    @property
    def hang(self):
        return self.watch.hang(now_secs=self.secs)


def passes(secs, hosts=ALL):
    """Time passes; these hosts send a heartbeat at its end."""

    def act(world):
        world.secs += secs
        for host in hosts:
            world.watch.heartbeat(host, now_secs=world.secs)

    return act


def begins(phase, hosts=ALL):
    def act(world):
        for host in hosts:
            world.watch.begin(host, phase, now_secs=world.secs)

    return act


def starts_again(world):
    world.watch.start_again(now_secs=world.secs)


def looks(world):
    world.watch.look(now_secs=world.secs)


def knows(phase, secs):
    """All hosts have been in a phase three times."""
    return [begins(phase), passes(secs)] * 3 + [begins(phase)]


reaches, joins = begins(watch.REACH), begins(watch.JOIN, (0, 1))
# What happens, and who hangs after the last act, but not before it.
HANGS = {
    "no heartbeat in any phase": (
        [passes(1), *[passes(1, (0, 2))] * 21],
        ({1}, "no heartbeat for 21 s, in ['start']"),
    ),
    "no heartbeat yet, so it has the time of its phase": (
        [passes(1, (0, 2))] * 601,
        (None, "phase 'start'"),
    ),
    "a phase that is not known": (
        [begins("compile"), passes(600), passes(1)],
        (set(), "hangs in phase 'compile' for 601 s"),
    ),
    "a short phase, for at least a minute": (
        [*knows("step", 0.1), passes(59.5), passes(1)],
        (set(), "phase 'step'"),
    ),
    "a known phase, for ten times its longest": (
        [*knows("step", 12), passes(119.5), passes(1)],
        (set(), "phase 'step'"),
    ),
    "a long phase, for at most the whole bound": (
        [*knows("step", 100), passes(599.5), passes(1)],
        (set(), "phase 'step'"),
    ),
    "the host that is behind": (
        [begins("step"), passes(1), begins("step", (0, 2)), passes(599), passes(2)],
        ({1}, "phase 'step'"),
    ),
    "a host that does not reach host 0": (
        [reaches, joins, passes(30), passes(1)],
        ({2}, "hangs in phase 'reach' for 31 s"),
    ),
    "host 0, if nobody reaches it": (
        [reaches, begins(watch.JOIN, (0,)), passes(30), passes(1)],
        ({0}, ""),
    ),
    "nobody, if all have joined": (
        [reaches, begins(watch.JOIN), passes(600), passes(1)],
        (set(), ""),
    ),
    "time counts when host 0 has begun to listen": (
        [
            *(begins(watch.REACH, (1, 2)), passes(100), begins(watch.REACH, (0,))),
            *(joins, passes(30), passes(1)),
        ],
        ({2}, ""),
    ),
    "hosts that were prepared have all the time": (
        [reaches, joins, passes(30), starts_again, passes(30), passes(1)],
        ({2}, ""),
    ),
    "one that has not started, for which the others wait": (
        [begins(watch.REACH, (0, 1)), joins, passes(600), passes(1)],
        ({2}, ""),
    ),
    "host 0 has not started": (
        [begins(watch.REACH, (1, 2)), passes(600), passes(1)],
        ({0}, ""),
    ),
    "one that compiles while another had the program": (
        [
            *(begins("compile"), passes(1), begins(watch.TRAIN, (0,))),
            *(passes(598), passes(3)),
        ],
        ({1, 2}, "hangs in phase 'compile' for 602 s"),
    ),
    "those in a step have the time of the one that compiles": (
        [
            *(*knows("step", 1), begins("compile", (1,)), begins("step", (0, 2))),
            *(passes(599), passes(2)),
        ],
        (None, ""),
    ),
    "a program is not judged by another one": (
        [
            *(begins("compile"), passes(1), begins("step"), passes(1)),
            *(begins("compile"), passes(599), passes(2)),
        ],
        (set(), "phase 'compile'"),
    ),
    "storage is not judged by memory": (
        [
            *(begins("restore"), passes(1), begins("step"), passes(1)),
            *(begins("restore"), passes(599), passes(2)),
        ],
        (set(), "phase 'restore'"),
    ),
    "a training that names no phases": (
        [*knows(watch.TRAIN, 1), passes(600), passes(1)],
        (set(), "phase 'train'"),
    ),
    "the watching process stood still, which does not count": (
        [
            *(begins("step"), passes(1), looks, passes(900, ())),
            # The message of one host is received first.
            *(passes(0, (0,)), looks),
            *[passes(1, (0, 2)), looks] * 19,
            passes(1, (0, 2)),
        ],
        ({1}, ""),
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_hang_is_found_when_its_time_is_over_and_not_before(name):
    (*acts, last), (hosts, why) = HANGS[name]
    world = World()
    for act in acts:
        act(world)
    assert world.hang is None
    last(world)
    assert hosts is None or world.hang.hosts == hosts
    assert why in world.hang.why


def test_a_host_reaches_host_0_as_slowly_as_a_heartbeat_may_take():
    world = World(watch.Limits(most_secs=600.0, heartbeat_secs=90.0))
    for act in (reaches, joins, passes(90)):
        act(world)
    assert world.hang is None
    passes(1)(world)
    assert world.hang.why == "hangs in phase 'reach' for 91 s"


@pytest.mark.parametrize("phase", ["start", "prepare", "restore", "compile", "step"])
def test_a_host_is_judged_by_no_other_host_and_no_other_world(phase):
    # Its slice may have lost its memory, its machine may be new.
    for act in (begins(phase), passes(1), begins("evaluate")):
        act(World())
    world = World()
    for act in (begins(phase), passes(1), begins("evaluate", (0,)), passes(598)):
        act(world)
    assert world.hang is None
    passes(3)(world)
    assert world.hang.hosts == {1, 2}


def test_uploads_at_the_end_may_take_any_time():
    world = World()
    begins(watch.CLOSE)(world)
    passes(100_000)(world)
    assert world.hang is None


def test_a_host_that_has_ended_is_not_waited_for():
    world = World()
    begins("step")(world)
    passes(1)(world)
    for host in ALL:
        world.watch.end(host)
    passes(1000, ())(world)
    assert world.hang is None


QUICK = {"late": 0.02, "data": 0.05}
STARVED = {"late": 0.7, "data": 0.05}
WAITING = {"late": 0.02, "data": 0.8}


class Loads:
    """Hosts that send a heartbeat a second, with parts of that second."""

    def __init__(self):
        self.secs = 1000.0
        self.slow = watch.SlowHosts(now_secs=self.secs)

    def slow_after(self, secs, *loads):
        named = []
        for _ in range(secs):
            self.secs += 1
            for host, load in enumerate(loads):
                self.slow.note(host, {**load, "secs": 1.0}, phase="step")
            named += self.slow.newly_slow(now_secs=self.secs)
        return [(each.host, each.phase) for each in named]


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
    assert Loads().slow_after(secs, *loads) == named


@pytest.mark.parametrize("pause_secs", [1, 10, 20])
def test_a_pause_of_a_host_is_not_slow_and_a_relapse_is(pause_secs):
    loads = Loads()
    for _ in range(5):
        assert not loads.slow_after(pause_secs, QUICK, STARVED, QUICK)
        assert not loads.slow_after(30, QUICK, QUICK, QUICK)
    assert not loads.slow_after(1, {"data": 60.0}, QUICK, QUICK)
    assert not loads.slow_after(60, QUICK, QUICK, QUICK)
    for _ in range(2):
        assert len(loads.slow_after(40, QUICK, STARVED, QUICK)) == 1
        loads.slow_after(10, QUICK, QUICK, QUICK)


def test_the_reason_has_both_numbers():
    slow = watch.SlowHosts(now_secs=0.0)
    for window in (1, 2, 3):
        for host, secs in enumerate((80.4, 1.2, 3.0)):
            slow.note(host, {"data": secs, "secs": 100.0}, phase="step")
        named = slow.newly_slow(now_secs=window * watch.WINDOW_SECS)
    (host,) = named
    assert host.why == "it waited for its data 80 % of the time, other hosts 2 %"
