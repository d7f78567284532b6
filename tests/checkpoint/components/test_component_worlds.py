"""Components of real hosts: each pattern on as many hosts as before, and on others.

One world of four hosts saves under every pattern, to our checkpointer and to Orbax's
own, with a component in between that raises on one host, and one that hangs. Worlds of
other sizes load it, strictly and not, with and without a rule.
"""

import functools
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint.components import loading
from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.checkpoint.components.rng import Rng
from elastic_ckpt.core import errors, topology
from elastic_ckpt.elastic import multicontroller, supervisor
from elastic_ckpt.tiers import choices
from elastic_ckpt.training import schema

SAVED_ON = 4
# By the number of hosts, the sizes of the axes `data` and `model`.
MESHES = {4: (2, 2), 2: (1, 2), 3: (1, 3), 1: (1, 1)}
PATTERNS = ("global", "replicated", "per_host", "per_node", "per_group")
STEP = 4
AXES = ("data", "model")


def mesh_of(num_hosts, *, renumbered):
    """A mesh of one device of each host; hosts may have the places of others."""
    devices = np.array(sorted(jax.devices(), key=lambda d: (d.process_index, d.id)))
    devices = devices[:: len(devices) // num_hosts]
    return Mesh(
        (devices[::-1] if renumbered else devices).reshape(MESHES[num_hosts]), AXES
    )


def place(mesh):
    """The coordinates of this host."""
    hosts = np.vectorize(lambda device: device.process_index)(mesh.devices)
    (at,) = np.argwhere(hosts == topology.this_host())
    return dict(zip(mesh.axis_names, map(int, at), strict=True))


def owner(pattern, mesh):
    """The place of this host's state among those of a pattern."""
    host = topology.this_host()
    own = {"per_host": host, "per_node": host // 2, "per_group": place(mesh)["model"]}
    return own.get(pattern, 0)


def count(pattern, num_hosts):
    """How many states there are."""
    counts = {
        "per_host": num_hosts,
        "per_node": -(-num_hosts // 2),
        "per_group": MESHES[num_hosts][1],
    }
    return counts.get(pattern, 1)


def components(mesh, value, rule="error"):
    """A component under each pattern; `value(pattern)` is its state."""
    node = Component(
        value("per_node"), "per_node", processes_per_node=2, on_resize=rule
    )
    group = Component(
        value("per_group"), "per_group", axis="data", mesh=mesh, on_resize=rule
    )
    return {
        "global": Component(value("global"), "global", on_resize=rule),
        "replicated": Component(value("replicated"), "replicated", on_resize=rule),
        "per_host": Component(value("per_host"), "per_host", on_resize=rule),
        "per_node": node,
        "per_group": group,
        "rng": Rng(7),
    }


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


def save(mesh, *, directory):
    """Saves steps; of those in which a component fails nothing is left."""
    parts = components(mesh, lambda pattern: {"v": [pattern, owner(pattern, mesh)]})
    parts["rng"].next()
    tiers = [choices.Persistent(f"{directory}/ours", every=1)]
    with frontend.Checkpointer(tiers) as ours:
        assert ours.save_checkpointables(1, parts)
        for step, host, hangs in ((2, 1, False), (3, 2, True)):
            more = Component(0, "per_host")
            if topology.this_host() == host:
                more = Component(Failing(hangs=hangs), "per_host")
                more.save_timeout_secs = 1.0
            assert not ours.save_checkpointables(step, {**parts, "more": more})
            assert ours.latest.step == 1
        assert ours.save_checkpointables(STEP, parts)
        assert [each.step for each in ours.checkpoints] == [1, STEP]
    with ocp.training.Checkpointer(f"{directory}/stock") as stock:
        stock.save_checkpointables(STEP, parts)


def _nothing(pattern):
    del pattern


def _ignore(name, **fields):
    del name, fields


def rotated(states, new_count):
    """A rule: the last of the old states first."""
    return [states[-1 - number % len(states)] for number in range(new_count)]


def load(mesh, *, directory):
    """Loads the step in every way, and compares with what is documented."""
    num_hosts = mesh.size
    changed = [
        pattern
        for pattern in PATTERNS
        if count(pattern, num_hosts) != count(pattern, SAVED_ON)
    ]
    tiers = [choices.Persistent(f"{directory}/ours", every=1)]
    with (
        frontend.Checkpointer(tiers) as ours,
        ocp.training.Checkpointer(f"{directory}/stock") as stock,
    ):
        for checkpointer in (ours, stock):
            _load_strictly(checkpointer, mesh, changed)
            _load_what_there_is(checkpointer, mesh, changed)
            _load_by_rule(checkpointer, mesh, changed)


def _load_strictly(checkpointer, mesh, changed):
    parts = components(mesh, _nothing)
    if not changed:
        summary = loading.load(checkpointer, parts)
        assert list(summary.loaded) == list(parts)
        _check(parts, mesh)
        return
    with pytest.raises(errors.CheckpointError) as caught:
        loading.load(checkpointer, parts)
    for pattern in PATTERNS:
        refused = f"component '{pattern}' was saved {pattern} with"
        assert (refused in str(caught.value)) == (pattern in changed)
    assert "choose on_resize=" in str(caught.value)
    assert all(parts[pattern].state is None for pattern in PATTERNS)


def _load_what_there_is(checkpointer, mesh, changed):
    parts = components(mesh, _nothing)
    parts["new"] = Component("as it was", "per_host", required=False)
    summary = loading.load(checkpointer, parts, strict=False)
    assert summary.step == STEP
    assert list(summary.failed) == changed
    assert list(summary.skipped) == ["new"]
    assert parts["new"].state == "as it was"
    _check({n: parts[n] for n in parts if n not in (*changed, "new")}, mesh)
    assert all(parts[pattern].state is None for pattern in changed)


def _load_by_rule(checkpointer, mesh, changed):
    parts = components(mesh, _nothing, rotated)
    loading.load(checkpointer, parts)
    _check({n: parts[n] for n in parts if n not in changed}, mesh)
    for pattern in changed:
        old = count(pattern, SAVED_ON)
        expected = old - 1 - owner(pattern, mesh) % old
        assert parts[pattern].state == {"v": [pattern, expected]}


def _check(parts, mesh):
    for name, component in parts.items():
        if name == "rng":
            assert component.state["taken"] == 1
            assert component.key == jax.random.key(7)
        else:
            assert component.state == {"v": [name, owner(name, mesh)]}


def host(place_in_world, emit, *, work, directory):
    """A host that joins its world and works."""
    del emit
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(place_in_world):
        work(directory=directory)


def work(*, directory, num_hosts, loads):
    """The work of each host of a world."""
    if not loads:
        save(mesh_of(num_hosts, renumbered=False), directory=directory)
        return
    load(mesh_of(num_hosts, renumbered=num_hosts == SAVED_ON), directory=directory)


@pytest.mark.slow
def test_components_of_real_hosts_on_any_number_of_hosts(tmp_path):
    def run(num_hosts, *, loads):
        task = functools.partial(work, num_hosts=num_hosts, loads=loads)
        supervisor.HostProcesses(
            functools.partial(host, work=task, directory=str(tmp_path)),
            num_hosts=num_hosts,
            log_directory=tmp_path / f"logs-{num_hosts}-{loads}",
            emit=_ignore,
        ).run()

    run(SAVED_ON, loads=False)
    for num_hosts in (4, 2, 3):
        run(num_hosts, loads=True)
    # One host is this process.
    load(mesh_of(1, renumbered=False), directory=str(tmp_path))
