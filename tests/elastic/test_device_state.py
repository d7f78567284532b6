"""State that stays in device memory from one world to the next."""

import jax
import numpy as np
from pathwaysutils.test import mock_fault_injection

from elastic_ckpt.core import topology
from elastic_ckpt.elastic.device_state import DeviceState


def meshes():
    """The meshes of three slices of two devices, and of four."""
    devices = jax.devices()
    few = [*devices[:2], *devices[4:]]
    return (
        topology.mesh_of(topology.present(3, few), few),
        topology.mesh_of(topology.present(4)),
    )


def state_on(mesh):
    sharding = jax.NamedSharding(mesh, jax.P("fsdp"))
    weights = jax.random.normal(jax.random.key(0), (6, 3), "float32")
    return {
        "weights": jax.device_put(weights, sharding),
        "step": jax.device_put(np.int32(7), topology.replicated(mesh)),
    }


def abstract(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        state,
    )


def kept(state, step=7):
    events = []
    device_state = DeviceState(lambda name, **fields: events.append((name, fields)))
    device_state.put(step, state)
    return device_state, events


def test_the_state_is_the_same_under_the_sharding_of_another_world():
    before, after = map(state_on, meshes())
    for old, new in ((before, after), (after, before)):
        device_state, events = kept(old)
        taken = device_state.take(7, abstract(new))
        for name, leaf in taken.items():
            assert leaf.sharding == new[name].sharding
            assert np.asarray(leaf).tobytes() == np.asarray(old[name]).tobytes()
        ((name, fields),) = events
        assert (name, fields["step"], fields["device_bytes"]) == ("state_kept", 7, 76)
        # It is kept no longer.
        assert device_state.take(7, abstract(new)) is None


def test_a_state_of_another_step_or_model_is_not_taken():
    before, after = map(state_on, meshes())
    wider = {**abstract(after), "weights": jax.ShapeDtypeStruct((6, 4), "float32")}
    for step, wanted in (
        (8, abstract(after)),
        (7, {"weights": abstract(after)["weights"]}),
        (7, wider),
    ):
        device_state, events = kept(before)
        assert device_state.take(step, wanted) is None
        assert not events


def test_a_state_of_devices_that_are_lost_is_not_taken():
    before, after = map(state_on, meshes())
    device_state, events = kept(before)
    simulator = mock_fault_injection.DeviceLossSimulator()
    simulator.mark_device_lost(jax.devices()[4])
    with simulator:
        assert device_state.take(7, abstract(after)) is None
    assert not events
