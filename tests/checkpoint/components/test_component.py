"""Components are saved and loaded by any number of hosts, under every pattern."""

import collections
import json

import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.checkpoint.components.rng import Rng
from elastic_ckpt.core import errors
from tests.checkpoint.components import simulated_hosts
from tests.checkpoint.components.test_encoding import leaves, same

PATTERNS = ("global", "replicated", "per_host", "per_node")
OLD = [10, 20, 30, 40]


@pytest.fixture
def turns(monkeypatch):
    return simulated_hosts.Turns(monkeypatch)


def made(pattern, value, **options):
    """A component under a pattern; nodes are of two hosts."""
    if pattern == "per_node":
        options["processes_per_node"] = 2
    return Component({"v": value}, pattern, **options)


def owner(pattern, host):
    """The place of a host's state."""
    return {"per_host": host, "per_node": host // 2}.get(pattern, 0)


def count(pattern, num_hosts):
    """How many states there are."""
    return {"per_host": num_hosts, "per_node": -(-num_hosts // 2)}.get(pattern, 1)


@pytest.fixture
def saved(tmp_path, turns):
    """The directories of a component of four hosts, by pattern."""
    for pattern in PATTERNS:
        turns.save(
            tmp_path / pattern, 4, lambda host, p=pattern: made(p, OLD[owner(p, host)])
        )
    return tmp_path


def test_files_have_logical_names(saved):
    def listed(pattern):
        return sorted(path.name for path in (saved / pattern).iterdir())

    assert listed("global") == ["component.json", "global.npz"]
    assert listed("replicated") == ["component.json", "global.npz"]
    ranks = [f"rank-{number:05d}.npz" for number in range(4)]
    assert listed("per_host") == ["component.json", *ranks]
    assert listed("per_node") == ["component.json", "node-00000.npz", "node-00001.npz"]


def rotated(states, new_count):
    """A rule: the last of the old states first."""
    values = [state["v"] for state in states]
    return [{"v": values[-1 - number % len(values)]} for number in range(new_count)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_resize_follows_the_declared_rule(saved, turns, pattern):
    old = [OLD[place] for place in range(count(pattern, 4))]
    for num_hosts in (4, 2, 8, 1, 3):
        new_count = count(pattern, num_hosts)

        def loaded(rule, num_hosts=num_hosts):
            def make(host):
                return made(pattern, -host, on_resize=rule)

            return [s["v"] for s in turns.load(saved / pattern, num_hosts, make)]

        own = [owner(pattern, number) for number in range(num_hosts)]
        if new_count == len(old):
            for rule in ("error", "reset", "from_first", rotated):
                assert loaded(rule) == [old[place] for place in own]
            continue
        with pytest.raises(errors.CheckpointError) as raised:
            loaded("error")
        message = str(raised.value)
        assert f"was saved {pattern} with {len(old)} states" in message
        assert f"there are {new_count} now" in message
        for choice in ("reset", "from_first", "(old_states, new_count)"):
            assert choice in message
        assert loaded("reset") == [-number for number in range(num_hosts)]
        assert loaded("from_first") == [old[0]] * num_hosts
        assert loaded(rotated) == [old[-1 - place % len(old)] for place in own]
        with pytest.raises(errors.CheckpointError, match=r"returned \d states for"):
            loaded(lambda states, count: [*states[:1], *[0] * count])


def test_another_pattern_than_before_is_a_resize(saved, turns):
    def values(pattern, num_hosts, now, **options):
        def make(_):
            return Component({"v": 0}, lambda: now, **options)

        return [each["v"] for each in turns.load(saved / pattern, num_hosts, make)]

    assert values("global", 2, "global") == [10, 10]
    assert values("per_host", 4, "per_host") == OLD
    assert values("global", 1, "per_host") == [10]
    with pytest.raises(errors.CheckpointError, match="'global': it was saved global"):
        values("global", 2, "per_host")
    assert values("global", 2, "per_host", on_resize="from_first") == [10, 10]


class Object:
    """An object that counts, with a state under either pair of names."""

    def __init__(self, names, value):
        self.value = value
        for name, method in zip(names, (self._get, self._set), strict=True):
            setattr(self, name, method)

    def _get(self):
        return {"value": self.value}

    def _set(self, state):
        self.value = state["value"]


@pytest.mark.parametrize(
    "names", [("get_state", "set_state"), ("state_dict", "load_state_dict")]
)
def test_an_object_is_set(tmp_path, names):
    simulated_hosts.save(Component(Object(names, 5), "global"), tmp_path)
    wrapped = Object(names, 0)
    component = Component(wrapped, "global")
    simulated_hosts.load(component, tmp_path)
    assert wrapped.value == 5
    assert component.state is wrapped
    written = json.loads((tmp_path / "component.json").read_text())
    assert written["kind"] == "tests.checkpoint.components.test_component.Object"


def test_files_are_written_by_the_leader_alone_though_all_give_their_state(
    turns, tmp_path
):
    asked = collections.Counter()

    def make(host):
        wrapped = Object(("get_state", "set_state"), host)
        wrapped.get_state = lambda: asked.update([host]) or {"value": host}
        return Component(wrapped, "replicated")

    turns.save(tmp_path, 3, make)
    assert asked == {0: 1, 1: 1, 2: 1}
    assert turns.load(tmp_path, 1, lambda _: Component({}, "global"))[0] == {"value": 0}


def test_an_optional_component_that_cannot_be_saved_is_left_out(tmp_path, caplog):
    simulated_hosts.save(Component([object()], "global", required=False), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "optional component is not saved" in caplog.text
    with pytest.raises(errors.CheckpointError, match=r"component\.json is missing"):
        simulated_hosts.load(Component([], "global"), tmp_path)


def test_a_state_that_is_missing_is_named(saved, turns):
    (saved / "per_node" / "node-00000.npz").unlink()
    with pytest.raises(errors.CheckpointError, match=r"node-00000\.npz is missing"):
        turns.load(
            saved / "per_node",
            1,
            lambda host: made("per_node", host, on_resize="from_first"),
        )


@pytest.mark.parametrize("kind", ["ours", "orbax"])
def test_components_are_saved_beside_weights_and_batches(make, tmp_path, kind):
    state = {"w": jnp.arange(4.0)}
    rng = Rng(3)
    rng.next()
    parts = {
        "state": state,
        "everything": Component(leaves(), "global"),
        "rank": Component({"n": 7}, "per_host"),
        "rng": rng,
    }
    loaded = {
        "everything": Component(None, "global"),
        "rank": Component(None, "per_host"),
        "rng": Rng(0),
    }
    stock = ocp.training.Checkpointer(tmp_path / "stock")
    with make() if kind == "ours" else stock as opened:
        opened.save_checkpointables(1, parts)
        opened.load_checkpointables(1, {"state": state, **loaded})
    for name, component in loaded.items():
        same(component.get(), parts[name].get())
