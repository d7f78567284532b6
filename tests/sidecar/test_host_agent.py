"""Tiers under a single controller: hosts keep and restore what the head only names."""

import pytest

from tests.multiprocess import tier_worlds
from tests.sidecar import simulated_hosts

LAYOUTS = pytest.mark.parametrize(
    "sharded", [True, False], ids=["sharded", "replicated"]
)


@pytest.fixture
def machines():
    with simulated_hosts.Machines() as found:
        yield found


def save(checkpointer, mesh, step, *, sharded=True):
    tier_worlds.save(checkpointer, mesh, steps=[step], sharded=sharded)


def restored_from(emitted):
    (event,) = (each for each in emitted if each["event"] == "restored_from")
    return event


@LAYOUTS
def test_four_hosts_save_and_any_number_restores(machines, sharded):
    with simulated_hosts.world(machines, 4) as (checkpointer, mesh, _):
        save(checkpointer, mesh, 3, sharded=sharded)
        save(checkpointer, mesh, 4, sharded=sharded)
    for num_hosts in (4, 2, 8, 1):
        with simulated_hosts.world(machines, num_hosts) as (checkpointer, mesh, heard):
            tier_worlds.restore(checkpointer, mesh, step=4, sharded=sharded)
            assert restored_from(heard)["persistent_bytes"] == 0
