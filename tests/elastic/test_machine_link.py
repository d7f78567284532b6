"""Supervisors exchange messages and hosts over a link that needs the key."""

import signal
import threading
import time

import pytest

from elastic_ckpt.core import codec, process
from elastic_ckpt.elastic import cluster, decision, faults
from elastic_ckpt.elastic.machines import machine_link, remote_machine
from elastic_ckpt.elastic.member import Member
from elastic_ckpt.elastic.slice_check import Checked
from elastic_ckpt.tiers.persistent import claims

WORK = decision.Train(slices=(0, 2), spares=(1,), rows=24, accumulated=3)
CLAIMANT = claims.Claimant(owner=process.this())
MEMBER = Member(address="127.0.0.1:1", num_hosts=2, host=1)


class Linked:
    """Both ends of a link: a machine as its leader sees it, and the raw other end."""

    def __init__(self, lost_secs=600):
        self.listener = machine_link.Listener("127.0.0.1", lost_secs)
        accepting = threading.Thread(target=self._accept)
        accepting.start()
        self.far = machine_link.connect(
            self.listener.address, self.listener.key, lost_secs
        )
        accepting.join()
        self.machine = remote_machine.RemoteMachine(1, self.near, lost_secs=lost_secs)
        self._serving = threading.Thread(target=self.machine.serve)
        self._serving.start()

    def _accept(self):
        while (accepted := self.listener.accept()) is None:
            time.sleep(0.01)
        self.near = self.listener.authenticated(accepted)

    def start(self):
        assignment = cluster.Assignment(number=4, work=WORK, claimant=CLAIMANT)
        host = self.machine.start(assignment, MEMBER, "/run/logs/world-1/host-1.log")
        return host, self.far.receive()

    def close(self):
        self.far.cut()
        self._serving.join()
        self.listener.close()


@pytest.fixture
def linked():
    linked = Linked()
    yield linked
    linked.close()


def test_a_connection_without_the_key_is_refused():
    listener = machine_link.Listener("127.0.0.1", 600)
    refused = []

    def accept():
        while (accepted := listener.accept()) is None:
            time.sleep(0.01)
        with pytest.raises(machine_link.LinkLostError):
            listener.authenticated(accepted)
        refused.append(True)

    accepting = threading.Thread(target=accept)
    accepting.start()
    with pytest.raises(machine_link.LinkLostError):
        machine_link.connect(listener.address, "another key", 600)
    accepting.join()
    listener.close()
    assert refused


def test_a_host_is_started_and_its_messages_and_its_end_arrive(linked):
    host, order = linked.start()
    sent = cluster.Assignment(number=4, work=WORK, claimant=CLAIMANT)
    assert codec.decode(cluster.Assignment, order["assignment"]) == sent
    assert codec.decode(Member, order["member"]) == MEMBER
    # Only names, of files in the directory that the other machine has configured.
    assert order["log"] == ["world-1", "host-1.log"]
    number = order["start"]
    linked.far.send(host=number, message='{"heartbeat": true}')
    assert host.channel.recv_bytes() == b'{"heartbeat": true}'
    host.tell(b"leave")
    assert linked.far.receive() == {"tell": number, "message": "leave"}
    host.send_signal(signal.SIGTERM)
    assert linked.far.receive() == {"signal": number, "number": signal.SIGTERM}
    linked.far.send(host=number, exit=3)
    with pytest.raises(EOFError):
        host.channel.recv_bytes()
    assert host.wait() == 3


def test_hosts_of_a_lost_machine_count_as_killed(linked):
    host, _ = linked.start()
    linked.far.cut()
    with pytest.raises(EOFError):
        host.channel.recv_bytes()
    assert host.wait() == -signal.SIGKILL
    assert linked.machine.is_lost
    late = linked.machine.start(
        cluster.Assignment(number=5, work=WORK), MEMBER, "/run/logs/w/host-1.log"
    )
    assert late.wait() == -signal.SIGKILL


def test_a_machine_that_does_not_answer_is_lost():
    linked = Linked(lost_secs=0.2)
    host, _ = linked.start()
    assert host.wait() == -signal.SIGKILL
    linked.close()
    assert linked.machine.is_lost


def test_a_slice_of_another_machine_is_unsound_until_it_has_passed_its_check(linked):
    linked.machine.begin(1)
    assert linked.far.receive() == {"check": 1}
    for problem in ("its device 0 computed 7", None):
        assert linked.machine.unsound == {1}
        linked.far.send(checked=1, problem=problem)
        results = []
        while not results:
            results = linked.machine.poll()
        assert results == [Checked(slice=1, problem=problem)]
    assert not linked.machine.unsound


def test_a_fault_of_a_slice_happens_on_its_machine(linked):
    linked.machine.begin(1)
    linked.machine.inject(faults.Kind.KILL_SLICE, 1)
    assert linked.far.receive() == {"check": 1}
    assert linked.far.receive() == {"fault": "kill_slice", "slice": 1}
    assert not linked.machine.unsound


def test_a_port_is_reserved_on_the_other_machine(linked):
    threading.Thread(
        target=lambda: (
            linked.far.send(reserved="127.0.0.2:77") if linked.far.receive() else None
        )
    ).start()
    reserved = linked.machine.reserve()
    assert reserved.address == "127.0.0.2:77"
    reserved.close()
    assert linked.far.receive() == {"release": "127.0.0.2:77"}


def test_an_address_at_which_nothing_listens_refuses():
    listener = machine_link.Listener("127.0.0.1", 600)
    listener.close()
    with pytest.raises(machine_link.LinkLostError) as lost:
        machine_link.connect(listener.address, listener.key, 600)
    assert isinstance(lost.value.__cause__, ConnectionRefusedError)
