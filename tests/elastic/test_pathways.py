"""A cluster of one controller; `test_cluster_contract` has the cases of any cluster."""

import gc
import importlib
import os
import signal
import sys
import time

import jax
import numpy as np
import pathwaysutils
import pytest
from pathwaysutils.test import mock_fault_injection

from elastic_ckpt.core import errors, topology
from elastic_ckpt.elastic import decision, pathways, world
from elastic_ckpt.elastic.cluster import Assignment
from elastic_ckpt.elastic.failures import WorldLostError
from tests import runs
from tests.recorded_events import RecordedEvents


class Cluster(pathways.Pathways):
    """Four simulated slices of two devices, and what is reported of them."""

    def __init__(self):
        self.emit = RecordedEvents()
        self.named = self.emit.named
        self.simulated = pathways.SimulatedSlices(4)
        super().__init__(self.simulated, emit=self.emit)

    def train(self, train, *slices, has_changed=lambda: None):
        work = decision.Train(slices=slices, spares=(), rows=0, accumulated=1)
        assignment = Assignment(number=1, work=work)
        return self.run_world(
            train, assignment, emit=self.emit, has_changed=has_changed
        )


@pytest.fixture
def cluster():
    with Cluster() as cluster:
        yield cluster


def test_a_world_has_the_devices_of_its_slices_whatever_becomes_of_the_others(cluster):
    def train(world):
        devices = jax.devices()
        assert list(world.mesh.devices.flat) == devices[4:]
        assert world.mesh.shape == {"slice": 2, "fsdp": 2}
        assert (world.topology.slices, world.topology.devices) == (2, 4)
        # Where arrays are placed.
        (device,) = jax.numpy.zeros(3).devices()
        assert device in world.mesh.devices
        for change, there in (
            (cluster.simulated.lose, {1, 2, 3}),
            (cluster.simulated.rejoin, {0, 1, 2, 3}),
        ):
            change(0)
            assert set(cluster.slices(frozenset({2, 3})).alive_secs) == there

    assert cluster.train(train, 2, 3)
    assert cluster.named("slice_lost") == [{"slice": 0, "why": "it does not answer"}]
    assert cluster.named("slice_returned") == [{"slice": 0}]


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


def test_an_error_is_of_the_run_unless_a_slice_that_is_there_again_caused_it(cluster):
    def raising(error, cause=None):
        def train(_):
            raise error from cause

        return train

    with pytest.raises(errors.RunError, match=r"^no such key$"):
        cluster.train(raising(errors.ConfigError("no such key")), 0, 1)
    unreadable = errors.CheckpointError("a step cannot be read")
    restarted = jax.errors.JaxRuntimeError("DATA_LOSS: the slice was restarted")
    with pytest.raises(WorldLostError):
        cluster.train(raising(unreadable, restarted), 0, 1, 2, 3)
    assert not cluster.named("slice_lost")


def test_a_signal_while_a_world_is_left_for_another_one_ends_the_run(cluster):
    def train(world):
        assert world.leaving(1) is None
        assert world.leaving(2) == "resume"
        os.kill(os.getpid(), signal.SIGTERM)
        while cluster.emit.events[-1][0] != "stop_requested":
            time.sleep(0.01)
        world.emit("run_stopped", step=2, saved=True)

    decided = iter((None, decision.Wait(why="fewer slices", within_secs=1.0)))
    assert cluster.train(train, 0, 1, has_changed=lambda: next(decided))
    assert cluster.emit.events[-1] == ("run_stopped", {"step": 2, "saved": True})
    assert not cluster.named("world_left")


def state_on(num_slices):
    """A state on the last slices, of two devices each."""
    devices = jax.devices()[-2 * num_slices :]
    mesh = topology.mesh_of(topology.present(num_slices, devices), devices)
    sharding = jax.NamedSharding(mesh, jax.P("fsdp"))
    weights = jax.random.normal(jax.random.key(0), (6, 3), "float32")
    return {
        "weights": jax.device_put(weights, sharding),
        "step": jax.device_put(np.int32(7), topology.replicated(mesh)),
    }


def test_the_state_is_taken_by_another_world_that_wants_the_same():
    def taken(state, step, wanted):
        recorded, kept = RecordedEvents(), world.DeviceState()
        kept.put(7, state)
        found = kept.take(step, wanted, recorded)
        # It is kept no longer.
        assert kept.take(step, wanted, recorded) is None
        return found, recorded.events

    states = {number: state_on(number) for number in (3, 4)}
    for old, new in (states[3], states[4]), (states[4], states[3]):
        found, ((name, fields),) = taken(old, 7, new)
        assert (name, fields["step"], fields["device_bytes"]) == ("state_kept", 7, 76)
        for leaf, expected, like in zip(
            *map(jax.tree.leaves, (found, old, new)), strict=True
        ):
            assert leaf.sharding == like.sharding
            assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()
    wider = {**new, "weights": jax.ShapeDtypeStruct((6, 4), "float32")}
    for step, other in ((8, new), (7, {"step": new["step"]}), (7, wider)):
        assert taken(old, step, other) == (None, [])
    with mock_fault_injection.DeviceLossSimulator() as simulator:
        simulator.mark_device_lost(jax.devices()[-1])
        assert taken(old, 7, new) == (None, [])


def test_a_head_starts_by_a_proxy_or_says_what_does(corpus, tmp_path, monkeypatch):
    config = runs.write_config(tmp_path, corpus, enable_single_controller=True)
    output = runs.verb("train", config, code=errors.CONFIG_EXIT_CODE)
    assert "JAX_PLATFORMS does not contain `proxy`" in output
    assert "configs/deploy/base/pathways" in output
    calls = []
    monkeypatch.setattr(pathwaysutils, "is_pathways_backend_used", lambda: True)
    monkeypatch.setattr(pathwaysutils, "initialize", lambda: calls.append("initialize"))
    pathways.initialize()
    assert calls == ["initialize"]


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    monkeypatch.delitem(sys.modules, pathways.__name__)
    with pytest.raises(errors.ConfigError, match=r"'\.\[pathways\]'"):
        importlib.import_module(pathways.__name__)
