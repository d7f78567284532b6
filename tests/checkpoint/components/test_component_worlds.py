"""Components of four real hosts, loaded by four, three and one under every pattern."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt.core import topology
from tests.checkpoint.components.test_component import rotated
from tests.checkpoint.components.test_validation import flipped
from tests.processes import tier_worlds

# By the number of hosts: the sizes of the axes `data` and `model`; how many states.
MESHES = {4: (2, 2), 3: (1, 3), 1: (1, 1)}
STATES = {
    "global": {4: 1, 3: 1, 1: 1},
    "replicated": {4: 1, 3: 1, 1: 1},
    "per_host": {4: 4, 3: 3, 1: 1},
    "per_node": {4: 2, 3: 2, 1: 1},
    "per_group": {4: 2, 3: 3, 1: 1},
}


def work(checkpointer, _, *, num_hosts):
    """Saves a step if there is none, and loads it in every way."""
    # One device of each host; hosts have the places of others.
    devices = sorted(jax.devices(), key=lambda each: (each.process_index, each.id))
    devices = np.array(devices[:: len(devices) // num_hosts][::-1])
    mesh = Mesh(devices.reshape(MESHES[num_hosts]), ("data", "model"))
    host, model = topology.this_host(), (~topology.this_host()) % mesh.shape["model"]
    own = {"per_host": host, "per_node": host // 2, "per_group": model}
    options = {pattern: {} for pattern in STATES}
    options["per_node"] = {"processes_per_node": 2}
    options["per_group"] = {"axis": "data", "mesh": mesh}

    def components(rule="error"):
        return {
            pattern: ec.components.Component(None, pattern, on_resize=rule, **more)
            for pattern, more in options.items()
        }

    saved, wanted, by_rule = components(), components(), components(rotated)
    for pattern, each in saved.items():
        each.state = [pattern, own.get(pattern, 0)]
    assert checkpointer.latest or checkpointer.save_checkpointables(1, saved)
    changed = [p for p, num in STATES.items() if num[num_hosts] != num[4]]
    summary = ec.components.load(checkpointer, wanted, strict=False)
    assert list(summary.failed) == changed
    ec.components.load(checkpointer, by_rule)
    for pattern, num in STATES.items():
        state, last = saved[pattern].state, num[4] - 1
        if pattern in changed:
            state = [pattern, last - own.get(pattern, 0) % num[4]]
        assert by_rule[pattern].state == state
        assert wanted[pattern].state == (None if pattern in changed else state)
    for tree, expected in trees(host) if num_hosts == 4 else ():
        for level in ("quick", "tensor", "full"):
            found = ec.components.validate(tree, level=level, timeout_secs=300)
            seen = [[f.leaf, f.box, f.hosts, len(f.devices)] for f in found]
            assert seen == expected, (level, expected)


def trees(host):
    """Trees of which hosts may hold different values, and the findings."""
    devices = np.array(jax.devices()).reshape(2, 2)
    whole = NamedSharding(Mesh(devices, ("slice", "fsdp")), PartitionSpec())

    def own(value):
        return jax.device_put(np.float32([1, value]), jax.local_devices()[0])

    w = jnp.zeros((4, 3), device=whole)
    mu = jnp.zeros((8, 3), device=whole.update(spec=PartitionSpec("fsdp")))
    state = {"w": w, "mu": mu, "own": own(1), "epoch": 3, "names": np.ones(2)}
    for changes, *finding in (
        ({},),
        ({"w": flipped(w, devices[1, 0], 254)}, "w", "[0:4, 0:3]", (2,), 1),
        ({"mu": flipped(mu, devices[1, 1], 98)}, "mu", "[4:8, 0:3]", (1, 3), 2),
        ({"epoch": 3 + (host == 1)}, "epoch", "", (1,), 0),
        ({"names": np.ones(2) + (host == 2)}, "names", "", (2,), 0),
        ({"own": own(1 + (host == 0))}, "own", "[0:2]", (0,), 1),
        ({"more": 1} if host == 2 else {}, "more", "", (2,), 0),
    ):
        yield state | changes, [finding] if finding else []


@pytest.mark.slow
def test_real_hosts_load_components_on_any_number_and_find_what_differs(tmp_path):
    directory = str(tmp_path / "steps")
    for num_hosts in (4, 3):
        tier_worlds.run(
            functools.partial(work, num_hosts=num_hosts),
            num_hosts=num_hosts,
            directories=[None] * num_hosts,
            logs=tmp_path / f"logs-{num_hosts}",
            persistent=directory,
        )
    # One host is this process.
    tiers = [ec.Persistent(directory, every=1)]
    with ec.Checkpointer(tiers, run="run") as checkpointer:
        work(checkpointer, None, num_hosts=1)
