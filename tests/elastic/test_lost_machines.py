"""A leader notices what becomes of machines and their hosts; no host is started."""

import contextlib
import math
import signal
import time
import types

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import (
    cluster,
    decision,
    link,
    process_cluster,
    watch,
)
from tests.elastic import test_machine
from tests.recorded_events import RecordedEvents

HELLO = {
    "machine": 1,
    "configured": "c",
    "agents": ["a"],
    "port": 9,
    "interface": "127.0.0.1",
}


class Station(test_machine.Station):
    """Its hosts are what a test says of them."""

    hosts_per_slice = 1
    hardware = types.SimpleNamespace(hardware="cpu", devices_per_host=1)

    def __init__(self, directory, slices=(0,)):
        super().__init__(0)
        self.slices, self.log_directory = slices, str(directory)


@pytest.fixture
def recorded():
    return RecordedEvents()


@pytest.fixture
def listener():
    with contextlib.closing(link.Listener("127.0.0.1", 600.0)) as listener:
        yield listener


@pytest.fixture
def machines(tmp_path, listener):
    """Of which machine 0 leads."""
    station = Station(tmp_path)
    with contextlib.closing(
        process_cluster.Machines(station, listener=listener, configured="c")
    ) as machines:
        yield machines


@pytest.fixture
def hosts(machines, recorded):
    """A cluster of these machines, and a far one that follows."""
    return process_cluster.ProcessCluster(
        machines,
        limits=watch.Limits(most_secs=math.inf, heartbeat_secs=math.inf),
        emit=recorded,
    )


def await_true(is_so, look=lambda: time.sleep(0.01)):
    until_secs = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < until_secs
        look()


def connected(listener, **changes):
    """The link of a machine that has said who it is."""
    hello = HELLO | changes
    far = link.connect(listener.address, listener.key, 600.0, **hello)
    # The leader takes it when it looks next.
    await_true(lambda: not listener.accepted.empty())
    return far


def assignment(*slices, number=1):
    work = decision.Train(slices=slices, spares=(), rows=0, accumulated=1)
    return cluster.Assignment(number=number, work=work)


def wait_until(is_so, hosts):
    await_true(is_so, lambda: hosts.wait(0.01))


def test_a_machine_that_is_back_at_once_has_lost_its_hosts(hosts, listener):
    machines = hosts._machines
    far = connected(listener)
    wait_until(lambda: 1 in machines.connected, hosts)
    world = hosts._world(assignment(0, 1))
    far.close()
    back = connected(listener)
    wait_until(lambda: world.alive == {0}, hosts)
    assert machines.connected == {0, 1}
    assert [each.message for each in world.failures] == ["killed by SIGKILL"]
    back.close()


def test_a_machine_that_does_not_end_its_hosts_is_lost(hosts, listener):
    far = connected(listener)
    wait_until(lambda: 1 in hosts._machines.connected, hosts)
    world = hosts._world(assignment(1))
    hosts._machines.lost_secs = 0.0
    hosts._await_end([world])
    assert not world.alive
    assert hosts._machines.connected == {0}
    far.close()


def test_a_machine_that_was_asked_to_end_may_come_back(hosts, listener):
    def present():
        return hosts.slices(frozenset()).alive_secs.keys()

    far = connected(listener)
    wait_until(lambda: present() == {0, 1}, hosts)
    far.send(leaving=True)
    wait_until(lambda: present() == {0}, hosts)
    far.close()
    back = connected(listener)
    wait_until(lambda: present() == {0, 1}, hosts)
    assert present() == {0, 1}
    back.close()


def test_sigterm_gives_no_further_time_after_a_failure_and_ends_the_run_once(hosts):
    world = hosts._world(assignment(0))
    world.is_running = True
    world.take(0, {"exit": -signal.SIGKILL})
    until_secs = world.deadline_secs
    world.stop()
    hosts._terminate(world)
    assert world.deadline_secs == until_secs
    assert not hosts._hands_over


def test_a_machine_that_comes_while_the_run_ends_is_told(machines, listener):
    far = connected(listener)
    machines.end(0.05, is_stopped=True)
    assert {"over": True, "is_stopped": True, "failure": ""} in far.receive()
    far.close()


def test_hosts_that_fail_while_the_run_ends_end_it(hosts):
    world = hosts._world(assignment(0))
    world.is_running = True
    world.stop()
    failure = {"host": 0, "message": "DEADLINE_EXCEEDED: Barrier", "at_secs": 1.0}
    world.take(0, {"failure": {**failure, "is_of_devices": True}})
    with pytest.raises(errors.StoppedError, match="may not have been saved"):
        world.result()


def test_hosts_that_leave_are_told_that_a_machine_goes_meanwhile(hosts):
    world = hosts._world(assignment(0))
    world.is_running = True
    orders = []
    hosts._machines.own.do = orders.append
    for loses_memory in (False, True):
        world.leave(3, loses_memory=loses_memory, may_abandon=False)
    told = [each["text"] for each in orders if "text" in each]
    assert told == ["leave", "lose memory"]


def test_hosts_that_leave_are_told_that_the_run_ends(hosts):
    """All machines get SIGTERM, but not at the same time."""
    world = hosts._world(assignment(0))
    world.is_running = True
    world.leave(3, loses_memory=True, may_abandon=False)
    orders = []
    hosts._machines.own.do = orders.append
    world.stop()
    assert orders == [{"tell": [1, 0], "text": "stop"}]


@pytest.mark.parametrize("host_alone", [False, True])
def test_the_memory_of_a_machine_that_ends_stays(hosts, host_alone):
    """It may start again; a slice that is preempted loses its memory."""
    world = hosts._training = hosts._world(assignment(0))
    if host_alone:
        hosts._preempt([0])
    else:
        hosts._terminate(world)
    hosts._change(world, None)
    orders = []
    hosts._machines.own.do = orders.append
    hosts._lose_memory()
    assert orders == [{"fault": "kill_slice", "slice": 0}] * host_alone


def test_a_slice_that_returns_is_refused_no_longer(hosts):
    hosts._refuse(0, "its devices are wrong")
    hosts._slices[0].is_away = True
    assert not hosts.slices(frozenset()).alive_secs
    hosts._slices[0].is_away = False
    assert hosts.slices(frozenset()).alive_secs.keys() == {0}


@pytest.mark.parametrize("hello", [{"configured": "d"}, {"machine": 0}])
def test_a_peer_that_is_no_machine_of_the_run_changes_nothing(hosts, listener, hello):
    far = connected(listener, **hello)
    wait_until(listener.accepted.empty, hosts)
    assert hosts._machines.connected == {0}
    far.close()


def test_a_prepared_world_blames_the_host_that_others_failed_for(hosts, listener):
    far = connected(listener)
    wait_until(lambda: 1 in hosts._machines.connected, hosts)
    world = hosts._world(assignment(0, 1))
    world.take(1, {"exit": -signal.SIGABRT})
    world.take(0, {"exit": -signal.SIGKILL})
    assert world.unfit() == {0: "killed by SIGKILL"}
    far.close()


def test_a_prepared_world_waits_for_any_time(hosts):
    hosts._limits = watch.Limits(most_secs=-1.0, heartbeat_secs=-1.0)
    world = hosts._next = hosts._world(assignment(0))
    world.take(0, {"phase": watch.JOIN, "begun": 1})
    hosts.wait(0.0)
    assert not world.failures
