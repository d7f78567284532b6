"""How many rounds of all hosts a save and a restore take, however large the state."""

import pathlib

import pytest

from elastic_ckpt.checkpoint.host.world import HostWorld
from tests import shared_memory
from tests.model import simulated_world


@pytest.fixture
def rounds(monkeypatch):
    """The rounds in which hosts of simulated worlds have answered."""
    made = []
    for kind in ("all", "first", "share", "check"):
        method = getattr(simulated_world.SimulatedHosts, kind)

        def call(*args, method=method, **kwargs):
            made.append((method.__name__, *args[1:2]))
            return method(*args, **kwargs)

        monkeypatch.setattr(simulated_world.SimulatedHosts, kind, call)
    return made


def test_a_save_takes_6_rounds_or_11_with_storage_and_a_restore_12(rounds):
    with (
        shared_memory.directory("rounds") as directory,
        simulated_world.Simulation(pathlib.Path(directory)) as sim,
    ):
        world = sim.open((0, 1), store_every=2)
        taken = []
        for step in (1, 2, 3):
            rounds.clear()
            parts = {"state": simulated_world.state_of(step)}
            assert world.save_checkpointables(step, parts)
            world.wait()
            taken.append(len(rounds))
        # The first claims the line.
        assert taken == [7, 11, 6]
        world.close()
        world = sim.open((2, 1), store_every=2)
        rounds.clear()
        world.load_checkpointables(None, {"state": simulated_world.abstract()})
        # What follows copies the step to its new hosts.
        assert rounds.index(("first", HostWorld.new_save)) == 11
