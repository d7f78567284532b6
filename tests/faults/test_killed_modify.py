"""A step that is modified is the old one or the new one, wherever that is killed."""

import os
import shutil
import signal

import pytest

from elastic_ckpt.checkpoint import modified_step, number_edit
from elastic_ckpt.core import storage
from elastic_ckpt.tiers.persistent import ocdbt, persistent_root
from tests import runs
from tests.cli.test_modify import components_of, opened, save_two_steps, saved  # noqa: F401
from tests.faults.test_killed_upload import children, ended  # noqa: F401

# All that a modification does to storage.
WRITERS = (
    (ocdbt, "write"),
    (ocdbt, "merge"),
    (storage, "write_atomic"),
    (storage, "rename"),
    (storage, "copy_tree"),
    (storage, "remove"),
    (storage, "make_directory"),
)
EDITS = {
    "state": [number_edit.Edit(path="step", value="100")],
    "schedule": [number_edit.Edit(path="count", value="100")],
}


def modify(steps):
    step = modified_step.ModifiedStep(steps / "2")
    with step.alone():
        step.modify([c for name in EDITS for c in step.changes(name, EDITS[name])])


def modify_and_die(steps, point, moment):
    """Is killed before or after the `point`-th write."""
    done = 0

    def dying(write):
        def act(*args, **options):
            nonlocal done
            done += 1
            if done == point and moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = write(*args, **options)
            if done == point and moment == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return act

    for module, name in WRITERS:
        setattr(module, name, dying(getattr(module, name)))
    modify(steps)


def in_place(path):
    """Steps that are written as into a bucket, which has no rename."""
    return persistent_root.PersistentRoot(path=storage.absolute(path), in_place=True)


def modify_in_place_and_die(steps, point, moment):
    """As `modify_and_die`; this process is a child."""
    persistent_root.PersistentRoot.from_path = in_place
    modify_and_die(steps, point, moment)


@pytest.fixture
def saved_in_place(tmp_path, monkeypatch):
    """The steps of `saved`, as in a bucket; this process looks at them so."""
    monkeypatch.setattr(persistent_root.PersistentRoot, "from_path", in_place)
    return save_two_steps(tmp_path / "saved" / "steps")


def check(steps):
    """One version of step 2 counts, and it is whole; returns its number."""
    runs.verb("verify", "--strict", str(steps))
    with opened(steps) as checkpointer:
        assert checkpointer.latest.step == 2
        step = int(checkpointer.load(None, None)["step"])
    of_component, _ = components_of(steps)
    assert of_component["count"] == (30 if step == 2 else step)
    return step


def killed_at(point, moment, original, steps, children, act=modify_and_die):  # noqa: F811
    """Kills a modification, and repeats it; whether it had come to its end."""
    shutil.copytree(original, steps)
    finished = ended(children, act, steps, point, moment)
    assert check(steps) in ({100} if finished else {2, 100})
    modify(steps)
    assert check(steps) == 100
    shutil.rmtree(steps)
    return finished


@pytest.mark.thorough
@pytest.mark.slow(minutes=1)
def test_killed_at_any_write_a_version_is_whole(saved, tmp_path, children):  # noqa: F811
    point = 1
    while not killed_at(point, "before", saved, tmp_path / "steps", children):
        point += 1
    # Chunks, a manifest, the merge, files of Orbax, two renames.
    assert point > 10


@pytest.mark.parametrize("point", [3, 17, 18, 19])
def test_killed_at_a_write_a_version_is_whole(point, saved, tmp_path, children):  # noqa: F811
    killed_at(point, "after", saved, tmp_path / "steps", children)


@pytest.mark.thorough
@pytest.mark.slow(minutes=0.7)
def test_killed_at_any_write_into_a_bucket_a_version_is_whole(
    saved_in_place,
    tmp_path,
    children,  # noqa: F811
):
    act, point = modify_in_place_and_die, 1
    steps = tmp_path / "steps"
    while not killed_at(point, "before", saved_in_place, steps, children, act):
        point += 1
    assert point > 10


# Between the copy that sets the step aside and what follows.
@pytest.mark.parametrize("point", [4])
def test_killed_at_a_write_into_a_bucket_a_version_is_whole(
    point,
    saved_in_place,
    tmp_path,
    children,  # noqa: F811
):
    act = modify_in_place_and_die
    assert not killed_at(
        point, "before", saved_in_place, tmp_path / "steps", children, act
    )
