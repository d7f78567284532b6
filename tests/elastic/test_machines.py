"""Supervisors of machines lead and follow by the claim in a shared directory.

A leader notices what becomes of machines and their hosts; no host is started.
"""

import contextlib
import dataclasses
import errno
import math
import os
import signal
import threading
import time
import types
from concurrent import futures
from multiprocessing import connection

import pytest

from elastic_ckpt.core import errors, events, process
from elastic_ckpt.elastic import (
    decision,
    failures,
    faults,
    leader_claim,
    link,
    machine,
    process_cluster,
    watch,
)
from tests import host_worlds
from tests.recorded_events import RecordedEvents

LIMITS = watch.Limits(most_secs=math.inf, heartbeat_secs=math.inf)


def process_of(number):
    """A process of another machine, which this one cannot tell to be alive."""
    return dataclasses.replace(process.this(), host=f"m{number}", boot_id=f"b{number}")


class Station:
    """Of a machine without hosts; it notes its orders and the leader's messages."""

    interface = "127.0.0.1"
    hosts = types.MappingProxyType({})
    hosts_per_slice = 1
    hardware = types.SimpleNamespace(hardware="cpu", devices_per_host=1)

    def __init__(self, number, log_directory=""):
        self.number, self.num_machines = number, 2
        self.slices, self.log_directory = (number,), str(log_directory)
        self.hello = {"agents": [f"http://m{number}"], "port": 1}
        self.hello |= {"interface": self.interface}
        self.orders, self.messages = [], []

    def wait(self, secs, *extra):
        told, self.messages = self.messages, []
        connection.wait(extra, 0.0 if told else secs)
        return told

    def do(self, order):
        self.orders.append(order)
        return []

    def stand_by(self):
        pass

    end_hosts = stand_by


class Machines:
    """Supervisors in threads, by the numbers of their machines.

    What one does that leads is a function of its cluster and of `emit`.
    """

    def __init__(self, directory):
        self.directory = directory
        # As each supervisor emits them, with its number.
        self.events = []
        # The ends of the supervisors, or their errors.
        self.ends = {}
        self._threads, self.is_over = [], threading.Event()

    def supervisor(
        self,
        number,
        lead,
        *,
        lost_secs=600.0,
        wait_secs=600.0,
        alone=False,
        configured="the same",
    ):
        def emit(name, **fields):
            events.check(name, fields)
            self.events.append((number, name, fields))

        made = machine.MachineSupervisor(
            *(Station(number), lead),
            shared=str(self.directory),
            injected=(),
            limits=LIMITS,
            lost_secs=lost_secs,
            kept=lambda: contextlib.nullcontext(emit),
            configured=configured,
            policy=decision.Policy(wait_secs=wait_secs),
            show=emit,
        )
        made._claims._owner = process_of(number)
        if alone:
            made._expected = {number}
        return made

    def start(self, number, lead, **changes):
        """Starts a supervisor, and returns it when it leads or follows."""
        made = self.supervisor(number, lead, **changes)

        def run():
            try:
                self.ends[number] = made.run()
            except (errors.RunError, OSError, SystemExit) as error:
                self.ends[number] = error

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)
        while (number, "leader_found") not in [each[:2] for each in self.events]:
            assert thread.is_alive(), self.ends
            time.sleep(0.01)
        return made

    def lead_on(self, cluster, _):
        """Leads until all are to end, which `join` says."""
        while not self.is_over.is_set():
            cluster.wait(0.01)

    def join(self):
        self.is_over.set()
        for thread in self._threads:
            thread.join()

    def leaders(self):
        """The machines that have led, in turn."""
        found = [each for _, name, each in self.events if name == "leader_found"]
        return [each["leader"] for each in found if each["machine"] == each["leader"]]


@pytest.fixture
def machines(tmp_path):
    return Machines(tmp_path)


def await_other(cluster, _):
    """Returns when the other machine follows."""
    while len(cluster._machines.connected) < 2:
        cluster.wait(0.01)


@pytest.mark.parametrize(
    "error",
    [
        None,
        errors.RunError("a host is gone"),
        errors.ReplacedError("another start"),
        # It does not begin again.
        OSError(28, "No space left on device"),
    ],
)
def test_a_run_goes_on_beside_machines_that_it_refuses_and_ends_on_all_others(
    machines, error
):
    def lead(cluster, emit):
        await_other(cluster, emit)
        emit("waiting_for_slices", why="they are refused", within_secs=600.0)
        machines.lead_on(cluster, emit)
        if error is not None:
            raise error

    first = machines.start(0, lead)
    machines.start(1, await_other)
    for number, configured, says in (
        (0, "the same", "machine 0 already has a supervisor"),
        (1, "the same", "machine 1 already has a supervisor"),
        (1, "another", "1 has a different configuration from machine 0"),
    ):
        made = {"wait_secs": 0.0, "configured": configured}
        again = machines.supervisor(number, None, **made)
        again._claims._owner = process_of(7)
        with pytest.raises(errors.RunError, match=says):
            again.run()
    machines.join()
    # A leader that reaches all does not give way.
    assert first._gives_way_secs == math.inf
    failed = f"the run has failed: {error}"
    assert machines.ends[0] is (error or False)
    assert str(machines.ends[1]) == (failed if error else "False")
    assert machines.leaders() == [0]


def test_the_next_leader_comes_once_nothing_listens_and_the_storage_is_there(
    machines, monkeypatch
):
    def dies(cluster, emit):
        await_other(cluster, emit)
        # As the kernel does for a process that was killed.
        cluster._machines.close()
        first._claims._held = None
        raise SystemExit

    def failing(*_, **__):
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    first = machines.start(0, dies)
    monkeypatch.setattr(leader_claim.LeaderClaims, "take", failing)
    second = machines.start(1, lambda *_: None)
    machines.join()
    assert machines.ends[1] is False
    assert machines.leaders() == [0, 1]
    # The lost machine's agents are not asked any more.
    forgotten = [each for each in second._own.orders if "forget" in each]
    assert forgotten == [{"forget": ["http://m0"]}]


def test_a_leader_that_waits_in_vain_gives_way_to_one_that_reaches_more(machines):
    def lead(cluster, emit):
        emit("waiting_for_slices", why="there are too few", within_secs=600.0)
        assert first._gives_way_secs < math.inf
        first._gives_way_secs = 0.0
        cluster.wait(0.01)

    first = machines.supervisor(0, lead, lost_secs=0.1, alone=True)
    first._claims.look()
    assert first._lead(None) is None
    # It does so once.
    assert not first._may_give_way
    assert not first._claims.has_lead


def test_sigterm_while_the_hosts_of_a_lost_leader_end_ends_the_machine(machines):
    def lead(cluster, emit):
        await_other(cluster, emit)
        cluster._machines.close()

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    machines.start(0, lead)
    second = machines.supervisor(1, None)
    second._own.end_hosts = lambda: os.kill(os.getpid(), signal.SIGTERM)
    assert second._follow(second._claims.look()) is True
    machines.join()
    signal.signal(signal.SIGTERM, before)


def test_a_machine_that_is_refused_after_it_has_followed_gives_up(machines):
    def lead(cluster, emit):
        await_other(cluster, emit)
        own = cluster._machines
        # The leader does not notice that the link is gone.
        own._links[1].close()
        while not machines.is_over.wait(0.01):
            while not own._listener.accepted.empty():
                own._admit(own._listener.accepted.get())
        own._links.clear()

    machines.start(0, lead)
    with pytest.raises(errors.RunError, match="machine 1 already has a supervisor"):
        machines.supervisor(1, None, wait_secs=0.5).run()
    machines.join()


def test_a_leader_that_cannot_be_reached_is_named_with_its_claim(machines):
    is_closed = threading.Event()

    def lead(cluster, emit):
        cluster._machines._listener.close()
        is_closed.set()
        machines.lead_on(cluster, emit)

    machines.start(0, lead, alone=True)
    is_closed.wait()
    second = machines.supervisor(1, None, wait_secs=0.0)
    address = second._claims.look().address
    with pytest.raises(errors.RunError) as refused:
        second.run()
    machines.join()
    claim = machines.directory / leader_claim.DIRECTORY / "1.json"
    for says in (
        f"machine 0, which leads the run, at {address}",
        "Connection refused",
        f"The leader still renews its claim, {claim}",
        "let the machines reach each other on all ports",
    ):
        assert says in str(refused.value)


@pytest.fixture
def listener():
    with contextlib.closing(link.Listener("127.0.0.1", 600.0)) as listener:
        yield listener


@pytest.fixture
def hosts(tmp_path, listener):
    """A cluster of machine 0, which leads, and a far one that may follow."""
    own = Station(0, tmp_path)
    with contextlib.closing(
        process_cluster.Machines(own, listener=listener, configured="the same")
    ) as machines:
        emit = RecordedEvents()
        yield process_cluster.ProcessCluster(machines, limits=LIMITS, emit=emit)


def wait_until(is_so, hosts):
    until_secs = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < until_secs
        hosts.wait(0.01)


def connected(listener):
    """The link of a machine that has said who it is."""
    hello = Station(1).hello
    return link.connect(
        *(listener.address, listener.key, 600.0),
        **{"machine": 1, "configured": "the same", **hello},
    )


def world_of(hosts, num_hosts):
    """A world that trains on slices, and the orders to its hosts from here on."""
    world = hosts._world(host_worlds.assignment(1, num_hosts))
    world.is_running = True
    hosts._machines.own.orders.clear()
    return world


@pytest.fixture
def far(hosts, listener):
    """The link of machine 1, which follows."""
    with contextlib.closing(connected(listener)) as far:
        wait_until(lambda: 1 in hosts._machines.connected, hosts)
        yield far


def test_a_machine_comes_leaves_comes_back_is_lost_and_is_told_of_the_end(
    hosts, far, listener
):
    def await_slices(*numbers):
        wait_until(
            lambda: hosts.slices(frozenset()).alive_secs.keys() == {*numbers}, hosts
        )

    await_slices(0, 1)
    far.send(leaving=True)
    await_slices(0)
    far.close()
    with contextlib.closing(connected(listener)) as far:
        await_slices(0, 1)
        world = world_of(hosts, 2)
    # It is back at once, without its hosts.
    with contextlib.closing(connected(listener)):
        wait_until(lambda: world.alive == {0}, hosts)
        await_slices(0, 1)
        assert [each.message for each in world.failures] == ["killed by SIGKILL"]
        # It does not end its hosts.
        world = world_of(hosts, 2)
        world.take(0, {"exit": 0})
        hosts._machines.lost_secs = 0.0
        hosts._await_end([world])
        assert not world.alive
        assert hosts._machines.connected == {0}
    with contextlib.closing(connected(listener)) as far:
        # The leader takes it when it looks next, and the run ends.
        listener.accepted.put(listener.accepted.get(timeout=600))
        hosts._machines.end(0.05, is_stopped=True)
        assert {"over": True, "is_stopped": True, "failure": ""} in far.receive()


def test_nothing_is_heard_of_a_world_that_is_lost(hosts):
    own = hosts._machines.own
    own.hosts_per_slice = 2
    steps = {"host": [1, 1], "event": "step_done", "fields": {"step": 1}}
    own.messages = [steps, {"host": [1, 0], "exit": -signal.SIGKILL}]
    more = {"emit": hosts._emit, "has_changed": lambda: None}
    with pytest.raises(failures.WorldLostError):
        hosts.run_world(print, host_worlds.assignment(1, 1), **more)
    for ends in ([{"host": [1, 1], "exit": 1}], []):
        own.messages = [steps, *ends]
        hosts.wait(0.0)
    assert hosts._emit.named("step_done") == [{"step": 1}]


def test_sigterm_after_a_failure_gives_no_further_time_and_ends_the_run_once(hosts):
    world = world_of(hosts, 1)
    failure = {"host": 0, "message": "DEADLINE_EXCEEDED: Barrier", "at_secs": 1.0}
    world.take(0, {"failure": {**failure, "is_of_devices": True}})
    until_secs = world.deadline_secs
    world.stop()
    hosts._terminate(world)
    assert world.deadline_secs == until_secs
    assert not hosts._hands_over
    with pytest.raises(errors.StoppedError, match="may not have been saved"):
        world.result()


def test_hosts_that_leave_are_told_that_a_machine_goes_and_that_the_run_ends(hosts):
    """All machines get SIGTERM, but not at the same time."""
    world = world_of(hosts, 1)
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
    world = hosts._training = world_of(hosts, 2)
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
    world = hosts._training = world_of(hosts, 1)
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
    for is_away in (True, False):
        hosts._slices[0].is_away = is_away
        assert bool(hosts.slices(frozenset()).alive_secs) != is_away


def test_a_fault_of_a_host_that_the_world_has_not_changes_nothing(hosts):
    hosts._faults = [faults.Fault(kind="kill_host", target=1)]
    hosts._inject(world_of(hosts, 1))
    assert len(hosts._emit.named("fault_injected")) == 1
    assert not hosts._machines.own.orders


@pytest.mark.usefixtures("far")
def test_a_prepared_world_waits_for_any_time_and_blames_the_host_that_others_failed_for(
    hosts,
):
    hosts._limits = watch.Limits(most_secs=-1.0, heartbeat_secs=-1.0)
    world = hosts._next = world_of(hosts, 2)
    for host in range(2):
        world.take(host, {"phase": watch.JOIN, "begun": 1})
    hosts.wait(0.0)
    assert not world.failures
    world.take(1, {"exit": -signal.SIGABRT})
    world.take(0, {"exit": -signal.SIGKILL})
    assert world.unfit() == {0: "killed by SIGKILL"}


def messages(one):
    found = []
    while not found:
        one.channel.poll(1)
        found = one.receive()
    return found


def end(far, near):
    far.send(exit=3)
    far.close()
    # What was sent before arrives.
    assert messages(near) == [{"exit": 3}]


@pytest.mark.parametrize(
    ("lose", "says"),
    [
        (end, "closed the connection"),
        (lambda far, _: far.channel.send_bytes(b"\xff"), "other than JSON"),
        (lambda _, near: setattr(near, "_lost_secs", -1.0), "stopped responding"),
    ],
)
def test_messages_go_both_ways_until_a_peer_ends_or_fails(monkeypatch, lose, says):
    accept, scarcity = link.socket.socket.accept, [OSError(errno.EMFILE, "Too many")]

    def scarce(listening):
        if scarcity:
            raise scarcity.pop()
        return accept(listening)

    # It has no descriptors left for a while.
    monkeypatch.setattr(link.socket.socket, "accept", scarce)
    with contextlib.closing(link.Listener("127.0.0.1", 600)) as listener:
        with pytest.raises(link.LinkLostError):
            link.connect(listener.address, "another key", 600)
        reached = link.socket.create_connection(listener.address.split(":"))
        with link._as_connection(reached, 600) as stranger:
            stranger.recv_bytes()
            stranger.send_bytes(bytes(20))
            assert stranger.recv_bytes() == b"#FAILURE#"
        assert listener.accepted.empty()
        far = link.connect(listener.address, listener.key, 600, machine=1)
        near = listener.accepted.get(timeout=600)
    assert not scarcity
    with contextlib.closing(far), contextlib.closing(near):
        assert near.hello == {"machine": 1}
        far.send(machine=1)
        near.send(start=[1, 0])
        near.send()
        assert messages(near) == [{"machine": 1}]
        assert messages(far) == [{"start": [1, 0]}]
        lose(far, near)
        with pytest.raises(link.LinkLostError, match=says):
            messages(near)


def test_a_peer_that_shows_the_key_too_late_is_not_linked():
    with contextlib.closing(link.Listener("127.0.0.1", 600)) as listener:
        pass
    with (
        link.socket.create_server(("127.0.0.1", 0)) as server,
        futures.ThreadPoolExecutor() as pool,
    ):
        address = "{}:{}".format(*server.getsockname())
        linked = pool.submit(link.connect, address, listener.key, 600)
        listener._admit(server.accept()[0])
        with contextlib.closing(linked.result()) as far:
            assert listener.accepted.empty()
            with pytest.raises(link.LinkLostError):
                messages(far)
