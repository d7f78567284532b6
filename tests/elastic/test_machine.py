"""Supervisors of machines lead and follow by the claim in a shared directory."""

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
import types
from multiprocessing import connection

import pytest

from elastic_ckpt.core import errors, events, process
from elastic_ckpt.elastic import decision, leader_claim, machine, watch


def far(number):
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

    def end_hosts(self):
        pass


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
        self, number, lead, *, lost_secs=600.0, wait_secs=600.0, alone=False, **changes
    ):
        def emit(name, **fields):
            events.check(name, fields)
            self.events.append((number, name, fields))

        run = {
            "shared": str(self.directory),
            "injected": (),
            "limits": watch.Limits(most_secs=math.inf, heartbeat_secs=math.inf),
            "lost_secs": lost_secs,
            "kept": lambda: contextlib.nullcontext(emit),
            "configured": "the digest of a configuration",
            "policy": decision.Policy(wait_secs=wait_secs),
            "show": emit,
        }
        made = machine.MachineSupervisor(Station(number), lead, **run | changes)
        made._claims._owner = far(number)
        if alone:
            made._expected = {number}
        return made

    def start(self, number, lead, **changes):
        """Starts a supervisor, and returns it when it leads or follows."""
        made = self.supervisor(number, lead, **changes)

        def run():
            try:
                self.ends[number] = made.run()
            except (errors.RunError, SystemExit) as error:
                self.ends[number] = error

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)
        while not any(
            (n, name) == (number, "leader_found") for n, name, _ in self.events
        ):
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
        found = [(n, each) for n, of, each in self.events if of == "leader_found"]
        return [number for number, each in found if each["leader"] == number]


@pytest.fixture
def machines(tmp_path):
    return Machines(tmp_path)


def await_other(cluster, _):
    """Returns when the other machine follows."""
    while len(cluster._machines.connected) < 2:
        cluster.wait(0.01)


def end_at_once(*_):
    pass


@pytest.mark.parametrize("kind", [errors.RunError, errors.ReplacedError])
def test_the_other_machines_end_with_a_run_that_fails(machines, kind):
    def lead(*run):
        await_other(*run)
        raise kind("a host is gone")

    machines.start(0, lead)
    machines.start(1, await_other)
    machines.join()
    assert str(machines.ends[0]) == "a host is gone"
    assert str(machines.ends[1]) == "the run has failed: a host is gone"
    assert machines.leaders() == [0]


def test_a_run_that_fails_at_storage_ends_and_does_not_begin_again(machines):
    def lead(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        machines.supervisor(0, lead, alone=True).run()
    assert machines.leaders() == [0]


def test_a_machine_waits_for_the_storage_of_the_claims(machines, monkeypatch):
    first = machines.supervisor(0, end_at_once, alone=True)
    take, failures = first._claims.take, [OSError(5, "Input/output error")]

    def failing(*args, **options):
        if failures:
            raise failures.pop()
        return take(*args, **options)

    monkeypatch.setattr(first._claims, "take", failing)
    assert first.run() is False
    assert machines.leaders() == [0]


def test_the_next_leader_comes_at_once_when_nothing_listens_any_more(machines):
    def dies(cluster, emit):
        await_other(cluster, emit)
        # As the kernel does for a process that was killed.
        cluster._machines.close()
        first._claims._held = None
        raise SystemExit

    first = machines.start(0, dies)
    second = machines.start(1, end_at_once)
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


def test_a_leader_that_reaches_all_does_not_give_way(machines):
    def lead(cluster, emit):
        await_other(cluster, emit)
        emit("waiting_for_slices", why="they are refused", within_secs=600.0)

    first = machines.start(0, lead)
    machines.start(1, await_other)
    machines.join()
    assert first._gives_way_secs == math.inf


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
    said = str(refused.value)
    assert f"machine 0, which leads the run, at {address}" in said
    assert "Connection refused" in said
    claim = machines.directory / leader_claim.DIRECTORY / "1.json"
    assert f"The leader still renews its claim, {claim}" in said
    assert "let the machines reach each other on all ports" in said


def test_a_machine_that_the_leader_refuses_ends_and_the_run_goes_on(machines):
    machines.start(0, machines.lead_on)
    machines.start(1, await_other)
    for number, changes, says in (
        (0, {}, "machine 0 already has a supervisor"),
        (1, {}, "machine 1 already has a supervisor"),
        (
            1,
            {"configured": "another"},
            "1 has a different configuration from machine 0",
        ),
    ):
        again = machines.supervisor(number, None, wait_secs=0.0, **changes)
        again._claims._owner = far(7)
        with pytest.raises(errors.RunError, match=says):
            again.run()
    machines.join()
    assert machines.ends == {0: False, 1: False}
