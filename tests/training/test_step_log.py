import numpy as np
import pytest

from elastic_ckpt.core import digest, errors, storage, topology
from elastic_ckpt.training import step_log, train_step

WORLD = topology.Topology(hosts=2, slices=1, devices=4)
HEADER = '{"version":1,"attempt":1,"start_step":0,"hosts":2,"slices":1,"devices":4}\n'


def report(ids, loss=1.5):
    return train_step.StepReport(
        loss=np.float32(loss),
        example_id=np.array([[id_ >> 32, id_ & 0xFFFFFFFF] for id_ in ids], np.uint32),
        row_digests=np.array([id_ % 97 for id_ in ids], np.uint32),
        tokens=np.int32(8),
        learning_rate=np.float32(0.01),
        gradient_norm=np.float32(1.0),
    )


def write_attempt(directory, start_step, steps, *, number=0, left_out=()):
    log = step_log.StepLog(
        directory,
        start_step=start_step,
        world=WORLD,
        data={"packing": True},
        number=number,
        left_out=left_out,
    )
    for step, ids in steps.items():
        log.append(step, report(ids))
    log.close()


def test_an_attempt_is_read_as_it_was_written(tmp_path):
    log = step_log.StepLog(tmp_path, start_step=3, world=WORLD, data={"packing": True})
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
            step_log.StepRecord(
                step=3,
                loss=float(np.float32(0.1)),
                digest=digest.batch_digest([5, 2**40], [5, 2**40 % 97]),
                ids=(5, 2**40),
                attempt=1,
            ),
        ),
    )


def test_version_4_has_these_lines(tmp_path, golden):
    left_out = ((2, 6), (8, 12))
    steps = {0: [12, 7], 1: [3, 4]}
    write_attempt(tmp_path, 0, steps, number=5, left_out=left_out)
    golden("step_log_v4.jsonl", (tmp_path / "step_log/attempt-00001.jsonl").read_text())
    (attempt,) = step_log.read(tmp_path)
    assert attempt.left_out == left_out


@pytest.mark.parametrize(
    ("version", "data", "world"),
    [(1, {}, 0), (2, {"packing": True}, 0), (3, {"packing": True}, 5)],
)
def test_older_versions_still_load(tmp_path, request, version, data, world):
    kept = request.path.parent.parent / "golden" / f"step_log_v{version}.jsonl"
    (tmp_path / "step_log").mkdir()
    (tmp_path / "step_log/attempt-00001.jsonl").write_bytes(kept.read_bytes())
    (attempt,) = step_log.read(tmp_path)
    # Version 1 lacks the data, it and 2 lack the world, and all lack what is left out.
    assert attempt.data == data
    assert attempt.world == world
    assert attempt.left_out == ()
    assert [record.ids for record in attempt.records] == [(12, 7), (3, 4)]


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
        ('{"version":5}\n', "has version 5, and this program reads versions 1 to 4"),
        ('{"no":1}\n', "has version None"),
        (HEADER + '{"step":0}\n', "not a step log"),
        (HEADER.replace("hosts", "hots"), "not a step log"),
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
