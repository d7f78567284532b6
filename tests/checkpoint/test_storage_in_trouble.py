"""Storage that fails for a while, and RAM that does not take a step."""

import errno
import os
import pathlib
import shutil
import stat
import threading

import pytest

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.persistent import persistent_root, records
from tests.checkpoint.test_checkpointer import check, save, stored
from tests.checkpoint.test_component_io import Counter
from tests.recorded_events import RecordedEvents
from tests.tiers import tiered_steps

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

CAUSES = {
    errno.ENOSPC: ("full", "make room there, or keep fewer steps"),
    errno.EACCES: ("refused", "check who may write there"),
}


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
    make, tmp_path, breaks, backlog, number
):
    cause, advice = CAUSES[number]
    recorded = RecordedEvents()
    checkpointer = make(emit=recorded)
    for step in range(1, 6):
        breaks(number if step in (2, 3, 4) else None)
        assert save(checkpointer, step)
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
    assert stored(tmp_path) == [1, 5]
    checkpointer.close()


def test_an_upload_that_hangs_until_others_are_due_is_slow_and_storage_recovers(
    make, tmp_path, breaks, backlog
):
    recorded = RecordedEvents()
    checkpointer = make(emit=recorded)
    assert save(checkpointer, 1)
    checkpointer.wait()
    is_answering = threading.Event()
    breaks(is_answering)
    for step in (2, 3, 4):
        assert save(checkpointer, step)
        checkpointer._stages.committing.wait()
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
    is_answering.set()
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
    assert stored(tmp_path) == [1, 2, 4]


def test_an_end_with_a_backlog_is_an_error_that_names_it(make, tmp_path, breaks):
    checkpointer = make(every=2)
    assert save(checkpointer, 2)
    checkpointer.wait()
    breaks(errno.ENOSPC)
    for step in (3, 4, 6, 7):
        save(checkpointer, step)
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
    again = make(every=2)
    assert again.latest.step == 7
    again.load_checkpointables(None, {"state": None, "data": Counter()})
    again.close()
    assert stored(tmp_path)[0] == 2
    assert stored(tmp_path)[-1] >= 6


def test_a_run_that_begins_without_storage_cleans_it_once_it_is_back(
    make, tmp_path, monkeypatch
):
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    left = root.unfinished(StepId(1, f"{1:015d}")) / "state"
    left.mkdir(parents=True)

    with make(every=None) as checkpointer:
        assert checkpointer.save(1, {"n": 1})

    def away(there):
        raise records.OutOfReachError(f"{there.directory} is out of reach")

    with monkeypatch.context() as patch:
        patch.setattr(records.Records, "newest", away)
        checkpointer = make()
    assert left.exists()
    assert checkpointer.save(2, {"n": 2})
    checkpointer.wait()
    assert root.steps() == [2]
    assert not left.exists()


def test_due_steps_are_stored_and_others_are_not(make, tmp_path):
    recorded = RecordedEvents()
    checkpointer = make(every=2, emit=recorded, local={"limit_bytes": 100})
    saved = [save(checkpointer, step) for step in range(1, 6)]
    assert saved == [False, True, False, True, False]
    assert checkpointer.latest.step == 4
    assert checkpointer.is_durable(4)
    check(checkpointer, 4)
    assert [each["step"] for each in recorded.named("backed_up")] == [2, 4]
    assert [each["step"] for each in recorded.named("saved")] == [2, 4]
    reasons = {each["step"]: each["why"] for each in recorded.named("degraded")}
    assert all("limit 100 bytes" in each for each in reasons.values())
    assert [step for step, why in reasons.items() if "without RAM" in why] == [2, 4]
    checkpointer.close()
    check(make(ram="other"), 4)
    assert stored(tmp_path) == [2, 4]


def test_the_next_step_is_stored_if_a_due_one_could_not_be(make, breaks):
    recorded = RecordedEvents()
    checkpointer = make(every=4, emit=recorded, local={"limit_bytes": 100})
    breaks(errno.EROFS)
    assert not save(checkpointer, 4)
    breaks(None)
    assert save(checkpointer, 5)
    assert not save(checkpointer, 6)
    assert [each["step"] for each in recorded.named("backed_up")] == [5]
    checkpointer.close()
    check(make(ram="other"), 5)


class Witness:
    """A component that notes the directory of the host, and who may read it."""

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            (path / "part").write_text("part")
            self.directory = pathlib.Path(os.fspath(path)).parents[1]
            self.mode = stat.S_IMODE(self.directory.stat().st_mode)

        return write()

    async def load(self, directory):
        async def read():
            assert [each.name for each in directory.iterdir()] == ["part"]

        return read()


def test_hosts_of_a_machine_write_elsewhere_in_private_directories_of_their_own(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    witnesses = []
    # Two slices of one run, and one of another run that has its name.
    for slice_ram in ("slice-0", "slice-1", "slice-0"):
        shutil.rmtree(tmp_path / slice_ram, ignore_errors=True)
        with tiered_steps.checkpointer(tmp_path / slice_ram) as opened:
            witnesses.append(Witness())
            assert opened.save_checkpointables(1, {"data": witnesses[-1]})
            assert opened.load_checkpointables(1, {"data": Witness()})
    assert {witness.directory.parent for witness in witnesses} == {
        tmp_path / "elsewhere"
    }
    assert len({witness.directory for witness in witnesses}) == 3
    assert {witness.mode for witness in witnesses} == {0o700}
    assert not os.listdir(tmp_path / "elsewhere")
