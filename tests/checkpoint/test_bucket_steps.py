"""Steps in buckets that are read, evaluated, preserved and edited by other programs."""

import json

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.persistent import leases, persistent_root
from tests import runs
from tests.tiers import tiered_steps
from tests.tiers.test_evaluations import committed

# The clients of S3 take seconds to start.
pytestmark = pytest.mark.parametrize(
    "bucket",
    ["gs", pytest.param("s3", marks=pytest.mark.slow)],
    indirect=True,
)

NEWEST = ocp.training.preservation_policies.LatestN(1)


def stored(bucket):
    return persistent_root.PersistentRoot.from_path(bucket).steps()


def has_leases(bucket):
    # An empty directory of a bucket is none.
    return (storage.absolute(bucket) / leases.DIRECTORY).exists()


def read(path, act=lambda: None):
    with ec.lease(path):
        act()


def listed(bucket):
    tiers = json.loads(runs.verb("inspect", "--json", bucket))["tiers"]
    return [(each["step"], each["abandoned"]) for each in tiers["steps"]]


def test_a_lease_and_a_removal_give_way_to_each_other(bucket):
    root = persistent_root.PersistentRoot.from_path(bucket)
    committed(root, 1, 2)
    watch = leases.Watch()
    with ec.lease(root.final(1)), leases.announced(root, [1], by=f"{100:015d}"):
        assert watch.leased(root) == {1}
        with pytest.raises(leases.StepGoneError, match="is being removed"):
            read(root.final(1))
    assert watch.leased(root) == set()
    with pytest.raises(leases.StepGoneError, match="name PERSISTENT_DIRECTORY"):
        read(root.final(3))
    assert not has_leases(bucket)
    with pytest.raises(errors.CheckpointError, match="was lost while it was read"):
        read(root.final(1), lambda: storage.remove(root.final(1)))
    again = f"{200:015d}"
    with pytest.raises(errors.CheckpointError, match="was lost while it was read"):
        read(root.final(2), lambda: committed(root, 2, save=again))


@pytest.mark.slow
def test_followed_best_and_preserved_steps_outlast_the_newest(bucket, tmp_path):
    keep = ocp.training.preservation_policies.AnyPreservationPolicy(
        [NEWEST, ec.BestN(1, metric="loss")]
    )
    options = {"keep": keep}
    with tiered_steps.checkpointer(tmp_path / "ram", bucket, **options) as run:
        tiered_steps.save(run, 1)
        followed = ec.watch_steps(bucket, timeout_secs=0)
        ec.record_metrics(next(followed), {"loss": 0.5})
        tiered_steps.save(run, 2)
        step = next(followed)
        assert (step.step, step.path.name) == (2, "2")
        tiered_steps.save(run, 3)
        # The best, the one that is read, and the newest.
        assert stored(bucket) == [1, 2, 3]
        ec.record_metrics(step, {"loss": 0.6})
        assert [each.step for each in followed] == [3]
        assert not has_leases(bucket)
        ec.pin(f"{bucket}/3")
        run.record_metrics(3, {"loss": 0.7})
        tiered_steps.save(run, 4)
        assert stored(bucket) == [1, 3, 4]
        assert run.evaluations() == {1: {"loss": 0.5}, 3: {"loss": 0.7}}
        ec.unpin(f"{bucket}/3")
        # Another program's word on a step that is gone.
        with pytest.raises(errors.CheckpointError, match="has committed"):
            ec.record_metrics(step.path, {"loss": 0.1})


def test_a_removal_that_was_cut_short_is_finished_by_the_next_one(bucket, tmp_path):
    root = persistent_root.PersistentRoot.from_path(bucket)
    with tiered_steps.checkpointer(tmp_path / "ram", bucket, keep=NEWEST) as run:
        tiered_steps.save(run, 3)
        # As a world leaves it that is killed meanwhile: of step 2 some files are left.
        killed = leases.announced(root, [2], by=f"{1:015d}")
        killed.__enter__()
        storage.write_atomic(root.final(2) / "state" / "d" / "x", b"")
        assert [each.step for each in root.leftovers()] == [2]
        tiered_steps.save(run, 4)
    assert root.leftovers() == []
    assert stored(bucket) == [4]
    assert not has_leases(bucket)
    # While the bucket is there, not in a garbage collection after it.
    killed.__exit__(None, None, None)


@pytest.mark.slow
def test_a_number_is_edited_once_no_run_is_alive(bucket, tmp_path):
    options = {"keep": NEWEST}
    with tiered_steps.checkpointer(tmp_path / "ram", bucket, **options) as run:
        tiered_steps.save(run, 1)
    edit = (f"{bucket}/1", "--set", "step=100")
    assert "no lock that shows" in runs.verb("modify", *edit, code=1)
    assert "1 -> 100" in runs.verb("modify", *edit, "--stopped")
    assert listed(bucket) == [(1, True), (1, False)]
    assert "PASSED" in runs.verb("verify", "--strict", bucket)
    with tiered_steps.checkpointer(tmp_path / "other", bucket, **options) as run:
        state = run.load(None, tiered_steps.state(1))
        assert state["step"] == 100
        saved = tiered_steps.state(1)["params"]["w"]
        assert np.asarray(state["params"]["w"]).tobytes() == np.asarray(saved).tobytes()
        # The version before is left until retention takes it.
        tiered_steps.save(run, 2)
    assert listed(bucket) == [(2, False)]
