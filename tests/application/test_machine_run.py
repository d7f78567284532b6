"""The place of a machine among those of a run, and the end of its leader."""

import json
import threading
import time
import types

import pytest

from elastic_ckpt.application import machine_run
from elastic_ckpt.config import load
from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic.machines import follower, followers
from tests import runs
from tests.elastic.machines import test_several_machines


def place(directory, environment=None, **settings):
    values = {
        "hosts": 4,
        "slices": 4,
        "elastic_enabled": True,
        "elastic_machines": "10.0.0.1:9000; 10.0.0.2:9000",
        **settings,
    }
    path = runs.write_config(directory, str(directory / "corpus"), **values)
    return machine_run.place(load.load(path), environment or {})


def test_slices_are_dealt_to_the_machines_in_order(tmp_path):
    own = place(tmp_path, elastic_machine=1)
    assert (own.interface, own.slices) == ("10.0.0.2", range(2, 4))


def test_the_number_of_a_machine_is_that_of_its_launcher_unless_it_is_set(tmp_path):
    environment = {"NODE_RANK": "1", "SLURM_NODEID": "0"}
    assert place(tmp_path, environment).number == 1
    assert place(tmp_path, {"JOB_COMPLETION_INDEX": "1"}).number == 1
    assert place(tmp_path, environment, elastic_machine=0).number == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"elastic_machine": -1}, "the environment has none of NODE_RANK"),
        ({"elastic_machine": 2}, "elastic_machine=2 is not the number of one of the 2"),
        ({"elastic_machines": "10.0.0.1"}, "write it as host:port"),
        ({"elastic_machines": "a:1;a:1"}, "has an address twice"),
        ({"elastic_machines": "10.0.0.1:9000"}, "for two machines or more"),
        ({"enable_single_controller": True}, "for two machines or more"),
        ({"enable_checkpointing": False}, "needs enable_checkpointing=true"),
        ({"elastic_enabled": False}, "needs elastic_enabled=true"),
        ({"slices": 2, "hosts": 3}, "cannot be dealt evenly to 2 machines"),
    ],
)
def test_places_that_cannot_work_are_refused(tmp_path, settings, message):
    with pytest.raises(errors.ConfigError, match=message):
        place(tmp_path, **{"elastic_machine": 0, **settings})


def ended(directory, monkeypatch, error):
    """The end of the leader's run with an error, and what the other machine gets."""
    path = runs.write_config(directory, str(directory / "corpus"))
    values, slices, received = {}, types.SimpleNamespace(), []
    slices.numbers, slices.interface, slices.agents = (0,), "127.0.0.1", []

    def follow():
        listener = json.loads(values[followers.LISTENER])
        members = test_several_machines.Members(1, values)
        link = follower.connected(members, slices, listener, leader._configured)
        received.append(link.receive())
        link.cut()

    def run(_, others, emit):
        emit("leader_found", machine=0, leader=0)
        following = threading.Thread(target=follow)
        following.start()
        while not others.all():
            others.poll()
            time.sleep(0.01)
        try:
            raise error
        finally:
            resources.append(following)

    resources = []
    members = test_several_machines.Members(0, values)
    leader = machine_run._Machine(load.load(path), None, slices, members, events.nobody)
    monkeypatch.setattr(machine_run._Machine, "_run", run)
    with pytest.raises(type(error)):
        leader.lead()
    for each in resources:
        each.join()
    return received


def test_machines_follow_the_leader_that_has_replaced_theirs(tmp_path, monkeypatch):
    error = errors.ReplacedError("another start has continued it")
    assert ended(tmp_path, monkeypatch, error) == [{"replaced": True}]


def test_machines_end_with_a_run_that_fails(tmp_path, monkeypatch):
    (message,) = ended(tmp_path, monkeypatch, errors.RunError("a host is gone"))
    assert message["failure"] == "a host is gone"
