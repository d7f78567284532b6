"""Steps in buckets that are read, evaluated, preserved and edited by other programs."""

import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.core import errors, storage
from elastic_ckpt.steps.step import Line
from elastic_ckpt.tiers.persistent import leases, persistent_root
from tests.tiers import tiered_steps

# `tests/tiers` has both kinds of buckets.
pytestmark = pytest.mark.parametrize("bucket", ["gs"], indirect=True)

NEWEST = ocp.training.preservation_policies.LatestN(1)


def stored(bucket):
    return persistent_root.PersistentRoot.from_path(bucket).steps()


def has_leases(bucket):
    # An empty directory of a bucket is none.
    return (storage.absolute(bucket) / leases.DIRECTORY).exists()


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
        of_killed = Line(save=f"{1:015d}", parents=())
        killed = leases.removing(root, [2], of_killed, watch={})
        killed.__enter__()
        storage.write_atomic(root.final(2) / "state" / "d" / "x", b"")
        assert [each.step for each in root.leftovers()] == [2]
        tiered_steps.save(run, 4)
    assert root.leftovers() == []
    assert stored(bucket) == [4]
    assert not has_leases(bucket)
    # While the bucket is there, not in a garbage collection after it.
    killed.__exit__(None, None, None)
