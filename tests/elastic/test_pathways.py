"""A cluster of one controller; `test_cluster_contract` has the cases of any cluster."""

import gc

import jax
import numpy as np
import pytest

from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import decision, pathways, simulated_slices
from elastic_ckpt.elastic.cluster import Assignment
from elastic_ckpt.elastic.failures import WorldLostError


class Cluster(pathways.Pathways):
    """Four simulated slices of two devices, and what is reported of them."""

    def __init__(self):
        self.events = []
        self.simulated = simulated_slices.SimulatedSlices(4)
        super().__init__(self.simulated, emit=self.emit)

    def emit(self, name, **fields):
        events.check(name, fields)
        self.events.append((name, fields))

    def train(self, train, *slices):
        work = decision.Train(slices=slices, spares=(), rows=0, accumulated=1)
        return self.run_world(
            train,
            Assignment(number=1, work=work),
            emit=self.emit,
            has_changed=lambda: False,
        )


@pytest.fixture
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


def test_a_world_has_the_devices_of_its_slices(cluster):
    def train(world):
        devices = jax.devices()
        mine = [*devices[:2], *devices[4:]]
        assert list(world.mesh.devices.flat) == mine
        assert world.mesh.shape == {"slice": 3, "fsdp": 2}
        assert (world.topology.slices, world.topology.devices) == (3, 6)

    assert cluster.train(train, 0, 2, 3)


def test_what_is_not_placed_is_on_a_slice_of_the_world(cluster):
    def train(world):
        (device,) = jax.numpy.zeros(3).devices()
        assert device in world.mesh.devices

    assert cluster.train(train, 2, 3)


def test_the_arrays_of_a_lost_world_are_released(cluster):
    shapes = []

    def live():
        gc.collect()
        return [array.shape for array in jax.live_arrays() if array.shape == (7, 77)]

    def train(world):
        state = jax.device_put(np.zeros((7, 77)), world.mesh.devices.flat[-1])
        shapes.extend(live())
        cluster.simulated.lose(3)
        np.asarray(state)

    # A user may keep the error, or a log of it.
    with pytest.raises(WorldLostError, match="DATA_LOSS") as kept:
        cluster.train(train, 0, 1, 2, 3)
    assert shapes == [(7, 77)]
    assert live() == []
    assert kept.value.__context__ is None


def test_an_error_of_a_slice_that_is_there_again_is_the_loss_of_a_world(cluster):
    def train(world):
        del world
        try:
            raise jax.errors.JaxRuntimeError("DATA_LOSS: the slice was restarted")
        except jax.errors.JaxRuntimeError as error:
            raise errors.CheckpointError("a step cannot be read") from error

    with pytest.raises(WorldLostError):
        cluster.train(train, 0, 1, 2, 3)
    assert not [name for name, _ in cluster.events if name == "slice_lost"]


def test_an_error_of_ours_has_its_own_message(cluster):
    def train(world):
        del world
        raise errors.ConfigError("no such key")

    with pytest.raises(errors.RunError, match=r"^no such key$"):
        cluster.train(train, 0, 1)


def test_slices_beside_a_world_are_lost_and_come_back(cluster):
    def train(world):
        del world
        for change, there in (
            (lambda: cluster.simulated.lose(3), {0, 1, 2}),
            (lambda: cluster.simulated.give_back(3), {0, 1, 2, 3}),
        ):
            change()
            assert set(cluster.slices(frozenset({0, 1})).present_secs) == there

    assert cluster.train(train, 0, 1)
    lost = {"slice": 3, "why": "it does not answer"}
    assert cluster.events[1:] == [
        ("slice_lost", lost),
        ("slice_returned", {"slice": 3}),
    ]


def test_a_world_that_is_to_end_is_left_before_its_first_step(cluster):
    left = []

    def train(world):
        left.append((world.should_stop_early(4), world.will_resume()))

    over = cluster.run_world(
        train,
        Assignment(
            number=1,
            work=decision.Train(slices=(0, 1), spares=(), rows=0, accumulated=1),
        ),
        emit=cluster.emit,
        has_changed=lambda: True,
    )
    assert left == [(True, True)]
    assert not over
    assert ("world_left", {"step": 4}) in cluster.events
