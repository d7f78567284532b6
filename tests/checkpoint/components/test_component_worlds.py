"""Components of real hosts: each pattern on as many hosts as before, and on others.

A world of four hosts saves under every pattern, with a component in between that raises
on one host, and one that hangs. Other worlds load it, strictly and by a rule.
"""

import functools
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint.components import loading
from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.checkpoint.components.rng import Rng
from elastic_ckpt.core import errors, topology
from elastic_ckpt.elastic import multicontroller, supervisor
from elastic_ckpt.tiers import choices
from elastic_ckpt.training import schema

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
            refused = f"component '{pattern}' was saved {pattern} with"
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


def host(place, emit, *, directory, num_hosts):
    """A host that joins its world, and saves what is not there yet."""
    del emit
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(place):
        work(directory, num_hosts)


def work(directory, num_hosts):
    with frontend.Checkpointer([choices.Persistent(directory, every=1)]) as opened:
        if opened.latest is None:
            save(opened, mesh_of(num_hosts))
        load(opened, mesh_of(num_hosts))


@pytest.mark.slow
def test_components_of_real_hosts_on_any_number_of_hosts(tmp_path):
    directory = str(tmp_path / "steps")
    for num_hosts in (4, 3):
        supervisor.HostProcesses(
            functools.partial(host, directory=directory, num_hosts=num_hosts),
            num_hosts=num_hosts,
            log_directory=tmp_path / f"logs-{num_hosts}",
            emit=lambda *_, **__: None,
        ).run()
    # One host is this process.
    work(directory, 1)
