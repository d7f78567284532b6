"""Where hosts are: their slices, their meshes, and their addresses."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.core import addresses, errors, topology


def test_whole_hosts_make_a_slice_or_a_host_simulates_whole_slices():
    for hosts, slices, devices in ((4, 2, 8), (2, 2, 2), (1, 2, 2), (1, 1, 1)):
        topology.Topology(hosts=hosts, slices=slices, devices=devices).check()
    for hosts, slices, devices in ((3, 2, 6), (1, 2, 1), (2, 4, 2)):
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
    slices = topology.slices_of(mesh)
    assert [slices[device] for device in jax.devices()] == ["0"] * 4 + ["1"] * 4
    turned = jax.sharding.Mesh(mesh.devices.T, ("fsdp", "slice"))
    assert topology.slices_of(turned) == slices
    flat = jax.sharding.Mesh(mesh.devices.reshape(-1), ("device",))
    assert set(topology.slices_of(flat).values()) == {"0"}


def test_placing_keeps_the_values_and_moves_nothing_that_lies_right():
    mesh = topology.mesh_of(topology.present(2))
    sharding = topology.batch_sharding(mesh)
    array = jax.device_put(np.arange(8), sharding)
    assert topology.place(array, sharding) is array
    reversed_mesh = jax.sharding.Mesh(mesh.devices[::-1, ::-1], mesh.axis_names)
    target = NamedSharding(reversed_mesh, PartitionSpec(("slice", "fsdp")))
    placed = topology.place(array, target)
    np.testing.assert_array_equal(placed, np.arange(8))
    assert placed.sharding == target


def test_the_address_of_a_host_is_the_one_that_reaches_the_coordinator(monkeypatch):
    monkeypatch.delenv("POD_IP", raising=False)

    def reach(coordinator, routes=None):
        state = types.SimpleNamespace(coordinator_address=coordinator)
        with monkeypatch.context() as patch:
            patch.setattr(addresses.distributed, "global_state", state)
            if routes is not None:
                patch.setattr(addresses, "toward", routes.__getitem__)
            return addresses.of_this_host()

    assert reach(None) == "127.0.0.1"
    assert reach("127.0.0.1:8080") == "127.0.0.1"
    assert reach("localhost:8080") in ("127.0.0.1", "::1")
    assert reach("10.0.0.1:8080", {"10.0.0.1": "10.0.0.7"}) == "10.0.0.7"
    assert reach("[fd00::1]:8080", {"fd00::1": "fd00::7"}) == "fd00::7"
    # A name that this machine alone takes for loopback is not announced.
    routes = {"head": "127.0.1.1", "192.0.2.1": "10.0.0.7"}
    assert reach("head:8080", routes) == "10.0.0.7"
    monkeypatch.setenv("POD_IP", "10.1.0.7")
    assert reach("10.0.0.1:8080") == addresses.of_the_head() == "10.1.0.7"
