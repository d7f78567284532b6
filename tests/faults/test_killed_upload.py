"""An upload that is killed anywhere: never half a step, and whole when repeated."""

import multiprocessing
import os
import signal
import threading

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import storage
from elastic_ckpt.tiers.persistent import ocdbt, persistent_root, persistent_tier
from tests.tiers import uploaded

# All that an upload and a commit do to storage.
WRITERS = (
    (ocdbt, "write"),
    (ocdbt, "merge"),
    (storage, "write_atomic"),
    (storage, "rename"),
    (storage, "remove"),
    (storage, "make_directory"),
)
# Before a write, storage is as after the write before it.
MOMENTS = ("within", "after")


def world():
    return uploaded.hosts(2)


def upload(root):
    """Two hosts upload a step in one process, and commit it."""
    saved = uploaded.saved_step()
    uploaded.write_all(root, saved, world())
    uploaded.commit_all(root, saved, world())


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def upload_and_die(root, point, moment):
    """Is killed at the `point`-th write: while it runs, or after it."""
    done = 0

    def dying(write):
        def act(*args):
            nonlocal done
            done += 1
            if done == point and moment == "within":
                threading.Thread(target=write, args=args).start()
                die()
            write(*args)
            if done == point and moment == "after":
                die()

        return act

    for module, name in WRITERS:
        setattr(module, name, dying(getattr(module, name)))
    upload(root)


def remove_and_die(root, point):
    """Is killed after the `point`-th change while the step is removed."""
    upload(root)
    done = 0

    def dying(write):
        def act(*args):
            nonlocal done
            done += 1
            write(*args)
            if done == point:
                die()

        return act

    for name in ("rename", "remove"):
        setattr(storage, name, dying(getattr(storage, name)))
    persistent_tier.PersistentTier(root, run=uploaded.RUN).remove(5)


@pytest.fixture(scope="module")
def children():
    return multiprocessing.get_context("forkserver")


def ended(children, target, *args):
    """Whether `target` came to its end."""
    child = children.Process(target=target, args=args)
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode == 0


def orbax_steps(root):
    context = ocp.Context()
    mode = ocp.options.AtomicityMode
    context.atomicity.mode = mode.COMMIT_FILE if root.in_place else mode.ATOMIC_RENAME
    with context, ocp.training.Checkpointer(root.path) as stock:
        return [each.step for each in stock.checkpoints]


def check_all_or_nothing(root):
    tier = persistent_tier.PersistentTier(root, run=uploaded.RUN)
    assert tier.steps() == orbax_steps(root)
    if tier.steps():
        uploaded.read(tier, 5)
        (held,) = tier.held()
        assert held.complete
    return tier


def check_killed_at(point, moment, root, children):
    """Kills an upload and repeats it; whether it had come to its end."""
    finished = ended(children, upload_and_die, root, point, moment)
    storage.make_directory(root.path)
    tier = check_all_or_nothing(root)
    if not tier.steps():
        assert not finished
        upload(root)
    # A host that did not learn of a commit repeats it.
    uploaded.commit_all(root, uploaded.saved_step(), world())
    assert check_all_or_nothing(root).steps() == [5]
    assert not root.leftovers()
    return finished


def root_of(path, in_place):
    return persistent_root.PersistentRoot(
        path=storage.absolute(path), in_place=in_place
    )


# A chunk, and the last file but one of 28; the long test below is killed at each.
@pytest.mark.parametrize(("point", "in_place"), [(6, False), (27, True)])
def test_killed_within_a_write_a_step_is_whole_or_is_not_there(
    point, in_place, tmp_path, children
):
    assert not check_killed_at(point, "within", root_of(tmp_path, in_place), children)


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_write_a_step_is_whole_or_is_not_there(
    moment, in_place, tmp_path, children
):
    point = 1
    while not check_killed_at(
        point, moment, root_of(tmp_path / str(point), in_place), children
    ):
        point += 1
    assert point > 25


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_killed_while_it_is_removed_a_step_is_whole_or_is_not_there(
    in_place, tmp_path, children
):
    for point in range(1, 10):
        root = root_of(tmp_path / str(point), in_place)
        finished = ended(children, remove_and_die, root, point)
        tier = check_all_or_nothing(root)
        for leftover in root.leftovers():
            storage.remove(leftover.path)
        assert not root.leftovers()
        if finished:
            break
    assert finished
    assert not tier.steps()
