"""The patch for Orbax applies to the release that is installed, and does what it says.

Its page is docs/upstream/README.md.
"""

import json
import pathlib

import pytest

from tests.upstream import upstream

pytestmark = pytest.mark.night

MEASURE = upstream.PAGES / "measure_checksums.py"
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
    directory = tmp_path_factory.mktemp("patched")
    return upstream.patched(directory, "orbax.checkpoint", "orbax-checksums.patch")


def test_its_own_tests_pass(patched):
    upstream.ran(["-m", OWN_TESTS], patched)


@pytest.mark.parametrize("writer_checks", ["checks", "does not"])
def test_the_release_and_the_patched_one_read_each_other(
    patched, tmp_path, writer_checks
):
    upstream.ran(["-c", SAVE, tmp_path / "patched", writer_checks], patched)
    upstream.ran(["-c", LOAD, tmp_path / "patched"], {})
    upstream.ran(["-c", SAVE, tmp_path / "released", ""], {})
    upstream.ran(["-c", LOAD, tmp_path / "released"], patched)


def test_flips_that_the_release_loads_are_errors():
    words = [MEASURE, "--flips", 10, "--mebibytes", 1, "--rounds", 1]
    released, checked = map(json.loads, upstream.ran(words, {}).splitlines())
    assert released["as_released"]["wrong"] > 0
    assert checked["with_checksums"] == {"errors": 10, "wrong": 0, "right": 0}


def test_it_applies_to_the_release_that_is_installed(patched):
    directory = patched["PYTHONPATH"].partition(":")[0]
    (options,) = pathlib.Path(directory).rglob("context/options.py")
    assert "use_checksums: bool = False" in options.read_text()
