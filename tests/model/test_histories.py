"""Whatever happens to a run, it loads what its model says, bit by bit."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.model import histories

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    "number",
    [
        30,
        pytest.param(100, marks=pytest.mark.slow),
        pytest.param(1_000, marks=pytest.mark.night),
    ],
)
def test_histories(number):
    # What is drawn depends on all modules that a process has: in a process of its own
    # it is the same each time, as a test has to be that changes must pass.
    done = subprocess.run(
        [sys.executable, "-m", histories.__name__, str(number)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]


@pytest.mark.night
def test_other_histories():
    # Each night draws others.
    histories.run(1_000, derandomize=False)
