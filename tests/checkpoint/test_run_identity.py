"""The identity of a run: RAM counts for the run alone whose storage has the same."""

import pathlib
import shutil

import jax.numpy as jnp
import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.persistent import run_files
from tests import shared_memory


@pytest.fixture
def ram():
    with shared_memory.directory("identity") as directory:
        yield pathlib.Path(directory) / "tiny"


def tiers(ram, storage=None, **options):
    chosen = [ec.Local(ram, **options)] if ram else []
    return [*chosen, *([ec.Persistent(storage, every=4)] if storage else [])]


def save(chosen, *steps, value=0):
    with ec.Checkpointer(chosen, run="tiny") as checkpointer:
        if checkpointer.latest is not None:
            checkpointer.load(None, None)
        for step in steps:
            assert checkpointer.save(step, {"w": jnp.full(4, value + step)})
            checkpointer.wait()


def newest(chosen):
    with ec.Checkpointer(chosen, run="tiny") as checkpointer:
        if checkpointer.latest is None:
            return None
        step = checkpointer.latest.step
        return step, int(checkpointer.load(None, None)["w"][0])


def refused(chosen, ram):
    with pytest.raises(errors.RunError, match="steps of another run") as raised:
        newest(chosen)
    assert "another run_name" in str(raised.value)
    assert f"rm -r {ram}" in str(raised.value)


def test_ram_of_another_run_of_the_same_name_is_refused(tmp_path, ram):
    save(tiers(ram, tmp_path / "a"), 4, 5)
    refused(tiers(ram, tmp_path / "b"), ram)
    # Nothing was changed, and the run of the RAM disk goes on.
    assert newest(tiers(ram, tmp_path / "a")) == (5, 5)
    # The remedy: the other run begins with an empty disk.
    shutil.rmtree(ram)
    assert newest(tiers(ram, tmp_path / "b")) is None
    save(tiers(ram, tmp_path / "b"), 4, value=100)
    assert newest(tiers(ram, tmp_path / "b")) == (4, 104)
    refused(tiers(ram, tmp_path / "a"), ram)


def test_ram_of_a_run_whose_storage_was_removed_is_continued_with_its_identity(
    tmp_path, ram
):
    save(tiers(ram, tmp_path / "a"), 4, 5)
    shutil.rmtree(tmp_path / "a")
    copied = f"copy {ram}/run.json to {tmp_path}/a/run.json"
    with pytest.raises(errors.RunError, match=f"holds steps .* only copy.*{copied}"):
        newest(tiers(ram, tmp_path / "a"))
    (tmp_path / "a").mkdir(exist_ok=True)
    shutil.copy(ram / "run.json", tmp_path / "a")
    assert newest(tiers(ram, tmp_path / "a")) == (5, 5)
    save(tiers(ram, tmp_path / "a"), 8)
    assert newest(tiers(None, tmp_path / "a")) == (8, 8)


def test_storage_alone_and_storage_that_is_added_have_the_identity(tmp_path, ram):
    save(tiers(ram), 1, 2)
    # The RAM disk of a run that had no storage.
    save(tiers(ram, tmp_path / "a"), 4, 5)
    assert newest(tiers(ram, tmp_path / "a")) == (5, 5)
    assert newest(tiers(None, tmp_path / "a")) == (4, 4)
    refused(tiers(ram, tmp_path / "b"), ram)
    # And without it again.
    assert newest(tiers(ram)) == (5, 5)
    refused(tiers(ram, tmp_path / "b"), ram)
    assert newest(tiers(ram, tmp_path / "a")) == (5, 5)


def disk(name, *, identity=None):
    known = identity and run_files.Identity(name=identity, is_stored=True)
    return run_files.Place(directory=name, identity=known)


def test_the_disks_of_hosts_without_storage_are_of_one_run():
    disks = [disk("a", identity="1"), disk("b"), disk("c", identity="1")]
    agreed = run_files.agreed(None, disks, fresh="2")
    assert agreed == disks[0].identity
    disks[1] = disk("b", identity="3")
    with pytest.raises(
        errors.RunError, match="host 1: b contains steps of another run"
    ):
        run_files.agreed(None, disks, fresh="2")
