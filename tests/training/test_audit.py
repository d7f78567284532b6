import dataclasses

import pytest

from elastic_ckpt.core import digest
from elastic_ckpt.training import audit, step_log

BATCH = 8


def records(data, num_steps, start_step=0):
    """What a one-host run logs."""
    rows = audit._one_host_rows(data.examples())
    for _ in range(start_step * BATCH):
        next(rows)
    for step in range(start_step, start_step + num_steps):
        ids, digests = zip(*(next(rows) for _ in range(BATCH)), strict=True)
        yield step_log.StepRecord(
            step=step, loss=1.0, digest=digest.batch_digest(ids, digests), ids=ids
        )


def attempt(steps, start_step=0, hosts=1):
    return step_log.Attempt(
        attempt=1, start_step=start_step, hosts=hosts, slices=1, devices=1,
        records=tuple(steps),
    )  # fmt: skip


def test_a_one_host_run_passes_over_several_epochs(data):
    outcome = audit.audit([attempt(records(data, 30))], data)
    assert outcome.passed
    assert (outcome.num_steps, outcome.num_examples) == (30, 240)
    assert outcome.num_epochs == 2.4
    assert outcome.num_row_identical_steps == 30


def test_rows_in_other_places_of_their_batch_pass_and_are_counted(data):
    steps = list(records(data, 4))
    rows = dict(audit_rows(data, steps[2]))
    ids = steps[2].ids[::-1]
    steps[2] = dataclasses.replace(
        steps[2], ids=ids, digest=digest.batch_digest(ids, [rows[i] for i in ids])
    )
    outcome = audit.audit([attempt(steps)], data)
    assert outcome.passed
    assert outcome.num_row_identical_steps == 3


def audit_rows(data, record):
    oracle = audit._one_host_rows(data.examples())
    rows = [next(oracle) for _ in range((record.step + 1) * BATCH)]
    return rows[-BATCH:]


def test_steps_that_were_trained_again_count_once(data):
    first = list(records(data, 7))
    again = list(records(data, 4, start_step=4))
    outcome = audit.audit(
        [attempt(first, hosts=4), attempt(again, start_step=4, hosts=2)], data
    )
    assert outcome.passed
    assert (outcome.num_steps, outcome.num_redone_steps) == (8, 3)
    assert outcome.hosts == (4, 2)


def test_an_example_used_twice_is_lost_elsewhere_and_named(data):
    steps = list(records(data, 3))
    wrong = steps[0].ids[5]
    ids = (*steps[1].ids[:3], wrong, *steps[1].ids[4:])
    lost = steps[1].ids[3]
    steps[1] = dataclasses.replace(steps[1], ids=ids)
    outcome = audit.audit([attempt(steps)], data)
    assert not outcome.passed
    assert (outcome.num_lost, outcome.num_repeated) == (1, 1)
    assert outcome.first_difference == (
        f"step 1, row 3: example {wrong} was used; the one-host run has [{lost}] in"
        f" this batch instead of [{wrong}]"
    )


def test_two_batches_in_the_wrong_order_are_a_difference_though_nothing_is_lost(data):
    steps = list(records(data, 3))
    steps[0], steps[1] = (
        dataclasses.replace(steps[1], step=0),
        dataclasses.replace(steps[0], step=1),
    )
    outcome = audit.audit([attempt(steps)], data)
    assert not outcome.passed
    assert (outcome.num_lost, outcome.num_repeated) == (0, 0)
    assert outcome.first_difference.startswith("step 0, row 0: example")


def test_the_right_ids_with_other_tokens_are_a_difference(data):
    steps = list(records(data, 3))
    steps[2] = dataclasses.replace(steps[2], digest="0" * 16)
    outcome = audit.audit([attempt(steps)], data)
    assert not outcome.passed
    assert "step 2: the examples are those" in outcome.first_difference


def test_a_log_that_ends_before_the_newest_checkpoint_is_a_difference(data):
    attempts = [attempt(records(data, 4))]
    assert audit.audit(attempts, data, num_saved_steps=4).passed
    outcome = audit.audit(attempts, data, num_saved_steps=6)
    assert outcome.first_difference.startswith("step 4 is missing from the step log")
    assert "checkpoint 6 was saved after it" in outcome.first_difference


@pytest.mark.parametrize("missing", [0, 2])
def test_a_step_that_was_not_logged_is_a_difference(data, missing):
    steps = [record for record in records(data, 4) if record.step != missing]
    outcome = audit.audit([attempt(steps)], data)
    assert outcome.first_difference == f"step {missing} is missing from the step log"
