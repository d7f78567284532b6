"""A save compares the states of replicated components on all hosts."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors, topology
from tests.multiprocess import machines, tier_worlds


class Broken:
    """An object that does not give its state."""

    def __init__(self, *, hangs):
        self._hangs = hangs

    def get_state(self):
        if self._hangs:
            threading.Event().wait()
        raise OSError("no such state")

    def set_state(self, state):
        raise NotImplementedError


def replicated(state):
    return ec.components.Component(state, "replicated", validation="tensor")


def save(checkpointer, mesh):
    """Saves steps with states that are equal on all hosts, or not."""
    host = topology.this_host()
    ema = np.arange(4, dtype=np.float32)
    ema.view(np.uint32)[2] ^= (host == 1) << 7
    steps = {
        1: {"lr": 0.5, "ema": jnp.arange(3.0), "warm": [True, None]},
        2: {"lr": 0.5, "groups": ({"lr": 0.1}, {"lr": 0.1 + 1e-9 * (host == 2)})},
        3: {"lr": 0.5, "ema": ema},
        4: {"lr": 0.5, "more": [0] * (3 + (host == 0))},
        5: {"lr": 0.5},
    }
    for step, state in steps.items():
        parts = {"state": tier_worlds.state(mesh, step, True), "a": replicated(state)}
        parts["b"] = replicated({"count": step})
        # Without a level it is not compared.
        parts["c"] = ec.components.Component({"count": host}, "replicated")
        assert checkpointer.save_checkpointables(step, parts)
    for step, hangs in ((6, False), (7, True)):
        part = replicated(Broken(hangs=hangs) if host == 1 else {"lr": 0.5})
        if hangs:
            part.save_timeout_secs = 1.0
        assert not checkpointer.save_checkpointables(step, {"a": part})
    assert checkpointer.save_checkpointables(8, {"a": replicated({"lr": 0.5})})


@pytest.mark.slow(minutes=0.3)
def test_a_state_that_differs_on_a_host_is_named_with_its_path(tmp_path):
    with machines.Machines() as ram:
        ram.start_agents(range(3))
        events = tier_worlds.run(
            save,
            num_hosts=3,
            directories=[ram.directory(number) for number in range(3)],
            logs=tmp_path / "logs",
        )
    differ = [each for each in events if each["event"] == "replicas_differ"]
    assert [(e["step"], e["leaf"], e["hosts"], e["is_certain"]) for e in differ] == [
        (2, "a/groups/1/lr", [2], True),
        (3, "a/ema", [1], True),
        (4, "a/more/3", [0], True),
        (6, "a/", [1], True),
        (7, "a/", [1], True),
    ]
    assert "no such state" in next(
        e["why"]
        for e in events
        if e.get("step") == 6 and "why" in e and e["event"] == "degraded"
    )


def test_a_level_that_is_none_is_refused():
    with pytest.raises(errors.ConfigError, match="choose one of none, quick"):
        ec.components.Component(0, "replicated", validation="some")
