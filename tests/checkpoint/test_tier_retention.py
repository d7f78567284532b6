"""Which steps are kept in storage and in RAM, also by their evaluations."""

import errno

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.core import errors, storage
from elastic_ckpt.steps.step import Line
from elastic_ckpt.tiers.persistent import leases, persistent_root, run_files, upload
from tests.checkpoint.test_checkpointer import stored
from tests.recorded_events import RecordedEvents
from tests.tiers import tiered_steps

policies = ocp.training.preservation_policies
BEST = policies.BestN(get_metric_fn=lambda m: -m["loss"], n=1)
NEWEST = policies.LatestN(1)


def root_of(tmp_path):
    return persistent_root.PersistentRoot.from_path(tmp_path / "steps")


def in_ram(tmp_path):
    names = (path.name for path in (tmp_path / "ram" / "hosts" / "0").iterdir())
    return sorted(int(name.partition("-")[0]) for name in names if name[0].isdigit())


def opened(tmp_path, **options):
    return tiered_steps.checkpointer(tmp_path / "ram", tmp_path / "steps", **options)


def numbers(steps):
    return [each.step for each in steps]


@pytest.mark.parametrize(
    ("keep", "keep_in_ram", "kept", "kept_in_ram"),
    [
        (None, BEST, [1, 2, 3, 4], [2, 4]),
        (BEST, policies.EveryNSteps(2), [2, 4], [2, 4]),
        (policies.LatestN(2), policies.EveryNSeconds(10**6), [3, 4], [1, 4]),
    ],
)
def test_policies_decide_what_stays(tmp_path, keep, keep_in_ram, kept, kept_in_ram):
    for steps in ([1, 2], [3, 4]):
        with opened(tmp_path, keep=keep, keep_in_ram=keep_in_ram) as checkpointer:
            for step in steps:
                loss = abs(step - 2.2)
                tiered_steps.save(checkpointer, step, metrics={"loss": loss})
    assert stored(tmp_path) == kept
    assert in_ram(tmp_path) == kept_in_ram
    assert root_of(tmp_path).leftovers() == []


@pytest.mark.parametrize("is_damaged", [True, False])
def test_on_a_full_disk_damaged_steps_go_and_unread_ones_stay(
    tmp_path, monkeypatch, is_damaged
):
    recorded, read = RecordedEvents(), storage.read_bytes

    def save(checkpointer, step):
        is_saved = checkpointer.save(step, {"w": np.full(2**18, step, np.float32)})
        checkpointer.wait()
        return is_saved

    def fails(path):
        if str(path) == str(manifest):
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    options = {"keep_in_ram": policies.PreserveAll(), "limit_bytes": 5 * 2**19}
    with opened(tmp_path, every=100, **options) as checkpointer:
        assert save(checkpointer, 1)
    (manifest,) = (tmp_path / "ram" / "hosts" / "0").glob("1-*/manifest-*")
    with opened(tmp_path, every=100, emit=recorded, **options) as checkpointer:
        if is_damaged:
            manifest.write_bytes(manifest.read_bytes().replace(b"run-7", b"run-8"))
        else:
            monkeypatch.setattr(storage, "read_bytes", fails)
        assert save(checkpointer, 2)
        assert save(checkpointer, 3) == is_damaged
    monkeypatch.undo()
    assert in_ram(tmp_path) == ([2, 3] if is_damaged else [1, 2])
    causes = {each["cause"] for each in recorded.named("degraded")}
    assert causes == (set() if is_damaged else {"full"})


def away(*_, **__):
    raise OSError(5, "storage is away")


def test_storage_that_is_away_is_told(tmp_path, monkeypatch):
    recorded = RecordedEvents()
    with opened(tmp_path, keep=NEWEST, emit=recorded) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(run_files, "record_evaluation", away)
            checkpointer.record_metrics(1, {"loss": 0.1})
        with monkeypatch.context() as patch:
            patch.setattr(upload, "commit", away)
            tiered_steps.save(checkpointer, 1)
        assert in_ram(tmp_path) == [1]
        assert stored(tmp_path) == []
        monkeypatch.setattr(persistent_root.PersistentRoot, "remove", away)
        tiered_steps.save(checkpointer, 2, 3)
    # Steps that cannot be removed are told, and the backups count.
    assert stored(tmp_path) == [2, 3]
    assert [each["step"] for each in recorded.named("backed_up")] == [2, 3]
    metrics, backup, *_, removal = recorded.named("degraded")
    assert "its metrics were not recorded: host 0: [Errno 5]" in metrics["why"]
    assert "it was not backed up: host 0: [Errno 5] storage" in backup["why"]
    assert removal["step"] == 3


def keep(n=1):
    """The newest, and the best."""
    return policies.AnyPreservationPolicy([NEWEST, ec.BestN(n, metric="loss")])


def test_the_best_by_evaluations_stay_over_worlds_whether_they_saved_or_not(tmp_path):
    with opened(tmp_path, keep=keep(2)) as checkpointer:
        # Evaluated before it is saved; saved and never evaluated; only evaluated.
        checkpointer.record_metrics(2, {"loss": 0.5})
        tiered_steps.save(checkpointer, 2, 4)
        checkpointer.record_metrics(5, {"loss": 0.4})
        tiered_steps.save(checkpointer, 6)
        assert stored(tmp_path) == [2, 4, 6]
        assert checkpointer.evaluations() == {2: {"loss": 0.5}, 5: {"loss": 0.4}}
    with opened(tmp_path, keep=keep(2)) as checkpointer:
        # Evaluated after it was saved, in another world.
        checkpointer.record_metrics(6, {"loss": float("nan")})
        tiered_steps.save(checkpointer, 8)
        assert stored(tmp_path) == [2, 4, 8]
        # The list shrinks with the steps.
        assert checkpointer.delete(4)
        tiered_steps.save(checkpointer, 10)
        assert stored(tmp_path) == [2, 10]
        assert checkpointer.evaluations() == {2: {"loss": 0.5}}


def test_metrics_need_a_step_in_storage_and_json(tmp_path):
    with opened(tmp_path) as checkpointer:
        tiered_steps.save(checkpointer, 1)
    for path in (tmp_path / "steps" / "2", tmp_path / "steps", tmp_path / "ram"):
        with pytest.raises(errors.CheckpointError, match="has committed"):
            ec.record_metrics(path, {"loss": 0.5})
    with pytest.raises(errors.CheckpointError, match="encoded as JSON"):
        ec.record_metrics(tmp_path / "steps" / "1", {"loss": object()})
    with (
        tiered_steps.checkpointer(tmp_path / "alone") as checkpointer,
        pytest.raises(errors.CheckpointError, match="add Persistent"),
    ):
        checkpointer.record_metrics(1, {"loss": 0.1})


def test_after_a_rollback_preserved_steps_stay(tmp_path):
    with opened(tmp_path, keep=NEWEST) as checkpointer:
        for step in (2, 4):
            tiered_steps.save(checkpointer, step)
            ec.pin(tmp_path / "steps" / str(step))
        tiered_steps.save(checkpointer, 6)
        (newest,) = (tmp_path / "ram" / "hosts" / "0").glob("6-*")
        ec.pin(newest)
        # As a run that diverged, which saves the step that it goes back to again.
        checkpointer.load(2, roll_back=True)
        tiered_steps.save(checkpointer, 2, overwrite=True)
        # Of step 2 the old save comes back when retention has removed the new one.
        tiered_steps.save(checkpointer, 8, 10)
    assert stored(tmp_path) == [2, 10]
    assert numbers(root_of(tmp_path).set_aside_steps()) == [4]
    assert in_ram(tmp_path) == [6, 10]


def test_metrics_recorded_after_a_save_are_those_of_the_step(tmp_path):
    with opened(tmp_path) as checkpointer:
        assert ec.best_step(checkpointer, metric="loss") is None
        for step in (2, 4, 6):
            tiered_steps.save(checkpointer, step, metrics={"lr": step})
        with pytest.raises(
            errors.CheckpointError,
            match=r"no step has .*'loss'; the steps have \['lr'\]",
        ):
            ec.best_step(checkpointer, metric="loss")
        checkpointer.record_metrics(4, {"loss": 0.3, "lr": 9})
        # Of the newest step before it, unless one is nearer.
        checkpointer.record_metrics(5, {"loss": 0.1})
        checkpointer.record_metrics(7, {"loss": 0.2})
        expected = [{"lr": 2}, {"loss": 0.3, "lr": 9}, {"loss": 0.2, "lr": 6}]
        assert [each.metrics for each in checkpointer.checkpoints] == expected
        assert ec.best_step(checkpointer, metric="loss") == 6
        assert ec.best_step(checkpointer, metric="loss", higher_is_better=True) == 4
    with opened(tmp_path) as checkpointer:
        assert ec.best_step(checkpointer, metric="loss") == 4
    with ocp.training.Checkpointer(tmp_path / "steps") as orbax:
        assert ec.best_step(orbax, metric="lr") == 2


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_in_a_bucket_followed_best_and_preserved_steps_stay(bucket, tmp_path):
    root = persistent_root.PersistentRoot.from_path(bucket)
    with tiered_steps.checkpointer(tmp_path / "ram", bucket, keep=keep()) as run:
        tiered_steps.save(run, 1)
        followed = ec.watch_steps(bucket, timeout_secs=0)
        ec.record_metrics(next(followed), {"loss": 0.5})
        tiered_steps.save(run, 2)
        step = next(followed)
        tiered_steps.save(run, 3)
        # The best, the one that is read, and the newest.
        assert root.steps() == [1, 2, 3]
        ec.record_metrics(step, {"loss": 0.6})
        assert numbers(followed) == [3]
        ec.pin(f"{bucket}/3")
        run.record_metrics(3, {"loss": 0.7})
        tiered_steps.save(run, 4)
        assert root.steps() == [1, 3, 4]
        assert run.evaluations() == {1: {"loss": 0.5}, 3: {"loss": 0.7}}
        # Another program's word on a step that is gone.
        with pytest.raises(errors.CheckpointError, match="has committed"):
            ec.record_metrics(step.path, {"loss": 0.1})


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
@pytest.mark.parametrize(("keep", "left"), [(NEWEST, [4]), (None, [3, 4])])
def test_a_removal_that_was_cut_short_is_finished_by_the_next_one(
    bucket, tmp_path, keep, left
):
    root = persistent_root.PersistentRoot.from_path(bucket)
    with tiered_steps.checkpointer(tmp_path / "ram", bucket, keep=keep) as run:
        tiered_steps.save(run, 3)
        # As a world leaves it that is killed meanwhile: of step 2 some files are left.
        of_killed = Line(save=f"{1:015d}", parents=())
        killed = leases.removing(root, [2, 3], of_killed, watch={})
        killed.__enter__()
        storage.write_atomic(root.final(2) / "state" / "d" / "x", b"")
        assert numbers(root.leftovers()) == [2]
        tiered_steps.save(run, 4)
    assert root.leftovers() == []
    # One that is whole is not removed by its announcement alone.
    assert root.steps() == left
    # An empty directory of a bucket is none.
    assert not (root.path / leases.DIRECTORY).exists()
    # While the bucket is there, not in a garbage collection after it.
    killed.__exit__(None, None, None)
