"""An audit passes what a run on one host trains on, and finds every other log."""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import digest
from elastic_ckpt.data import example_id, rows, stages
from elastic_ckpt.training import audit, step_log, step_record, stream
from tests import conftest, formats
from tests.formats import of_stage
from tests.training import recorded_run

BATCH, STEPS = 8, 6


@pytest.fixture(scope="module")
def data(corpus):
    return conftest.data_of(corpus)


@pytest.fixture(scope="module")
def one_host(data):
    """The rows of the one-host run over two epochs, each an id and a digest."""
    host = data.host_batches(
        rows.Placement.in_order(0, num_hosts=1, global_batch_size=BATCH)
    )
    found = []
    for _ in range(30):
        batch = next(host)
        tokens = np.concatenate(digest.row_features(batch), axis=1)
        ids = example_id.join(batch["example_id"])
        found += zip(ids, digest.row_digests(tokens).tolist(), strict=True)
    return found


def batches_of(one_host, *numbers):
    return [one_host[number * BATCH : (number + 1) * BATCH] for number in numbers]


@pytest.fixture(params=["ids", "proof", "summary"])
def detail(request, monkeypatch):
    """What the log has of a batch: its ids, digests of two rows each, or one digest."""
    if request.param != "ids":
        monkeypatch.setattr(step_record, "MAX_ID_BYTES", 0)
        monkeypatch.setattr(step_record, "MAX_BLOCKS", 4)
    return request.param


def logged(batches, *, first=0, detail="proof", **changes):
    """An attempt that logs that it trained on some batches."""
    records = []
    for step, rows_ in enumerate(batches, start=first):
        ids, tokens = (np.array(column) for column in zip(*rows_, strict=True))
        batch = step_record.Rows(
            ids=ids.astype(np.uint64), digests=tokens.astype(np.uint32)
        )
        kind = "summary" if detail == "summary" else "proof"
        line = step_record.line(step, 1.0, batch, detail=kind)
        records.append(step_record.parse(line, attempt=changes.get("attempt", 1)))
    return step_log.Attempt(
        **{"attempt": 1, "hosts": 1, "slices": 1, "devices": 1, "data": {}, **changes},
        start_step=first,
        records=tuple(records),
    )


def audited(attempts, data, **options):
    return audit.audit(
        attempts, lambda _: data, num_records=data.num_records, **options
    )


def test_one_host_run_passes_over_several_epochs(data, one_host, detail):
    outcome = audited([logged(batches_of(one_host, *range(30)), detail=detail)], data)
    assert outcome.passed
    assert (outcome.num_steps, outcome.num_examples) == (30, 240)
    assert outcome.num_epochs == 2.4
    assert outcome.num_batch_identical_steps == 30
    assert outcome.num_row_identical_steps == 30
    assert outcome.is_count_exact


@st.composite
def wrong_batches(draw, one_host):
    """Six batches, at least one of which the one-host run does not have there."""
    batches = batches_of(one_host, *range(STEPS))
    step = draw(st.integers(0, STEPS - 1))
    row, other = draw(st.permutations(range(BATCH)))[:2]
    kind = draw(st.sampled_from(["id", "tokens", "rows", "batches", "once more"]))
    rows_ = batches[step]
    if kind == "id":
        rows_[row] = draw(st.sampled_from(one_host[STEPS * BATCH :]))
    elif kind == "tokens":
        rows_[row] = (rows_[row][0], rows_[row][1] ^ draw(st.integers(1, 2**32 - 1)))
    elif kind == "rows":
        rows_[row], rows_[other] = rows_[other], rows_[row]
    elif kind == "batches":
        second = draw(st.sampled_from([n for n in range(STEPS) if n != step]))
        batches[step], batches[second] = batches[second], rows_
        step = min(step, second)
    else:
        # A host with the last rows repeats its part of the first batch from there on.
        step, parts = max(1, step), [each[4:] for each in batches]
        for late in range(step, STEPS):
            batches[late] = [*batches[late][:4], *parts[late - 1]]
    return kind, step, row // 2 * 2, batches


def counted(batches):
    return collections.Counter(id_ for rows_ in batches for id_, _ in rows_)


@pytest.mark.parametrize("kind", ["ids", "proof", "summary"])
@settings(max_examples=12)
@given(drawn=st.data())
def test_any_other_batch_is_found_at_its_step_and_counted(one_host, data, kind, drawn):
    wrong, step, block, batches = drawn.draw(wrong_batches(one_host))
    with pytest.MonkeyPatch.context() as patch:
        if kind != "ids":
            patch.setattr(step_record, "MAX_ID_BYTES", 0)
            patch.setattr(step_record, "MAX_BLOCKS", 4)
        outcome = audited([logged(batches, detail=kind)], data)
    assert not outcome.passed
    assert outcome.first_difference.startswith(f"step {step}"), outcome
    expected = batches_of(one_host, *range(STEPS))
    is_same = [a == b for a, b in zip(batches, expected, strict=True)]
    assert outcome.num_row_identical_steps == sum(is_same)
    if kind != "summary":
        is_equal = [
            sorted(a) == sorted(b) for a, b in zip(batches, expected, strict=True)
        ]
        assert outcome.num_batch_identical_steps == sum(is_equal)
    if kind == "ids" or outcome.is_count_exact:
        lost = counted(expected) - counted(batches)
        repeated = counted(batches) - counted(expected)
        assert outcome.num_lost == lost.total()
        assert outcome.num_repeated == repeated.total()
    if kind == "proof" and wrong in ("id", "tokens"):
        named = f"step {step}, rows {block} to {block + 1}: "
        assert outcome.first_difference.startswith(named)
    if kind == "proof":
        # A block of two rows is the smallest thing that it has.
        assert outcome.is_count_exact or wrong in ("id", "once more")


def test_rows_in_other_places_of_their_batch_do_not_pass(data, one_host, detail):
    batches = batches_of(one_host, *range(4))
    batches[2].reverse()
    outcome = audited([logged(batches, detail=detail)], data)
    assert not outcome.passed
    assert outcome.num_row_identical_steps == 3
    # A summary is one digest of the rows in their order.
    assert outcome.num_batch_identical_steps == (3 if detail == "summary" else 4)


def test_first_difference_says_what_was_used_instead(data, one_host):
    batches = batches_of(one_host, 0, 1, 2)
    wrong, lost = batches[0][5][0], batches[1][3][0]
    batches[1][3] = batches[0][5]
    outcome = audited([logged(batches)], data)
    assert outcome.first_difference == (
        f"step 1, row 3: example {wrong} was used; the one-host run has [{lost}] in"
        f" this batch instead of [{wrong}]"
    )


def test_first_difference_of_a_proof_names_the_rows_of_its_first_block(
    data, one_host, monkeypatch
):
    monkeypatch.setattr(step_record, "MAX_ID_BYTES", 0)
    # Rows 0 to 2, 3 to 5, and 6 and 7.
    monkeypatch.setattr(step_record, "MAX_BLOCKS", 3)
    monkeypatch.setattr(audit, "_MAX_NAMED_IDS", 2)
    batches = batches_of(one_host, 0, 1)
    ids = [id_ for id_, _ in batches[1]]
    for row, named, first in (
        (7, "rows 6 to 7", 6),
        (4, "rows 3 to 5 and 1 other blocks", 3),
    ):
        batches[1][row] = one_host[40 + row]
        assert audited([logged(batches)], data).first_difference == (
            f"step 1, {named}: other examples were used than those of the one-host run,"
            f" which has {ids[first]}, {ids[first + 1]} ... from row {first} on"
        )


def test_ids_are_named_by_their_ranges():
    assert audit._ranges([300, 0, 2, 1]) == "0-2, 300"
    assert audit._ranges(range(0, 16, 2)) == "0, 2, 4, 6, 8, 10, 12, 14"
    assert audit._ranges(range(0, 18, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, ..."


def test_forged_digest_is_a_difference(data, one_host, detail):
    attempt = logged(batches_of(one_host, 0, 1, 2), detail=detail)
    *records, last = attempt.records
    forged = dataclasses.replace(last, digest="0" * len(last.digest))
    attempt = dataclasses.replace(attempt, records=(*records, forged))
    difference = audited([attempt], data).first_difference
    assert difference.startswith("step 2")
    cannot = "is a summary, which cannot show the rows that differ"
    assert difference.endswith(cannot) == (detail == "summary")


def test_forged_ids_are_a_difference(data, one_host):
    attempt = logged(batches_of(one_host, 0, 1))
    first, second = attempt.records
    forged = dataclasses.replace(second, runs=first.runs)
    attempt = dataclasses.replace(attempt, records=(first, forged))
    assert audited([attempt], data).first_difference.startswith("step 1, row ")


def test_steps_that_were_trained_again_count_once(data, one_host, detail):
    first = logged(batches_of(one_host, *range(7)), detail=detail, hosts=4)
    again = logged(
        batches_of(one_host, 4, 5, 6, 7), first=4, detail=detail, attempt=2, hosts=2
    )
    outcome = audited([first, again], data)
    assert outcome.passed
    assert (outcome.num_steps, outcome.num_redone_steps) == (8, 3)
    assert outcome.hosts == (4, 2)


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
    data, one_host, detail, left_out, numbers, has_passed
):
    before = logged(batches_of(one_host, *range(5)), detail=detail)
    after = logged(
        batches_of(one_host, *numbers),
        first=2,
        detail=detail,
        attempt=2,
        left_out=left_out,
    )
    outcome = audited([before, after], data)
    assert outcome.passed == has_passed, outcome.first_difference
    if has_passed:
        assert (outcome.num_steps, outcome.num_redone_steps) == (5, 3)
        assert outcome.num_left_out == 24
    else:
        assert outcome.first_difference.startswith("step 2")
        assert outcome.num_lost > 0


def test_steps_that_are_missing_are_a_difference(data, one_host):
    batches = batches_of(one_host, *range(4))
    attempt = logged(batches)
    assert audited([attempt], data, num_saved_steps=4).passed
    outcome = audited([attempt], data, num_saved_steps=6)
    assert outcome.first_difference.startswith("step 4 is missing from the step log")
    assert "checkpoint 6 was saved after it" in outcome.first_difference
    assert not audited([attempt], data, missing_checkpoint="it was due").passed
    for missing in (0, 2):
        records = attempt.records[:missing] + attempt.records[missing + 1 :]
        outcome = audited([dataclasses.replace(attempt, records=records)], data)
        expected = f"step {missing} is missing from the step log"
        assert outcome.first_difference == expected


@pytest.mark.parametrize(
    ("actual", "problem"),
    [
        ({"num_steps": 55, "saved": 55}, ""),
        ({"num_steps": 55, "saved": 50}, "checkpoint 55 was due"),
        ({"num_steps": 55, "saved": 0}, "but there is none"),
        ({"num_steps": 55, "saved": 50, "at_end": False}, ""),
        ({"num_steps": 9, "saved": 0, "at_end": False}, ""),
        (
            {"num_steps": 55, "saved": 40, "at_end": False},
            "checkpoint 50 was due in storage, but the newest is 40",
        ),
        # The first may be on its way.
        ({"finished": False, "num_steps": 19, "saved": 0}, ""),
        ({"finished": False, "num_steps": 20, "saved": 0}, "checkpoint 10 was due"),
        ({"finished": False, "num_steps": 55, "saved": 10}, ""),
        ({"finished": False, "num_steps": 55, "saved": 0, "period": None}, ""),
    ],
)
def test_checkpoint_that_did_not_reach_storage_is_named(actual, problem):
    given_ = {"finished": True, "period": 10, "at_end": True, **actual}
    message = audit.missing_checkpoint(**given_)
    assert bool(message) == bool(problem)
    assert problem in message


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return formats.write(tmp_path_factory.mktemp("formats"), "parquet")


def check_one_host_run(run):
    """The rows that the audit reads again are those of the run, byte for byte."""
    placed = stream.Stream(run.attempts, run.data.__getitem__)
    placed.place()
    oracle = audit.OneHostRun(placed)
    for trained in sorted(placed.trained, key=lambda each: each.record.step):
        if trained.is_current:
            made, record = oracle.next(trained), trained.record
            assert made.digests.tolist() == run.digests[record.attempt, record.step]
    oracle.close()


def test_run_that_goes_back_over_stages_twice_with_batches_of_other_sizes(parts):
    data = stages.staged(
        [
            stages.Stage(begin=0, data=of_stage(parts, weights={"web": 1.0})),
            stages.Stage(begin=3, data=of_stage(parts, weights={"books": 1.0})),
            stages.Stage(begin=6, data=of_stage(parts, length=31)),
        ]
    )
    run = recorded_run.Run().attempt(data, [12] * 6 + [6] * 2)
    run.attempt(data, [18, 4, 4], start=5)
    run.attempt(data, [18] * 4, start=2, goes_back=True)
    run.attempt(data, [12] * 5, start=2, goes_back=True)
    check_one_host_run(run)


def test_run_that_goes_back_to_before_other_weights(parts):
    before, after = (
        of_stage(parts, weights=weights)
        for weights in ({"web": 0.7, "code": 0.3}, {"web": 0.1, "code": 0.9})
    )
    run = recorded_run.Run().attempt(before, [12] * 4)
    run.attempt(after, [12] * 3, start=4)
    run.attempt(after, [12] * 5, start=2, goes_back=True)
    check_one_host_run(run)
