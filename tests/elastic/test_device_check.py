"""Devices compute a known number before a step of theirs counts."""

import jax
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.elastic import host
from elastic_ckpt.elastic.world import BetweenWorlds, World


def test_the_number_is_that_of_whole_numbers_on_every_device():
    size, modulus = host._SIZE, host._MODULUS
    rows, columns = np.indices((size, size)).astype(np.int64)
    weights = (5 * rows + 3 * columns * columns + 1) % modulus
    values = (7 * rows + 11 * columns) % modulus
    for _ in range(host._ROUNDS):
        values = values @ weights % modulus
    expected = int((values * (rows * size + columns + 1)).sum() % 2**32)
    assert expected == host.EXPECTED
    # Exact in bfloat16 and float32.
    assert modulus <= 2**8
    assert size * (modulus - 1) ** 2 < 2**24
    host.check_devices(jax.local_devices()[:2])


def test_a_wrong_number_names_the_device():
    device = jax.local_devices()[0]
    with pytest.raises(host.DeviceWrongError, match="and sound devices") as e:
        host.check_devices([device], error=1)
    assert f"{device} computed {host.EXPECTED + 1}" in str(e.value)


def test_no_step_is_done_or_saved_before_the_devices_are_sound(tmp_path):
    def check():
        host.check_devices(jax.local_devices(), error=1)

    told = []
    between = BetweenWorlds(emit=lambda name, **_: told.append(name), await_check=check)
    world = World(number=1, slices=(0,), slice_name="0", _between=between)
    with world.checkpointer([ec.Persistent(tmp_path, every=1)]) as checkpointer:
        with pytest.raises(host.DeviceWrongError):
            checkpointer.save_checkpointables_async(1, {"state": {}})
        assert not checkpointer.checkpoints
    with pytest.raises(host.DeviceWrongError):
        between.leaving(1)
    assert not told
