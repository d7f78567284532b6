"""A leader notices what becomes of machines and their hosts; no host is started.

Its messages go over a link that needs the key.
"""

import contextlib
import errno
import math
import signal
import threading
import time

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import (
    cluster,
    decision,
    failures,
    faults,
    link,
    process_cluster,
    watch,
)
from tests.elastic import test_machine
from tests.recorded_events import RecordedEvents


@pytest.fixture
def listener():
    with contextlib.closing(link.Listener("127.0.0.1", 600.0)) as listener:
        yield listener


@pytest.fixture
def hosts(tmp_path, listener):
    """A cluster of machine 0, which leads, and a far one that may follow."""
    own = test_machine.Station(0, tmp_path)
    with contextlib.closing(
        process_cluster.Machines(own, listener=listener, configured="the same")
    ) as machines:
        yield process_cluster.ProcessCluster(
            machines,
            limits=watch.Limits(most_secs=math.inf, heartbeat_secs=math.inf),
            emit=RecordedEvents(),
        )


def wait_until(is_so, hosts):
    until_secs = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < until_secs
        hosts.wait(0.01)


def connected(listener):
    """The link of a machine that has said who it is."""
    hello = test_machine.Station(1).hello
    return link.connect(
        *(listener.address, listener.key, 600.0),
        **{"machine": 1, "configured": "the same", **hello},
    )


@pytest.fixture
def far(hosts, listener):
    """The link of machine 1, which follows."""
    with contextlib.closing(connected(listener)) as far:
        wait_until(lambda: 1 in hosts._machines.connected, hosts)
        yield far


def assignment(*slices):
    work = decision.Train(slices=slices, spares=(), rows=0, accumulated=1)
    return cluster.Assignment(number=1, work=work)


def world_of(hosts, *slices):
    """A world that trains on these slices, and the orders to its hosts from here on."""
    world = hosts._world(assignment(*slices))
    world.is_running = True
    hosts._machines.own.orders.clear()
    return world


def test_a_machine_that_is_back_at_once_has_lost_its_hosts(hosts, far, listener):
    world = world_of(hosts, 0, 1)
    far.close()
    with contextlib.closing(connected(listener)):
        wait_until(lambda: world.alive == {0}, hosts)
        wait_until(lambda: hosts._machines.connected == {0, 1}, hosts)
    assert [each.message for each in world.failures] == ["killed by SIGKILL"]


@pytest.mark.usefixtures("far")
def test_a_machine_that_does_not_end_its_hosts_is_lost(hosts):
    world = world_of(hosts, 1)
    hosts._machines.lost_secs = 0.0
    hosts._await_end([world])
    assert not world.alive
    assert hosts._machines.connected == {0}


def test_a_machine_that_was_asked_to_end_may_come_back(hosts, far, listener):
    def present():
        return hosts.slices(frozenset()).alive_secs.keys()

    assert present() == {0, 1}
    far.send(leaving=True)
    wait_until(lambda: present() == {0}, hosts)
    far.close()
    with contextlib.closing(connected(listener)):
        wait_until(lambda: present() == {0, 1}, hosts)


def test_a_machine_that_comes_while_the_run_ends_is_told(hosts, listener):
    with contextlib.closing(connected(listener)) as far:
        # The leader takes it when it looks next.
        listener.accepted.put(listener.accepted.get(timeout=600))
        hosts._machines.end(0.05, is_stopped=True)
        assert {"over": True, "is_stopped": True, "failure": ""} in far.receive()


def test_nothing_is_heard_of_a_world_that_is_lost(hosts):
    own = hosts._machines.own
    own.hosts_per_slice = 2
    steps = {"host": [1, 1], "event": "step_done", "fields": {"step": 1}}
    own.messages = [steps, {"host": [1, 0], "exit": -signal.SIGKILL}]
    with pytest.raises(failures.WorldLostError):
        hosts.run_world(
            *(print, assignment(0)), emit=hosts._emit, has_changed=lambda: None
        )
    for ends in ([{"host": [1, 1], "exit": 1}], []):
        own.messages = [steps, *ends]
        hosts.wait(0.0)
    assert hosts._emit.named("step_done") == [{"step": 1}]


def test_sigterm_gives_no_further_time_after_a_failure_and_ends_the_run_once(hosts):
    world = world_of(hosts, 0)
    world.take(0, {"exit": -signal.SIGKILL})
    until_secs = world.deadline_secs
    world.stop()
    hosts._terminate(world)
    assert world.deadline_secs == until_secs
    assert not hosts._hands_over


def test_hosts_that_fail_while_the_run_ends_end_it(hosts):
    world = world_of(hosts, 0)
    world.stop()
    failure = {"host": 0, "message": "DEADLINE_EXCEEDED: Barrier", "at_secs": 1.0}
    world.take(0, {"failure": {**failure, "is_of_devices": True}})
    with pytest.raises(errors.StoppedError, match="may not have been saved"):
        world.result()


def test_hosts_that_leave_are_told_that_a_machine_goes_and_that_the_run_ends(hosts):
    """All machines get SIGTERM, but not at the same time."""
    world = world_of(hosts, 0)
    for loses_memory in (False, True):
        world.leave(3, loses_memory=loses_memory, may_abandon=False)
    world.stop()
    host = [1, 0]
    assert hosts._machines.own.orders == [
        {"tell": host, "text": "leave"},
        {"signal": host, "number": signal.SIGTERM},
        {"tell": host, "text": "lose memory"},
        {"tell": host, "text": "stop"},
    ]


@pytest.mark.usefixtures("far")
def test_a_change_that_is_decided_does_not_wait_for_a_compile(hosts):
    world = hosts._training = world_of(hosts, 0, 1)
    world.begin(hosts._emit)
    world.take(0, {"phase": watch.COMPILE, "begun": 3})
    decided = decision.Train(slices=(0,), spares=(1,), rows=0, accumulated=1)
    hosts._change(world, decided)
    assert not world.is_over, "its hosts train on until the next ones have joined"
    hosts._next.take(0, {"ready": True})
    hosts._change(world, decided)
    hosts._change(world, decided)
    assert world.is_over
    assert world.result() is False
    left = [name for name, _ in hosts._emit.events]
    assert left == ["world_leaving", "world_left"]


@pytest.mark.parametrize("host_alone", [False, True])
def test_the_memory_of_a_machine_that_ends_stays(hosts, host_alone):
    """It may start again; a slice that is preempted loses its memory."""
    world = hosts._training = world_of(hosts, 0)
    if host_alone:
        hosts._preempt([0])
    else:
        hosts._terminate(world)
    hosts._change(world, None)
    hosts._machines.own.orders.clear()
    hosts._lose_memory()
    lost = [{"fault": "kill_slice", "slice": 0}] * host_alone
    assert hosts._machines.own.orders == lost


def test_a_slice_that_returns_is_refused_no_longer(hosts):
    hosts._refuse(0, "its devices are wrong")
    hosts._slices[0].is_away = True
    assert not hosts.slices(frozenset()).alive_secs
    hosts._slices[0].is_away = False
    assert hosts.slices(frozenset()).alive_secs.keys() == {0}


def test_a_fault_of_a_host_that_the_world_has_not_changes_nothing(hosts):
    hosts._faults = [faults.Fault(kind="kill_host", target=1)]
    hosts._inject(world_of(hosts, 0))
    assert len(hosts._emit.named("fault_injected")) == 1
    assert not hosts._machines.own.orders


@pytest.mark.usefixtures("far")
def test_a_prepared_world_blames_the_host_that_others_failed_for(hosts):
    world = world_of(hosts, 0, 1)
    world.take(1, {"exit": -signal.SIGABRT})
    world.take(0, {"exit": -signal.SIGKILL})
    assert world.unfit() == {0: "killed by SIGKILL"}


def test_a_prepared_world_waits_for_any_time(hosts):
    hosts._limits = watch.Limits(most_secs=-1.0, heartbeat_secs=-1.0)
    world = hosts._next = world_of(hosts, 0)
    world.take(0, {"phase": watch.JOIN, "begun": 1})
    hosts.wait(0.0)
    assert not world.failures


@pytest.fixture
def ends(listener):
    """Both ends of a link: the one that connected, and the one that was accepted."""
    far = link.connect(listener.address, listener.key, 600.0, machine=1)
    near = listener.accepted.get(timeout=600)
    with contextlib.closing(far), contextlib.closing(near):
        yield far, near


def messages(one):
    found = []
    while not found:
        one.channel.poll(1)
        found = one.receive()
    return found


def test_messages_go_both_ways_until_one_side_ends_the_link(ends):
    far, near = ends
    assert near.hello == {"machine": 1}
    far.send(machine=1)
    near.send(start=[1, 0])
    near.send()
    assert messages(near) == [{"machine": 1}]
    assert messages(far) == [{"start": [1, 0]}]
    far.send(exit=3)
    far.close()
    # What was sent before arrives.
    assert messages(near) == [{"exit": 3}]
    with pytest.raises(link.LinkLostError):
        messages(near)


def test_a_peer_that_gives_no_sign_is_lost(ends):
    _, near = ends
    near._lost_secs = -1.0
    with pytest.raises(link.LinkLostError, match="stopped responding"):
        near.receive()


def test_a_peer_that_sends_no_json_is_lost(ends):
    far, near = ends
    far.channel.send_bytes(b"\xff")
    with pytest.raises(link.LinkLostError, match="other than JSON"):
        messages(near)


def test_a_connection_without_the_key_is_refused(listener):
    with pytest.raises(link.LinkLostError):
        link.connect(listener.address, "another key", 600)
    assert listener.accepted.empty()


def test_a_machine_without_descriptors_accepts_peers_later(monkeypatch, request):
    accept, scarcity = link.socket.socket.accept, [OSError(errno.EMFILE, "Too many")]

    def scarce(listening):
        if scarcity:
            raise scarcity.pop()
        return accept(listening)

    monkeypatch.setattr(link.socket.socket, "accept", scarce)
    request.getfixturevalue("ends")
    assert not scarcity


def test_a_peer_that_shows_the_key_too_late_is_not_linked():
    with contextlib.closing(link.Listener("127.0.0.1", 600)) as listener:
        pass
    with link.socket.create_server(("127.0.0.1", 0)) as server:
        ours = link.socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    peer = threading.Thread(target=listener._admit, args=(theirs,))
    peer.start()
    channel = link._as_connection(ours, 600)
    link.connection.answer_challenge(channel, listener.key.encode())
    link.connection.deliver_challenge(channel, listener.key.encode())
    channel.send_bytes(b"{}")
    peer.join()
    assert listener.accepted.empty()
    with pytest.raises(EOFError):
        channel.recv_bytes()
    channel.close()
