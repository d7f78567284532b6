"""Machines of a run that cannot reach each other over the network."""

import contextlib

import pytest

from elastic_ckpt.training import step_log
from tests import runs, shared_memory
from tests.multiprocess import networks, supervisors


@pytest.fixture
def partitioned(tmp_path, corpus):
    """Starts a run on some machines of a network, which is returned beside them."""

    def start(number, **settings):
        network = resources.enter_context(networks.Network(number))
        machines = supervisors.Supervisors(
            *(tmp_path, corpus, ram),
            machines=number,
            network=network,
            **{"elastic_machine_timeout_seconds": 10, **settings},
        )
        return network, resources.enter_context(machines)

    with (
        shared_memory.directory("partition") as ram,
        contextlib.ExitStack() as resources,
    ):
        yield start


@pytest.mark.thorough
@pytest.mark.slow(minutes=0.6)
def test_nothing_counts_that_a_leader_writes_while_it_is_cut_off(partitioned):
    # The other machine is a spare, so that no step of the leader needs the network.
    network, machines = partitioned(2, elastic_max_slice_count=1)
    machines.train_on([0])
    network.join([[0], [1]])
    machines.train_on([1], may=[0])
    code, output = machines.ended(0)
    assert code == 1, output
    assert output.count("has continued it as world 2, so this one stops") == 1, output
    machines.stop()
    assert machines.leaders()[-2:] == [0, 1]
    cut_off, counted = step_log.read(machines.run)
    assert cut_off.records[-1].step >= counted.start_step
    assert {
        record.attempt
        for record in runs.steps(machines.run)
        if record.step >= counted.start_step
    } == {counted.attempt}
    assert "PASSED" in runs.verb("audit", machines.run)
    assert "PASSED" in runs.verb("verify", machines.run)


@pytest.mark.slow(minutes=0.8)
def test_more_than_half_of_the_machines_go_on_and_half_of_them_stop(partitioned):
    network, machines = partitioned(4, elastic_machine_majority=True)
    machines.train_on([0, 1, 2, 3])
    network.join([[0], [1, 2, 3]])
    machines.train_on([1, 2, 3], may=[0])
    network.join([[0], [1], [2, 3]])
    for number in range(4):
        code, output = machines.ended(number, may=range(4))
        assert code == 1, output
        assert output.count("which is not a majority") == 1, output
    # A machine may be late at the start.
    worlds = machines.worlds()
    assert worlds[worlds.index([0, 1, 2, 3]) :] == [[0, 1, 2, 3], [1, 2, 3]]
    assert "PASSED" in runs.verb("audit", machines.run)
