"""The patch for Grain applies to the release that is installed, and does what it says.

Its page is docs/upstream/README.md.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.upstream import upstream

pytestmark = pytest.mark.night

TRANSFORMATIONS = "grain._src.python.dataset.transformations"
PROGRAM = """
import json, sys
import numpy as np
from grain import python as pygrain
from grain import experimental

lengths = np.random.default_rng(0).integers(1, 9, 300)
def document(number):
    return {"x": np.full(lengths[number], number)}

files = [
    pygrain.MapDataset.range(n * 100, n * 100 + 100).map(document).to_iter_dataset()
    for n in range(3)
]
mixed = experimental.InterleaveIterDataset(files, cycle_length=2)
iterator = iter(getattr(experimental, sys.argv[2])(
    mixed, length_struct={"x": 16}, num_packing_bins=4
))
if len(sys.argv) == 3:
    rows, states = [], []
    while True:
        states.append(iterator.get_state())
        row = next(iterator, None)
        if row is None:
            break
        rows.append(row["x"].tolist())
    json.dump({"rows": rows, "states": states}, open(sys.argv[1], "w"))
    sys.exit()
made = json.load(open(sys.argv[1]))
refused = 0
for number, state in enumerate(made["states"]):
    try:
        iterator.set_state(state)
    except KeyError as error:
        assert error.args == ("parent",)
        refused += 1
        continue
    assert [row["x"].tolist() for row in iterator] == made["rows"][number:], number
print(json.dumps([len(made["states"]), refused]))
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    directory = tmp_path_factory.mktemp("patched")
    return upstream.patched(directory, "grain", "grain-packing-state.patch")


@pytest.mark.parametrize("test", ["packing_state_test", "packing_test"])
def test_its_own_tests_and_those_of_the_release_pass(patched, test):
    upstream.ran(["-m", f"{TRANSFORMATIONS}.{test}"], patched)


@pytest.mark.parametrize(
    "packer", ["FirstFitPackIterDataset", "BestFitPackIterDataset"]
)
def test_states_of_the_release_continue_and_rows_are_the_same(
    patched, tmp_path, packer
):
    released, own = tmp_path / "released.json", tmp_path / "patched.json"
    upstream.ran(["-c", PROGRAM, released, packer], os.environ)
    upstream.ran(["-c", PROGRAM, own, packer], patched)
    assert (
        json.loads(released.read_text())["rows"] == json.loads(own.read_text())["rows"]
    )
    read = upstream.ran(["-c", PROGRAM, released, packer, "read"], patched)
    number, refused = json.loads(read)
    assert (number > 50, refused) == (True, 0)
    # The release does not continue a state of the patch at a wrong place.
    _, refused = json.loads(
        upstream.ran(["-c", PROGRAM, own, packer, "read"], os.environ)
    )
    assert refused > 0


def test_it_applies_to_the_release_that_is_installed(patched):
    program = f"import {TRANSFORMATIONS}.packing as p; print(p.__file__)"
    found = upstream.ran(["-c", program], patched).strip()
    assert found.startswith(patched["PYTHONPATH"].partition(os.pathsep)[0])
    with open(found) as file:
        assert "num_drawn" in file.read()
    assert not subprocess.run([sys.executable, "-c", program], check=False).returncode
