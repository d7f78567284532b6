"""Slices that came back compute a known number before they are used."""

import contextlib
import multiprocessing
import time
import types
from unittest import mock

import jax
import numpy as np
import pytest

from elastic_ckpt.elastic import host_start, slice_check, watch
from elastic_ckpt.training import schema

SECS = 600


def test_the_number_is_that_of_whole_numbers_on_every_device():
    size, modulus = slice_check._SIZE, slice_check._MODULUS
    rows, columns = np.indices((size, size)).astype(np.int64)
    weights = (5 * rows + 3 * columns * columns + 1) % modulus
    values = (7 * rows + 11 * columns) % modulus
    for _ in range(slice_check._ROUNDS):
        values = values @ weights % modulus
    expected = int((values * (rows * size + columns + 1)).sum() % 2**32)
    assert expected == slice_check.EXPECTED
    # Exact in bfloat16 and float32.
    assert modulus <= 2**8
    assert size * (modulus - 1) ** 2 < 2**24
    devices = jax.local_devices()[:2]
    assert [slice_check.compute(device) for device in devices] == [expected] * 2


def test_a_wrong_number_names_device_and_host():
    sound = slice_check.EXPECTED
    assert slice_check.problem_of({0: [sound, sound], 1: [sound]}) is None
    problem = slice_check.problem_of({0: [sound, 3], 1: [sound, sound]})
    assert problem == (
        f"device 1 of its host 0 computed 3, and sound devices compute {sound}"
    )


@pytest.fixture
def checks(tmp_path):
    checks = slice_check.SliceChecks(
        schema.WorldSection(devices_per_host=2),
        machine=host_start.ThisMachine(),
        hosts_per_slice=2,
        log_directory=str(tmp_path),
        limits=watch.unlimited(),
    )
    yield checks
    checks.close()


def result(checks):
    deadline_secs = time.monotonic() + SECS
    while time.monotonic() < deadline_secs:
        for each in checks.poll():
            return each
        time.sleep(0.01)
    raise AssertionError("the check has not ended")


def test_a_slice_whose_devices_are_gone_does_not_pass_on_cpus(tmp_path):
    checks = slice_check.SliceChecks(
        schema.WorldSection(hardware="gpu"),
        machine=host_start.ThisMachine(),
        hosts_per_slice=1,
        log_directory=str(tmp_path),
        limits=watch.Limits(),
    )
    with contextlib.closing(checks):
        checks.begin(0)
        assert "its host 0 failed in the check; see" in result(checks).problem
    (log,) = tmp_path.iterdir()
    assert "hardware=gpu, but JAX finds only CPUs" in log.read_text()


def hang(*_):
    time.sleep(3600)


def test_a_slice_that_does_not_compute_is_refused_in_time(checks, monkeypatch):
    monkeypatch.setattr(slice_check, "run", hang)
    monkeypatch.setattr(checks, "_limits", watch.Limits(most_secs=0.1))
    checks.begin(0)
    assert "its hosts [0, 1] did not finish the check in" in result(checks).problem
    assert checks.unsound == {0}
    assert not multiprocessing.active_children()


def fail(*_):
    raise SystemExit(1)


def test_a_slice_whose_processes_die_is_refused(checks, monkeypatch):
    monkeypatch.setattr(slice_check, "run", fail)
    checks.begin(0)
    assert "failed in the check; see" in result(checks).problem


def test_a_slice_that_is_gone_is_not_checked(checks, monkeypatch):
    monkeypatch.setattr(slice_check, "run", hang)
    checks.begin(0)
    checks.forget(0)
    assert not checks.unsound
    assert not checks.poll()


def test_a_refused_slice_is_checked_again_after_longer_and_longer_times(
    checks, monkeypatch
):
    clock = types.SimpleNamespace(secs=0, monotonic=lambda: clock.secs)
    began, limits, found = [], [], []

    def check(number, *_, **__):
        """A check that takes 20 s; of its starts, the fifth finds a sound slice."""
        began.append(clock.secs)

        def result(limit_secs, *, now_secs):
            limits.append(limit_secs)
            problem = "hot" if len(began) < 5 else None
            checked = slice_check.Checked(slice=number, problem=problem)
            return checked if now_secs >= began[-1] + 20 else None

        close = mock.Mock()
        return types.SimpleNamespace(result=result, began_secs=began[-1], close=close)

    monkeypatch.setattr(slice_check, "time", clock)
    monkeypatch.setattr(slice_check, "_Check", check)
    monkeypatch.setattr(checks, "_limits", watch.Limits(most_secs=900))
    checks.begin(0)
    for clock.secs in range(1000):
        found += [each.problem for each in checks.poll()]
        assert checks.unsound == ({0} if len(found) < 5 else set())
    # After 30 s, 60 s, and so on.
    assert began == [0, 50, 130, 270, 530]
    assert found == ["hot"] * 4 + [None]
    # From then on another one may take a multiple of these 20 s.
    checks.begin(1)
    checks.poll()
    assert limits[0] == 900
    assert limits[-1] == watch.patience_secs(checks._limits, 20.0) < 900
