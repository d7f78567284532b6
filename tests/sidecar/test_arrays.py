"""Leaves are moved in groups, whose bytes pass through a host's memory at a time."""

import jax
import numpy as np
import pytest
from elastic_ckpt_sidecar import arrays
from jax.sharding import NamedSharding, PartitionSpec


def hosts(num_hosts):
    devices = np.array(jax.devices()).reshape(num_hosts, -1)
    return [
        arrays.HostDevices(accelerators=tuple(each), cpus=tuple(each))
        for each in devices
    ]


@pytest.mark.parametrize(
    ("group_bytes", "expected"),
    [
        (2**20, [["a", "b", "c", "d"], ["z"]]),
        # A device has 64 bytes of each array that is sharded, a host 128.
        (256, [["a", "b"], ["c"], ["d"], ["z"]]),
        (1, [["a"], ["b"], ["c"], ["d"], ["z"]]),
    ],
)
def test_a_group_has_no_more_bytes_on_a_host_unless_a_leaf_has(group_bytes, expected):
    mesh = jax.make_mesh((8,), ("x",))

    def array(*spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.device_put(np.zeros((8, 16), np.float32), sharding)

    tree = {"a": array("x"), "b": array("x"), "c": array(), "d": array("x"), "z": 3}
    made = arrays.HeadArrays(hosts(4), group_bytes=group_bytes)
    groups, values = made.to_save(tree)
    assert [[leaf.path for leaf in group.leaves] for group in groups] == expected
    assert [len(each) for each in values] == [len(each) for each in expected]
