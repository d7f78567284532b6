"""Hosts are slow by what they alone spend time on, compared with the others."""

import pytest

from elastic_ckpt.elastic import slow_hosts

QUICK = {"late": 0.02, "data": 0.05}
STARVED = {"late": 0.7, "data": 0.05}
WAITING = {"late": 0.02, "data": 0.8}


class World:
    """Hosts that send a heartbeat a second, with the given parts of that second."""

    def __init__(self):
        self.secs = 1000.0
        self.slow = slow_hosts.SlowHosts(now_secs=self.secs)

    def passes(self, secs, *loads, phase="step"):
        named = []
        for _ in range(secs):
            self.secs += 1
            for host, load in enumerate(loads):
                self.slow.note(host, {**load, "secs": 1.0}, phase=phase)
            named += self.slow.newly_slow(now_secs=self.secs)
        return [(each.host, each.phase) for each in named]


@pytest.fixture
def world():
    return World()


def test_a_slow_host_is_named_once(world):
    assert len(world.passes(300, QUICK, STARVED, QUICK)) == 1
    world.passes(10, QUICK, QUICK, QUICK)
    assert len(world.passes(30, QUICK, STARVED, QUICK)) == 1


@pytest.mark.parametrize("pause_secs", [1, 10, 20])
def test_a_pause_of_a_host_is_not_slow(world, pause_secs):
    for _ in range(5):
        assert not world.passes(pause_secs, QUICK, STARVED, QUICK)
        assert not world.passes(30, QUICK, QUICK, QUICK)


@pytest.mark.parametrize(
    ("secs", "loads", "named"),
    [
        (30, [QUICK, STARVED, QUICK], [(1, "step")]),
        (30, [WAITING, QUICK], [(0, "data")]),
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
def test_a_host_is_slow_in_a_phase_if_it_is_so_alone(world, secs, loads, named):
    assert world.passes(secs, *loads) == named


def test_a_long_wait_that_ends_in_one_window_is_not_slow(world):
    assert not world.passes(1, {"data": 60.0}, QUICK, QUICK)
    assert not world.passes(60, QUICK, QUICK, QUICK)


def test_the_reason_has_both_numbers():
    slow = slow_hosts.slow_in({0: {"data": 80.4}, 1: {"data": 1.2}, 2: {"data": 3.0}})
    why = "it waited for its data 80 % of the time, other hosts 2 %"
    assert slow == {(0, "data"): why}
