"""Supervisors of machines lead and follow by the claim in a shared directory."""

import contextlib
import dataclasses
import socket
import threading
import time
import types

import pytest

from elastic_ckpt.core import errors, events, process
from elastic_ckpt.elastic import machine_supervisor, processes, termination
from elastic_ckpt.elastic.machines import leader_claim, places, slice_machines


def far(number):
    """A process of another machine, which this one cannot tell to be alive."""
    return dataclasses.replace(process.this(), host=f"m{number}", boot_id=f"b{number}")


class NoSignal:
    """No signal reaches a supervisor in a thread."""

    def __init__(self):
        self._reader, self._writer = socket.socketpair()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._reader.close()
        self._writer.close()

    def fileno(self):
        return self._reader.fileno()


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
        self._threads = []
        self._taken = contextlib.ExitStack()

    def supervisor(self, number, lead, **changes):
        slices = types.SimpleNamespace(
            numbers=(number,),
            interface="127.0.0.1",
            agents=[f"http://m{number}"],
            forgotten=[],
            checks=types.SimpleNamespace(poll=list),
            limits=types.SimpleNamespace(grace_secs=600),
        )
        slices.forget = slices.forgotten.extend

        def emit(name, **fields):
            events.check(name, fields)
            self.events.append((number, name, fields))

        of_machine = {
            "place": places.place(
                *(2, number), slices=2, interface="127.0.0.1", environment={}
            ),
            "slices": slices,
            "shared": str(self.directory),
            "injected": (),
            "lost_secs": 600.0,
        }
        of_machine |= {name: changes.pop(name) for name in {"lost_secs"} & {*changes}}
        run = {
            "machine": processes.OfMachine(**of_machine),
            "train": print,
            "lead": lead,
            "kept": lambda: contextlib.nullcontext(emit),
            "configured": "the digest of a configuration",
            "min_slices": 1,
            "wait_secs": 600.0,
        }
        made = machine_supervisor.MachineSupervisor(
            machine_supervisor.Run(**run | changes), emit
        )
        made._claims._owner = far(number)
        return made

    def start(self, number, lead, **changes):
        """Starts a supervisor, and returns it."""
        made = self.supervisor(number, lead, **changes)

        def run():
            try:
                self.ends[number] = made.run()
            except errors.RunError as error:
                self.ends[number] = error

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)
        return made

    def taken(self, supervisor):
        """The machines that a supervisor leads from now on, until the test ends."""
        others = slice_machines.SliceMachines(
            supervisor._slices,
            supervisor._claims,
            configured=supervisor._run.configured,
        )
        self._taken.callback(others.close)
        supervisor._claims.look()
        assert others.take_lead()
        # A thread renews it, also where a test has the supervisor forget it.
        self._taken.callback(supervisor._claims._held.give_back)
        return others

    def join(self):
        for thread in self._threads:
            thread.join()

    def close(self):
        self._taken.close()

    def leaders(self):
        """The machines that have led, in turn."""
        found = [(n, each) for n, of, each in self.events if of == "leader_found"]
        return [number for number, each in found if each["leader"] == number]

    def await_event(self, number, name):
        while not any((n, each) == (number, name) for n, each, _ in self.events):
            time.sleep(0.01)


@pytest.fixture
def machines(tmp_path, monkeypatch):
    # Only the main thread receives signals.
    monkeypatch.setattr(termination, "Notice", NoSignal)
    with contextlib.closing(Machines(tmp_path)) as machines:
        yield machines


def await_other(cluster, emit=None):
    """Returns when the other machine follows."""
    del emit
    while not cluster._machines.others():
        cluster._machines.poll()
        time.sleep(0.01)


def raising(error):
    def lead(cluster, emit):
        await_other(cluster, emit)
        raise error

    return lead


@pytest.mark.parametrize("kind", [errors.RunError, errors.ReplacedError])
def test_the_other_machines_end_with_a_run_that_fails(machines, kind):
    machines.start(0, raising(kind("a host is gone")))
    machines.await_event(0, "leader_found")
    machines.start(1, await_other)
    machines.join()
    assert str(machines.ends[0]) == "a host is gone"
    assert str(machines.ends[1]) == "the run has failed: a host is gone"
    assert machines.leaders() == [0]


def test_a_leader_that_stood_still_follows_the_one_that_has_its_claim(machines):
    # On a slow machine the claim may change hands again: each does the same.
    stale = machines.start(0, await_other, lost_secs=4.0)
    machines.await_event(0, "leader_found")
    second = machines.supervisor(1, await_other)
    second._claims.look()
    second._claims.note_end(second._claims.leader().term, "it has ended")
    # As `start` does.
    second.run()
    machines.join()
    assert machines.ends[0] is False
    assert machines.leaders()[:2] == [0, 1]
    assert ("machine", 0) in machines.events[-1][2].items()
    assert not stale._claims.has_lead


def test_the_next_leader_comes_at_once_when_nothing_listens_any_more(machines):
    ends = threading.Event()

    def lead(cluster, emit):
        await_other(cluster, emit)
        while not ends.is_set():
            time.sleep(0.01)
        # As the kernel does for a process that was killed.
        cluster._machines.close()
        first._claims._held = None
        raise SystemExit

    first = machines.supervisor(0, lead)
    others = machines.taken(first)
    leading = threading.Thread(target=_dies, args=(first, others))
    leading.start()
    second = machines.start(1, lambda *_: None)
    machines.await_event(1, "leader_found")
    ends.set()
    leading.join()
    machines.join()
    assert machines.ends == {1: False}
    assert machines.leaders() == [0, 1]
    # The lost machine's agents are not asked any more.
    assert second._slices.forgotten == ["http://m0"]


def _dies(supervisor, others):
    with contextlib.suppress(SystemExit):
        supervisor._lead(others, None)


def test_a_leader_that_cannot_be_reached_is_named_with_its_claim(machines):
    first = machines.supervisor(0, None)
    others = machines.taken(first)
    others.close()
    second = machines.supervisor(1, None, wait_secs=0.0)
    with pytest.raises(errors.RunError) as refused:
        second.run()
    leader = second._claims.leader()
    said = str(refused.value)
    assert f"machine 0, which leads the run, at {leader.address}" in said
    assert "Connection refused" in said
    claim = machines.directory / leader_claim.DIRECTORY / "1.json"
    assert f"Its claim is {claim}, and is renewed" in said
    assert "let the machines reach each other at all ports" in said


@pytest.mark.parametrize("number", [0, 1])
def test_a_second_start_of_a_machine_that_is_there_is_refused(machines, number):
    leads = threading.Event()

    def lead(cluster, emit):
        await_other(cluster, emit)
        while not leads.is_set():
            cluster._machines.poll()
            time.sleep(0.01)

    machines.start(0, lead)
    machines.await_event(0, "leader_found")
    machines.start(1, await_other)
    machines.await_event(1, "leader_found")
    again = machines.supervisor(number, None, wait_secs=0.0)
    again._claims._owner = far(7)
    with pytest.raises(
        errors.RunError, match=f"another supervisor of machine {number} is there"
    ):
        again.run()
    leads.set()
    machines.join()
    assert machines.ends == {0: False, 1: False}


def test_a_machine_with_another_configuration_is_refused_and_the_run_goes_on(machines):
    machines.start(0, await_other)
    machines.await_event(0, "leader_found")
    other = machines.supervisor(1, None, configured="the digest of another one")
    with pytest.raises(
        errors.RunError, match=r"machine 1 has another configuration than machine 0"
    ):
        other.run()
    machines.start(1, await_other)
    machines.join()
    assert machines.ends == {0: False, 1: False}
