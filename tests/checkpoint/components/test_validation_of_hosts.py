"""Copies on several hosts, which are processes with two devices each."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt.core import topology
from elastic_ckpt.elastic import multicontroller, supervisor
from elastic_ckpt.training import schema
from tests.checkpoint.components.flipped import flipped

HOSTS = 3
LEVELS = ("quick", "tensor", "full")


def trees(host):
    """By case, a tree of which hosts may hold different values."""
    devices = np.array(jax.devices()).reshape(HOSTS, 2)
    mesh = Mesh(devices, ("slice", "fsdp"))

    def placed(values, *spec):
        return jax.make_array_from_callback(
            values.shape,
            NamedSharding(mesh, PartitionSpec(*spec)),
            lambda index: values[index],
        )

    state = {
        "w": placed(np.arange(12, dtype=np.float32).reshape(4, 3)),
        "mu": placed(np.arange(24, dtype=np.float32).reshape(8, 3), "fsdp"),
        "own": jax.device_put(np.ones(3, np.float32), jax.local_devices()[1]),
        "epoch": 3,
        "names": np.array([1.5, 2.5]),
    }
    own = np.ones(3, np.float32) + (host == 0)
    return {
        "clean": state,
        "replica": state | {"w": flipped(state["w"], devices[1, 0], 30, element=7)},
        "shard": state | {"mu": flipped(state["mu"], devices[2, 1], 2, element=3)},
        "value": state | {"epoch": 3 + (host == 1)},
        "array": state | {"names": np.array([1.5, 2.5 + (host == 2)])},
        "own": state | {"own": jax.device_put(own, jax.local_devices()[1])},
        "structure": state | ({"more": 1} if host == 2 else {}),
    }


def validate(place, emit):
    multicontroller.configure(schema.WorldSection(devices_per_host=2))
    with multicontroller.joined(place):
        host = topology.this_host()
        for case, tree in trees(host).items():
            for level in LEVELS:
                findings = ec.components.validate(tree, level=level, timeout_secs=300)
                seen = [[f.leaf, f.box, f.hosts, len(f.devices)] for f in findings]
                emit("degraded", tier=case, cause=level, step=host, why=str(seen))


@pytest.mark.slow
def test_all_hosts_find_the_leaf_and_the_host_that_differ(tmp_path):
    reports = {}

    def record(_, *, tier, cause, step, why):
        reports.setdefault((tier, cause), {})[step] = why

    supervisor.HostProcesses(
        functools.partial(validate),
        num_hosts=HOSTS,
        log_directory=tmp_path / "logs",
        emit=record,
    ).run()
    expected = {
        "clean": [],
        "replica": [["w", "[0:4, 0:3]", (1,), 1]],
        "shard": [["mu", "[4:8, 0:3]", (2,), 1]],
        "value": [["epoch", "", (1,), 0]],
        "array": [["names", "", (2,), 0]],
        "own": [["own", "[0:3]", (0,), 1]],
        "structure": [["more", "", (2,), 0]],
    }
    for case, findings in expected.items():
        for level in LEVELS:
            of_hosts = reports[case, level]
            assert of_hosts == dict.fromkeys(range(HOSTS), str(findings)), case
