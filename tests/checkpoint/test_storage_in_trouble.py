"""Storage that fails for a while, and RAM that does not take a step."""

import errno

import pytest

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.persistent import persistent_root, records
from tests.checkpoint.test_checkpointer import check, save, stored
from tests.recorded_events import RecordedEvents

CAUSES = {
    errno.ENOSPC: ("full", "free up space there, or keep fewer steps"),
    errno.EACCES: ("refused", "check the credentials"),
}


@pytest.mark.parametrize("number", CAUSES)
def test_a_cause_is_told_and_storage_recovers(make, tmp_path, breaks, recorded, number):
    emitted, (cause, advice) = RecordedEvents(), CAUSES[number]
    checkpointer = make(emit=emitted)
    for step in range(1, 6):
        breaks(number if step in (2, 3, 4) else None)
        assert save(checkpointer, step)
        if step == 5:
            checkpointer.wait()
        else:
            # Without a last attempt for the step that waits.
            checkpointer._stages._backup_stage.wait()
            checkpointer._stages._copy_stage.wait()
    for each in emitted.named("degraded"):
        assert (each["tier"], each["cause"]) == ("persistent", cause)
        assert advice in each["why"]
        assert "state/" not in each["why"]
        assert "\n" not in each["why"]
    (recovered,) = emitted.named("storage_recovered")
    assert (recovered["step"], recovered["cause"]) == (5, cause)
    backlog = recorded[metrics.CHECKPOINT_BACKLOG]
    assert recovered["steps"] == max(backlog) == 4
    assert backlog[-1] == 0
    assert stored(tmp_path) == [1, 5]


def test_an_end_with_a_backlog_is_an_error_that_names_it(make, tmp_path, breaks):
    checkpointer = make(every=2)
    assert save(checkpointer, 2)
    checkpointer.wait()
    breaks(errno.ENOSPC)
    for step in (3, 4, 6, 7):
        save(checkpointer, step)
        checkpointer.wait()
    message = (
        r"^step 6 was due in persistent storage but is not there \(like 1 before it,"
        r" from step 4 on\).*No space left on device; free up space there"
    )
    with pytest.raises(errors.CheckpointError, match=message):
        checkpointer.close()
    # The next start backs it up from RAM.
    breaks(None)
    with make(every=2) as again:
        check(again, 7)
    assert stored(tmp_path) == [2, 7]


def test_storage_is_cleaned_once_it_is_back(make, tmp_path, monkeypatch):
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    left = root.unfinished(StepId(1, f"{1:015d}")) / "state"
    left.mkdir(parents=True)
    with make(every=None) as checkpointer:
        assert checkpointer.save(1, {"n": 1})

    def away(there):
        raise records.OutOfReachError(f"{there.directory} is out of reach")

    with monkeypatch.context() as patch:
        patch.setattr(records.RecordStore, "newest", away)
        checkpointer = make()
    assert left.exists()
    assert checkpointer.save(2, {"n": 2})
    checkpointer.wait()
    assert root.steps() == [2]
    assert not left.exists()


@pytest.mark.parametrize("ram", [None, "ram"])
def test_what_does_not_fit_into_ram_is_stored_if_it_is_due(make, breaks, ram):
    recorded = RecordedEvents()
    limit = {"limit_bytes": 100}
    with make(ram=ram, every=2, emit=recorded, local=limit) as checkpointer:
        assert [save(checkpointer, step) for step in (1, 2, 3)] == [False, True, False]
        check(checkpointer, 2)
        breaks(errno.EROFS)
        response = checkpointer.save_async(4, {"n": 4})
        assert not response.result()
        assert not response.durable()
        breaks(None)
        assert checkpointer.latest.step == 2
        # It stands for the one that failed.
        assert save(checkpointer, 5, force=not ram)
        assert checkpointer.is_durable(5)
    for name in ("saved", "backed_up"):
        assert [each["step"] for each in recorded.named(name)] == [2, 5]
    told = recorded.named("degraded")
    if ram:
        assert all("limit 100 bytes" in each["why"] for each in told[:3])
        assert "straight to storage" in told[1]["why"]
    else:
        assert [(each["tier"], each["step"]) for each in told] == [("persistent", 4)]
    check(make(ram="other"), 5)
