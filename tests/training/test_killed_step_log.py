"""`kill -9` of the writer of a step log: no step before a checkpoint is lost."""

import signal

import pytest

from elastic_ckpt.core import storage
from elastic_ckpt.training import step_log
from tests import runs
from tests.training import killed_step_log


def killed(run, point, moment):
    """The number of steps that were durable when the writer was killed."""
    ended = runs.forked(killed_step_log.write_until_killed, run, point, moment)
    assert ended.returncode == -signal.SIGKILL, ended.stdout + ended.stderr
    return max(map(int, ended.stdout.split()), default=0)


def check(run, num_synced, at_most):
    """All durable steps are in the log, and the next attempt completes it."""
    (attempt,) = step_log.read(run)
    steps = [record.step for record in attempt.records]
    assert steps == list(range(len(steps)))
    assert num_synced <= len(steps) <= at_most
    killed_step_log.write(run, num_synced, num_synced + 6)
    lineage = step_log.lineage(step_log.read(run))
    assert {step: record.ids for step, record in lineage.items()} == {
        step: killed_step_log.ids(step) for step in range(num_synced + 6)
    }


@pytest.mark.parametrize("moment", ["within", "after"])
@pytest.mark.parametrize("point", [1, 8, 11])
def test_killed_during_an_append_a_log_on_a_disk_has_all_steps(tmp_path, point, moment):
    num_synced = killed(str(tmp_path), point, moment)
    assert num_synced == (point - 1) // 4 * 4
    check(tmp_path, num_synced, point)
    (attempt, _) = step_log.read(tmp_path)
    assert len(attempt.records) == point or moment == "within"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["within", "after"])
@pytest.mark.parametrize("point", [1, 3])
def test_killed_between_uploads_a_log_in_a_bucket_has_all_saved_steps(
    bucket, point, moment
):
    num_synced = killed(bucket, point, moment)
    assert num_synced == (point - 1) * killed_step_log.PERIOD
    check(bucket, num_synced, point * killed_step_log.PERIOD)


@pytest.mark.parametrize("num_torn_bytes", [1, 20, 60])
def test_a_torn_line_on_a_disk_is_dropped(tmp_path, num_torn_bytes):
    killed_step_log.write(tmp_path, 0, 10)
    path = tmp_path / "step_log/attempt-00001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines[-1]) > 60
    path.write_bytes(b"".join(lines)[:-num_torn_bytes])
    check(tmp_path, 8, 9)


@pytest.mark.slow
def test_a_writer_in_a_bucket_holds_no_more_than_a_segment(bucket):
    log = step_log.StepLog(
        bucket, step_log.Start(step=0, world=killed_step_log.WORLD, data={})
    )
    report = killed_step_log.report(0)
    report = report._replace(example_id=report.example_id.repeat(200, axis=0))
    report = report._replace(row_digests=report.row_digests.repeat(200))
    most = num_steps = 0
    while len(segments(bucket)) < 2:
        for _ in range(500):
            log.append(num_steps, report)
            num_steps += 1
            most = max(most, log._log.pending_bytes)
    log.close()
    assert 2**20 - 2000 < most <= 2**20
    assert len(segments(bucket)) == 3
    (attempt,) = step_log.read(bucket)
    assert [record.step for record in attempt.records] == list(range(num_steps))


def segments(run):
    directory = storage.absolute(f"{run}/step_log/attempt-00001")
    return list(directory.glob("*.jsonl"))
