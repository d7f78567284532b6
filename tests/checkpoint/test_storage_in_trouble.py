"""Storage that fails for a while: the run reports it, and the backlog is small."""

import errno
import os
import threading

import pytest

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.core import storage as files
from elastic_ckpt.tiers.persistent import persistent_root
from tests.checkpoint.test_checkpointer import (  # noqa: F401
    RecordedEvents,
    make,
    state,
    storage,
)

CAUSES = {
    errno.ENOSPC: ("full", "make room there, or keep fewer steps"),
    errno.EROFS: ("read_only", "mount it so that it can be written to"),
    errno.EACCES: ("refused", "check who may write there"),
}


@pytest.fixture
def breaks(tmp_path, monkeypatch):
    """Has storage fail with an errno; None has it work."""
    write, number = files.write_atomic, [None]

    def write_atomic(target, content, **options):
        if number[0] and os.fspath(target).startswith(str(tmp_path / "steps")):
            raise OSError(number[0], os.strerror(number[0]))
        write(target, content, **options)

    monkeypatch.setattr(files, "write_atomic", write_atomic)

    def breaks(new):
        number[0] = new

    return breaks


@pytest.fixture
def hangs(tmp_path, monkeypatch):
    """Makes writes to storage wait until the returned event is set again."""
    write, is_answering = files.write_atomic, threading.Event()
    is_answering.set()

    def write_atomic(target, content, **options):
        if os.fspath(target).startswith(str(tmp_path / "steps")):
            is_answering.wait()
        write(target, content, **options)

    monkeypatch.setattr(files, "write_atomic", write_atomic)
    yield is_answering
    is_answering.set()


@pytest.fixture
def backlog(monkeypatch):
    """The values of the metric, as they are recorded."""
    values = []
    record = metrics.Metric.record

    def recorded(self, value):
        if self is metrics.CHECKPOINT_BACKLOG:
            values.append(value)
        record(self, value)

    monkeypatch.setattr(metrics.Metric, "record", recorded)
    return values


@pytest.mark.parametrize("number", CAUSES)
def test_a_cause_is_reported_and_storage_recovers_by_itself(
    make,  # noqa: F811
    tmp_path,
    breaks,
    backlog,
    number,
):
    cause, advice = CAUSES[number]
    recorded = RecordedEvents()
    checkpointer = make(storage(tmp_path), emit=recorded)
    for step in range(1, 6):
        breaks(number if step in (2, 3, 4) else None)
        assert checkpointer.save(step, state(step))
        if step == 5:
            checkpointer.wait()
        else:
            # Without a last attempt for the step that waits.
            checkpointer._stages._backup_stage.wait()
            checkpointer._stages._copy_stage.wait()
    whys = recorded.named("degraded")
    assert {(each["tier"], each["cause"]) for each in whys} == {("persistent", cause)}
    for each in whys:
        assert advice in each["why"]
        assert "params" not in each["why"]
        assert "\n" not in each["why"]
    (recovered,) = recorded.named("storage_recovered")
    assert (recovered["step"], recovered["cause"]) == (5, cause)
    assert recovered["steps"] == 4
    assert max(backlog) == 4
    assert backlog[-1] == 0
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    assert root.steps() == [1, 5]
    checkpointer.close()


def test_an_upload_that_hangs_until_others_are_due_is_slow_and_storage_recovers(
    make,  # noqa: F811
    tmp_path,
    hangs,
    backlog,
):
    recorded = RecordedEvents()
    checkpointer = make(storage(tmp_path), emit=recorded)
    assert checkpointer.save(1, state(1))
    checkpointer.wait()
    hangs.clear()
    for step in (2, 3, 4):
        assert checkpointer.save(step, state(step))
        checkpointer._stages.wait_for_commit()
        checkpointer._stages._copy_stage.wait()
    checkpointer._events.flush()
    late = recorded.named("degraded")
    assert [(each["tier"], each["step"]) for each in late] == [
        ("persistent", 3),
        ("persistent", 4),
    ]
    assert {each["cause"] for each in late} == {"slow"}
    assert all("use faster storage" in each["why"] for each in late)
    assert backlog[-1] == 3
    hangs.set()
    checkpointer._stages._backup_stage.wait()
    checkpointer._events.flush()
    # One that is stored late leaves two that are due.
    assert backlog[-1] == 2
    assert recorded.named("storage_recovered") == []
    checkpointer.wait()
    (recovered,) = recorded.named("storage_recovered")
    assert (recovered["step"], recovered["cause"]) == (4, "slow")
    assert recovered["steps"] == 2
    assert backlog[-1] == 0
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    assert root.steps() == [1, 2, 4]


def test_ram_keeps_one_step_that_waits_and_drops_it_when_a_newer_one_waits(
    make,  # noqa: F811
    tmp_path,
    breaks,
):
    checkpointer = make(storage(tmp_path))
    breaks(errno.ENOSPC)
    for step in range(1, 8):
        assert checkpointer.save(step, state(step))
        checkpointer._stages._backup_stage.wait()
        checkpointer._stages._copy_stage.wait()
        in_ram = {path.name for path in (tmp_path / "ram/hosts/0").glob("*-*")}
        assert len(in_ram) <= 3
    breaks(None)
    checkpointer.close()
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    assert root.steps() == [7]


def test_an_end_with_a_backlog_is_an_error_that_names_it(make, tmp_path, breaks):  # noqa: F811
    checkpointer = make(storage(tmp_path, every=2))
    assert checkpointer.save(2, state(2))
    checkpointer.wait()
    breaks(errno.ENOSPC)
    for step in (3, 4, 6, 7):
        checkpointer.save(step, state(step))
        checkpointer.wait()
    with pytest.raises(errors.CheckpointError) as raised:
        checkpointer.close()
    message = str(raised.value)
    assert message.startswith("step 6 was due in persistent storage and is not there")
    assert "like 1 before it since step 4" in message
    assert "No space left on device" in message
    assert "make room there" in message
    # The next start backs it up from RAM.
    breaks(None)
    again = make(storage(tmp_path, every=2))
    assert again.latest.step == 7
    again.load(None, state(0))
    again.close()
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    assert root.steps()[0] == 2
    assert root.steps()[-1] >= 6
