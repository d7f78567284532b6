"""Hosts that save different things, or replicas that differ, in every choice of tiers.

The step fails on all hosts, says which host has what, and the next one is saved.
"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt.core import errors, topology
from tests.multiprocess import machines, tier_worlds


class Stubborn:
    """An object that on one host does not take its state a second time."""

    def __init__(self, value, *, refuses=False):
        self.values = [value]
        self._refuses = refuses

    def get_state(self):
        return {"value": self.values[0]}

    def set_state(self, state):
        self.values[0] = state["value"]
        if self._refuses and state["value"] == "saved":
            raise ValueError("not again")


def replicated_array(mesh, value):
    """An array that is whole on each device, with values of this host's choice."""
    sharding = NamedSharding(mesh, PartitionSpec())
    here = [
        jax.device_put(np.full(4, value, np.float32), device)
        for device in mesh.local_devices
    ]
    return jax.make_array_from_single_device_arrays((4,), sharding, here)


def different_parts(host, mesh):
    """By step, what this host saves under which name."""
    weights = {"w": np.arange(6.0)}
    per_host = functools.partial(ec.components.Component, host, "per_host")
    replicated = functools.partial(
        ec.components.Component, 0, "replicated", validation="quick"
    )
    more = {
        1: {"cache": per_host()} if host == 1 else {},
        2: {"cache": per_host(required=False)} if host == 0 else {},
        3: {"cache": replicated()} if host == 1 else {},
        4: {"cache": ec.components.Component(0, "global") if host else per_host()},
        5: {"cache": per_host(required=bool(host))},
    }
    parts = {step: {"state": weights, **each} for step, each in more.items()}
    parts[6] = {"state": weights | ({"b": np.zeros(2)} if host == 1 else {})}
    parts[7] = {"state": {"w": np.zeros((2 + host,))}}
    parts[8] = {"state": {"w": np.arange(4.0) + host}}
    parts[9] = {"state": {"w": replicated_array(mesh, float(host))}}
    parts[10] = {"state": {"count": 3 + host}}
    return parts


def work(checkpointer, mesh, *, in_ram):
    """Saves steps that differ, each followed by one that does not."""
    host = topology.this_host()
    for step, parts in different_parts(host, mesh).items():
        saved = checkpointer.save_checkpointables(step, parts)
        # Replicas in RAM are compared when they are copied.
        assert saved == (in_ram and step >= 8), step
        checkpointer.wait()
        assert checkpointer.is_durable(step) is False
    parts = {
        name: ec.components.Component(Stubborn("saved"), "global")
        for name in ("a", "z")
    }
    assert checkpointer.save_checkpointables(
        20, {"state": {"w": np.arange(6.0)}, **parts}
    )
    checkpointer.wait()
    refuses = [False, host == 1]
    wanted = {
        name: ec.components.Component(Stubborn("before", refuses=each), "global")
        for name, each in zip(("a", "z"), refuses, strict=True)
    }
    with pytest.raises(errors.CheckpointError, match=r"host 1: 'z' .*not again"):
        ec.components.load(checkpointer, wanted, ignore=["state"])
    assert [each.state.values for each in wanted.values()] == [["before"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["storage", "ram"])
def test_a_step_that_hosts_save_differently_fails_on_all_of_them(tmp_path, tiers):
    with machines.Machines() as ram:
        in_ram = tiers == "ram"
        if in_ram:
            ram.start_agents(range(2))
        events = tier_worlds.run(
            functools.partial(work, in_ram=in_ram),
            num_hosts=2,
            directories=[
                ram.directory(number) if in_ram else None for number in (0, 1)
            ],
            logs=tmp_path / "logs",
            persistent=str(tmp_path / "steps"),
        )
    whys = dict.fromkeys(range(1, 21), "")
    for each in events:
        if each["event"] == "degraded":
            whys[each["step"]] += each["why"] + "\n"
    has = {
        1: "'cache' (host 0: nothing; host 1: component, per_host)",
        2: "'cache' (host 0: optional component, per_host; host 1: nothing)",
        3: "'cache' (host 0: nothing; host 1: component, replicated, compared",
        4: "'cache' (host 0: component, per_host; host 1: component, global)",
        5: "'cache' (host 0: optional component, per_host; host 1: component, per_host",
        6: "'state/b' (host 0: nothing; host 1: float64[2])",
        7: "'state/w' (host 0: float64[2]; host 1: float64[3])",
    }
    for step, part in has.items():
        assert f"hosts save different things as {part}" in whys[step], whys[step]
    for step, leaf in ((8, "state/w"), (9, "state/w"), (10, "state/count")):
        lines = whys[step].splitlines()
        assert any(
            f"{leaf}[" in line and "different values at" in line for line in lines
        )
    named = [line for line in whys[8].splitlines() if "different values at the" in line]
    assert "state/w[0:4] has different values at the hosts" in named[0]
    steps = sorted(path.name for path in (tmp_path / "steps").iterdir())
    assert [name for name in steps if name.isdigit()] == ["20"]
