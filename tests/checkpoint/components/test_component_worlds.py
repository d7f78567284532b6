"""Components of real hosts: each pattern on as many hosts as before, and on others.

A world of four hosts saves under every pattern, with a component in between that raises
on one host, and one that hangs. Other worlds load it, strictly and by a rule. One of
them compares copies that differ on one host.
"""

import functools
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt import frontend
from elastic_ckpt.checkpoint.components import loading
from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.checkpoint.components.rng import Rng
from elastic_ckpt.core import errors, topology
from elastic_ckpt.elastic import multicontroller, supervisor
from elastic_ckpt.tiers import choices
from elastic_ckpt.training import schema
from tests.checkpoint.components.flipped import flipped

# By the number of hosts, the sizes of the axes `data` and `model`.
MESHES = {4: (2, 2), 3: (1, 3), 1: (1, 1)}
PATTERNS = ("global", "replicated", "per_host", "per_node", "per_group")


def mesh_of(num_hosts):
    """A mesh of one device of each host; hosts have the places of others."""
    devices = np.array(sorted(jax.devices(), key=lambda d: (d.process_index, d.id)))
    devices = devices[:: len(devices) // num_hosts][::-1]
    return Mesh(devices.reshape(MESHES[num_hosts]), ("data", "model"))


def owner(pattern, mesh):
    """The place of this host's state among those of a pattern."""
    host = topology.this_host()
    hosts = np.vectorize(lambda device: device.process_index)(mesh.devices)
    ((_, model),) = np.argwhere(hosts == host)
    own = {"per_host": host, "per_node": host // 2, "per_group": int(model)}
    return own.get(pattern, 0)


def count(pattern, num_hosts):
    """How many states there are."""
    counts = {"per_host": num_hosts, "per_node": -(-num_hosts // 2)}
    return {**counts, "per_group": MESHES[num_hosts][1]}.get(pattern, 1)


def components(mesh, value=lambda _: None, rule="error"):
    """A component under each pattern; `value(pattern)` is its state."""
    more = {
        "per_node": {"processes_per_node": 2},
        "per_group": {"axis": "data", "mesh": mesh},
    }
    made = {
        pattern: Component(
            value(pattern), pattern, on_resize=rule, **more.get(pattern, {})
        )
        for pattern in PATTERNS
    }
    return {**made, "rng": Rng(7)}


class Failing:
    """An object that does not give its state."""

    def __init__(self, *, hangs):
        self._hangs = hangs

    def get_state(self):
        if not self._hangs:
            raise OSError("no such state")
        threading.Event().wait()

    def set_state(self, state):
        raise NotImplementedError


def save(checkpointer, mesh):
    """Saves steps; of those in which a component fails nothing is left."""
    parts = components(mesh, lambda pattern: {"v": [pattern, owner(pattern, mesh)]})
    parts["rng"].next()
    assert checkpointer.save_checkpointables(1, parts)
    for step, host, hangs in ((2, 1, False), (3, 2, True)):
        more = Component(0, "per_host")
        if topology.this_host() == host:
            more = Component(Failing(hangs=hangs), "per_host")
            more.save_timeout_secs = 1.0
        assert not checkpointer.save_checkpointables(step, {**parts, "more": more})
        assert checkpointer.latest.step == 1
    assert checkpointer.save_checkpointables(4, parts)
    assert [each.step for each in checkpointer.checkpoints] == [1, 4]


def rotated(states, new_count):
    """A rule: the last of the old states first."""
    return [states[-1 - number % len(states)] for number in range(new_count)]


def load(checkpointer, mesh):
    """Loads the step in every way, and compares with what is documented."""
    changed = [p for p in PATTERNS if count(p, mesh.size) != count(p, 4)]
    parts = components(mesh)
    if changed:
        with pytest.raises(errors.CheckpointError) as caught:
            loading.load(checkpointer, parts)
        for pattern in PATTERNS:
            refused = f"component '{pattern}': it was saved {pattern} with"
            assert (refused in str(caught.value)) == (pattern in changed)
            assert parts[pattern].state is None
    summary = loading.load(checkpointer, parts, strict=False)
    assert (summary.step, list(summary.failed)) == (4, changed)
    by_rule = components(mesh, rule=rotated)
    loading.load(checkpointer, by_rule)
    for pattern in PATTERNS:
        expected = owner(pattern, mesh)
        if pattern in changed:
            assert parts[pattern].state is None
            expected = count(pattern, 4) - 1 - expected % count(pattern, 4)
        else:
            assert parts[pattern].state == {"v": [pattern, expected]}
        assert by_rule[pattern].state == {"v": [pattern, expected]}
    assert parts["rng"].state["taken"] == 1
    assert parts["rng"].key == jax.random.key(7)


def trees(host):
    """By case, a tree of which hosts may hold different values."""
    devices = np.array(jax.devices()).reshape(3, 2)
    mesh = Mesh(devices, ("slice", "fsdp"))

    def placed(values, *spec):
        over = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(
            values.shape, over, lambda index: values[index]
        )

    def own(values):
        return jax.device_put(values, jax.local_devices()[1])

    ones = np.ones(3, np.float32)
    state = {
        "w": placed(np.arange(12, dtype=np.float32).reshape(4, 3)),
        "mu": placed(np.arange(24, dtype=np.float32).reshape(8, 3), "fsdp"),
        "own": own(ones),
        "epoch": 3,
        "names": np.array([1.5, 2.5]),
    }
    return {
        "clean": state,
        "replica": state | {"w": flipped(state["w"], devices[1, 0], 30, element=7)},
        "shard": state | {"mu": flipped(state["mu"], devices[2, 1], 2, element=3)},
        "value": state | {"epoch": 3 + (host == 1)},
        "array": state | {"names": np.array([1.5, 2.5 + (host == 2)])},
        "own": state | {"own": own(ones + (host == 0))},
        "structure": state | ({"more": 1} if host == 2 else {}),
    }


# By the case: leaf, box, hosts, and the number of devices.
FINDINGS = {
    "clean": [],
    "replica": [["w", "[0:4, 0:3]", (1,), 1]],
    "shard": [["mu", "[4:8, 0:3]", (2,), 1]],
    "value": [["epoch", "", (1,), 0]],
    "array": [["names", "", (2,), 0]],
    "own": [["own", "[0:3]", (0,), 1]],
    "structure": [["more", "", (2,), 0]],
}


def validate():
    """All hosts find the leaf and the host that differ."""
    for case, tree in trees(topology.this_host()).items():
        for level in ("quick", "tensor", "full"):
            findings = ec.components.validate(tree, level=level, timeout_secs=300)
            seen = [[f.leaf, f.box, f.hosts, len(f.devices)] for f in findings]
            assert seen == FINDINGS[case], (case, level)


def host(place, emit, *, directory, num_hosts):
    """A host that joins its world, and saves what is not there yet."""
    multicontroller.configure(schema.WorldSection(devices_per_host=2))
    with multicontroller.joined(place):
        work(directory, num_hosts)
        if num_hosts == 3:
            validate()
        emit("degraded", tier="", cause="", step=topology.this_host(), why="done")


def work(directory, num_hosts):
    with frontend.Checkpointer([choices.Persistent(directory, every=1)]) as opened:
        if opened.latest is None:
            save(opened, mesh_of(num_hosts))
        load(opened, mesh_of(num_hosts))


@pytest.mark.slow
def test_real_hosts_load_components_on_any_number_and_find_what_differs(tmp_path):
    directory = str(tmp_path / "steps")
    for num_hosts in (4, 3):
        done = []
        supervisor.HostProcesses(
            functools.partial(host, directory=directory, num_hosts=num_hosts),
            num_hosts=num_hosts,
            log_directory=tmp_path / f"logs-{num_hosts}",
            emit=lambda *_, done=done, **fields: done.append(fields["step"]),
        ).run()
        assert sorted(done) == list(range(num_hosts))
    # One host is this process.
    work(directory, 1)
