"""Machines of a run that cannot reach each other over the network."""

import contextlib

import pytest

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


@pytest.mark.night
def test_the_machine_that_holds_the_claim_goes_on_and_the_other_one_comes_back(
    partitioned,
):
    network, machines = partitioned(2)
    machines.train_on([0, 1])
    leader = machines.leader()
    network.join([[0], [1]])
    machines.train_on([leader])
    network.join([[0, 1]])
    machines.train_on([0, 1])
    machines.stop()
    # The claim is renewed in storage, which both of them reach.
    assert machines.leaders() == [leader]
    assert "PASSED" in runs.verb("audit", machines.run)
    assert "PASSED" in runs.verb("verify", machines.run)


@pytest.mark.slow
def test_a_leader_that_is_cut_off_gives_way_if_its_slices_are_too_few(partitioned):
    network, machines = partitioned(3, elastic_min_slice_count=2)
    machines.train_on([0, 1, 2])
    leader = machines.leader()
    others = [number for number in range(3) if number != leader]
    network.join([[leader], others])
    machines.train_on(others)
    network.join([[0, 1, 2]])
    machines.train_on([0, 1, 2])
    machines.stop()
    first, *between, last = machines.leaders()
    assert first == leader
    assert last in others
    assert set(between) <= {*others, leader}
    assert "PASSED" in runs.verb("audit", machines.run)
    assert "PASSED" in runs.verb("verify", machines.run)
