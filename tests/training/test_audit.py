"""An audit passes what a run on one host trains on, and finds every other log."""

import contextlib
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import digest, jsonlog, topology
from elastic_ckpt.data import local_batches, rows
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.inspect import run_files
from elastic_ckpt.training import audit, step_log
from tests import conftest, jobs, runs
from tests.training import recorded_run

BATCH, STEPS = 8, 6


@pytest.fixture(scope="module")
def data(corpus):
    return conftest.data_of(corpus)


class Shown(list):
    """A list that Hypothesis prints briefly."""

    def __repr__(self):
        return "[...]"


@pytest.fixture(scope="module")
def batches(data):
    """The batches of the one-host run over two epochs."""
    host = data.host_batches(rows.in_order(1, BATCH)[0])
    return Shown(next(host) for _ in range(30))


def logged(batches, *, first=0, attempt=1, **changes):
    """An attempt that logs that it trained on some batches."""
    records = (
        recorded_run.recorded(batch, step, attempt=attempt)
        for step, batch in enumerate(batches, start=first)
    )
    changes |= {"attempt": attempt, "start_step": first}
    return recorded_run.attempt_of(records, **changes)


def audited(attempts, data, **options):
    return audit.audit(attempts, lambda _: data, **options)


def test_run_over_several_epochs_passes_and_steps_trained_again_count_once(
    data, batches
):
    first = logged(batches[:7], hosts=4)
    again = logged(batches[4:], first=4, attempt=2, hosts=2)
    outcome = audited([first, again], data)
    assert outcome.passed
    assert (outcome.num_steps, outcome.num_redone_steps) == (30, 3)
    assert outcome.num_examples == 240
    assert (outcome.num_identical_steps, outcome.hosts) == (30, (4, 2))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=7), st.integers(0, 7))
def test_batches_that_a_run_skips_swaps_or_repeats_are_counted(batches, data, own, n):
    # Steps from the first on have their own batches, and others follow.
    numbers = [*range(n), *own]
    outcome = audited([logged([batches[each] for each in numbers])], data, first_step=1)
    # Of steps with one batch, the first one comes before the others.
    is_own = [n == step == numbers.index(n) for step, n in enumerate(numbers)]
    assert outcome.passed == all(is_own)
    assert outcome.num_identical_steps == sum(is_own)
    assert outcome.num_examples == BATCH * len(numbers)
    assert outcome.num_lost == BATCH * len({*range(max(numbers))} - {*numbers})
    assert outcome.num_repeated == BATCH * (len(numbers) - len({*numbers}))
    if not outcome.passed:
        step = is_own.index(False)
        number = numbers[step]
        why = f"they belong to step {number + 1}"
        if number < step:
            why = "other steps have used 8 of them"
            why += "; was the data state restored?" * (number == 0)
        place = f"rows {8 * number} to {8 * number + 7} of the data"
        assert outcome.first_difference == f"step {step + 1} ({place}): {why}"


@given(
    st.sampled_from(["tokens", "swap", "twice", "other"]),
    st.integers(0, STEPS - 1),
    st.permutations(range(BATCH)),
    st.integers(0, 29 - STEPS),
)
def test_batch_with_any_other_row_is_found(batches, data, kind, step, rows_, late):
    used, (row, other, *_) = [dict(each) for each in batches[:STEPS]], rows_
    for name, feature in batches[step].items():
        mixed = used[step][name] = feature.copy()
        if kind == "tokens" and name == "inputs":
            mixed[row, late % mixed.shape[1]] ^= 1
        elif kind == "other":
            mixed[row] = batches[STEPS + late][name][row]
        elif kind in ("swap", "twice"):
            mixed[row] = feature[other]
            if kind == "swap":
                mixed[other] = feature[row]
    outcome = audited([logged(used)], data, first_step=1)
    assert outcome.first_difference.startswith(f"step {step + 1} (rows "), outcome
    assert "the batch of the one-host run has different" in outcome.first_difference
    assert outcome.num_identical_steps == STEPS - 1
    assert (outcome.num_lost, outcome.num_repeated) == (0, 0)


@pytest.mark.parametrize(
    ("left_out", "numbers", "has_passed"),
    [
        (((16, 40),), (5, 6, 7), True),
        # Ranges may adjoin, and need not be whole batches.
        (((16, 21), (21, 40), (99, 120)), (5, 6, 7), True),
        ((), (5, 6, 7), False),
        (((16, 32),), (5, 6, 7), False),
        (((16, 48),), (5, 6, 7), False),
        (((15, 40),), (5, 6, 7), False),
        (((16, 40),), (2, 3, 4), False),
    ],
)
def test_rows_that_a_run_left_out_when_it_went_back_are_those_that_it_noted(
    data, batches, left_out, numbers, has_passed
):
    before = logged(batches[:5])
    used = [batches[n] for n in numbers]
    after = logged(used, first=2, attempt=2, left_out=left_out)
    outcome = audited([before, after], data)
    assert outcome.passed == has_passed, outcome.first_difference
    skipped = 8 * (numbers[0] - 2)
    assert outcome.num_lost + outcome.num_left_out == skipped
    if has_passed:
        assert (outcome.num_steps, outcome.num_redone_steps) == (5, 3)
        assert outcome.num_left_out == skipped
    else:
        assert outcome.first_difference.startswith(("step 1", "step 2"))


def test_steps_that_are_missing_are_a_difference(data, batches):
    attempt = logged(batches[:4])
    assert audited([attempt], data, num_saved_steps=4).passed
    outcome = audited([attempt], data, num_saved_steps=6)
    assert outcome.first_difference.startswith("step 4 is missing from the step log")
    assert "checkpoint 6 was saved later" in outcome.first_difference
    assert not audited([attempt], data, missing_checkpoint="it was due").passed
    for missing in (0, 2):
        records = attempt.records[:missing] + attempt.records[missing + 1 :]
        outcome = audited([dataclasses.replace(attempt, records=records)], data)
        expected = f"step {missing} is missing from the step log"
        assert outcome.first_difference == expected
        assert outcome.num_lost == BATCH


@pytest.mark.parametrize(
    ("is_finished", "at_end", "period", "num_steps", "saved", "problem"),
    [
        (True, True, 10, 55, 55, ""),
        (True, True, 10, 55, 50, "checkpoint 55 was due"),
        (True, True, 10, 55, 0, "but there is none"),
        (True, False, 10, 55, 50, ""),
        (True, False, 10, 9, 0, ""),
        (True, False, 10, 55, 40, "storage, but the newest is 40"),
        # The first may be on its way.
        (False, True, 10, 19, 0, ""),
        (False, True, 10, 20, 0, "checkpoint 10 was due"),
        (False, True, 10, 55, 10, ""),
        (False, True, None, 55, 0, ""),
    ],
)
def test_checkpoint_that_did_not_reach_storage_is_named(
    is_finished, at_end, period, num_steps, saved, problem
):
    steps = {"period": period, "num_steps": num_steps, "saved": saved}
    message = audit.missing_checkpoint(**steps, at_end=at_end, finished=is_finished)
    assert bool(message) == bool(problem)
    assert problem in message


def test_attempts_whose_files_are_missing_are_a_difference(data, batches):
    # The last one has retrained steps of those before it, so that no step is missing.
    attempts = [
        logged(batches[n - 1 : 8 + n // 3], first=n - 1, attempt=n, world=n)
        for n in (1, 2, 3)
    ]
    noted = {"num_attempts": 3, "newest_world": 3}
    assert audited(attempts, data, **noted).passed
    for n in (1, 2, 3):
        left = [each for each in attempts if each.attempt != n]
        problem = audited(left, data, **noted).first_difference
        assert f"attempt {n} is missing" in problem


CLAIMED = [{"event": "world_claimed", "world": 1}, {"event": "save_started"}]
CLAIMS = [*CLAIMED, {"event": "world_claimed", "world": 2}]


@pytest.mark.parametrize(
    ("program", "events", "problem"),
    [
        ("loop", [{"event": "run_started"}] * 2, "attempt 2 is missing"),
        ("train", [{"event": "run_started"}] * 2, ""),
        # The second start may have been killed before its attempt.
        ("train", CLAIMS, ""),
        ("train", [*CLAIMS, {"event": "save_started"}], "world 2 saved steps, but"),
    ],
)
def test_newest_attempt_that_was_lost_is_known_by_the_events(
    tmp_path, corpus, program, events, problem
):
    config = jobs.configured(tmp_path, corpus)
    runs.write_record(tmp_path, config)
    record = dataclasses.replace(run_files.read(str(tmp_path)), program=program)
    run_files.write(tmp_path, record)
    world = topology.Topology(hosts=1, slices=1, devices=1)
    log = step_log.StepLog(tmp_path, 0, world=world, data=record.data, claim=1)
    data = pipeline.from_config(config.data)
    batches = local_batches.LocalBatches(data, global_batch_size=BATCH)
    for step, batch in zip(range(3), batches, strict=False):
        log.write(step, batch["example_id"], digest.row_digests(batch), 1.0)
    log.close()
    with contextlib.closing(jsonlog.writer(tmp_path / run_files.EVENTS)) as writing:
        for event in events:
            writing.append(event)
    outcome = audit.RunAudit(str(tmp_path)).outcome()
    assert outcome.passed == (not problem), outcome
    assert problem in outcome.first_difference
