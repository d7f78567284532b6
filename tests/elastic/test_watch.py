"""Hosts that hang or are slow are found by their heartbeats and phases."""

import itertools
import math

import pytest

from elastic_ckpt.elastic import watch

# A phase begins once more, which heartbeats alone tell; a host ends.
AGAIN, END = "again", "end"
# Of a host, the phase that it begins in a second.
START, STEP, COMPILE = {}, {0: "step"}, {0: "compile"}
REACH, JOIN = {0: watch.REACH}, {0: watch.REACH, 1: watch.JOIN}


def first_hang(hosts, silent_from=math.inf, paused_at=math.inf, heartbeat_secs=20.0):
    """The first second in which hosts hang, which ones, and why.

    Host 1 sends no heartbeats from a second on. The watching process is paused in one,
    or the hosts wait for their world to begin.
    """
    limits = watch.Limits(most_secs=600.0, heartbeat_secs=heartbeat_secs)
    watched = watch.Watch(limits, len(hosts), now_secs=1000.0)
    begun, alive = [0] * len(hosts), {*range(len(hosts))}
    for secs in range(2000):
        watched.look(now_secs=1000.0 + secs + 900 * (secs >= paused_at))
        for host, phases in enumerate(hosts):
            phase = phases.get(secs)
            begun[host] += phase is not None
            if phase == END:
                alive.remove(host)
                watched.end(host)
            elif phase not in (None, AGAIN):
                watched.begin(host, phase, begun[host])
            if host in alive and (host != 1 or secs < silent_from):
                watched.heartbeat(host, begun[host], {})
        if hang := watched.hang():
            return secs, set(hang.hosts), hang.why
    return None


@pytest.mark.parametrize(
    ("hosts", "more", "secs", "found", "why"),
    [
        # No heartbeat, in any phase.
        ([START] * 3, {"silent_from": 5}, 25, {1}, "no heartbeat for 21 s, in 'start'"),
        # None yet, so it has the time of its phase.
        ([START] * 3, {"silent_from": 0}, 601, set(), "start"),
        ([COMPILE] * 3, {}, 601, set(), "compile"),
        # One is behind the others.
        ([{**STEP, 1: "step"}, STEP, {**STEP, 1: "step"}], {}, 601, {1}, "step"),
        # One does not reach host 0, as slowly as a heartbeat may take; and nobody does.
        ([JOIN, JOIN, REACH], {}, 32, {2}, "reach"),
        ([JOIN, JOIN, REACH], {"heartbeat_secs": 90.0}, 92, {2}, "reach' for 92 s"),
        ([JOIN, REACH, REACH], {}, 32, {0}, "join"),
        ([JOIN] * 3, {}, 602, set(), "join"),
        # Time counts from when host 0 listens.
        (
            [{100: watch.REACH, 101: watch.JOIN}, {**REACH, 101: watch.JOIN}, REACH],
            *({}, 132, {2}, "reach"),
        ),
        # Time in which nobody looks does not count, and no heartbeats are missed in it.
        ([JOIN, JOIN, REACH], {"paused_at": 9}, 32, {2}, "reach"),
        (
            *([STEP] * 3, {"silent_from": 5, "paused_at": 9}, 25, {1}),
            "no heartbeat for 21 s, in 'step'",
        ),
        # One has not started, for which the others wait.
        ([JOIN, JOIN, START], {}, 602, {2}, "start"),
        ([START, REACH, REACH], {}, 601, {0}, "start"),
        # Some are in a phase that another one has left: its slice may have lost its
        # memory, its machine may be new, it had the program.
        *(
            ([{0: phase, 1: "evaluate"}, *[{0: phase}] * 2], {}, 602, {1, 2}, phase)
            for phase in ("start", "prepare", "restore", "compile", "step")
        ),
        # Those in a step have the time of the one that compiles.
        (
            [{**STEP, 1: "step"}, {**STEP, 1: "compile"}, {**STEP, 1: "step"}],
            *({}, 602, set(), "step"),
        ),
        # A program is not judged by another one.
        ([{**COMPILE, 1: "step", 2: "compile"}] * 3, {}, 603, set(), "compile"),
        # A known phase may take ten times its longest.
        ([{0: "step", 1: AGAIN, 2: AGAIN}] * 3, {}, 63, set(), "step"),
        ([{0: "step", 12: AGAIN, 20: AGAIN}] * 3, {}, 141, set(), "step"),
        ([{0: "step", 100: AGAIN}] * 3, {}, 701, set(), "step"),
        ([{0: "train", 1: AGAIN}] * 3, {}, 602, set(), "train"),
    ],
)
def test_hang_is_found_when_its_time_is_over_and_not_before(
    hosts, more, secs, found, why
):
    told = first_hang(hosts, **more)
    assert told[:2] == (secs, found)
    assert why in told[2].replace("[", "").replace("]", "")


@pytest.mark.parametrize("phases", [{0: watch.CLOSE}, {**STEP, 5: END}])
def test_uploads_at_the_end_and_hosts_that_have_ended_may_take_any_time(phases):
    assert first_hang([phases] * 3) is None


def slow_hosts(num_hosts):
    """A function that tells what becomes slow while steps have these parts a second."""
    watched = watch.Watch(watch.Limits(), num_hosts, now_secs=0.0)
    for host in range(num_hosts):
        watched.begin(host, "step", 1)
    clock = itertools.count(1.0)

    def after(secs, *loads):
        found = []
        for now_secs in itertools.islice(clock, secs):
            watched.look(now_secs=now_secs)
            for host, load in enumerate(loads):
                watched.heartbeat(host, 1, load)
            found += [
                f"{host}, {phase}: {why}" for host, phase, why in watched.newly_slow()
            ]
        return found

    return after


QUICK = {"late": 0.02, "data": 0.05}
STARVED = {"late": 0.7, "data": 0.05}
WAITING = {"late": 0.02, "data": 0.8}


@pytest.mark.parametrize(
    ("secs", "loads", "named"),
    [
        (30, [QUICK, STARVED, QUICK], "1, step: it was stopped"),
        (30, [WAITING, QUICK], "0, data: it waited"),
        (
            *(30, [{"data": 0.804}, {"data": 0.012}, {"data": 0.03}]),
            "data 80% of the time; the median of the other hosts is 2%",
        ),
        # Named once.
        (300, [QUICK, STARVED, QUICK], "1, step"),
        # Those that are equally slow, as on a machine that has too few processors.
        (300, [STARVED, STARVED, STARVED, QUICK], ""),
        (300, [{"late": part} for part in (0.2, 0.3, 0.5, 0.25)], ""),
        # A small part of its time.
        (300, [{"late": 0.25}, {"late": 0.001}, {"late": 0.001}], ""),
        # Nothing to compare it with.
        (300, [STARVED], ""),
        (100, [{}], ""),
        (100, [], ""),
    ],
)
def test_a_host_is_slow_in_a_phase_if_it_is_so_alone(secs, loads, named):
    found = slow_hosts(len(loads))(secs, *loads)
    assert len(found) == bool(named)
    assert named in "".join(found)


@pytest.mark.parametrize("pause_secs", [1, 10, 20])
def test_a_pause_of_a_host_is_not_slow_and_a_relapse_is(pause_secs):
    slow_after = slow_hosts(3)

    def count(secs, load):
        return len(slow_after(secs, load, QUICK, QUICK))

    for _ in range(5):
        assert not count(pause_secs, STARVED) + count(30, QUICK)
    assert not count(1, {"data": 60.0}) + count(60, QUICK)
    for _ in range(2):
        assert count(40, STARVED) == 1
        count(10, QUICK)
