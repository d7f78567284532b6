"""Audits of logs that have digests in place of ids: of large batches, and summaries."""

import dataclasses

import numpy as np
import pytest

from elastic_ckpt.training import step_record
from tests.training import test_audit

BATCH = test_audit.BATCH
STEPS = 6


def record(rows, step, *, detail="proof", attempt=1):
    """The record of a step with these rows, each an id and its digest."""
    ids, tokens = (np.array(column) for column in zip(*rows, strict=True))
    batch = step_record.Rows(
        ids=ids.astype(np.uint64), digests=tokens.astype(np.uint32)
    )
    line = step_record.line(step, 1.0, batch, detail=detail)
    return step_record.parse(line, attempt=attempt)


@pytest.fixture
def rows(data):
    """The rows of each step of the one-host run."""
    actual = test_audit.one_host_rows(data)
    return [[next(actual) for _ in range(BATCH)] for _ in range(STEPS)]


@pytest.fixture(params=["proof", "summary"])
def detail(request):
    return request.param


@pytest.fixture(autouse=True)
def without_lists(monkeypatch):
    """No ids are listed, and a block has two rows."""
    monkeypatch.setattr(step_record, "MAX_ID_BYTES", 0)
    monkeypatch.setattr(step_record, "MAX_BLOCKS", 4)


def outcome_of(rows, data, *, detail="proof", **options):
    steps = [record(each, step, detail=detail) for step, each in enumerate(rows)]
    assert not any(each.ids for each in steps)
    return test_audit.run_audit([test_audit.attempt(steps)], data, **options)


def test_a_one_host_run_passes(data, rows, detail):
    outcome = outcome_of(rows, data, detail=detail)
    assert outcome.passed
    assert outcome.num_examples == STEPS * BATCH
    assert outcome.num_row_identical_steps == STEPS
    assert outcome.is_count_exact


def test_an_example_in_place_of_another_is_named_by_its_block(data, rows):
    rows[3][5] = rows[0][0]
    outcome = outcome_of(rows, data)
    assert not outcome.passed
    expected = rows[3][4][0]
    assert outcome.first_difference.startswith(
        "step 3, rows 4 to 5: other examples were used than those of the one-host run,"
        f" which has {expected}, "
    )
    assert (outcome.num_lost, outcome.num_repeated) == (2, 2)
    assert not outcome.is_count_exact
    assert outcome.num_batch_identical_steps == STEPS - 1


def test_other_tokens_are_named_by_their_block_and_nothing_is_lost(data, rows):
    id_, tokens = rows[2][7]
    rows[2][7] = (id_, tokens ^ 1)
    rows[2][0] = (rows[2][0][0], 5)
    outcome = outcome_of(rows, data)
    assert outcome.first_difference.startswith(
        "step 2, rows 0 to 1 and 1 other blocks: the examples are those of the"
        " one-host run, but their tokens are not"
    )
    assert (outcome.num_lost, outcome.num_repeated) == (0, 0)
    assert outcome.is_count_exact


def test_rows_in_other_places_fail_only_where_their_order_is_promised(data, rows):
    rows[1][2], rows[1][3] = rows[1][3], rows[1][2]
    outcome = outcome_of(rows, data)
    assert outcome.first_difference == (
        "step 1, rows 2 to 3: its examples are in other rows than in the one-host run,"
        " but the pipeline guarantees their order"
    )
    assert outcome.num_batch_identical_steps == STEPS
    outcome = outcome_of(rows, data, in_order=False)
    assert outcome.passed
    assert outcome.num_row_identical_steps == STEPS - 1


def test_two_batches_in_the_wrong_order_are_a_difference_though_nothing_is_lost(
    data, rows
):
    rows[0], rows[1] = rows[1], rows[0]
    outcome = outcome_of(rows, data)
    assert outcome.first_difference.startswith("step 0, rows 0 to 1 and 3 other")
    assert (outcome.num_lost, outcome.num_repeated) == (0, 0)
    assert outcome.is_count_exact


def test_a_block_that_a_host_read_once_more_is_lost_and_repeated_once(data, rows):
    # The second host, which has rows 4 to 7, repeats a batch, and is late from then on.
    halves = [each[4:] for each in rows]
    for step in range(2, STEPS):
        rows[step] = [*rows[step][:4], *halves[step - 1]]
    outcome = outcome_of(rows, data)
    assert (outcome.num_lost, outcome.num_repeated) == (4, 4)
    assert outcome.first_difference.startswith("step 2, rows 4 to 5 and 1 other")


def test_a_summary_proves_the_order_and_names_the_step(data, rows):
    rows[4][0], rows[4][1] = rows[4][1], rows[4][0]
    outcome = outcome_of(rows, data, detail="summary")
    assert outcome.first_difference.startswith("step 4: its batch has digest")
    assert "a summary, which cannot show the rows" in outcome.first_difference
    outcome = outcome_of(rows, data, detail="summary", in_order=False)
    assert not outcome.passed
    assert "use step_log=proof" in outcome.first_difference
    assert (outcome.num_lost, outcome.is_count_exact) == (BATCH, False)


def test_a_forged_digest_is_a_difference(data, rows):
    steps = [record(each, step) for step, each in enumerate(rows)]
    steps[2] = dataclasses.replace(steps[2], digest="0" * 32)
    outcome = test_audit.run_audit([test_audit.attempt(steps)], data)
    assert outcome.first_difference.startswith("step 2: its examples are in other rows")


def test_resizes_rollbacks_and_logs_of_older_programs_are_audited_together(data, rows):
    """Versions 4 and 5, ids and digests, and a summary, in one run.

    It is continued at step 2 on two hosts, and goes back from step 4 to 3: what it read
    for step 3 is left out.
    """
    old = list(test_audit.records(data, 3))
    again = [record(rows[step], step, attempt=2) for step in (2, 3)]
    back = [
        record(rows[4], 3, detail="summary", attempt=3),
        record(rows[5], 4, attempt=3),
    ]
    attempts = [
        test_audit.attempt(old),
        test_audit.attempt(again, start_step=2, hosts=2),
        test_audit.attempt(back, start_step=3),
    ]
    attempts = [
        dataclasses.replace(each, attempt=number)
        for number, each in enumerate(attempts, start=1)
    ]
    left_out = ((3 * BATCH, 4 * BATCH),)
    attempts[2] = dataclasses.replace(attempts[2], left_out=left_out)
    outcome = test_audit.run_audit(attempts, data)
    assert outcome.passed, outcome.first_difference
    assert (outcome.num_steps, outcome.num_redone_steps) == (5, 2)
    assert outcome.num_left_out == BATCH
    assert outcome.hosts == (1, 2, 1)
