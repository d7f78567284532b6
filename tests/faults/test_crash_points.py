"""Uploads, removals and edits of a step that end at any change of storage.

Afterwards the step is whole or not there, old or new, and what was begun can be
repeated; on disks, and in place as in buckets.
"""

import contextlib
import shutil

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import modified_step, number_edit
from elastic_ckpt.core import storage
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier
from tests import runs
from tests.cli.test_modify import components_of, opened, save_two_steps
from tests.model.simulated_world import Crash, Files
from tests.tiers import uploaded

EDITS = {
    "state": [number_edit.Edit(path="step", value="100")],
    "schedule": [number_edit.Edit(path="count", value="100")],
}
# A few points by default, and all of them in a long test.
EVERY = pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
IN_PLACE = pytest.mark.parametrize("in_place", [False, True])


def crash_at(number, act, *, torn=False):
    """Ends `act` at a change of storage; whether it had come to its end."""
    files = Files(crash_at=number, torn=torn)
    with storage.watched(files), contextlib.suppress(Crash):
        act()
        return True
    return False


def root_of(path, in_place):
    return persistent_root.PersistentRoot(
        path=storage.absolute(path), in_place=in_place
    )


def upload(root):
    """Two hosts upload a step, and commit it."""
    saved = uploaded.saved_step()
    uploaded.write_all(root, saved, uploaded.hosts(2))
    uploaded.commit_all(root, saved, uploaded.hosts(2))


def orbax_steps(root):
    context = ocp.Context()
    mode = ocp.options.AtomicityMode
    context.atomicity.mode = mode.COMMIT_FILE if root.in_place else mode.ATOMIC_RENAME
    with context, ocp.training.Checkpointer(root.path) as stock:
        return [each.step for each in stock.checkpoints]


def check_all_or_nothing(root):
    storage.make_directory(root.path)
    tier = persistent_tier.PersistentTier(root, run=uploaded.RUN)
    assert tier.steps() == orbax_steps(root)
    if tier.steps():
        uploaded.read(tier, 5)
        (held,) = tier.held()
        assert held.complete
        # What Orbax reads: one store of all that hosts wrote.
        for name in ("_CHECKPOINT_METADATA", "state/manifest.ocdbt"):
            assert (root.final(5) / name).exists()
    return tier


@EVERY
@IN_PLACE
def test_an_upload_that_ends_at_any_change_leaves_a_whole_step_or_none(
    in_place, every, tmp_path
):
    number, finished = 1, False
    while not finished:
        root = root_of(tmp_path / str(number), in_place)
        torn = bool(number % 2)
        finished = crash_at(number, lambda root=root: upload(root), torn=torn)
        if not check_all_or_nothing(root).steps():
            assert not finished
            upload(root)
        # A host that did not learn of a commit repeats it.
        uploaded.commit_all(root, uploaded.saved_step(), uploaded.hosts(2))
        assert check_all_or_nothing(root).steps() == [5]
        assert not root.leftovers()
        number += every
    assert number > 25


@IN_PLACE
def test_a_removal_that_ends_at_any_change_leaves_a_whole_step_or_none(
    in_place, tmp_path
):
    number, finished = 0, False
    while not finished:
        number += 1
        root = root_of(tmp_path / str(number), in_place)
        upload(root)
        tier = persistent_tier.PersistentTier(root, run=uploaded.RUN)
        finished = crash_at(number, lambda tier=tier: tier.remove(5), torn=True)
        tier = check_all_or_nothing(root)
        for leftover in root.leftovers():
            storage.remove(leftover.path)
        assert not root.leftovers()
    assert number > 1
    assert not tier.steps()


def modify(steps):
    step = modified_step.ModifiedStep(steps / "2")
    with step.alone():
        step.modify([c for name in EDITS for c in step.changes(name, EDITS[name])])


def check_version(steps):
    """One version of step 2 counts, and it is whole; returns its number."""
    runs.verb("verify", "--strict", str(steps))
    with opened(steps) as checkpointer:
        assert checkpointer.latest.step == 2
        step = int(checkpointer.load(None, None)["step"])
    of_component, _ = components_of(steps)
    assert of_component["count"] == (30 if step == 2 else step)
    return step


@EVERY
@IN_PLACE
def test_an_edit_that_ends_at_any_change_leaves_a_whole_version(
    in_place, every, tmp_path, monkeypatch
):
    if in_place:
        from_path = lambda path: root_of(path, True)  # noqa: E731
        monkeypatch.setattr(persistent_root.PersistentRoot, "from_path", from_path)
    saved = save_two_steps(tmp_path / "saved" / "steps")
    number, finished, found = 1, False, []
    while not finished:
        steps = shutil.copytree(saved, tmp_path / str(number) / "steps")
        finished = crash_at(number, lambda steps=steps: modify(steps))
        found.append(check_version(steps))
        modify(steps)
        assert check_version(steps) == 100
        number += every
    # The old one, and then the new one.
    assert found == sorted(found)
    assert {*found} == {2, 100}
    assert number > 10
