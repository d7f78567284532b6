"""Leftovers of dead uploads are removed, files of live ones stay."""

import subprocess
import sys

import pytest

from elastic_ckpt.core import errors, storage
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier, writers
from tests.tiers import uploaded

OLD, NOW, LATER = (f"{number:015d}" for number in (5, 6, 7))
KINDS = ("renamed", "in place")


@pytest.fixture(params=KINDS)
def root(request, tmp_path):
    return persistent_root.PersistentRoot(
        path=storage.absolute(tmp_path / "steps"), in_place=request.param == "in place"
    )


@pytest.fixture
def world(root):
    world = writers.WritingWorld(root, run=uploaded.RUN)
    yield world
    world.close()


def upload(root, step, save, *, commit=False):
    """Uploads all of a step, and commits it or not."""
    saved, hosts = uploaded.saved_step(step, save=save), uploaded.hosts(2)
    uploaded.write_all(root, saved, hosts)
    if commit:
        uploaded.commit_all(root, saved, hosts)


def left(root):
    return [each.step for each in root.leftovers()]


def test_a_new_world_removes_the_uploads_of_older_ones_alone(root, world):
    upload(root, 3, OLD, commit=True)
    for step, save in ((4, OLD), (5, NOW), (6, LATER), (7, "orbax-own")):
        upload(root, step, save)
    removed = world.discard_dead(before=NOW)
    assert [each.step for each in removed] == [4]
    assert left(root) == [5, 6, 7]
    uploaded.read(persistent_tier.PersistentTier(root, run=uploaded.RUN), 3)


# A program that joins, prints a line, and waits.
WRITER = (
    "import signal, sys\n"
    "from elastic_ckpt.core import storage\n"
    "presence = storage.Presence(sys.argv[1])\n"
    "print('there', flush=True)\n"
    "signal.pause()\n"
)


def test_a_world_that_was_killed_writes_no_more(root, world):
    command = [sys.executable, "-c", WRITER, root.path / writers.LOCK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "there\n"
        upload(root, 4, OLD)
        removed = world.discard_dead(before=NOW)
        writer.kill()
    assert removed == []
    assert len(world.discard_dead(before=NOW)) == 1


def test_what_another_run_or_orbax_is_writing_stays(root, world):
    upload(root, 4, OLD)
    for step in (5, 6):
        unfinished = root.unfinished(StepId(step, "1700000000000000"))
        storage.write_atomic(unfinished / "state" / "d" / "x", b"")
    other = writers.WritingWorld(root, run="another")
    if root.in_place:
        # The name contains no save there, and the manifest is of another run.
        assert other.discard_dead(before=NOW) == []
    other.close()
    assert len(world.discard_dead(before=NOW)) == 1
    assert left(root) == [5, 6]


def test_a_world_removes_what_its_own_failed_uploads_left(root, world):
    for step in (4, 5, 6):
        upload(root, step, NOW)
    upload(root, 3, OLD)
    assert len(world.discard_own(StepId(6, NOW))) == 2
    assert left(root) == [3, 6]


def test_nothing_is_committed_once_a_world_has_said_that_it_writes_no_more(world):
    world.be_present()
    with world.committing():
        pass
    world.close()
    with pytest.raises(errors.CheckpointError, match="was closed before"):
        world.committing().__enter__()


def test_where_there_are_no_locks_nothing_is_removed():
    root = persistent_root.PersistentRoot.from_path("gs://bucket/steps")
    world = writers.WritingWorld(root, run=uploaded.RUN)
    assert world.discard_dead(before=NOW) == []
    world.close()


@pytest.mark.parametrize(
    "bucket",
    ["gs", pytest.param("s3", marks=pytest.mark.slow)],
    indirect=True,
)
def test_who_has_claimed_a_run_in_a_bucket_removes_what_is_long_dead(
    bucket, monkeypatch
):
    root = persistent_root.PersistentRoot.from_path(bucket)
    upload(root, 3, OLD, commit=True)
    upload(root, 4, OLD)
    upload(root, 5, LATER)
    # The rests of removals that were cut short.
    for rest in (root.final(6), root.aside(StepId(2, OLD))):
        storage.write_atomic(rest / "state" / "d" / "x", b"")
    world = writers.WritingWorld(root, run=uploaded.RUN)
    assert world.discard_dead(before=NOW, is_claimed=True) == []
    monkeypatch.setattr(writers, "_QUIET_SECS", -60.0)
    assert world.discard_dead(before=NOW) == []
    removed = world.discard_dead(before=NOW, is_claimed=True)
    assert [each.step for each in removed] == [2, 4, 6]
    assert left(root) == [5]
    uploaded.read(persistent_tier.PersistentTier(root, run=uploaded.RUN), 3)
    world.close()
