import json
import os
import pathlib
from unittest import mock

import hypothesis
import jsonschema
import numpy as np
import pytest
from hypothesis import strategies as st

from elastic_ckpt import training
from elastic_ckpt.core import errors, storage, topology
from elastic_ckpt.data import elastic_data
from elastic_ckpt.training import step_log

WORLD = topology.Topology(hosts=2, slices=1, devices=4)


def rows(ids):
    """The example ids and the row digests of a batch."""
    halves = np.array([[i >> 32, i & 0xFFFFFFFF] for i in ids], np.uint32)
    return halves, np.array([i % 97 for i in ids], np.uint32)


def opened(directory, step, **more):
    return step_log.StepLog(directory, step, world=WORLD, data={"packed": 1}, **more)


def write_attempt(directory, start_step, steps, **more):
    """Logs steps, of which each has the one row of its number."""
    log = opened(directory, start_step, **more)
    for step, row in steps.items():
        log.write(step, *rows([row]), 1.5)
    log.close()


def test_attempts_are_read_as_they_were_written_in_the_lines_of_the_format(
    tmp_path, golden
):
    write_attempt(tmp_path, 0, {0: 0, 1: 1}, claim=5, left_out=((2, 6), (8, 12)))
    log = opened(tmp_path, 2, claim=6)
    log.write(2, *rows(range(2**40, 2**40 + 300)), None)
    log.close()
    paths = sorted((tmp_path / "step_log").iterdir())
    golden("step_log_v1.jsonl", "".join(path.read_text() for path in paths))
    schema = pathlib.Path(training.__file__).parent / "schemas/step_log.json"
    validator = jsonschema.Draft202012Validator(json.loads(schema.read_text()))
    for path, attempt in zip(paths, step_log.read(tmp_path), strict=True):
        header, *steps = lines = [*map(json.loads, path.read_text().splitlines())]
        for line in lines:
            validator.validate(line)
        assert header.pop("version") == step_log.VERSION
        header["left_out"] = tuple(map(tuple, header["left_out"]))
        number = attempt.attempt
        records = (step_log.StepRecord(**each, attempt=number) for each in steps)
        # A loss that is no number equals none, but prints as it does.
        assert repr(attempt) == repr(step_log.Attempt(**header, records=tuple(records)))
    log = opened(tmp_path, 3)
    log.write(3, *rows([7, elastic_data.NO_ID]), 0.1)
    log.close()
    *_, (padded,) = (each.records for each in step_log.read(tmp_path))
    assert (padded.row, padded.rows, padded.loss) == (7, 2, 0.1)


@hypothesis.given(
    st.integers(0, 2**40), st.integers(1, 40), st.sets(st.integers(0, 39)), st.data()
)
def test_batch_has_its_row_though_rows_are_padding_or_two_are_swapped(
    row, size, padding, drawn
):
    ids = np.arange(row, row + size, dtype=np.uint64)
    if size > 4:
        one = drawn.draw(st.sampled_from([0, size // 2]))
        other = drawn.draw(st.integers(0, size - 1))
        ids[[one, other]] = ids[[other, one]]
    elif len(padding) < size:
        ids[[n for n in padding if n < size]] = elastic_data.NO_ID
    assert step_log.first_row(ids) == row


def test_steps_that_a_disk_has_lost_or_may_have_lost_are_an_error(
    tmp_path, monkeypatch
):
    log = opened(tmp_path, 0)
    log.write(0, *rows([1]), 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", mock.Mock(side_effect=OSError("no disk")))
        with pytest.raises(OSError, match="no disk"):
            log.sync()
    (tmp_path / "step_log/attempt-00001.jsonl").unlink()
    with pytest.raises(errors.RunError, match="was removed"):
        log.sync()
    log.close()


def test_log_in_a_bucket_is_read_and_so_is_a_copy_on_a_disk(bucket, tmp_path):
    log = opened(bucket, 0)
    for step in range(20):
        log.write(step, *rows([step]), 0)
        if step == 9:
            assert log.sync() is None
    log.close()
    write_attempt(bucket, 12, {12: 300}, claim=3)
    attempts = step_log.read(bucket)
    assert [record.row for record in attempts[0].records] == [*range(20)]
    assert [record.step for record in attempts[1].records] == [12]
    for path in storage.absolute(f"{bucket}/step_log").glob("*/*.jsonl"):
        name = str(path).removeprefix(bucket)
        storage.write_atomic(f"{tmp_path}{name}", path.read_bytes())
    assert step_log.read(tmp_path) == attempts


# Attempts by their first step, their claim, and the rows of their steps.
@pytest.mark.parametrize(
    ("attempts", "order", "expected"),
    [
        ([(0, 0, [1, 2, 3, 4]), (2, 0, [30])], [1, 2], [1, 2, 30]),
        # The last one did not get as far.
        ([(0, 0, [1, 2, 3, 4]), (2, 0, [30]), (1, 0, [])], [1, 2, 3], [1]),
        # World 6 was replaced before it had begun its log. A start without checkpoints
        # claims no world, and comes after those before it.
        (
            [(0, 0, [1, 2]), (1, 7, [20, 30, 40]), (1, 6, [21, 31, 41]), (3, 0, [400])],
            [1, 3, 2, 4],
            [1, 20, 30, 400],
        ),
    ],
)
def test_later_attempt_overrules_the_steps_from_its_first_one_on(
    tmp_path, attempts, order, expected
):
    for first, claim, of_steps in attempts:
        write_attempt(tmp_path, first, dict(enumerate(of_steps, first)), claim=claim)
    found = step_log.read(tmp_path)
    assert [each.attempt for each in found] == order
    lineage = step_log.lineage(found)
    assert {n: each.row for n, each in lineage.items()} == dict(enumerate(expected))


def test_of_two_starts_at_the_same_time_each_has_a_file(tmp_path, monkeypatch):
    create = storage.create

    def late(path, content):
        monkeypatch.undo()
        write_attempt(tmp_path, 0, {0: 1}, claim=2)
        return create(path, content)

    monkeypatch.setattr(storage, "create", late)
    write_attempt(tmp_path, 0, {0: 10, 1: 20}, claim=1)
    attempts = step_log.read(tmp_path)
    assert [(each.attempt, each.world) for each in attempts] == [(2, 1), (1, 2)]
    assert [record.row for record in attempts[0].records] == [10, 20]


def test_attempt_that_was_killed_in_its_first_line_counts_for_nothing(tmp_path):
    write_attempt(tmp_path, 0, {0: 1})
    (tmp_path / "step_log/attempt-00002.jsonl").write_text('{"version":1,"att')
    assert len(step_log.read(tmp_path)) == 1
    write_attempt(tmp_path, 1, {1: 2})
    assert [attempt.attempt for attempt in step_log.read(tmp_path)] == [1, 3]
