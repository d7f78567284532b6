"""A host fails, hangs or differs in a save or a load: that fails, and the next works.

One world of three hosts, with RAM disks and storage, goes through all of it.
"""

import asyncio
import dataclasses
import functools
import gc
import pathlib
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt.checkpoint.components import loading
from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import errors, host_memory, topology
from tests.processes import machines, test_layout_tiers, tier_worlds

HOSTS = 3
# The host that cannot load, or take part in other ways.
FAILS = 1
NOT_IN_TIME = "components ['more'] were not saved in time"
# By step: the host that fails, its error, and when that is raised.
FAILURES = {
    2: (1, TypeError, "no such thing", "begin"),
    3: (0, OSError, "disk full", "begin"),
    4: (2, ValueError, "cut in two", "background"),
    5: (1, TypeError, "no memory", "capture"),
    6: (0, OSError, "no directory", "capture"),
    7: (1, None, NOT_IN_TIME, "begin"),
    8: (0, None, NOT_IN_TIME, "background"),
}
GOOD = 10


class Failing(tier_worlds.Counter):
    """A component that writes half of its files, and then fails or hangs.

    Args:
      error: that it raises; None if it hangs.
      message: of the error.
      in_background: whether it begins well.
    """

    def __init__(self, error, message="", *, in_background=True):
        super().__init__()
        self._error, self._message = error, message
        self._in_background = in_background
        if error is None:
            self.save_timeout_secs = 1.0

    async def _fail(self):
        if self._error is None:
            await asyncio.sleep(3600)
        raise self._error(self._message)

    async def save(self, directory):
        async def write():
            (directory.path / "half").write_text("cut")
            await self._fail()

        if self._in_background:
            return write()
        return await write()

    async def load(self, directory):
        del directory
        await self._fail()


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


class Taken:
    """The host memory that this process has taken from pools and not given back."""

    def __init__(self):
        self.num_bytes = 0
        take, release = host_memory.Pool.take, host_memory.Pool.release

        def counted_take(pool, num_bytes):
            self.num_bytes += num_bytes
            return take(pool, num_bytes)

        def counted_release(pool, memory):
            self.num_bytes -= memory.nbytes
            release(pool, memory)

        host_memory.Pool.take = counted_take
        host_memory.Pool.release = counted_release


def fail_to_save(checkpointer, mesh, slot):
    """Saves a step, fails to save the next ones, and saves the one after them."""
    taken = Taken()
    tier_worlds.save(checkpointer, mesh, steps=[1], sharded=True)
    captured = capture.capture
    for step, (host, error, message, moment) in FAILURES.items():
        state = tier_worlds.state(mesh, step, True)
        # Copied whole: only arrays of JAX may be held without a copy.
        state["copied"] = tier_worlds.values("w", step)
        held = [weakref.ref(state["w"])]
        checkpointables = {"state": state, "data": tier_worlds.Counter(step)}
        checkpointables["more"] = tier_worlds.Counter(step)
        fails = topology.this_host() == host
        if fails and moment == "capture":
            capture.capture = functools.partial(_fail, error, message)
        elif fails:
            in_background = moment == "background"
            checkpointables["more"] = Failing(
                error, message, in_background=in_background
            )
        raised = ""
        try:
            assert not checkpointer.save_checkpointables(step, checkpointables)
        except TypeError as raised_error:
            raised = str(raised_error)
        capture.capture = captured
        assert raised == (message if fails and error is TypeError else "")
        checkpointer.wait()
        assert checkpointer.latest.step == 1
        assert list(slot.glob(f"{step}-*")) == []
        assert list(slot.rglob("half")) == []
        assert taken.num_bytes == 0
        del state, checkpointables
        _wait_until_gone(held)
    tier_worlds.save(checkpointer, mesh, steps=[GOOD], sharded=True)
    assert taken.num_bytes == 0
    tier_worlds.restore(checkpointer, mesh, step=GOOD, sharded=True)


def _fail(error, message, *_):
    raise error(message)


def _wait_until_gone(held):
    # A thread that is done may still be about to end.
    deadline = time.monotonic() + 60
    while any(each() is not None for each in held):
        gc.collect()
        assert time.monotonic() < deadline, "the arrays of the step are still held"
        time.sleep(0.01)


def leave_out(checkpointer, mesh):
    """Saves steps without an optional component, and with it."""
    for step, can_save in ((11, False), (12, True)):
        fails = topology.this_host() == FAILS and not can_save
        state = Broken(hangs=False) if fails else topology.this_host()
        cache = ec.components.Component(state, "per_host", required=False)
        checkpointables = {"state": tier_worlds.state(mesh, step, True), "cache": cache}
        checkpointables["count"] = ec.components.Component(
            step, "global", required=False
        )
        assert checkpointer.save_checkpointables(step, checkpointables)
        why = cache.save_problem or ""
        assert ("host 1: OSError('no such state')" in why) != can_save
        assert checkpointables["count"].save_problem is None
        cache = ec.components.Component(7, "per_host", required=False)
        wanted = {"cache": cache, "count": ec.components.Component(0, "global")}
        summary = ec.components.load(checkpointer, wanted, ignore=["state"])
        assert list(summary.skipped) == ([] if can_save else ["cache"])
        assert cache.state == (topology.this_host() if can_save else 7)
        assert wanted["count"].state == step
        held = checkpointer.checkpointables_metadata(step).metadata
        assert ("cache" in held) == can_save


def replicated(state, *, validation="tensor"):
    return ec.components.Component(state, "replicated", validation=validation)


def differ(checkpointer, mesh):
    """Saves replicated states that are equal on all hosts, or not."""
    host = topology.this_host()
    ema = np.arange(4, dtype=np.float32)
    ema.view(np.uint32)[2] ^= (host == 1) << 7
    steps = {
        21: {"lr": 0.5, "ema": jnp.arange(3.0), "warm": [True, None]},
        22: {"lr": 0.5, "groups": ({"lr": 0.1}, {"lr": 0.1 + 1e-9 * (host == 2)})},
        23: {"lr": 0.5, "ema": ema},
        24: {"lr": 0.5, "more": [0] * (3 + (host == 0))},
    }
    for step, state in steps.items():
        checkpointables = {
            "state": tier_worlds.state(mesh, step, True),
            "a": replicated(state),
        }
        # Without a level it is not compared.
        checkpointables["c"] = ec.components.Component({"count": host}, "replicated")
        assert checkpointer.save_checkpointables(step, checkpointables)
    for step, hangs in ((25, False), (26, True)):
        part = replicated(Broken(hangs=hangs) if host == FAILS else {"lr": 0.5})
        if hangs:
            part.save_timeout_secs = 1.0
        assert not checkpointer.save_checkpointables(step, {"a": part})
    assert checkpointer.save_checkpointables(27, {"a": replicated(np.arange(3.0))})


def fail_to_load(checkpointer, mesh):
    """Loads a step with a component that fails on one host, in each way."""
    checkpointables = {"state": tier_worlds.state(mesh, 30, True)}
    checkpointables |= {
        "data": tier_worlds.Counter(30),
        "more": tier_worlds.Counter(30),
    }
    assert checkpointer.save_checkpointables(30, checkpointables)
    is_here = topology.this_host() == FAILS
    for error, why in ((ValueError, "cut in two"), (None, "not loaded in time")):

        def wanted(*, error=error):
            more = Failing(error, "cut in two") if is_here else tier_worlds.Counter()
            return {"data": tier_worlds.Counter(), "more": more}

        with pytest.raises(errors.CheckpointError) as strict:
            loading.load(checkpointer, wanted(), ignore=["state"])
        assert f"host {FAILS}: 'more' cannot be loaded: " in str(strict.value)
        assert why in str(strict.value)
        checkpointables = wanted()
        summary = loading.load(checkpointer, checkpointables, strict=False)
        assert list(summary.failed) == (["more"] if is_here else [])
        assert checkpointables["data"].step == 30
        # As the trainer does it.
        with pytest.raises(Exception, match=why) as plain:
            checkpointer.load_checkpointables(30, wanted())
        assert "more" in str(plain.value) or (is_here and error)
        if not is_here:
            assert f"host {FAILS}: 'more' was not loaded: " in str(plain.value)
    # One of a name that only this host asks for.
    absent = {"absent": tier_worlds.Counter()} if is_here else {}
    with pytest.raises(errors.CheckpointError, match=f"host {FAILS}: 'absent' cannot"):
        loading.load(checkpointer, {**wanted(), **absent}, ignore=["state"])
    good = {"data": tier_worlds.Counter(), "more": tier_worlds.Counter()}
    assert list(loading.load(checkpointer, good).loaded) == ["data", "more"]


def load_through_layouts(checkpointer, mesh):
    """Loads a step through a layout that is wrong on one host, and then is right."""
    _, abstract = test_layout_tiers.wanted(mesh, 30)
    is_here = topology.this_host() == FAILS
    layout = test_layout_tiers.LAYOUT
    wrong = dataclasses.replace(layout, drop=()) if is_here else layout
    wanted = {"state": abstract, "data": tier_worlds.Counter()}
    with pytest.raises(errors.ElasticCkptError, match="scale") as raised:
        checkpointer.load_checkpointables(30, wanted, layout=wrong)
    assert is_here or f"host {FAILS}: " in str(raised.value)
    assert wanted["data"].step == 0
    test_layout_tiers.load(checkpointer, mesh, expected_step=30)


def replicated_array(mesh, value):
    """An array that is whole on each device, with values of this host's choice."""
    sharding = NamedSharding(mesh, PartitionSpec())
    here = [
        jax.device_put(np.full(4, value, np.float32), device)
        for device in mesh.local_devices
    ]
    return jax.make_array_from_single_device_arrays((4,), sharding, here)


# By step, what hosts 0 and 1 save, as the event says it.
DIFFERENT = {
    31: "'cache' (hosts 0, 2: nothing; host 1: component, per_host",
    32: "'cache' (hosts 0, 2: optional component, per_host; host 1: nothing",
    33: "'cache' (hosts 0, 2: nothing; host 1: component, replicated, compared",
    34: "'cache' (hosts 0, 2: component, per_host; host 1: component, global",
    35: "'state/b' (hosts 0, 2: nothing; host 1: float64[2]",
    36: "'state/w' (hosts 0, 2: float64[2]; host 1: float64[3]",
}
# What replicas have that differ.
UNEQUAL = {37: "state/w", 38: "state/w", 39: "state/count"}


def different_checkpointables(host, mesh):
    """By step, what this host saves under which name; host 2 does as host 0."""
    is_1 = host == 1
    weights = {"w": np.arange(6.0)}
    per_host = functools.partial(ec.components.Component, host, "per_host")
    quick = functools.partial(replicated, 0, validation="quick")
    more = {
        31: {"cache": per_host()} if is_1 else {},
        32: {} if is_1 else {"cache": per_host(required=False)},
        33: {"cache": quick()} if is_1 else {},
        34: {"cache": ec.components.Component(0, "global") if is_1 else per_host()},
    }
    checkpointables = {step: {"state": weights, **each} for step, each in more.items()}
    checkpointables[35] = {"state": weights | ({"b": np.zeros(2)} if is_1 else {})}
    checkpointables[36] = {"state": {"w": np.zeros((2 + is_1,))}}
    checkpointables[37] = {"state": {"w": np.arange(4.0) + is_1}}
    checkpointables[38] = {"state": {"w": replicated_array(mesh, float(is_1))}}
    checkpointables[39] = {"state": {"count": 3 + is_1}}
    return checkpointables


def save_differently(checkpointer, mesh):
    """Saves steps that differ."""
    host = topology.this_host()
    for step, checkpointables in different_checkpointables(host, mesh).items():
        saved = checkpointer.save_checkpointables(step, checkpointables)
        assert not saved, step
        checkpointer.wait()
        assert checkpointer.is_durable(step) is False
    tier_worlds.save(checkpointer, mesh, steps=[40], sharded=True)


def work(checkpointer, mesh, *, directories):
    slot = pathlib.Path(directories[topology.this_host()], "hosts", "0")
    fail_to_save(checkpointer, mesh, slot)
    leave_out(checkpointer, mesh)
    differ(checkpointer, mesh)
    fail_to_load(checkpointer, mesh)
    load_through_layouts(checkpointer, mesh)
    save_differently(checkpointer, mesh)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The events of the world, and the directory of its storage."""
    directory = tmp_path_factory.mktemp("failing")
    with machines.Machines() as ram:
        ram.start_agents(range(HOSTS))
        directories = [ram.directory(number) for number in range(HOSTS)]
        events = tier_worlds.run(
            functools.partial(work, directories=directories),
            num_hosts=HOSTS,
            directories=directories,
            logs=directory / "logs",
            persistent=str(directory / "steps"),
        )
    return events, directory / "steps"


@pytest.mark.slow
def test_one_host_that_cannot_save_stops_no_other(world):
    events, steps = world
    for step, (host, _, message, _) in FAILURES.items():
        reported = [each for each in events if each.get("step") == step]
        assert [each["event"] for each in reported] == ["save_started", "degraded"]
        why = reported[1]["why"]
        assert why.startswith("it was not saved: ")
        assert f"host {host}" in why
        assert message in why
    stored = {each.name for each in steps.iterdir() if each.name[:1].isdecimal()}
    assert {"1", str(GOOD)} <= stored
    assert not stored & {*map(str, (*FAILURES, *DIFFERENT, *UNEQUAL))}
    assert list(steps.rglob("half")) == []


@pytest.mark.slow
def test_a_step_has_an_optional_component_of_all_hosts_or_of_none(world):
    events, steps = world
    degraded = [each for each in events if each["event"] == "degraded"]
    whys = [each["why"] for each in degraded if each["step"] == 11]
    (why,) = [each for each in whys if "optional" in each]
    assert why.startswith("it is saved without the optional component 'cache': host 1")
    assert not (steps / "11" / "cache").exists()
    assert (steps / "12" / "cache").exists()


@pytest.mark.slow
def test_a_state_that_differs_on_a_host_is_named_with_its_path(world):
    events, _ = world
    differ = [each for each in events if each["event"] == "replicas_differ"]
    assert [(e["step"], e["leaf"], e["hosts"], e["is_certain"]) for e in differ] == [
        (22, "a/groups/1/lr", [2], True),
        (23, "a/ema", [1], True),
        (24, "a/more/3", [0], True),
        (25, "a/lr", [1], True),
        (26, "a/lr", [1], True),
    ]
    assert "no such state" in next(
        each["why"]
        for each in events
        if each["event"] == "degraded" and each["step"] == 25
    )


@pytest.mark.slow
def test_a_step_that_hosts_save_differently_says_which_host_has_what(world):
    events, _ = world
    whys = dict.fromkeys((*DIFFERENT, *UNEQUAL), "")
    for each in events:
        if each["event"] == "degraded" and each["step"] in whys:
            whys[each["step"]] += each["why"] + "\n"
    for step, part in DIFFERENT.items():
        said = f"hosts save different kinds of values as {part}"
        assert said in whys[step], whys[step]
    for step, leaf in UNEQUAL.items():
        assert any(
            f"{leaf}[" in line and "different values on" in line
            for line in whys[step].splitlines()
        ), whys[step]


def leave(checkpointer, mesh, *, alone):
    """Raises on all hosts, or on one, while a save is in flight."""
    del mesh
    for step in (1, 2):
        checkpointer.save_async(step, {"w": np.arange(2.0**20) + step})
    multihost_utils.sync_global_devices("saved")
    if topology.this_host() == 0 or not alone:
        raise ValueError("stop")
    # The other host goes on training.
    multihost_utils.sync_global_devices("never")


def left(tmp_path, *, alone):
    with pytest.raises(Exception, match="stop"):
        tier_worlds.run(
            functools.partial(leave, alone=alone),
            num_hosts=2,
            directories=[None, None],
            logs=tmp_path / "logs",
            persistent=str(tmp_path / "steps"),
        )
    (log,) = tmp_path.glob("logs/*/host-0.log")
    return log.read_text()


@pytest.mark.slow
def test_saves_in_flight_are_finished_by_hosts_that_leave_together(tmp_path):
    left(tmp_path, alone=False)
    steps = sorted(path.name for path in (tmp_path / "steps").iterdir())
    assert [name for name in steps if name.isdigit()] == ["1", "2"]


@pytest.mark.slow
def test_a_host_that_leaves_alone_does_not_wait_for_the_others(tmp_path):
    log = left(tmp_path, alone=True)
    assert "saves in flight are not finished" in log
