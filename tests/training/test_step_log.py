import errno
import json
import pathlib
from unittest import mock

import jsonschema
import numpy as np
import pytest

from elastic_ckpt import training
from elastic_ckpt.core import append_log, digest, errors, storage, topology
from elastic_ckpt.training import step_log, step_record, train_step

WORLD = topology.Topology(hosts=2, slices=1, devices=4)
HEADER = '{"version":1,"attempt":1,"start_step":0,"hosts":2,"slices":1,"devices":4}\n'
STEP = f'{{"step":0,"loss":1.5,"digest":"{"00" * 16}",'


def report(ids, loss=1.5):
    return train_step.StepReport(
        loss=np.float32(loss),
        example_id=np.array([[id_ >> 32, id_ & 0xFFFFFFFF] for id_ in ids], np.uint32),
        row_digests=np.array([id_ % 97 for id_ in ids], np.uint32),
        tokens=np.int32(8),
        learning_rate=np.float32(0.01),
        gradient_norm=np.float32(1.0),
    )


def write_attempt(
    directory, start_step, steps, *, number=0, left_out=(), detail="proof"
):
    log = step_log.StepLog(
        directory,
        step_log.Start(
            step=start_step,
            world=WORLD,
            data={"packing": True},
            number=number,
            left_out=left_out,
        ),
        detail=detail,
    )
    for step, ids in steps.items():
        log.append(step, report(ids))
    log.close()


def test_an_attempt_is_read_as_it_was_written(tmp_path):
    start = step_log.Start(step=3, world=WORLD, data={"packing": True})
    log = step_log.StepLog(tmp_path, start)
    assert log.append(3, report([5, 2**40], loss=0.1)) == float(np.float32(0.1))
    log.close()
    (attempt,) = step_log.read(tmp_path)
    assert attempt == step_log.Attempt(
        attempt=1,
        start_step=3,
        hosts=2,
        slices=1,
        devices=4,
        data={"packing": True},
        records=(
            step_record.StepRecord(
                step=3,
                loss=float(np.float32(0.1)),
                digest=digest.batch_digest([5, 2**40], [5, 2**40 % 97], num_bytes=16),
                num_rows=2,
                runs=[5, 2**40],
                attempt=1,
            ),
        ),
    )


def test_steps_that_a_full_disk_does_not_take_are_logged_when_it_has_room(
    tmp_path, monkeypatch
):
    log = step_log.StepLog(tmp_path, step_log.Start(step=0, world=WORLD, data={}))
    full = OSError(errno.ENOSPC, "No space left on device")
    log.append(0, report([5]))
    with monkeypatch.context() as patch:
        patch.setattr(append_log.AppendLog, "_write", mock.Mock(side_effect=full))
        for step in (1, 2):
            log.append(step, report([step]))
        assert "No space left" in log.sync()
        (attempt,) = step_log.read(tmp_path)
        assert [each.step for each in attempt.records] == [0]
    log.append(3, report([3]))
    assert log.sync() is None
    monkeypatch.setattr(append_log.AppendLog, "_write", mock.Mock(side_effect=full))
    log.append(4, report([4]))
    with pytest.raises(errors.RunError, match=r"cannot be logged: .* make room there"):
        log.close()
    (attempt,) = step_log.read(tmp_path)
    assert [each.step for each in attempt.records] == [0, 1, 2, 3]


def shuffled(num_rows, seed=0):
    """Distinct ids without runs."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 2**40, num_rows, np.uint64).tolist()


def test_version_5_has_these_lines(tmp_path, golden):
    left_out = ((2, 6), (8, 12))
    steps = {0: [12, 7], 1: [3, *range(100, 164, 2)], 2: shuffled(300)}
    write_attempt(tmp_path, 0, steps, number=5, left_out=left_out)
    write_attempt(tmp_path, 3, {3: [9, 1]}, number=6, detail="summary")
    paths = sorted((tmp_path / "step_log").iterdir())
    golden("step_log_v5.jsonl", "".join(path.read_text() for path in paths))
    first, second = step_log.read(tmp_path)
    assert first.left_out == left_out
    assert [list(record.ids) for record in first.records] == [steps[0], steps[1], []]
    assert [record.num_rows for record in first.records] == [2, 33, 300]
    assert len(first.records[2].digests.block_digests) == 30
    (summary,) = second.records
    assert (summary.num_rows, summary.ids, summary.digests) == (2, (), None)


@pytest.mark.parametrize(
    ("version", "data", "world", "left_out"),
    [
        (1, {}, 0, ()),
        (2, {"packing": True}, 0, ()),
        (3, {"packing": True}, 5, ()),
        (4, {"packing": True}, 5, ((2, 6), (8, 12))),
    ],
)
def test_older_versions_still_load(tmp_path, request, version, data, world, left_out):
    kept = request.path.parent.parent / "golden" / f"step_log_v{version}.jsonl"
    (tmp_path / "step_log").mkdir()
    (tmp_path / "step_log/attempt-00001.jsonl").write_bytes(kept.read_bytes())
    (attempt,) = step_log.read(tmp_path)
    # Version 1 lacks the data, it and 2 lack the world, 1 to 3 lack what is left out.
    assert attempt.data == data
    assert attempt.world == world
    assert attempt.left_out == left_out
    assert [record.ids for record in attempt.records] == [(12, 7), (3, 4)]


def test_the_log_of_an_older_program_is_continued(tmp_path, request):
    kept = request.path.parent.parent / "golden" / "step_log_v4.jsonl"
    old = tmp_path / "step_log/attempt-00001.jsonl"
    storage.write_atomic(old, kept.read_bytes())
    write_attempt(tmp_path, 1, {1: shuffled(300), 2: [5, 6]}, number=6)
    assert old.read_bytes() == kept.read_bytes()
    lineage = step_log.lineage(step_log.read(tmp_path))
    assert [record.num_rows for record in lineage.values()] == [2, 300, 2]
    assert [record.ids for record in lineage.values()] == [(12, 7), (), (5, 6)]


def test_the_lines_of_version_5_are_of_the_schema(request):
    room = pathlib.Path(training.__file__).parent
    schema = json.loads((room / "schemas/step_log.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    golden = request.path.parent.parent / "golden"
    for line in (golden / "step_log_v5.jsonl").read_text().splitlines():
        jsonschema.validate(json.loads(line), schema)
    for line in (golden / "step_log_v4.jsonl").read_text().splitlines():
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(line), schema)


def test_in_a_bucket_each_step_is_uploaded_once_and_a_copy_on_a_disk_is_read(
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
        log.append(step, report([step, 7]))
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
    for pattern in ("*.jsonl", "*/*.jsonl"):
        for path in storage.absolute(f"{bucket}/step_log").glob(pattern):
            name = str(path).removeprefix(bucket)
            storage.write_atomic(f"{tmp_path}{name}", path.read_bytes())
    assert step_log.read(tmp_path) == attempts


def test_a_later_attempt_overrules_the_steps_that_it_repeats(tmp_path):
    write_attempt(tmp_path, 0, {0: [1], 1: [2], 2: [3], 3: [4]})
    write_attempt(tmp_path, 2, {2: [30]})
    lineage = step_log.lineage(step_log.read(tmp_path))
    assert {step: record.ids for step, record in lineage.items()} == {
        0: (1,),
        1: (2,),
        2: (30,),
    }


def test_steps_that_a_replaced_start_logs_do_not_count(tmp_path):
    write_attempt(tmp_path, 0, {0: [1], 1: [2]})
    write_attempt(tmp_path, 1, {1: [20], 2: [30], 3: [40]}, number=7)
    # World 6 was replaced before it had begun its log.
    write_attempt(tmp_path, 1, {1: [21], 2: [31], 3: [41], 4: [51]}, number=6)
    # A start without checkpoints claims no world, and comes after those before it.
    write_attempt(tmp_path, 3, {3: [400]})
    attempts = step_log.read(tmp_path)
    assert [attempt.attempt for attempt in attempts] == [1, 3, 2, 4]
    ids = {step: each.ids for step, each in step_log.lineage(attempts).items()}
    assert ids == {0: (1,), 1: (20,), 2: (30,), 3: (400,)}


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


def test_an_attempt_that_was_killed_in_its_first_line_counts_for_nothing(tmp_path):
    write_attempt(tmp_path, 0, {0: [1]})
    (tmp_path / "step_log/attempt-00002.jsonl").write_text(HEADER[:20])
    assert len(step_log.read(tmp_path)) == 1
    write_attempt(tmp_path, 1, {1: [2]})
    assert [attempt.attempt for attempt in step_log.read(tmp_path)] == [1, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version":6}\n', "has version 6, and this program reads versions 1 to 5"),
        ('{"no":1}\n', "has version None"),
        (HEADER + '{"step":0}\n', "not a step log"),
        (HEADER.replace("hosts", "hots"), "not a step log"),
        (HEADER + STEP + '"rows":0}\n', "a batch of 0 rows"),
        (HEADER + STEP + '"ids":[[0,-5,1],[0,6,1]]}\n', "a run of -5 ids"),
        (HEADER + STEP + '"ids":[[0,99999999999,1]]}\n', "a batch of 99999999999 rows"),
        (HEADER + STEP + '"rows":3,"ids":[[7,2,1]]}\n', "not a step log.*2 ids of 3"),
        (HEADER + STEP + '"rows":2,"ids":[[7,2]]}\n', "not a step log"),
        (
            HEADER + STEP + '"rows":9,"examples":"","contents":"","blocks":"00"}\n',
            r"not a step log.*digests of \[0, 0, 2\] hex digits for 9 rows",
        ),
        (HEADER + STEP.replace("00", "", 1) + '"ids":[1]}\n', "not a step log.*digest"),
    ],
)
def test_what_is_no_step_log_is_refused(tmp_path, text, message):
    (tmp_path / "step_log").mkdir()
    (tmp_path / "step_log/attempt-00001.jsonl").write_text(text)
    with pytest.raises(errors.DataError, match=message):
        step_log.read(tmp_path)


def test_a_directory_without_a_log_is_no_run(tmp_path):
    with pytest.raises(errors.DataError, match="no step log in it; give the directory"):
        step_log.read(tmp_path)
