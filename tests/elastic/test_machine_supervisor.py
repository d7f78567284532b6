"""The other machines of a run learn how it has ended at the one that leads."""

import contextlib
import json
import threading
import time
import types

import pytest

from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import machine_supervisor
from elastic_ckpt.elastic.machines import follower, followers
from tests.elastic.machines import test_several_machines

CONFIGURED = "the digest of a configuration"


def ended(error):
    """The end of the leader's run with an error, and what the other machine gets."""
    values, slices, received = {}, types.SimpleNamespace(), []
    slices.numbers, slices.interface, slices.agents = (0,), "127.0.0.1", []

    def follow():
        listener = json.loads(values[followers.LISTENER])
        members = test_several_machines.Members(1, values)
        link = follower.connected(members, slices, listener, CONFIGURED)
        received.append(link.receive())
        link.cut()

    members = test_several_machines.Members(0, values)
    following = threading.Thread(target=follow)

    def train(others, emit):
        emit("leader_found", machine=0, leader=0)
        following.start()
        while not others.all():
            others.poll()
            time.sleep(0.01)
        raise error

    run = machine_supervisor.Run(
        functions=follower.Functions(train=print, compile_ahead=print),
        lead=lambda *_: None,
        kept=lambda: contextlib.nullcontext(events.nobody),
        configured=CONFIGURED,
        min_slices=1,
        wait_secs=600,
        needs_majority=False,
    )
    leader = machine_supervisor.MachineSupervisor(run, slices, members, events.nobody)
    leader._train = train
    with pytest.raises(type(error)):
        leader.run()
    following.join()
    return received


def test_machines_follow_the_leader_that_has_replaced_theirs():
    error = errors.ReplacedError("another start has continued it")
    assert ended(error) == [{"replaced": True}]


def test_machines_end_with_a_run_that_fails():
    (message,) = ended(errors.RunError("a host is gone"))
    assert message["failure"] == "a host is gone"
