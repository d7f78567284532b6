"""A checkpointer with persistent storage alone: the same class, checked as strictly."""

import errno
import os
import random
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.core import errors, events
from elastic_ckpt.core import storage as files
from elastic_ckpt.tiers.choices import Local, Persistent
from tests.checkpoint.test_checkpointer import (
    Counter,
    RecordedEvents,
    abstract,
    bits,
    state,
)

policies = ocp.training.preservation_policies
P = jax.P("a")


@pytest.fixture
def make(tmp_path):
    made = []

    def make(emit=events.nobody, tiers=(), run=None, **options):
        stored = Persistent(tmp_path / "steps", **(options or {"every": 2}))
        made.append(frontend.Checkpointer([*tiers, stored], run=run, emit=emit))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


def save(checkpointer, step, **options):
    parts = {"state": state(step), "data": Counter(10 * step)}
    return checkpointer.save_checkpointables(step, parts, **options)


def check(checkpointer, step, asked=None):
    counter = Counter()
    restored = checkpointer.load_checkpointables(
        asked, {"state": abstract(state(0)), "data": counter}
    )
    assert bits(restored["state"]) == bits(state(step))
    assert counter.count == 10 * step


def test_a_result_is_there_when_the_step_is_in_storage(make, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    os.makedirs(tmp_path / "temporary")
    recorded = RecordedEvents()
    checkpointer = make(emit=recorded)
    assert [save(checkpointer, step) for step in range(1, 5)] == [False, True] * 2
    assert checkpointer.latest.path == tmp_path / "steps" / "4"
    assert (tmp_path / "steps" / "4").is_dir()
    assert checkpointer.is_durable(4)
    response = checkpointer.save_async(5, state(5), force=True)
    assert response.result()
    assert (tmp_path / "steps" / "5").is_dir()
    assert response.durable()
    check(checkpointer, 4, 4)
    assert [each["step"] for each in recorded.named("saved")] == [2, 4, 5]
    assert [each["step"] for each in recorded.named("backed_up")] == [2, 4, 5]
    assert recorded.named("degraded") == []
    checkpointer.close()
    # Nothing is left on this machine.
    assert os.listdir(tmp_path / "temporary") == []
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        assert [each.step for each in stock.checkpoints] == [2, 4, 5]
        restored = stock.load_checkpointables(4, {"state": abstract(state(0))})["state"]
        assert bits(restored) == bits(state(4))


def test_an_interrupted_save_is_reported_and_removed(make, tmp_path):
    checkpointer = make()
    save(checkpointer, 2)
    checkpointer.close()
    half = tmp_path / "steps" / "4.orbax-checkpoint-tmp-000000000000001"
    (half / "state").mkdir(parents=True)
    recorded = RecordedEvents()
    again = make(emit=recorded)
    again.wait()
    assert not half.exists()
    (event,) = recorded.named("step_interrupted")
    assert event["path"] == str(half)
    assert (event["step"], event["resume_step"]) == (4, 2)


def test_a_failed_save_is_reported_and_the_next_is_made(make, tmp_path, monkeypatch):
    recorded = RecordedEvents()
    checkpointer = make(emit=recorded)
    save(checkpointer, 2)
    write = files.write_atomic

    def fail(target, content, **options):
        if os.fspath(target).startswith(str(tmp_path / "steps")):
            raise OSError(errno.EROFS, "read-only")
        write(target, content, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomic", fail)
        response = checkpointer.save_async(4, state(4))
        assert not response.result()
        assert not response.durable()
    assert checkpointer.latest.step == 2
    checkpointer.wait()
    (event,) = recorded.named("degraded")
    assert (event["tier"], event["step"]) == ("persistent", 4)
    assert save(checkpointer, 6)
    checkpointer.close()
    check(make(), 6)


def test_a_removed_step_does_not_bring_back_what_its_line_abandoned(make):
    checkpointer = make(every=1)
    for step in (1, 2, 3):
        save(checkpointer, step)
    check(checkpointer, 1, 1)
    assert checkpointer.save(2, state(20))
    checkpointer.delete(2)
    assert checkpointer.latest.step == 1
    checkpointer.close()
    again = make(every=1)
    assert [each.step for each in again.checkpoints] == [1]
    # An abandoned step is there for a caller who names it, and its line goes on.
    check(again, 3, 3)
    assert again.save(4, state(40))
    again.delete(4)
    assert again.latest.step == 3


def test_a_run_can_drop_gain_and_rename_its_local_tier(make, tmp_path):
    with_ram = make(tiers=[Local(tmp_path / "ram")], run="the run")
    save(with_ram, 2)
    with_ram.close()
    alone = make()
    check(alone, 2)
    save(alone, 4)
    alone.close()
    with_ram = make(tiers=[Local(tmp_path / "ram")])
    check(with_ram, 4)
    save(with_ram, 5)
    with_ram.close()
    (tmp_path / "ram").rename(tmp_path / "renamed")
    check(make(tiers=[Local(tmp_path / "renamed")]), 5)


@pytest.mark.parametrize("local", [[], ["ram"]])
def test_a_run_of_another_name_does_not_begin_anew_among_steps(make, tmp_path, local):
    tiers = [Local(tmp_path / name) for name in local]
    one = make(tiers=tiers, run="one")
    save(one, 2)
    one.close()
    with pytest.raises(
        errors.RunError, match="another run, 'one', and this run is 'tw"
    ):
        make(tiers=tiers, run="two")
    check(make(tiers=tiers), 2)


def test_a_flipped_bit_is_never_loaded_in_silence(make, tmp_path):
    saved = make(run="run")
    save(saved, 2)
    saved.close()
    step = tmp_path / "steps" / "2"
    everything = [path for path in sorted(step.rglob("*")) if path.is_file()]
    chance = random.Random(0)
    refused = 0
    # Large files twice, and one bit of each other file.
    everything += [path for path in everything if path.stat().st_size > 500]
    for path in everything:
        before = path.read_bytes()
        at, bit = chance.randrange(len(before) or 1), chance.randrange(8)
        flipped = bytes([before[at] ^ 1 << bit]) if before else b"x"
        path.write_bytes(before[:at] + flipped + before[at + 1 :])
        try:
            # A load returns the saved values, or raises.
            check(make(run="run"), 2)
        except errors.ElasticCkptError:
            refused += 1
        path.write_bytes(before)
    assert refused > len(everything) / 10
    check(make(run="run"), 2)


CAPTURES = {"auto": 8, "host": 1, "device": 8, "wait": 1, "in RAM": 8}


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_loop_that_donates_its_state_saves_each_step_as_it_was(
    make, tmp_path, capture
):
    devices = jax.devices()[: CAPTURES[capture]]
    over = jax.NamedSharding(jax.make_mesh((len(devices),), ("a",), devices=devices), P)
    step_of = jax.jit(
        lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0
    )
    tree = {
        "large": jax.device_put(jnp.zeros((8, 2**16)), over),
        "small": jnp.zeros(8, jnp.bfloat16),
    }
    if capture == "in RAM":
        ram = Local(tmp_path / "ram", keep=policies.PreserveAll())
        checkpointer = make(tiers=[ram], every=100)
    else:
        checkpointer = make(every=1, capture=capture)
    saved = {}
    for step in range(3):
        response = checkpointer.save_async(step, tree)
        assert response is not None
        if capture == "wait":
            # It is in storage when the call returns.
            assert response.durable()
            assert checkpointer.is_durable(step)
        saved[step] = jax.tree.map(np.array, tree)
        tree = step_of(tree)
    checkpointer.wait()
    for step, expected in saved.items():
        restored = checkpointer.load(step, abstract(tree))
        for name, values in expected.items():
            assert np.asarray(restored[name]).tobytes() == values.tobytes()
