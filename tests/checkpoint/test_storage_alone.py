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

from elastic_ckpt.core import errors
from tests.checkpoint.test_checkpointer import abstract, bits, check, save, state
from tests.recorded_events import RecordedEvents

P = jax.P("a")


def test_a_result_is_there_when_the_step_is_in_storage(make, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    os.makedirs(tmp_path / "temporary")
    recorded = RecordedEvents()
    checkpointer = make(ram=None, every=2, emit=recorded)
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
    checkpointer = make(ram=None, every=2)
    save(checkpointer, 2)
    checkpointer.close()
    half = tmp_path / "steps" / "4.orbax-checkpoint-tmp-000000000000001"
    (half / "state").mkdir(parents=True)
    recorded = RecordedEvents()
    again = make(ram=None, every=2, emit=recorded)
    again.wait()
    assert not half.exists()
    (event,) = recorded.named("step_interrupted")
    assert event["path"] == str(half)
    assert (event["step"], event["resume_step"]) == (4, 2)


def test_a_failed_save_is_reported_and_the_next_is_made(make, breaks):
    recorded = RecordedEvents()
    checkpointer = make(ram=None, every=2, emit=recorded)
    save(checkpointer, 2)
    breaks(errno.EROFS)
    response = checkpointer.save_async(4, state(4))
    assert not response.result()
    assert not response.durable()
    breaks(None)
    assert checkpointer.latest.step == 2
    checkpointer.wait()
    (event,) = recorded.named("degraded")
    assert (event["tier"], event["step"]) == ("persistent", 4)
    assert save(checkpointer, 6)
    checkpointer.close()
    check(make(ram=None), 6)


def test_a_run_can_drop_gain_and_rename_its_local_tier(make, tmp_path):
    with make(every=2, run="the run") as with_ram:
        save(with_ram, 2)
    with make(ram=None, every=2, run=None) as alone:
        check(alone, 2)
        save(alone, 4)
    with make(every=2, run=None) as with_ram:
        check(with_ram, 4)
        save(with_ram, 5)
    (tmp_path / "ram").rename(tmp_path / "renamed")
    check(make(ram="renamed", run=None), 5)


@pytest.mark.parametrize("ram", [None, "ram"])
def test_a_run_of_another_name_does_not_begin_anew_among_steps(make, ram):
    with make(ram=ram, run="one") as one:
        save(one, 2)
    with pytest.raises(
        errors.RunError, match="another run, 'one', and this run is 'tw"
    ):
        make(ram=ram, run="two")
    check(make(ram=ram, run=None), 2)


def test_a_flipped_bit_is_never_loaded_in_silence(make, tmp_path):
    with make(ram=None) as saved:
        save(saved, 2)
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
            with make(ram=None) as opened:
                check(opened, 2)
        except errors.ElasticCkptError:
            refused += 1
        path.write_bytes(before)
    assert refused > len(everything) / 10
    check(make(ram=None), 2)


CAPTURES = {"auto": 8, "host": 1, "device": 8, "wait": 1}


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_loop_that_donates_its_state_saves_each_step_as_it_was(make, capture):
    devices = jax.devices()[: CAPTURES[capture]]
    over = jax.NamedSharding(jax.make_mesh((len(devices),), ("a",), devices=devices), P)
    step_of = jax.jit(
        lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0
    )
    tree = {
        "large": jax.device_put(jnp.zeros((8, 2**16)), over),
        "small": jnp.zeros(8, jnp.bfloat16),
    }
    checkpointer = make(ram=None, capture=capture)
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
