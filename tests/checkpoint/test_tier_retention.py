"""Which steps are kept in storage and in RAM, also by their evaluations."""

import errno

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt import frontend
from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.persistent import (
    persistent_root,
    persistent_tier,
    run_files,
    upload,
)
from tests.recorded_events import RecordedEvents
from tests.tiers import tiered_steps, uploaded
from tests.tiers.tiered_steps import steps_of

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

policies = ocp.training.preservation_policies


def stored(tmp_path):
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    return root.steps()


def in_ram(tmp_path):
    names = (path.name for path in (tmp_path / "ram" / "hosts" / "0").iterdir())
    return sorted(int(name.partition("-")[0]) for name in names if name[0].isdigit())


def opened(tmp_path, **options):
    return tiered_steps.checkpointer(tmp_path / "ram", tmp_path / "steps", **options)


BEST = policies.BestN(get_metric_fn=lambda m: -m["loss"], n=1)


@pytest.mark.parametrize(
    ("keep", "keep_in_ram", "kept", "kept_in_ram"),
    [
        (None, BEST, [1, 2, 3, 4], [2, 4]),
        (BEST, policies.EveryNSteps(2), [2, 4], [2, 4]),
        (policies.LatestN(2), policies.EveryNSeconds(10**6), [3, 4], [1, 4]),
    ],
)
def test_policies_of_orbax_decide_what_stays_in_each_tier_also_over_a_new_world(
    tmp_path, keep, keep_in_ram, kept, kept_in_ram
):
    for steps in ([1, 2], [3, 4]):
        with opened(tmp_path, keep=keep, keep_in_ram=keep_in_ram) as checkpointer:
            for step in steps:
                loss = abs(step - 2.2)
                tiered_steps.save(checkpointer, step, metrics={"loss": loss})
    assert stored(tmp_path) == kept
    assert in_ram(tmp_path) == kept_in_ram
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    assert root.leftovers() == []


def test_what_is_preserved_by_hand_stays_in_ram_over_a_new_world(tmp_path):
    with opened(tmp_path, every=100) as checkpointer:
        tiered_steps.save(checkpointer, 1)
        (step,) = (tmp_path / "ram" / "hosts" / "0").glob("1-*")
        preserved.pin(step)
        tiered_steps.save(checkpointer, 2, 3)
        assert in_ram(tmp_path) == [1, 3]
    # A new world removes old steps, and respects the mark.
    with opened(tmp_path, every=100) as checkpointer:
        tiered_steps.save(checkpointer, 4)
        assert in_ram(tmp_path) == [1, 4]
        preserved.unpin(step)
        tiered_steps.save(checkpointer, 5)
    assert in_ram(tmp_path) == [5]


def test_steps_of_others_and_the_step_of_a_damaged_newer_one_stay(tmp_path):
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    # Orbax alone saved step 0.
    storage.make_directory(root.final(0) / "state")
    tiers = {"keep": policies.LatestN(1)}
    ram = tmp_path / "ram"
    with tiered_steps.checkpointer(ram, root.path, run="x", **tiers) as checkpointer:
        # Step 1 is another run's.
        saved = uploaded.saved_step(1)
        uploaded.write_all(root, saved, uploaded.hosts(2))
        uploaded.commit_all(root, saved)
        assert steps_of(persistent_tier.PersistentTier(root, run="x")) == [1]
        tiered_steps.save(checkpointer, 2, 3)
    assert stored(tmp_path) == [0, 1, 3]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_on_a_full_ram_disk_damaged_steps_go_and_those_that_cannot_be_read_stay(
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
    if is_damaged:
        assert in_ram(tmp_path) == [2, 3]
        assert not recorded.named("degraded")
    else:
        assert in_ram(tmp_path) == [1, 2]
        assert {each["cause"] for each in recorded.named("degraded")} == {"full"}
        with opened(tmp_path, **options) as checkpointer:
            assert checkpointer.load(1)["w"][0] == 1


def test_storage_that_is_away_or_refuses_is_told_and_training_goes_on(
    tmp_path, monkeypatch
):
    def refuse(*_, **more):
        del more
        raise OSError(5, "storage is away")

    recorded = RecordedEvents()
    with monkeypatch.context() as patch:
        patch.setattr(upload, "commit", refuse)
        with opened(tmp_path, keep=policies.LatestN(1), emit=recorded) as checkpointer:
            tiered_steps.save(checkpointer, 1)
            assert in_ram(tmp_path) == [1]
            assert stored(tmp_path) == []
            patch.undo()
            patch.setattr(persistent_root.PersistentRoot, "remove", refuse)
            tiered_steps.save(checkpointer, 2, 3)
    # Steps that cannot be removed are told, and the backups count.
    assert stored(tmp_path) == [2, 3]
    assert [each["step"] for each in recorded.named("backed_up")] == [2, 3]
    told = recorded.named("degraded")
    assert "it was not backed up: host 0: [Errno 5] storage" in told[0]["why"]
    assert told[-1]["step"] == 3


def keep(n=1, **options):
    """The newest, and the best."""
    best = ec.BestN(n, metric="loss", **options)
    return policies.AnyPreservationPolicy([policies.LatestN(1), best])


def test_the_best_by_evaluations_stay_over_worlds_whether_they_saved_or_not(tmp_path):
    with opened(tmp_path, keep=keep(2)) as checkpointer:
        # Evaluated before it is saved.
        checkpointer.record_metrics(2, {"loss": 0.5})
        tiered_steps.save(checkpointer, 2)
        # Saved, and never evaluated; an evaluation that was not saved.
        tiered_steps.save(checkpointer, 4)
        checkpointer.record_metrics(5, {"loss": 0.4})
        tiered_steps.save(checkpointer, 6)
        assert stored(tmp_path) == [2, 4, 6]
        assert checkpointer.evaluations() == {2: {"loss": 0.5}, 5: {"loss": 0.4}}
    with opened(tmp_path, keep=keep(2)) as checkpointer:
        # Evaluated after it was saved, in another world.
        checkpointer.record_metrics(6, {"loss": float("nan")})
        tiered_steps.save(checkpointer, 8)
        assert stored(tmp_path) == [2, 4, 8]
        checkpointer.record_metrics(8, {"loss": 0.45})
        tiered_steps.save(checkpointer, 9)
        assert stored(tmp_path) == [4, 8, 9]
        # The list shrinks with the steps.
        assert checkpointer.delete(4)
        tiered_steps.save(checkpointer, 10)
        assert stored(tmp_path) == [8, 10]
        assert checkpointer.evaluations() == {8: {"loss": 0.45}}


def test_another_program_records_metrics_of_a_step_in_storage(tmp_path):
    with opened(tmp_path, keep=keep()) as checkpointer:
        tiered_steps.save(checkpointer, 1)
        ec.record_metrics(tmp_path / "steps" / "1", {"loss": 0.5})
        tiered_steps.save(checkpointer, 2, 3)
        assert stored(tmp_path) == [1, 3]
        with ocp.training.Checkpointer(tmp_path / "steps") as orbax:
            assert [each.step for each in orbax.checkpoints] == [1, 3]
    for path in (tmp_path / "steps" / "2", tmp_path / "steps", tmp_path / "ram"):
        with pytest.raises(errors.CheckpointError, match="has committed"):
            ec.record_metrics(path, {"loss": 0.5})
    with pytest.raises(errors.CheckpointError, match="are not JSON"):
        ec.record_metrics(tmp_path / "steps" / "1", {"loss": object()})


def test_metrics_need_storage_and_if_it_is_away_the_run_goes_on(tmp_path, monkeypatch):
    with (
        tiered_steps.checkpointer(tmp_path / "ram") as checkpointer,
        pytest.raises(errors.CheckpointError, match="add Persistent"),
    ):
        checkpointer.record_metrics(1, {"loss": 0.1})
    recorded = RecordedEvents()

    def away(*_):
        raise OSError(5, "storage is away")

    with opened(tmp_path, emit=recorded) as checkpointer:
        monkeypatch.setattr(run_files, "record_evaluation", away)
        checkpointer.record_metrics(1, {"loss": 0.1})
    (event,) = recorded.named("degraded")
    assert "its metrics were not recorded: host 0: [Errno 5]" in event["why"]


LOWEST_LOSS = ec.BestN(0)


def saver(tmp_path, *, every=100, keep=None, best=LOWEST_LOSS):
    """A saver of a run that saves its best step."""
    tiers = [
        ec.Local(tmp_path / "ram", every=every),
        ec.Persistent(tmp_path / "steps", every=every, keep=keep),
    ]
    saved = run_saver.Saved(best=best, in_background=False)
    checkpointer = frontend.Checkpointer(tiers, run="run", slice_name="s0")
    return run_saver.RunSaver(
        checkpointer=checkpointer, saved=saved, data=tiered_steps.Cursors()
    )


def evaluate(run, *steps, sign=1):
    """Evaluates steps, and saves those that are due."""
    for step, loss in steps:
        run.record(step, {"eval_loss": sign * loss})
        if run.is_due(step, last=False):
            run.save(step, tiered_steps.state(step), last=False)
            run.checkpointer.wait()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_that_is_the_best_so_far_is_saved_though_it_is_not_due(tmp_path, sign):
    best = ec.BestN(0, higher_is_better=sign < 0)
    first = saver(tmp_path, best=best)
    losses = (1, 0.5), (2, 0.6), (3, 0.4), (4, 0.4), (5, float("nan"))
    evaluate(first, *losses, sign=sign)
    first.close()
    assert stored(tmp_path) == [1, 3]
    again = saver(tmp_path, best=best)
    evaluate(again, (6, 0.45), (7, 0.3), sign=sign)
    again.close()
    assert stored(tmp_path) == [1, 3, 7]


def set_aside(tmp_path):
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    return [each.step for each in root.set_aside_steps()]


def test_after_a_rollback_preserved_steps_stay(tmp_path):
    run = saver(tmp_path, every=2, keep=policies.LatestN(1))
    for step in (2, 4):
        evaluate(run, (step, 0.5))
        ec.pin(tmp_path / "steps" / str(step))
    evaluate(run, (6, 0.5))
    assert stored(tmp_path) == [2, 4, 6]
    (newest,) = (tmp_path / "ram" / "hosts" / "0").glob("6-*")
    ec.pin(newest)
    # As a run that diverged, which saves the step that it goes back to again.
    run.checkpointer.wait()
    good = next(each for each in run.checkpointer.checkpoints if each.step == 2)
    run.save_again(2, run.restore(None, good, data=tiered_steps.Cursors()))
    # Of step 2 the old save comes back when retention has removed the new one.
    evaluate(run, (8, 0.5), (10, 0.5))
    assert stored(tmp_path) == [2, 10]
    assert set_aside(tmp_path) == [4]
    assert in_ram(tmp_path) == [6, 10]
    run.close()


def test_metrics_recorded_after_a_save_are_those_of_the_step(tmp_path):
    with opened(tmp_path, keep=None) as checkpointer:
        assert ec.best_step(checkpointer, metric="loss") is None
        for step in (2, 4, 6):
            tiered_steps.save(checkpointer, step, metrics={"lr": step})
        with pytest.raises(
            errors.CheckpointError, match=r"no step has .*'loss'; they have \['lr'\]"
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
        ec.record_metrics(tmp_path / "steps" / "2", {"loss": 0.05})
        assert ec.best_step(checkpointer, metric="loss") == 2
    with opened(tmp_path, keep=None) as checkpointer:
        tiered_steps.save(checkpointer, 8)
        assert [each.metrics for each in checkpointer.checkpoints][1] == expected[1]
        assert ec.best_step(checkpointer, metric="loss") == 2
    with ocp.training.Checkpointer(tmp_path / "steps") as orbax:
        assert ec.best_step(orbax, metric="lr") == 2
