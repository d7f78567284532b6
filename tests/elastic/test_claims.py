"""Each world of a run belongs to one supervisor: the first that creates its record."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import claims


def claim(number, claimant="a", **fields):
    values = {"slices": (0, 2), "address": "10.0.0.1:8476", "step": 40, "save": "7"}
    return claims.Claim(number=number, claimant=claimant, **values | fields)


@pytest.fixture(params=["local", "gs", "s3"])
def directory(request, tmp_path):
    """The directory of a run, on a disk or in a bucket."""
    if request.param == "local":
        return str(tmp_path / "run")
    environment = request.getfixturevalue("object_stores")
    patch = request.getfixturevalue("monkeypatch")
    for name, value in environment.items():
        patch.setenv(name, value)
    return f"{request.param}://bucket/{tmp_path.name}"


def test_the_newest_claim_is_read_back(directory):
    of_run = claims.Claims(directory)
    assert of_run.newest() is None
    first, second = claim(1, slices=(0, 1, 2)), claim(2)
    assert of_run.claim(first)
    assert of_run.newest() == first
    assert of_run.is_current(first)
    assert of_run.claim(second)
    assert of_run.newest() == second
    assert not of_run.is_current(first)


def test_a_claimed_world_is_not_claimed_again(directory):
    of_run = claims.Claims(directory)
    assert of_run.claim(claim(1))
    assert not of_run.claim(claim(1, "b"))
    assert of_run.claim(claim(2, "b"))
    # A supervisor that was cut off comes back with an old number.
    assert not of_run.claim(claim(1, "c"))
    assert of_run.newest().claimant == "b"


CLAIMANT = """
import sys
from elastic_ckpt.elastic import claims
print("ready", flush=True)
sys.stdin.readline()
won = [
    number
    for number in range(1, 33)
    if claims.Claims(sys.argv[1]).claim(
        claims.Claim(
            number=number,
            claimant=sys.argv[2],
            slices=(0,),
            address="",
            step=0,
            save="",
        )
    )
]
print(won)
"""


def test_of_processes_that_race_for_worlds_each_world_has_one_winner(tmp_path):
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMANT, tmp_path, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "abc"
    ]
    for each in racing:
        assert each.stdout.readline() == "ready\n"
    won = [json.loads(each.communicate("go\n")[0]) for each in racing]
    # A racer that is late finds newer worlds, and gets none of the older.
    numbers = sorted(itertools.chain.from_iterable(won))
    assert len(numbers) == len(set(numbers))
    records = os.listdir(tmp_path / claims.DIRECTORY)
    assert sorted(records) == sorted(f"{number}.json" for number in numbers)
    for name, worlds in zip("abc", won, strict=True):
        for number in worlds:
            path = tmp_path / claims.DIRECTORY / f"{number}.json"
            assert json.loads(path.read_bytes())["claimant"] == name


def test_a_damaged_claim_is_an_error_that_names_it(tmp_path):
    of_run = claims.Claims(tmp_path)
    of_run.claim(claim(1))
    path = tmp_path / claims.DIRECTORY / "1.json"
    path.write_bytes(path.read_bytes().replace(b"10.0.0.1", b"10.0.0.2"))
    with pytest.raises(errors.RunError, match=r"1\.json was altered"):
        of_run.newest()
    with pytest.raises(errors.RunError, match=r"1\.json was altered"):
        of_run.claim(claim(2))


def test_storage_out_of_reach_is_an_error_and_no_claim(tmp_path):
    (tmp_path / "file").write_text("")
    of_run = claims.Claims(tmp_path / "file")
    for attempt in (of_run.newest, lambda: of_run.claim(claim(1))):
        with pytest.raises(errors.RunError, match="out of reach"):
            attempt()


def test_a_record_holds_every_field_of_its_claim(tmp_path):
    of_run = claims.Claims(tmp_path)
    of_run.claim(claim(1))
    content = json.loads((tmp_path / claims.DIRECTORY / "1.json").read_bytes())
    names = {field.name for field in dataclasses.fields(claims.Claim)}
    assert content.keys() == names | {"version", "digest"}
