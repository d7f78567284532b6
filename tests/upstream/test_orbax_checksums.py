"""The patch for Orbax applies to the release that is installed, and does what it says.

Its page is docs/upstream/README.md.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

MEASURE = pathlib.Path(__file__).parents[2] / "docs/upstream/measure_checksums.py"
OWN_TESTS = "orbax.checkpoint.experimental.v1._src.serialization.checksums_test"
SAVE = """
import sys, numpy as np
from orbax.checkpoint import v1 as ocp
context = ocp.Context()
if sys.argv[2] == "checks":
    context.array.saving.use_checksums = True
with context:
    ocp.save(sys.argv[1], {"w": np.arange(4096.0), "s": 3, "t": np.ones((2, 3), "i4")})
"""
LOAD = """
import sys, numpy as np
from orbax.checkpoint import v1 as ocp
loaded = ocp.load(sys.argv[1])
assert loaded["s"] == 3
np.testing.assert_array_equal(loaded["w"], np.arange(4096.0))
np.testing.assert_array_equal(loaded["t"], np.ones((2, 3), "i4"))
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """The environment of programs that import the patched Orbax."""
    directory = tmp_path_factory.mktemp("patched")
    program = (
        "import measure_checksums, pathlib, sys\n"
        "measure_checksums.patched(pathlib.Path(sys.argv[1]))\n"
    )
    ran(["-c", program, directory], {"PYTHONPATH": str(MEASURE.parent)})
    return {"PYTHONPATH": str(directory)}


def ran(words, environment):
    ended = subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow(minutes=0.2)
def test_its_own_tests_pass(patched):
    ran(["-m", OWN_TESTS], patched)


@pytest.mark.slow(minutes=0.3)
@pytest.mark.parametrize("writer_checks", ["checks", "does not"])
def test_the_release_and_the_patched_one_read_each_other(
    patched, tmp_path, writer_checks
):
    ran(["-c", SAVE, tmp_path / "patched", writer_checks], patched)
    ran(["-c", LOAD, tmp_path / "patched"], {})
    ran(["-c", SAVE, tmp_path / "released", ""], {})
    ran(["-c", LOAD, tmp_path / "released"], patched)


@pytest.mark.slow(minutes=0.3)
def test_flips_that_the_release_loads_are_errors():
    words = [MEASURE, "--flips", 10, "--mebibytes", 1, "--rounds", 1]
    released, checked = map(json.loads, ran(words, {}).splitlines())
    assert released["as_released"]["wrong"] > 0
    assert checked["with_checksums"] == {"errors": 10, "wrong": 0, "right": 0}


def test_it_applies_to_the_release_that_is_installed(patched):
    (options,) = pathlib.Path(patched["PYTHONPATH"]).rglob("context/options.py")
    assert "use_checksums: bool = False" in options.read_text()
