import dataclasses

import numpy as np
import pytest

from elastic_ckpt.core import digest
from elastic_ckpt.data import example_id, rows
from elastic_ckpt.training import audit, step_log, step_record

BATCH = 8


def one_host_rows(data, *, skip=0):
    """Id and digest of every row of the one-host run, from one on."""
    host = data.host_batches(
        rows.Placement.in_order(0, num_hosts=1, global_batch_size=BATCH)
    )
    for batch in iter(lambda: next(host), None):
        tokens = np.concatenate(digest.row_features(batch), axis=1)
        ids = example_id.join(batch["example_id"])
        for row in zip(ids, digest.row_digests(tokens).tolist(), strict=True):
            if skip:
                skip -= 1
            else:
                yield row


def records(data, num_steps, start_step=0, attempt=1):
    """The log of a run on one host."""
    actual = one_host_rows(data, skip=start_step * BATCH)
    for step in range(start_step, start_step + num_steps):
        ids, digests = zip(*(next(actual) for _ in range(BATCH)), strict=True)
        yield step_record.StepRecord(
            step=step,
            loss=1.0,
            digest=digest.batch_digest(ids, digests),
            num_rows=BATCH,
            runs=ids,
            attempt=attempt,
        )


def attempt(steps, start_step=0, hosts=1):
    return step_log.Attempt(
        attempt=1, start_step=start_step, hosts=hosts, slices=1, devices=1,
        data={}, records=tuple(steps),
    )  # fmt: skip


def run_audit(attempts, data, *, in_order=True, **options):
    return audit.audit(
        attempts,
        lambda _: data,
        is_in_order=lambda _: in_order,
        num_records=data.num_records(),
        **options,
    )


def test_a_one_host_run_passes_over_several_epochs(data):
    outcome = run_audit([attempt(records(data, 30))], data)
    assert outcome.passed
    assert (outcome.num_steps, outcome.num_examples) == (30, 240)
    assert outcome.num_epochs == 2.4
    assert outcome.num_batch_identical_steps == 30
    assert outcome.num_row_identical_steps == 30


def with_rows_reversed(steps, step, data):
    digests = dict(audit_rows(data, steps[step]))
    ids = steps[step].ids[::-1]
    changed = dataclasses.replace(
        steps[step],
        runs=ids,
        digest=digest.batch_digest(ids, [digests[i] for i in ids]),
    )
    return [*steps[:step], changed, *steps[step + 1 :]]


def test_rows_in_other_places_of_their_batch_pass_where_no_order_is_promised(data):
    steps = with_rows_reversed(list(records(data, 4)), 2, data)
    outcome = run_audit([attempt(steps)], data, in_order=False)
    assert outcome.passed
    assert outcome.num_batch_identical_steps == 4
    assert outcome.num_row_identical_steps == 3
    assert outcome.num_row_promised_steps == 0


def test_rows_in_other_places_fail_where_their_order_is_promised(data):
    one_host = list(records(data, 4))
    outcome = run_audit([attempt(with_rows_reversed(one_host, 2, data))], data)
    assert not outcome.passed
    assert (outcome.num_lost, outcome.num_repeated) == (0, 0)
    assert outcome.num_batch_identical_steps == 4
    assert outcome.num_row_identical_steps == 3
    assert outcome.num_row_promised_steps == 4
    first, last = one_host[2].ids[0], one_host[2].ids[-1]
    assert outcome.first_difference == (
        f"step 2, row 0: example {last} is in the row of example {first} in the"
        " one-host run, but the pipeline guarantees the order of rows"
    )


def audit_rows(data, record):
    oracle = one_host_rows(data, skip=record.step * BATCH)
    return [next(oracle) for _ in range(BATCH)]


def test_steps_that_were_trained_again_count_once(data):
    first = list(records(data, 7))
    again = list(records(data, 4, start_step=4))
    outcome = run_audit(
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
    steps[1] = dataclasses.replace(steps[1], runs=ids)
    outcome = run_audit([attempt(steps)], data)
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
    outcome = run_audit([attempt(steps)], data)
    assert not outcome.passed
    assert (outcome.num_lost, outcome.num_repeated) == (0, 0)
    assert outcome.first_difference.startswith("step 0, row 0: example")


def after_going_back(data, *, left_out=((16, 40),), skip=5):
    """The log of a run of 5 steps that went back to step 2, and left out 3 batches."""
    before = attempt(records(data, 5))
    after = [
        dataclasses.replace(record, step=2 + number, attempt=2)
        for number, record in enumerate(records(data, 3, start_step=skip))
    ]
    again = attempt(after, start_step=2)
    return [before, dataclasses.replace(again, attempt=2, left_out=left_out)]


def test_what_a_run_that_went_back_has_left_out_is_neither_lost_nor_repeated(data):
    outcome = run_audit(after_going_back(data), data)
    assert outcome.passed, outcome.first_difference
    assert (outcome.num_steps, outcome.num_redone_steps) == (5, 3)
    assert outcome.num_left_out == 24


def test_ranges_may_adjoin_and_need_not_be_whole_batches(data):
    outcome = run_audit(
        after_going_back(data, left_out=((16, 21), (21, 40), (99, 120))), data
    )
    assert outcome.passed, outcome.first_difference


@pytest.mark.parametrize(
    ("left_out", "skip"),
    [((), 5), (((16, 32),), 5), (((16, 48),), 5), (((15, 40),), 5), (((16, 40),), 2)],
    ids=["not noted", "too few", "too many", "from another row", "not left out"],
)
def test_rows_that_are_left_out_otherwise_than_noted_are_lost(data, left_out, skip):
    outcome = run_audit(after_going_back(data, left_out=left_out, skip=skip), data)
    assert not outcome.passed
    assert outcome.num_lost > 0
    assert outcome.num_repeated > 0
    assert outcome.first_difference.startswith("step 2, row 0")


def test_an_example_used_twice_after_going_back_is_named(data):
    before, after = after_going_back(data)
    wrong = after.records[0].ids[5]
    ids = (*after.records[1].ids[:3], wrong, *after.records[1].ids[4:])
    changed = dataclasses.replace(after.records[1], runs=ids)
    records_ = (after.records[0], changed, after.records[2])
    outcome = run_audit([before, dataclasses.replace(after, records=records_)], data)
    assert (outcome.num_lost, outcome.num_repeated) == (1, 1)
    assert outcome.first_difference.startswith(f"step 3, row 3: example {wrong}")


def test_the_right_ids_with_other_tokens_are_a_difference(data):
    steps = list(records(data, 3))
    steps[2] = dataclasses.replace(steps[2], digest="0" * 16)
    outcome = run_audit([attempt(steps)], data)
    assert not outcome.passed
    assert "step 2: the examples are those" in outcome.first_difference


def test_a_log_that_ends_before_the_newest_checkpoint_is_a_difference(data):
    attempts = [attempt(records(data, 4))]
    assert run_audit(attempts, data, num_saved_steps=4).passed
    outcome = run_audit(attempts, data, num_saved_steps=6)
    assert outcome.first_difference.startswith("step 4 is missing from the step log")
    assert "checkpoint 6 was saved after it" in outcome.first_difference


@pytest.mark.parametrize("missing", [0, 2])
def test_a_step_that_was_not_logged_is_a_difference(data, missing):
    steps = [record for record in records(data, 4) if record.step != missing]
    outcome = run_audit([attempt(steps)], data)
    assert outcome.first_difference == f"step {missing} is missing from the step log"


@pytest.mark.parametrize(
    ("actual", "problem"),
    [
        ({"finished": True, "num_steps": 55, "saved": 55}, ""),
        ({"finished": True, "num_steps": 55, "saved": 50}, "checkpoint 55 was due"),
        ({"finished": True, "num_steps": 55, "saved": 0}, "but there is none"),
        ({"finished": True, "num_steps": 55, "saved": 50, "at_end": False}, ""),
        ({"finished": True, "num_steps": 9, "saved": 0, "at_end": False}, ""),
        (
            {"finished": True, "num_steps": 55, "saved": 40, "at_end": False},
            "checkpoint 50 was due in storage, but the newest is 40",
        ),
        # The first may be on its way.
        ({"finished": False, "num_steps": 19, "saved": 0}, ""),
        ({"finished": False, "num_steps": 20, "saved": 0}, "checkpoint 10 was due"),
        ({"finished": False, "num_steps": 55, "saved": 10}, ""),
        ({"finished": False, "num_steps": 55, "saved": 0, "period": None}, ""),
        # Such runs go on from the checkpoint of another program.
        ({"finished": False, "num_steps": 39, "saved": 0, "start_step": 25}, ""),
        (
            {"finished": False, "num_steps": 40, "saved": 0, "start_step": 25},
            "checkpoint 30 was due",
        ),
        (
            {
                "finished": True,
                "num_steps": 28,
                "saved": 0,
                "start_step": 25,
                "at_end": False,
            },
            "",
        ),
    ],
)
def test_a_checkpoint_that_did_not_reach_storage_is_named(actual, problem):
    message = audit.missing_checkpoint(**{"period": 10, "at_end": True, **actual})
    assert bool(message) == bool(problem)
    assert problem in message


def test_a_run_without_the_checkpoints_that_were_due_does_not_pass(data):
    outcome = run_audit(
        [attempt(records(data, 3))], data, missing_checkpoint="checkpoint 2 was due"
    )
    assert not outcome.passed
