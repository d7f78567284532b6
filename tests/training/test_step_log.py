import errno
import json
import pathlib
import signal
from unittest import mock

import hypothesis
import jsonschema
import numpy as np
import pytest
from hypothesis import strategies as st

from elastic_ckpt import training
from elastic_ckpt.core import digest, errors, jsonlog, storage
from elastic_ckpt.training import step_log, step_record
from tests import runs
from tests.training import killed_step_log
from tests.training.killed_step_log import PERIOD, WORLD, report


def write_attempt(directory, start_step, steps, *, detail="proof", **start):
    log = step_log.StepLog(
        directory,
        step_log.Start(step=start_step, world=WORLD, data={"packing": True}, **start),
        detail=detail,
    )
    for step, ids in steps.items():
        log.append(step, report(1.5, ids))
    log.close()


def test_attempt_is_read_as_it_was_written(tmp_path):
    start = step_log.Start(step=3, world=WORLD, data={"packing": True})
    log = step_log.StepLog(tmp_path, start)
    assert log.append(3, report(0.1, [5, 2**40])) == float(np.float32(0.1))
    log.close()
    (attempt,) = step_log.read(tmp_path)
    record = step_record.StepRecord(
        step=3,
        loss=float(np.float32(0.1)),
        digest=digest.batch_digest([5, 2**40], [5, 2**40 % 97], num_bytes=16),
        num_rows=2,
        runs=[5, 2**40],
        attempt=1,
    )
    assert attempt == step_log.Attempt(
        attempt=1,
        start_step=3,
        hosts=2,
        slices=1,
        devices=4,
        data={"packing": True},
        records=(record,),
    )


def test_steps_that_a_full_disk_does_not_take_are_logged_when_it_has_room(
    tmp_path, monkeypatch
):
    def logged():
        (attempt,) = step_log.read(tmp_path)
        return [each.step for each in attempt.records]

    log = step_log.StepLog(tmp_path, step_log.Start(step=0, world=WORLD, data={}))
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    log.append(0, report(0, [5]))
    with monkeypatch.context() as patch:
        patch.setattr(jsonlog._File, "_take", full)
        for step in (1, 2):
            log.append(step, report(step, [step]))
        assert "No space left" in log.sync()
        assert logged() == [0]
    log.append(3, report(3, [3]))
    assert log.sync() is None
    monkeypatch.setattr(jsonlog._File, "_take", full)
    log.append(4, report(4, [4]))
    with pytest.raises(errors.RunError, match=r"cannot be logged: .* make room there"):
        log.close()
    assert logged() == [0, 1, 2, 3]


def shuffled(num_rows):
    """Distinct ids without runs."""
    generator = np.random.default_rng(0)
    return generator.integers(0, 2**40, num_rows, np.uint64).tolist()


def test_lines_are_those_of_the_format_and_its_schema(tmp_path, golden):
    left_out = ((2, 6), (8, 12))
    steps = {0: [12, 7], 1: [3, *range(100, 164, 2)], 2: shuffled(300)}
    write_attempt(tmp_path, 0, steps, number=5, left_out=left_out)
    write_attempt(tmp_path, 3, {3: [9, 1]}, number=6, detail="summary")
    paths = sorted((tmp_path / "step_log").iterdir())
    text = "".join(path.read_text() for path in paths)
    golden("step_log_v1.jsonl", text)
    schema = pathlib.Path(training.__file__).parent / "schemas/step_log.json"
    validator = jsonschema.Draft202012Validator(json.loads(schema.read_text()))
    for line in text.splitlines():
        validator.validate(json.loads(line))
    first, second = step_log.read(tmp_path)
    assert first.left_out == left_out
    assert [list(record.ids) for record in first.records] == [steps[0], steps[1], []]
    assert [record.num_rows for record in first.records] == [2, 33, 300]
    assert len(first.records[2].digests.block_digests) == 30
    (summary,) = second.records
    assert (summary.num_rows, summary.ids, summary.digests) == (2, (), None)


def test_each_step_is_uploaded_once_to_a_bucket_and_a_copy_on_a_disk_is_read(
    bucket, tmp_path, monkeypatch
):
    sizes = {}
    write = storage.write_atomic

    def counted(path, content):
        assert path not in sizes
        sizes[path] = len(content)
        write(path, content)

    monkeypatch.setattr(storage, "write_atomic", counted)
    log = step_log.StepLog(bucket, step_log.Start(step=0, world=WORLD, data={}))
    for step in range(10, 40):
        log.append(step, report(0, [step, 7]))
        if step % 10 == 9:
            log.sync()
    log.close()
    assert len(set(sizes.values())) == 1 < len(sizes) == 3
    write_attempt(bucket, 12, {12: shuffled(300)}, number=3)
    attempts = step_log.read(bucket)
    assert [record.ids for record in attempts[0].records] == [
        (step, 7) for step in range(10, 40)
    ]
    assert [record.step for record in attempts[1].records] == [12]
    for path in storage.absolute(f"{bucket}/step_log").glob("*/*.jsonl"):
        name = str(path).removeprefix(bucket)
        storage.write_atomic(f"{tmp_path}{name}", path.read_bytes())
    assert step_log.read(tmp_path) == attempts


def ids_of(directory):
    lineage = step_log.lineage(step_log.read(directory))
    return {step: record.ids for step, record in lineage.items()}


def test_later_attempt_overrules_the_steps_from_its_first_one_on(tmp_path):
    write_attempt(tmp_path, 0, {0: [1], 1: [2], 2: [3], 3: [4]})
    write_attempt(tmp_path, 2, {2: [30]})
    assert ids_of(tmp_path) == {0: (1,), 1: (2,), 2: (30,)}
    # Also if it did not get as far.
    write_attempt(tmp_path, 1, {})
    assert ids_of(tmp_path) == {0: (1,)}


def test_steps_that_a_replaced_start_logs_do_not_count(tmp_path):
    write_attempt(tmp_path, 0, {0: [1], 1: [2]})
    write_attempt(tmp_path, 1, {1: [20], 2: [30], 3: [40]}, number=7)
    # World 6 was replaced before it had begun its log.
    write_attempt(tmp_path, 1, {1: [21], 2: [31], 3: [41], 4: [51]}, number=6)
    # A start without checkpoints claims no world, and comes after those before it.
    write_attempt(tmp_path, 3, {3: [400]})
    assert [each.attempt for each in step_log.read(tmp_path)] == [1, 3, 2, 4]
    assert ids_of(tmp_path) == {0: (1,), 1: (20,), 2: (30,), 3: (400,)}


def test_of_two_starts_at_the_same_time_each_has_a_file(tmp_path, monkeypatch):
    create = storage.create

    def late(path, content):
        monkeypatch.undo()
        write_attempt(tmp_path, 0, {0: [1]}, number=2)
        return create(path, content)

    monkeypatch.setattr(storage, "create", late)
    write_attempt(tmp_path, 0, {0: [10], 1: [20]}, number=1)
    attempts = step_log.read(tmp_path)
    assert [(each.attempt, each.world) for each in attempts] == [(2, 1), (1, 2)]
    assert [record.ids for record in attempts[0].records] == [(10,), (20,)]


def test_attempt_that_was_killed_in_its_first_line_counts_for_nothing(tmp_path):
    write_attempt(tmp_path, 0, {0: [1]})
    (tmp_path / "step_log/attempt-00002.jsonl").write_text('{"version":1,"att')
    assert len(step_log.read(tmp_path)) == 1
    write_attempt(tmp_path, 1, {1: [2]})
    assert [attempt.attempt for attempt in step_log.read(tmp_path)] == [1, 3]


def check_killed(directory, num_synced, at_most):
    """All durable steps are in the log, and the next attempt completes it."""
    (attempt,) = step_log.read(directory)
    steps = [record.step for record in attempt.records]
    assert steps == list(range(len(steps)))
    assert num_synced <= len(steps) <= at_most
    killed_step_log.write(directory, num_synced, num_synced + 6)
    assert ids_of(directory) == {
        step: killed_step_log.ids(step) for step in range(num_synced + 6)
    }
    return len(steps)


@pytest.mark.parametrize("moment", ["within", "after"])
def test_writer_that_is_killed_has_logged_all_synced_steps(tmp_path, moment):
    point = 11
    write = killed_step_log.write_until_killed
    ended = runs.forked(write, str(tmp_path), point, moment)
    assert ended.returncode == -signal.SIGKILL, ended.stdout + ended.stderr
    num_synced = max(map(int, ended.stdout.split()))
    assert num_synced == (point - 1) // PERIOD * PERIOD
    num_logged = check_killed(tmp_path, num_synced, point)
    assert num_logged == point or moment == "within"


@pytest.mark.slow
def test_writer_that_is_killed_between_uploads_has_logged_all_saved_steps(bucket):
    point = 3
    write = killed_step_log.write_until_killed
    ended = runs.forked(write, bucket, point, "within")
    assert ended.returncode == -signal.SIGKILL, ended.stdout + ended.stderr
    num_synced = max(map(int, ended.stdout.split()))
    assert num_synced == (point - 1) * PERIOD
    check_killed(bucket, num_synced, point * PERIOD)


@pytest.mark.parametrize("num_torn_bytes", [1, 20, 60])
def test_torn_line_on_a_disk_is_dropped(tmp_path, num_torn_bytes):
    killed_step_log.write(tmp_path, 0, 10)
    path = tmp_path / "step_log/attempt-00001.jsonl"
    path.write_bytes(path.read_bytes()[:-num_torn_bytes])
    check_killed(tmp_path, 8, 9)


IDS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=300)
RUNS = st.lists(
    st.tuples(
        st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63), st.integers(1, 20)
    ),
    min_size=1,
    max_size=20,
).map(lambda runs: [(a + n * d) % 2**64 for a, d, count in runs for n in range(count)])


@hypothesis.given(IDS | RUNS)
@hypothesis.example(list(range(5, 10**5, 3)))
def test_listed_ids_are_read_in_the_same_order_and_a_line_is_short(ids):
    listed = np.array(ids, np.uint64)
    items = step_record.encoded(listed)
    if len(ids) > 10**4:
        # Those in the order of files are one run of any length.
        assert items == [[5, len(ids), 3]]
    assert items is None or step_record.decoded(items) == tuple(ids)
    # So many ids fit, whatever they are.
    assert items is not None or len(ids) > step_record.MAX_ID_BYTES // 22
    rows = step_record.Rows(ids=listed, digests=np.zeros(len(ids)))
    line = step_record.line(2**53, -1.2345678901234567e-300, rows, detail="proof")
    assert len(str(line)) <= 2000


def digests(ids, tokens):
    return step_record.BatchDigests.of_rows(
        step_record.Rows(
            ids=np.array(ids, np.uint64), digests=np.array(tokens, np.uint32)
        )
    )


@hypothesis.given(
    num_rows=st.sampled_from([64, 4096]),
    change=st.sampled_from(["id", "tokens", "order"]),
    place=st.integers(0, 2**20),
)
def test_changed_row_changes_the_digest_of_its_block_alone(num_rows, change, place):
    ids, tokens = list(range(num_rows)), [7 * n for n in range(num_rows)]
    before = digests(ids, tokens)
    num_blocks = len(before.block_digests)
    assert num_blocks == 32
    row = place % num_rows // 2 * 2
    if change == "id":
        ids[row] = 99_999
    elif change == "tokens":
        tokens[row] += 1
    else:
        pair = slice(row, row + 2)
        ids[pair], tokens[pair] = ids[pair][::-1], tokens[pair][::-1]
    after = digests(ids, tokens)
    blocks = zip(before.block_digests, after.block_digests, strict=True)
    changed = [number for number, (a, b) in enumerate(blocks) if a != b]
    assert changed == [row * num_blocks // num_rows]
    assert (after.examples != before.examples) == (change == "id")
    assert (after.contents != before.contents) == (change != "order")


def test_block_has_the_same_digest_in_another_place():
    one = digests(range(64), range(64)).block_digests
    turned = [*range(10, 64), *range(10)]
    assert digests(turned, turned).block_digests[0] == one[5]
