"""Devices compute a known number before a step of theirs counts."""

import jax
import numpy as np
import pytest

from elastic_ckpt.elastic import device_check


def test_the_number_is_that_of_whole_numbers_on_every_device():
    size, modulus = device_check._SIZE, device_check._MODULUS
    rows, columns = np.indices((size, size)).astype(np.int64)
    weights = (5 * rows + 3 * columns * columns + 1) % modulus
    values = (7 * rows + 11 * columns) % modulus
    for _ in range(device_check._ROUNDS):
        values = values @ weights % modulus
    expected = int((values * (rows * size + columns + 1)).sum() % 2**32)
    assert expected == device_check.EXPECTED
    # Exact in bfloat16 and float32.
    assert modulus <= 2**8
    assert size * (modulus - 1) ** 2 < 2**24
    device_check.check_devices(jax.local_devices()[:2])


def test_a_wrong_number_names_the_device():
    device = jax.local_devices()[0]
    with pytest.raises(device_check.DeviceWrongError, match="and sound devices") as e:
        device_check.check_devices([device], error=1)
    assert f"{device} computed {device_check.EXPECTED + 1}" in str(e.value)
