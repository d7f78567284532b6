import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.core import errors, topology


@pytest.mark.parametrize(
    ("hosts", "slices", "devices"),
    [(4, 2, 8), (2, 2, 2), (1, 2, 2), (1, 1, 1), (6, 3, 6)],
)
def test_whole_hosts_make_a_slice_or_a_host_simulates_whole_slices(
    hosts, slices, devices
):
    topology.Topology(hosts=hosts, slices=slices, devices=devices).check()


@pytest.mark.parametrize(
    ("hosts", "slices", "devices"), [(3, 2, 6), (1, 2, 1), (2, 4, 2)]
)
def test_a_world_that_does_not_divide_names_the_slices_that_do(hosts, slices, devices):
    world = topology.Topology(hosts=hosts, slices=slices, devices=devices)
    with pytest.raises(errors.ConfigError, match=r"set slices to one of \[1"):
        world.check()


def test_the_mesh_has_a_row_of_devices_for_each_slice():
    world = topology.present(2)
    mesh = topology.mesh_of(world)
    assert mesh.axis_names == ("slice", "fsdp")
    assert mesh.devices.shape == (2, 4)
    assert world == topology.Topology(hosts=1, slices=2, devices=8)
    assert list(mesh.devices.flat) == jax.devices()


def test_placing_moves_nothing_that_lies_right():
    mesh = topology.mesh_of(topology.present(2))
    sharding = topology.batch_sharding(mesh)
    array = jax.device_put(np.arange(8), sharding)
    assert topology.place(array, sharding) is array


def test_placing_on_another_order_of_devices_keeps_the_values():
    mesh = topology.mesh_of(topology.present(2))
    reversed_mesh = jax.sharding.Mesh(mesh.devices[::-1, ::-1], mesh.axis_names)
    array = jax.device_put(np.arange(8), topology.batch_sharding(mesh))
    target = NamedSharding(reversed_mesh, PartitionSpec(("slice", "fsdp")))
    placed = topology.place(array, target)
    np.testing.assert_array_equal(placed, np.arange(8))
    assert placed.sharding == target


def test_slices_are_those_of_the_mesh_if_it_has_them():
    mesh = topology.mesh_of(topology.present(2))
    slices = topology.slices_of(mesh)
    assert [slices[device] for device in jax.devices()] == ["0"] * 4 + ["1"] * 4
    turned = jax.sharding.Mesh(mesh.devices.T, ("fsdp", "slice"))
    assert topology.slices_of(turned) == slices
    flat = jax.sharding.Mesh(mesh.devices.reshape(-1), ("device",))
    assert set(topology.slices_of(flat).values()) == {"0"}
