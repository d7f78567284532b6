"""Components are saved and loaded by any number of hosts, under every pattern."""

import asyncio
import itertools
import json
import types

import jax
import numpy as np
import pytest
from etils import epath

from elastic_ckpt.checkpoint import component_io
from elastic_ckpt.checkpoint.components.component import Component, of_nodes, per_group
from elastic_ckpt.checkpoint.components.rng import Rng
from elastic_ckpt.core import errors, topology

# By pattern, the files of the states of four hosts.
STATES = {
    "global": ["global.npz"],
    "replicated": ["global.npz"],
    "per_host": [f"rank-{number:05d}.npz" for number in range(4)],
    "per_node": ["node-00000.npz", "node-00001.npz"],
}
OLD = [10, 20, 30, 40]


class Turns:
    """Replaces the host that this process is, and the number of hosts."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch

    def run(self, num_hosts, work):
        """The results of `work(host)` of each host."""
        results = []
        for host in range(num_hosts):
            self._monkeypatch.setattr(topology, "this_host", lambda host=host: host)
            self._monkeypatch.setattr(topology, "num_hosts", lambda: num_hosts)
            results.append(work(host))
        return results


def save(component, directory):
    """Saves a component into a directory, as a checkpointer does."""

    async def saved():
        await (await component.save(component_io.Created(epath.Path(directory))))

    asyncio.run(saved())


def load(component, directory):
    """Loads a component; returns its values."""
    component_io.load(component, directory)
    return component.get()


def places(pattern, num_hosts):
    """The number of each host's state; nodes are of two hosts."""
    each = {"per_host": 1, "per_node": 2}.get(pattern, num_hosts)
    return [host // each for host in range(num_hosts)]


def component(pattern, value, **options):
    if pattern == "per_node":
        options["processes_per_node"] = 2
    return Component({"v": value}, pattern, **options)


@pytest.fixture
def turns(monkeypatch):
    return Turns(monkeypatch)


@pytest.fixture
def saved(tmp_path, turns):
    """The directories of a component of four hosts, by pattern."""

    def save_all(host):
        for pattern in STATES:
            value = OLD[places(pattern, 4)[host]]
            save(component(pattern, value), tmp_path / pattern)

    turns.run(4, save_all)
    return tmp_path


def loaded(turns, directory, num_hosts, pattern, **options):
    """The value of each host, which is minus its number before."""

    def value(host):
        return load(component(pattern, -host, **options), directory)["v"]

    return turns.run(num_hosts, value)


def test_files_have_logical_names_and_one_that_is_missing_is_named(saved, turns):
    for pattern, files in STATES.items():
        directory = saved / pattern
        assert {path.name for path in directory.iterdir()} == {"component.json", *files}
        for name in (files[0], "component.json"):
            (directory / name).unlink()
            with pytest.raises(errors.CheckpointError, match=rf"{name} is missing"):
                loaded(turns, directory, 1, pattern, on_resize="from_first")


def rotated(states, new_count):
    """A rule: the last of the old states first."""
    return [states[-1 - number % len(states)] for number in range(new_count)]


@pytest.mark.parametrize("pattern", STATES)
def test_a_resize_follows_the_declared_rule(saved, turns, pattern):
    old = OLD[: len(STATES[pattern])]
    for num_hosts in (4, 2, 8, 1, 3):
        own = places(pattern, num_hosts)
        place = turns, saved / pattern, num_hosts, pattern
        if own[-1] + 1 == len(old):
            for rule in ("error", "reset", "from_first", rotated):
                assert loaded(*place, on_resize=rule) == [old[each] for each in own]
            continue
        with pytest.raises(errors.CheckpointError) as raised:
            loaded(*place)
        saved_as = f"was saved as {pattern!r} with {len(old)} states"
        now = saved_as, f"this world needs {own[-1] + 1}"
        for said in (*now, "reset", "from_first", "(old_states, new_count)"):
            assert said in str(raised.value)
        assert loaded(*place, on_resize="reset") == [-n for n in range(num_hosts)]
        assert loaded(*place, on_resize="from_first") == [old[0]] * num_hosts
        last_first = [old[-1 - each % len(old)] for each in own]
        assert loaded(*place, on_resize=rotated) == last_first
        with pytest.raises(errors.CheckpointError, match=r"returned \d states, but"):
            loaded(*place, on_resize=lambda *_: [0] * 5)


def test_another_pattern_than_before_is_a_resize(saved, turns):
    def values(before, num_hosts, now, **options):
        return loaded(turns, saved / before, num_hosts, lambda: now, **options)

    assert values("global", 2, "global") == [10, 10]
    assert values("per_host", 4, "per_host") == OLD
    assert values("global", 1, "per_host") == [10]
    with pytest.raises(
        errors.CheckpointError, match="'global': it was saved as 'global'"
    ):
        values("global", 2, "per_host")
    assert values("global", 2, "per_host", on_resize="from_first") == [10, 10]


@pytest.mark.parametrize("names", ["get_state set_state", "state_dict load_state_dict"])
def test_all_hosts_are_asked_though_the_leader_writes(turns, tmp_path, names):
    asked = []

    def component(values):
        methods = (lambda: asked.append(values) or dict(values), values.update)
        wrapped = types.SimpleNamespace(
            **dict(zip(names.split(), methods, strict=True))
        )
        return Component(wrapped, "replicated")

    turns.run(3, lambda host: save(component({"host": host}), tmp_path))
    assert asked == [{"host": 0}, {"host": 1}, {"host": 2}]
    assert load(component({}), tmp_path) == {"host": 0}
    written = json.loads((tmp_path / "component.json").read_text())
    assert written["kind"] == "types.SimpleNamespace"


def test_an_optional_component_that_cannot_be_saved_is_left_out(tmp_path, caplog):
    save(Component([object()], "global", required=False), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "optional component is not saved" in caplog.text


def test_nodes_are_numbered_by_their_first_host_which_writes():
    for nodes, numbers, writers in (
        ("aabb", [0, 0, 1, 1], [0, 2]),
        ("abab", [0, 1, 0, 1], [0, 1]),
        ("bbba", [0, 0, 0, 1], [0, 3]),
    ):
        each = [of_nodes("per_node", nodes, host=n) for n in range(4)]
        assert [one.name for one in each] == [f"node-{n:05d}" for n in numbers]
        assert [n for n in range(4) if each[n].is_writer] == writers


@pytest.mark.parametrize("order", [range(8), [3, 1, 7, 5, 0, 2, 6, 4]])
def test_hosts_that_differ_only_along_the_axes_of_a_mesh_share_a_state(order):
    names = ("data", "model", "pipe")
    mesh = np.array(order).reshape(2, 2, 2)
    for count in (1, 2, 3):
        for axes in itertools.combinations(names, count):
            each = [per_group(mesh, names, axes, host=host) for host in range(8)]
            groups = {}
            for place, host in np.ndenumerate(mesh):
                at = zip(names, place, strict=True)
                named = [f"{name}-{n}" for name, n in at if name not in axes]
                groups.setdefault("-".join(["group", *named]), set()).add(host)
            assert {one.names for one in each} == {tuple(groups)}
            for name, hosts in groups.items():
                assert {n for n in range(8) if each[n].name == name} == hosts
                assert [n for n in hosts if each[n].is_writer] == [min(hosts)]


def test_axes_of_size_1_odd_names_and_hosts_of_several_devices_are_no_matter():
    thin = per_group(np.arange(2).reshape(2, 1, 1), ("a/b", "x", "y"), "x", host=1)
    assert thin.names == ("group-a%2Fb-0", "group-a%2Fb-1")
    assert thin.name == "group-a%2Fb-1"
    # Four hosts of two devices each, which differ along the last axis.
    hosts = np.arange(8).reshape(2, 2, 2) // 2
    assert per_group(hosts, ("a", "b", "c"), "c", host=3).name == "group-a-1-b-1"


def test_no_two_random_keys_are_equal_and_the_count_is_a_part_of_the_state():
    def bits(key):
        return tuple(np.asarray(jax.random.key_data(key)).tolist())

    rng = Rng(1)
    assert bits(rng.key) == bits(Rng(jax.random.key(1)).key) == bits(jax.random.key(1))
    made = [rng.key, rng.for_shard(3, 2), *(rng.next() for _ in range(5))]
    for number, step in itertools.product(range(3), range(3)):
        made += [rng.for_shard(number, step), rng.for_name(str(number), step)]
    assert len(set(map(bits, made))) == len(made)
    # Derived keys do not change with the count, and may be traced.
    traced = jax.jit(rng.for_shard)(3, 2)
    assert bits(made[1]) == bits(rng.for_shard(3, 2)) == bits(traced)
    other = Rng(5)
    other.put(rng.get())
    assert bits(other.next()) == bits(rng.next())
