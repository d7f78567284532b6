"""`verify` and `inspect` of what a real world of four hosts left, and lost."""

import json
import pathlib
import random

import pytest

from tests import runs
from tests.multiprocess import machines
from tests.multiprocess.test_elastic_ram import on, restored, saved

HOSTS = 4


@pytest.fixture
def ram():
    with machines.Machines() as started:
        yield started


def found_by(verb, *arguments, code=0):
    return json.loads(runs.verb(verb, *arguments, "--json", code=code))


def flip(path):
    """Flips a random bit of the values in a file of one chunk."""
    content = bytearray(path.read_bytes())
    content[random.Random(3).randrange(max(1, len(content) - 4))] ^= 8
    path.write_bytes(content)


@pytest.mark.slow
def test_bad_copies_in_ram_and_in_storage_are_both_named_and_a_restore_mends_ram(
    ram, tmp_path
):
    steps = tmp_path / "steps"
    options = {"copies": 1, "slices": 2, "persistent": str(steps)}
    on(ram, range(HOSTS), saved([4], sharded=True), tmp_path, **options)
    roots = [ram.directory(number) for number in range(HOSTS)] + [steps]
    before = found_by("verify", *roots)
    assert before["passed"]
    (step,) = before["steps"]
    assert step["state"] == "complete"

    # The first of the chunks that host 2 saved, and will read first.
    chunks = {
        int(path.parent.name)
        for path in pathlib.Path(ram.root).glob("*/hosts/0/4-*/state/w/c/*/0")
    }
    (save,) = pathlib.Path(ram.directory(2)).glob("hosts/0/4-*")
    in_ram = save / "state" / "w" / "c" / str(len(chunks) // 2) / "0"
    flip(in_ram)
    shard = sorted((steps / "4" / "data").glob("shard-*"))[7]
    flip(shard)
    bad = found_by("verify", *roots, code=1)["problems"]
    assert {(each["tier"], each["path"]) for each in bad} == {
        ("local", str(in_ram)),
        ("persistent", str(shard)),
    }
    assert all("has a good copy" in each["remedy"] for each in bad)

    on(ram, range(HOSTS), restored(4, sharded=True), tmp_path, **options)
    (left,) = found_by("verify", *roots, code=1)["problems"]
    assert left["path"] == str(shard)


@pytest.mark.slow
def test_coverage_says_what_placement_protects_and_assuming_it_does_not(ram, tmp_path):
    for assumed in (False, True):
        options = {"assume_data_parallelism": assumed, "slices": 2, "copies": 1}
        on(ram, range(HOSTS), saved([4], sharded=True), tmp_path, **options)
        roots = [ram.directory(number) for number in range(HOSTS)]
        tiers = found_by("inspect", *roots)["tiers"]
        for covered in tiers["coverage"]:
            survives = covered["num_survivors"] == covered["num_items"]
            assert survives == (not assumed)
            # Values that all hosts hold are not at risk even so.
            lost = {name for each in covered["losses"] for name in each["first"]}
            assert "state/scale[]" not in lost
        lost = roots.pop()
        assert pathlib.Path(lost).exists()
        (step,) = found_by("inspect", *roots)["tiers"]["steps"]
        assert (step["problem"] is None) == (not assumed)
        for number in range(HOSTS):
            ram.lose(number)
